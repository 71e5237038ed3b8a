// mmrec-jax as an architecture (models/runtime/model.h).
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "kernels/tensor.h"
#include "models/mmrec_jax/config.h"
#include "models/mmrec_jax/state.h"
#include "models/mmrec_jax/weight_table.h"
#include "models/runtime/model.h"

namespace mmrec::models::jax {

template <class Backend, class A>
class Net;

struct MmrecJax : TableDefaults {
  static constexpr std::string_view kName = "mmrec-jax";
  using Config = jax::Config;
  template <class Matrix, class Vector>
  using Fields = ModelFields<Matrix, Vector>;
  template <class Backend, class A>
  using Net = jax::Net<Backend, A>;

  template <class Visit, class... Models>
  static void visit(const Visit& visit, Models&... models) {
    jax::visit_model(visit, models...);
  }
  /// The projections may be one tensor, W_fused, or four.
  static Sizes sizes(const Config& config, const Checkpoint& checkpoint) {
    return sizes_of(config, checkpoint.find("block_0.W_fused.kernel") != nullptr);
  }
  static std::vector<TensorSpec> tensors(const Config& config, const Sizes& sizes) {
    return tensor_specs(config, sizes.fused);
  }
  static TensorRules rules(const Config& config);
  static Config identity(Config config) {
    config.ids = {};
    config.calls = Config().calls;
    return config;
  }

  static Config config_of(const ModelSource& source);
  static void describe(const Config& config, ModelInfo& info);
  static void count_bytes(const Config& config, const WeightsOf<MmrecJax>& weights, std::optional<kernels::DType> type,
                          ModelInfo& info);
  static ProductCounts products(const Config& config);
  static SyntheticModel synthetic(const SyntheticSizes& sizes);
};

using HostWeights = WeightsOf<MmrecJax>;
template <class Space>
using ModelView = ViewOf<MmrecJax, Space>;
template <class Space>
using LayerView = LayerFields<kernels::WeightView<Space>, const float*>;

}  // namespace mmrec::models::jax

extern template class mmrec::models::ModelOf<mmrec::models::jax::MmrecJax>;
