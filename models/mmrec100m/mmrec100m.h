// MMRec100M as an architecture (models/runtime/model.h): the table of its weights, which is MM-Rec's for the blocks of
// an expert, and what else tells it from others.
#pragma once

#include <array>
#include <optional>
#include <string_view>
#include <vector>

#include "models/mmrec/mmrec.h"
#include "models/mmrec100m/config.h"
#include "models/mmrec100m/state.h"

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

/// visit(Field, members...) for every field, as visit_model; nothing of an expert without layers.
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
    visit(Field{.kind = kNorm, .parts = table::kNorm, .prefix = kExpertPrefixes[e]}, first.experts[e].norm,
          others.experts[e].norm...);
    visit_blocks(visit, kExpertPrefixes[e], first.experts[e], others.experts[e]...);
  }
}

template <class Backend, class A>
class Net100m;

struct Mmrec100m : TableDefaults {
  static constexpr std::string_view kName = "mmrec100m";
  using Config = Config100m;
  template <class Matrix, class Vector>
  using Fields = Fields100m<Matrix, Vector>;
  template <class Backend, class A>
  using Net = Net100m<Backend, A>;

  template <class Visit, class... Models>
  static void visit(const Visit& visit, Models&... models) {
    visit_100m(visit, models...);
  }
  static Sizes sizes(const Config& config, const Checkpoint& /*checkpoint*/) { return sizes_of(config.stack()); }
  /// Whichever expert runs.
  static std::vector<TensorSpec> tensors(const Config& config, const Sizes& sizes);
  static TensorRules rules(const Config& config);
  static bool is_read(const Field& field) { return !(field.of_memory && field.is_matrix()); }  // nothing is attended to
  /// Of the experts that run.
  template <class Weights>
  static void make_layers(const Config& config, Weights& weights) {
    for (std::size_t i = 0; i < config.stacks(); ++i) {
      weights.experts[config.first() + i].layers.resize(static_cast<std::size_t>(config.num_layers));
    }
  }
  template <class From, class To>
  static void match_layers(const From& from, To& to) {
    for (std::size_t e = 0; e < to.experts.size(); ++e) to.experts[e].layers.resize(from.experts[e].layers.size());
  }
  /// Heads that attend to nothing change nothing either.
  static Config identity(Config config) {
    config.ids = {};
    config.num_heads = 1;
    return config;
  }

  static Config config_of(const ModelSource& source);
  static void describe(const Config& config, ModelInfo& info);
  static void count_bytes(const Config& config, const WeightsOf<Mmrec100m>& weights, std::optional<kernels::DType> type,
                          ModelInfo& info);
  static ProductCounts products(const Config& config);
  /// Both experts run.
  static SyntheticModel synthetic(const SyntheticSizes& sizes);
};

using HostWeights100m = WeightsOf<Mmrec100m>;
template <class Space>
using View100m = ViewOf<Mmrec100m, Space>;

/// An expert as a stack of MM-Rec's takes it: without a head.
template <class Space>
ModelView<Space> stack_view(const View100m<Space>& view, std::size_t expert) {
  const auto& fields = view.experts[expert];
  return {.embedding = view.embedding, .head = {}, .norm = fields.norm, .layers = fields.layers};
}

extern template class ModelOf<Mmrec100m>;

}  // namespace mmrec::models
