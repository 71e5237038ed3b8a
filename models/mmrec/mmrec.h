// MM-Rec as an architecture (models/runtime/model.h): the table of its weights, every field with the tensors of the
// public state dict that fill it, their shapes and its purpose; and what else the runtime asks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/tensor.h"
#include "models/mmrec/config.h"
#include "models/mmrec/layer_fields.h"
#include "models/mmrec/state.h"
#include "models/runtime/model.h"
#include "models/weights/fields.h"

namespace mmrec::models {

/// The fields of a whole model.
template <class Matrix, class Vector>
struct ModelFields {
  Matrix embedding{};  // [V, D]
  Matrix head{};       // [V, D]
  Vector norm{};       // [D]
  std::vector<LayerFields<Matrix, Vector>> layers;
};

namespace table {

inline constexpr Variants kAll = [](const Sizes& /*sizes*/) { return true; };
inline constexpr Variants kMdi = [](const Sizes& s) { return !s.low_rank; };
inline constexpr Variants kDpg = [](const Sizes& s) { return s.low_rank; };
inline constexpr Variants kSplitMdi = [](const Sizes& s) { return !s.fused && !s.low_rank; };
inline constexpr Variants kFusedMdi = [](const Sizes& s) { return s.fused && !s.low_rank; };

inline constexpr TensorPart kEmbedding[] = {{"embedding", kV, kD}};
inline constexpr TensorPart kHead[] = {{"lm_head", kV, kD}};
inline constexpr TensorPart kNorm[] = {{"norm", kD, kNone}};

inline constexpr TensorPart kQvzk[] = {{"W_q", kD, kD, kSplit},
                                       {"W_v", kD, kD, kSplit},
                                       {"W_z", kD, kD, kSplit},
                                       {"W_k", kD, kD, kSplitMdi},
                                       {"W_fused", 4 * kD, kD, kFused, kNone, kD},  // its rows are q, k, v, z
                                       {"W_fused", 4 * kD, kD, kFused, 2 * kD, 2 * kD},
                                       {"W_fused", 4 * kD, kD, kFusedMdi, kD, kD}};
inline constexpr TensorPart kGate[] = {{"W_g", kD, kD}, {"mdi.W_g", kD, 2 * kD, kAll, kNone, kD, kD, kD}};
inline constexpr TensorPart kGateZ[] = {{"mdi.W_g", kD, 2 * kD, kAll, kNone, kD, kNone, kD}};
inline constexpr TensorPart kGammaIn[] = {{"mdi.W_gamma.0", kG, kD, kMdi}, {"W_gamma_down", kR, kD, kDpg}};
inline constexpr TensorPart kGammaUp[] = {{"mdi.W_gamma.2", kD, kG, kMdi}, {"W_gamma_up", kD, kR, kDpg}};
inline constexpr TensorPart kContextIn[] = {{"mdi.W_context.0", kG, kD, kMdi}};
inline constexpr TensorPart kContextUp[] = {{"mdi.W_context.2", kD, kG, kMdi}};
inline constexpr TensorPart kMemoryQ[] = {{"multi_mem_attention.W_q", kD, kD}};
inline constexpr TensorPart kMemoryOut[] = {{"multi_mem_attention.W_o", kD, kD}};
inline constexpr TensorPart kFfnIn[] = {{"ffn.0", kF, kD}};
inline constexpr TensorPart kFfnOut[] = {{"ffn.3", kD, kF}};
inline constexpr TensorPart kNorm1[] = {{"norm1", kD, kNone}};
inline constexpr TensorPart kNorm2[] = {{"norm2", kD, kNone}};

}  // namespace table

/// Calls visit(Field, members...) for every field of a block, with that member of each instance; there may be no
/// instance. A model's fingerprint is taken in this order.
template <class Visit, class... Layers>
constexpr void visit_layer(const Visit& visit, Layers&... w) {
  using enum Field::Kind;
  visit(Field{.kind = kLinear, .parts = table::kQvzk, .mixes_formats = true}, w.qvzk...);
  visit(Field{kBias, table::kQvzk}, w.qvzk_bias...);
  visit(Field{kLinear, table::kGate}, w.gate...);
  visit(Field{kLinear, table::kGateZ}, w.gate_z...);
  visit(Field{kBias, table::kGate}, w.gate_bias...);
  visit(Field{kBias, table::kGateZ}, w.gate_z_bias...);
  visit(Field{kLinear, table::kGammaIn}, w.gamma_in...);
  visit(Field{kBias, table::kGammaIn}, w.gamma_in_bias...);
  visit(Field{kLinear, table::kGammaUp}, w.gamma_up...);
  visit(Field{kBias, table::kGammaUp}, w.gamma_up_bias...);
  visit(Field{kLinear, table::kContextIn}, w.context_in...);
  visit(Field{kBias, table::kContextIn}, w.context_in_bias...);
  visit(Field{kLinear, table::kContextUp}, w.context_up...);
  visit(Field{kBias, table::kContextUp}, w.context_up_bias...);
  visit(Field{kLinear, table::kMemoryQ, true}, w.memory_q...);
  visit(Field{kBias, table::kMemoryQ, true}, w.memory_q_bias...);
  visit(Field{kLinear, table::kMemoryOut, true}, w.memory_out...);
  visit(Field{kBias, table::kMemoryOut, true}, w.memory_out_bias...);
  visit(Field{kLinear, table::kFfnIn}, w.ffn_in...);
  visit(Field{kBias, table::kFfnIn}, w.ffn_in_bias...);
  visit(Field{kLinear, table::kFfnOut}, w.ffn_out...);
  visit(Field{kBias, table::kFfnOut}, w.ffn_out_bias...);
  visit(Field{kNorm, table::kNorm1}, w.norm1...);
  visit(Field{kNorm, table::kNorm2}, w.norm2...);
}

/// Of all blocks, whose tensors are named `prefix`blocks.N.; the instances have as many layers as the first.
template <class Visit, class Model, class... Models>
void visit_blocks(const Visit& visit, std::string_view prefix, Model& first, Models&... others) {
  for (std::size_t i = 0; i < first.layers.size(); ++i) {
    const std::string of_block = std::string(prefix) + "blocks." + std::to_string(i) + ".";
    visit_layer(at_prefix(visit, of_block), first.layers[i], others.layers[i]...);
  }
}

/// The same for a model.
template <class Visit, class Model, class... Models>
void visit_model(const Visit& visit, Model& first, Models&... others) {
  using enum Field::Kind;
  visit(Field{kTable, table::kEmbedding}, first.embedding, others.embedding...);
  visit(Field{.kind = kTable, .parts = table::kHead, .optional = true}, first.head, others.head...);
  visit_blocks(visit, "", first, others...);
  visit(Field{kNorm, table::kNorm}, first.norm, others.norm...);
}

inline Sizes sizes_of(const Config& c) {
  return {c.vocab_size, c.model_dim, c.ffn_dim, c.gate_hidden_dim(), c.dpg_rank, c.use_hem, c.use_dpg};
}

/// Tensors of blocks that only training uses, which several architectures have.
inline constexpr std::string_view kTrainingNames = "mdi.W_planning_*";
bool is_training_only(std::string_view name);

template <class Backend, class A>
class Net;

/// What TableDefaults says of a device's copy, for blocks: they are composed (layer_fields.h).
struct BlocksOnDevice : TableDefaults {
  static constexpr bool kBatchInvariant = true;
  static std::int64_t more_rows(const Field& field, const Sizes& sizes) {
    return field.parts.data() == table::kQvzk && sizes.low_rank ? sizes.d : 0;
  }
  static bool is_passing(const Field& field) { return field.parts.data() == table::kGateZ; }
  static RowsOnDevice rows_on_device(const Field& field, std::int64_t rows, const Sizes& sizes) {
    const auto* const parts = field.parts.data();
    if (parts == table::kQvzk) return {3 * sizes.d, sizes.d};
    if (parts == table::kGammaIn || parts == table::kContextIn) return {0, 0};
    return {rows, field.of_memory ? rows : 0};
  }
};
bool blocks_step_compact(const Config& config, std::int64_t vocab, int gpu);
void compose_blocks(std::vector<LayerFields<kernels::WeightView<kernels::Device>, const float*>>& layers, int gpu);

struct Mmrec : BlocksOnDevice {
  using Config = models::Config;
  template <class Matrix, class Vector>
  using Fields = ModelFields<Matrix, Vector>;
  template <class Backend, class A>
  using Net = models::Net<Backend, A>;

  template <class Visit, class... Models>
  static void visit(const Visit& visit, Models&... models) {
    visit_model(visit, models...);
  }
  static Sizes sizes(const Config& config, const Checkpoint* /*checkpoint*/) { return sizes_of(config); }
  static TensorRules rules(const Config& config);
  template <class View>
  static void complete(View& view) {
    if (is_tied(view)) view.head = view.embedding;
  }
  template <class View>
  static void complete_on_device(View& view, int gpu) {
    compose_blocks(view.layers, gpu);
  }
  static bool steps_compact(const Config& config, int gpu) {
    return blocks_step_compact(config, config.vocab_size, gpu);
  }
  template <class Weights>
  static bool is_tied(const Weights& weights) {
    return weights.head.rows == 0;
  }

  static void describe(const Config& config, ModelInfo& info);
  static void correct_bytes(const Config& config, std::optional<kernels::DType> type, ModelInfo& info);
  static ProductCounts products(const Config& config);
  static Config synthetic(const SyntheticSizes& sizes);
};

/// head.rows == 0 where it is tied to the embedding.
using HostWeights = WeightsOf<Mmrec>;
template <class Space>
using ModelView = ViewOf<Mmrec, Space>;
template <class Space>
using LayerView = LayerFields<kernels::WeightView<Space>, const float*>;

/// The products of the model's blocks. Those of the memory count only in models of several slots: attention to a single
/// slot needs no query.
ProductCounts products_of_blocks(const Config& config);

/// Bytes of W_q of all blocks. A GPU's step multiplies it only where there is something to attend to.
std::uint64_t bytes_of_queries(const Config& config, kernels::DType type);

}  // namespace mmrec::models
