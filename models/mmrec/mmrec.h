// MM-Rec as an architecture (models/runtime/model.h).
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "kernels/tensor.h"
#include "models/mmrec/config.h"
#include "models/mmrec/state.h"
#include "models/mmrec/weight_table.h"
#include "models/runtime/model.h"

namespace mmrec::models {

template <class Backend, class A>
class Net;

struct Mmrec : TableDefaults {
  static constexpr std::string_view kName = "mmrec";
  using Config = models::Config;
  template <class Matrix, class Vector>
  using Fields = ModelFields<Matrix, Vector>;
  template <class Backend, class A>
  using Net = models::Net<Backend, A>;

  template <class Visit, class... Models>
  static void visit(const Visit& visit, Models&... models) {
    visit_model(visit, models...);
  }
  static Sizes sizes(const Config& config, const Checkpoint& /*checkpoint*/) { return sizes_of(config); }
  static std::vector<TensorSpec> tensors(const Config& config, const Sizes& /*sizes*/) { return tensor_specs(config); }
  static TensorRules rules(const Config& config) { return tensor_rules(config); }
  // Public checkpoints hold the tied head twice: it is kept only if it differs.
  static bool is_read(const Field& field) { return field.parts.data() != table::kHead; }
  static void read_rest(WeightReader& reader, const Sizes& sizes, WeightsOf<Mmrec>& weights);
  template <class View>
  static void complete(View& view) {
    if (view.head.rows == 0) view.head = view.embedding;
  }
  static Config identity(Config config) {
    config.ids = {};
    return config;
  }

  static Config config_of(const ModelSource& source) {
    return parse_config(source.config, source.config_name, source.warn);
  }
  static void describe(const Config& config, ModelInfo& info);
  static void count_bytes(const Config& config, const WeightsOf<Mmrec>& weights, std::optional<kernels::DType> type,
                          ModelInfo& info);
  static ProductCounts products(const Config& config);
  static SyntheticModel synthetic(const SyntheticSizes& sizes);
};

/// head.rows == 0 where it is tied to the embedding.
using HostWeights = WeightsOf<Mmrec>;
template <class Space>
using ModelView = ViewOf<Mmrec, Space>;
template <class Space>
using LayerView = LayerFields<kernels::WeightView<Space>, const float*>;

/// Of the model's blocks. Those of the memory only where several slots are filled: a single one is attended to whatever
/// the query.
ProductCounts products_of_blocks(const Config& config);

/// Adds the weight bytes that one decoded token reads of a block: every matrix and vector, the projections of attention
/// over memory slots by themselves. Matrices are of `type` on the device that decodes, of their stored type where none
/// is given.
void add_block_bytes(ModelInfo& info, const LayerFields<HostMatrix, HostVector>& layer,
                     std::optional<kernels::DType> type);

extern template class ModelOf<Mmrec>;

}  // namespace mmrec::models
