// mmrec-jax as an architecture (models/runtime/model.h): the table of its weights, every field with the tensors of the
// public parameters that fill it, their shapes and its purpose; where the state of a sequence lies in its slot; and
// what else the runtime asks. Dense kernels are [in, out] in the checkpoint and [out, in] in memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/tensor.h"
#include "models/mmrec_jax/config.h"
#include "models/runtime/host_state.h"
#include "models/runtime/model.h"
#include "models/weights/fields.h"

namespace mmrec::models::mmrec_jax {

template <class Matrix, class Vector>
struct LayerFields {
  Matrix qkvz{};        // [4D, D] on u: q, k, v, z
  Matrix gate_z{};      // [D, D] on z
  Matrix gate_h{};      // [D, D] on h_{t-1}
  Matrix gamma_in{};    // [G, D] on z
  Matrix gamma_up{};    // [D, G]
  Matrix context_in{};  // [G, D] on k
  Matrix context_up{};  // [D, G]
  Matrix query{};       // [D, D] on h, of the attention to the bank
  Matrix attended{};    // [D, D] on what is attended to
  Matrix ffn_in{};      // [F, D]
  Matrix ffn_out{};     // [D, F]

  Vector qkvz_bias{}, gate_z_bias{}, gate_h_bias{};
  Vector gamma_in_bias{}, gamma_up_bias{}, context_in_bias{}, context_up_bias{};
  Vector ffn_in_bias{}, ffn_out_bias{};
  Vector norm1{}, norm2{}, norm_recurrence{};  // [D]
};

template <class Matrix, class Vector>
struct ModelFields {
  Matrix embedding{};  // [V, D], also the head
  Vector norm{};       // [D]
  std::vector<LayerFields<Matrix, Vector>> layers;
};

namespace table {

using namespace models::table;

inline constexpr TensorPart kEmbedding[] = {{"shared_embed.embedding", kV, kD}};
inline constexpr TensorPart kNorm[] = {{"norm_final", kD, kNone}};
inline constexpr TensorPart kQkvz[] = {{"W_fused", 4 * kD, kD, kFused},
                                       {"W_q", kD, kD, kSplit},
                                       {"W_k", kD, kD, kSplit},
                                       {"W_v", kD, kD, kSplit},
                                       {"W_z", kD, kD, kSplit}};
inline constexpr TensorPart kGateZ[] = {{"W_g_z", kD, kD}};
inline constexpr TensorPart kGateH[] = {{"W_g_h", kD, kD}};
inline constexpr TensorPart kGammaIn[] = {{"W_gamma_1", kG, kD}};
inline constexpr TensorPart kGammaUp[] = {{"W_gamma_2", kD, kG}};
inline constexpr TensorPart kContextIn[] = {{"W_gamma_context_1", kG, kD}};
inline constexpr TensorPart kContextUp[] = {{"W_gamma_context_2", kD, kG}};
inline constexpr TensorPart kQuery[] = {{"attn.q_proj", kD, kD}};
inline constexpr TensorPart kAttended[] = {{"attn.out_proj", kD, kD}};
inline constexpr TensorPart kFfnIn[] = {{"ffn_dense1", kF, kD}};
inline constexpr TensorPart kFfnOut[] = {{"ffn_dense2", kD, kF}};
inline constexpr TensorPart kNorm1[] = {{"norm1", kD, kNone}};
inline constexpr TensorPart kNorm2[] = {{"norm2", kD, kNone}};
inline constexpr TensorPart kNormRecurrence[] = {{"norm_recurrence", kD, kNone}};

}  // namespace table

/// visit(Field, members...) for every field of a block; see visit_layer of models/mmrec/mmrec.h.
template <class Visit, class... Layers>
constexpr void visit_layer(const Visit& visit, Layers&... w) {
  using enum Field::Kind;
  const auto linear = [&](std::span<const TensorPart> parts, auto&... of) {
    visit(Field{kLinear, parts, false, kFlaxKernel}, of...);
  };
  const auto bias = [&](std::span<const TensorPart> parts, auto&... of) { visit(Field{kBias, parts}, of...); };
  const auto plain = [&](std::span<const TensorPart> parts, auto&... of) {
    visit(Field{kTable, parts, false, kFlaxKernel}, of...);
  };
  const auto norm = [&](std::span<const TensorPart> parts, auto&... of) {
    visit(Field{kNorm, parts, false, kFlaxScale}, of...);
  };
  linear(table::kQkvz, w.qkvz...), bias(table::kQkvz, w.qkvz_bias...);
  linear(table::kGateZ, w.gate_z...), bias(table::kGateZ, w.gate_z_bias...);
  linear(table::kGateH, w.gate_h...), bias(table::kGateH, w.gate_h_bias...);
  linear(table::kGammaIn, w.gamma_in...), bias(table::kGammaIn, w.gamma_in_bias...);
  linear(table::kGammaUp, w.gamma_up...), bias(table::kGammaUp, w.gamma_up_bias...);
  linear(table::kContextIn, w.context_in...), bias(table::kContextIn, w.context_in_bias...);
  linear(table::kContextUp, w.context_up...), bias(table::kContextUp, w.context_up_bias...);
  plain(table::kQuery, w.query...);
  plain(table::kAttended, w.attended...);
  linear(table::kFfnIn, w.ffn_in...), bias(table::kFfnIn, w.ffn_in_bias...);
  linear(table::kFfnOut, w.ffn_out...), bias(table::kFfnOut, w.ffn_out_bias...);
  norm(table::kNorm1, w.norm1...);
  norm(table::kNorm2, w.norm2...);
  norm(table::kNormRecurrence, w.norm_recurrence...);
}

/// Offsets and size in bytes. There is a bank, or h where no bank is written. How many of the bank's rows are written
/// follows from the position, whatever the calls: every layer of a call writes as many as it has tokens.
struct SlotLayout {
  std::size_t logits = 0;  // [V] fp32: of the next token
  std::size_t h = 0;       // [L, D] fp32
  std::size_t bank = 0;    // [S, D] fp32, the rows written so far
  std::size_t bytes = 0;   // of a slot

  explicit SlotLayout(const Config& config) {
    const auto dim = static_cast<std::size_t>(config.model_dim);
    SlotPlaces places;
    logits = places.place(static_cast<std::size_t>(config.vocab_size) * sizeof(float));
    if (config.bank) {
      bank = places.place(static_cast<std::size_t>(config.long_mem_len) * dim * sizeof(float));
    } else {
      h = places.place(static_cast<std::size_t>(config.num_layers) * dim * sizeof(float));
    }
    bytes = places.bytes();
  }
};

/// Rows of the bank that are written at a position.
inline Filling bank_filling(const Config& config) {
  return {.pieces = config.long_mem_len, .tokens = 1, .at_once = config.num_layers};
}
inline std::int64_t used_rows(const Config& config, std::int64_t position) {
  return bank_filling(config).filled(position);
}

/// The saved part of the state.
inline StateLayout state_layout(const Config& config) {
  using enum StatePart::Type;
  const SlotLayout slot(config);
  const StatePart memory =
      config.bank
          ? StatePart{"bank", kF32, 1, config.long_mem_len * config.model_dim, slot.bank, true, bank_filling(config)}
          : StatePart{"h", kF32, config.num_layers, config.model_dim, slot.h};
  return {.numbers = {{"num_layers", config.num_layers},
                      {"model_dim", config.model_dim},
                      {"long_mem_len", config.long_mem_len},
                      {"vocab_size", config.vocab_size}},
          .parts = {memory, {"logits", kF32, 1, config.vocab_size, slot.logits, false}},
          .slot_bytes = slot.bytes};
}

template <class Backend, class A>
class Net;

struct MmrecJax : TableDefaults {
  using Config = mmrec_jax::Config;
  template <class Matrix, class Vector>
  using Fields = ModelFields<Matrix, Vector>;
  template <class Backend, class A>
  using Net = mmrec_jax::Net<Backend, A>;

  template <class Visit, class Model, class... Models>
  static void visit(const Visit& visit, Model& first, Models&... others) {
    using enum Field::Kind;
    visit(Field{kTable, table::kEmbedding, false, kFlaxTable}, first.embedding, others.embedding...);
    for (std::size_t i = 0; i < first.layers.size(); ++i) {
      const std::string prefix = "block_" + std::to_string(i) + ".";
      mmrec_jax::visit_layer(at_prefix(visit, prefix), first.layers[i], others.layers[i]...);
    }
    visit(Field{kNorm, table::kNorm, false, kFlaxScale}, first.norm, others.norm...);
  }
  /// The projections may be one tensor, W_fused, or four.
  static Sizes sizes(const Config& config, const Checkpoint* checkpoint) {
    return {.v = config.vocab_size,
            .d = config.model_dim,
            .f = config.ffn_dim(),
            .g = config.gate_hidden_dim(),
            .fused = checkpoint == nullptr || checkpoint->find("block_0.W_fused.kernel") != nullptr};
  }
  static TensorRules rules(const Config& config);
  template <class Weights>
  static bool is_tied(const Weights& /*weights*/) {
    return true;
  }
  static Config identity(Config config) {
    config.calls = Config().calls;
    return config;
  }

  static void describe(const Config& config, ModelInfo& info);
  /// A step multiplies no h_{t-1} where it is 0, and attends to nothing without a bank.
  static bool step_reads(const Config& config, const Field& field) {
    const TensorPart* const parts = field.parts.data();
    const bool idle = config.bank ? parts == table::kGateH : parts == table::kQuery || parts == table::kAttended;
    return !(idle && field.is_matrix());
  }
  static ProductCounts products(const Config& config);
  static Config synthetic(const SyntheticSizes& sizes);
};

using HostWeights = WeightsOf<MmrecJax>;
template <class Space>
using ModelView = ViewOf<MmrecJax, Space>;
template <class Space>
using LayerView = LayerFields<kernels::WeightView<Space>, const float*>;

}  // namespace mmrec::models::mmrec_jax
