// The table of MM-Rec's weights: every field with the tensors of the public state dict that fill it, their shapes and
// its purpose.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "models/mmrec/config.h"
#include "models/mmrec/layer_fields.h"
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
inline constexpr Variants kSplit = [](const Sizes& s) { return !s.fused; };
inline constexpr Variants kFused = [](const Sizes& s) { return s.fused; };
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

/// visit(Field, members...) for every field of a block: the same member of each instance, of which there may be none. A
/// model's fingerprint is taken in this order.
template <class Visit, class... Layers>
constexpr void visit_layer(const Visit& visit, Layers&... w) {
  using enum Field::Kind;
  visit(Field{kLinear, table::kQvzk}, w.qvzk...);
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
  visit(Field{kTable, table::kHead}, first.head, others.head...);
  visit_blocks(visit, "", first, others...);
  visit(Field{kNorm, table::kNorm}, first.norm, others.norm...);
}

inline Sizes sizes_of(const Config& c) {
  return {c.vocab_size, c.model_dim, c.ffn_dim, c.gate_hidden_dim(), c.dpg_rank, c.use_hem, c.use_dpg};
}

/// Appends the tensors of `layers` blocks, named `prefix`blocks.N., in the order of checks.
void add_block_specs(const std::string& prefix, const Sizes& sizes, std::int64_t layers,
                     std::vector<TensorSpec>& specs);

/// All tensors of a model, in the order of checks.
std::vector<TensorSpec> tensor_specs(const Config& config);

/// The names of tensors of blocks that only training uses, and whether this is one.
inline constexpr std::string_view kTrainingNames = "mdi.W_planning_*";
bool is_training_only(std::string_view name);

/// What is said of a tensor that is missing or unexpected.
TensorRules tensor_rules(const Config& config);

}  // namespace mmrec::models
