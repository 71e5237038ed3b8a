// MMRec100M's weights: the table of their fields, which is MM-Rec's for the blocks of an expert; in host memory, and
// views of them anywhere.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "models/mmrec/weights.h"
#include "models/mmrec100m/config.h"

namespace mmrec::models {

inline constexpr std::array<std::string_view, 2> kExpertPrefixes = {"text_expert.", "code_expert."};

template <class Matrix, class Vector>
struct ExpertFields {
  Vector norm{};                                    // [E]
  std::vector<LayerFields<Matrix, Vector>> layers;  // none of an expert that does not run
};

template <class Matrix, class Vector>
struct Fields100m {
  Matrix embedding{};    // [V, E]
  Matrix fusion{};       // [2E, 2E], on the experts' outputs side by side, text first
  Vector fusion_bias{};  // [2E]
  Vector norm{};         // [2E]
  Matrix head{};         // [V, 2E]
  std::array<ExpertFields<Matrix, Vector>, 2> experts;
};

namespace table {

inline constexpr TensorPart kFusion[] = {{"fusion.fusion_proj", 2 * kD, 2 * kD}};
inline constexpr TensorPart kFinalNorm[] = {{"final_norm", 2 * kD, kNone}};
inline constexpr TensorPart kWideHead[] = {{"lm_head", kV, 2 * kD}};

}  // namespace table

/// visit(Field, members...) for every field, as visit_model. Experts have as many layers as the first instance's.
template <class Visit, class Model, class... Models>
void visit_100m(const Visit& visit, Model& first, Models&... others) {
  using enum Field::Kind;
  visit(Field{kTable, table::kEmbedding}, first.embedding, others.embedding...);
  visit(Field{kLinear, table::kFusion}, first.fusion, others.fusion...);
  visit(Field{kBias, table::kFusion}, first.fusion_bias, others.fusion_bias...);
  visit(Field{kNorm, table::kFinalNorm}, first.norm, others.norm...);
  visit(Field{kTable, table::kWideHead}, first.head, others.head...);
  for (std::size_t e = 0; e < first.experts.size(); ++e) {
    if (first.experts[e].layers.empty()) continue;
    visit(Field{kNorm, table::kNorm}, first.experts[e].norm, others.experts[e].norm...);
    for (std::size_t i = 0; i < first.experts[e].layers.size(); ++i) {
      visit_layer(visit, first.experts[e].layers[i], others.experts[e].layers[i]...);
    }
  }
}

struct HostWeights100m : Fields100m<HostMatrix, HostVector>, WeightTotals {};

template <class Space>
using View100m = Fields100m<kernels::WeightView<Space>, const float*>;

/// A view whose experts have as many layers as `weights`, all of it null.
template <class Space>
View100m<Space> empty_view(const HostWeights100m& weights) {
  View100m<Space> view;
  for (std::size_t e = 0; e < view.experts.size(); ++e) view.experts[e].layers.resize(weights.experts[e].layers.size());
  return view;
}
View100m<kernels::Host> view_of(const HostWeights100m& weights);

/// An expert as a stack of MM-Rec's takes it: without a head.
template <class Space>
ModelView<Space> stack_view(const View100m<Space>& view, std::size_t expert) {
  const auto& fields = view.experts[expert];
  return {.embedding = view.embedding, .head = {}, .norm = fields.norm, .layers = fields.layers};
}

/// The type of all matrices where they agree, fp32 otherwise.
kernels::DType common_dtype(const HostWeights100m& weights);

/// All tensors of a checkpoint, whichever expert runs, in the order of checks.
std::vector<TensorSpec> tensor_specs(const Config100m& config);

/// As load_weights of models/mmrec/weights.h; of the experts only those that run are read.
HostWeights100m load_weights(const Checkpoint& checkpoint, const Config100m& config, const WeightOptions& options = {},
                             const WarningSink& warn = {});

}  // namespace mmrec::models
