// The table of a model's weights: every field with the tensors of the public state dict that fill it, their shapes and
// its purpose. Checking, binding, viewing, copying, counting and making up weights all go through it.
//
// Another kind of block is another such table: a struct of fields, their parts, and a visitor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "models/files/checkpoint.h"
#include "models/mmrec/config.h"
#include "models/mmrec/layer_fields.h"

namespace mmrec::models {

/// A size that depends on the configuration: a sum of multiples of its dimensions.
struct Extent {
  std::int64_t v = 0, d = 0, f = 0, g = 0, r = 0;

  std::int64_t of(const Config& c) const {
    return v * c.vocab_size + d * c.model_dim + f * c.ffn_dim + g * c.gate_hidden_dim() + r * c.dpg_rank;
  }
};
constexpr Extent operator*(std::int64_t n, const Extent& e) { return {n * e.v, n * e.d, n * e.f, n * e.g, n * e.r}; }

/// Says of a configuration whether it is one of a set.
using Variants = bool (*)(const Config& config);

/// What one tensor gives to a field: rows [row, row + rows) and columns [col, col + cols) of NAME.weight [out, in].
struct TensorPart {
  std::string_view name;                                             // behind the prefix of its block
  Extent out, in;                                                    // `in` is not used for a vector
  Variants used_by = [](const Config& /*config*/) { return true; };  // the MDI gate's are with DPG too, unused
  Extent row = {}, rows = out;  // fewer than `out`: the tensor may have more, which nothing uses
  Extent col = {}, cols = in;
};

/// Describes a field of LayerFields or ModelFields.
struct Field {
  enum class Kind : std::uint8_t {
    kLinear,  // a matrix, of tensors that have biases
    kBias,    // these biases, NAME.bias [out]: of parts that begin at column 0, so that each is taken once
    kTable,   // a matrix without biases
    kNorm,    // a vector NAME.weight [out]
  };
  Kind kind;
  std::span<const TensorPart> parts;  // from top to bottom; the field is empty in a model that uses none of them
  bool of_memory = false;             // of the attention over memory slots: idle while there are none

  constexpr bool is_matrix() const { return kind == Kind::kLinear || kind == Kind::kTable; }
};

/// The fields of a whole model.
template <class Matrix, class Vector>
struct ModelFields {
  Matrix embedding{};  // [V, D]
  Matrix head{};       // [V, D]
  Vector norm{};       // [D]
  std::vector<LayerFields<Matrix, Vector>> layers;
};

namespace table {

inline constexpr Extent kV{.v = 1}, kD{.d = 1}, kF{.f = 1}, kG{.g = 1}, kR{.r = 1}, kNone{};
inline constexpr Variants kAll = [](const Config& /*config*/) { return true; };
inline constexpr Variants kSplit = [](const Config& c) { return !c.use_hem; };
inline constexpr Variants kFused = [](const Config& c) { return c.use_hem; };
inline constexpr Variants kMdi = [](const Config& c) { return !c.use_dpg; };
inline constexpr Variants kDpg = [](const Config& c) { return c.use_dpg; };
inline constexpr Variants kSplitMdi = [](const Config& c) { return !c.use_hem && !c.use_dpg; };
inline constexpr Variants kFusedMdi = [](const Config& c) { return c.use_hem && !c.use_dpg; };

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

/// The same for a model; the instances have as many layers as the first.
template <class Visit, class Model, class... Models>
void visit_model(const Visit& visit, Model& first, Models&... others) {
  using enum Field::Kind;
  visit(Field{kTable, table::kEmbedding}, first.embedding, others.embedding...);
  visit(Field{kTable, table::kHead}, first.head, others.head...);
  visit(Field{kNorm, table::kNorm}, first.norm, others.norm...);
  for (std::size_t i = 0; i < first.layers.size(); ++i) visit_layer(visit, first.layers[i], others.layers[i]...);
}

/// One tensor a checkpoint of a configuration may hold.
struct TensorSpec {
  enum class Use : std::uint8_t {
    kRequired,
    kOptional,  // used if present (a head that is not tied)
    kUnused,    // in the public state dict, without a part in the model's equations
  };
  std::string name;
  std::vector<std::int64_t> shape;
  Use use = Use::kRequired;
  bool may_have_more_rows = false;  // W_fused: shape[0] is the least; rows beyond are unused
};

/// In the order of checks. A bias follows its weight.
std::vector<TensorSpec> tensor_specs(const Config& config);

/// Compares all of a checkpoint's tensors with these. Throws std::runtime_error naming file, tensor, found and expected
/// for one that is missing, unexpected or of another shape; those that only training uses are reported to `warn`.
void check_tensors(const Checkpoint& checkpoint, const Config& config, const WarningSink& warn);

}  // namespace mmrec::models
