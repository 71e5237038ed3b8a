// The table of an mmrec-jax model's weights: every field with the tensors of the public parameters that fill it, their
// shapes and its purpose. Dense kernels are [in, out] in the checkpoint and [out, in] in memory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "models/mmrec_jax/config.h"
#include "models/weights/fields.h"

namespace mmrec::models::jax {

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

using models::table::kD;
using models::table::kF;
using models::table::kG;
using models::table::kNone;
using models::table::kV;
inline constexpr Variants kFused = [](const Sizes& s) { return s.fused; };
inline constexpr Variants kSplit = [](const Sizes& s) { return !s.fused; };

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

/// visit(Field, members...) for every field of a block; see visit_layer of models/mmrec/weight_table.h.
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

inline constexpr Field kEmbeddingField{Field::Kind::kTable, table::kEmbedding, false, kFlaxTable};
inline constexpr Field kNormField{Field::Kind::kNorm, table::kNorm, false, kFlaxScale};

inline std::string block_prefix(std::size_t layer) { return "block_" + std::to_string(layer) + "."; }

/// The same for a model; the instances have as many layers as the first.
template <class Visit, class Model, class... Models>
void visit_model(const Visit& visit, Model& first, Models&... others) {
  visit(kEmbeddingField, first.embedding, others.embedding...);
  for (std::size_t i = 0; i < first.layers.size(); ++i) {
    const std::string prefix = block_prefix(i);
    jax::visit_layer(at_prefix(visit, prefix), first.layers[i], others.layers[i]...);
  }
  visit(kNormField, first.norm, others.norm...);
}

/// fused: the four projections of u are one tensor.
inline Sizes sizes_of(const Config& c, bool fused) {
  return {.v = c.vocab_size, .d = c.model_dim, .f = c.ffn_dim(), .g = c.gate_hidden_dim(), .fused = fused};
}

/// All tensors of a model, in the order of checks.
std::vector<TensorSpec> tensor_specs(const Config& config, bool fused);

}  // namespace mmrec::models::jax
