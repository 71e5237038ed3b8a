// mmrec-jax's weights and its executor on a GPU.
#include "models/runtime/cuda/executor.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

#include "models/mmrec_jax/executors.h"
#include "models/mmrec_jax/net.h"
#include "models/mmrec_jax/state.h"
#include "models/runtime/cuda/upload.h"

namespace mmrec::models::jax {

class CudaWeights : public DeviceWeights<ModelView<kernels::Device>> {
 public:
  CudaWeights(const HostWeights& weights, Precision precision, int gpu)
      : DeviceWeights(
            weights, {.layers = {weights.layers.size(), LayerView<kernels::Device>()}},
            [](const auto& visit, auto&... models) { jax::visit_model(visit, models...); }, common_dtype(weights),
            precision, gpu) {}
};

namespace {

/// Rows of 64 prompts of 512 tokens where D = 1,024, so that their recurrences go side by side: 8 clusters of 16
/// multiprocessors; fewer where activations are wider.
Plan plan_of(const Config& config) {
  constexpr std::int64_t kElements = std::int64_t{32} << 20;
  return {.tokens = 4096, .tile = 1, .rows = std::clamp<std::int64_t>(kElements / config.model_dim, 4096, 32768)};
}

using CudaModel = BoundModel<Config, CudaWeights>;

template <class A>
struct CudaLane {
  using Model = CudaModel;
  using Element = A;
  using Forward = models::Forward<Net<kernels::Cuda, A>>;
  explicit CudaLane(const CudaModel& model)
      : backend(model.gpu()), forward(model.config, model.weights->view(), backend, plan_of(model.config)) {}
  kernels::Cuda backend;
  Forward forward;
};

}  // namespace

std::shared_ptr<const CudaWeights> upload_weights(const HostWeights& weights, Precision precision, int gpu) {
  return std::make_shared<const CudaWeights>(weights, precision, gpu);
}
std::uint64_t device_bytes(const CudaWeights& weights) { return weights.bytes(); }
Precision precision_of(const CudaWeights& weights) { return models::precision_of(weights.type()); }

std::shared_ptr<Executor> make_cuda_executor(const Config& config, std::shared_ptr<const CudaWeights> weights) {
  return cuda_executor_of<CudaLane>(config, std::move(weights));
}

}  // namespace mmrec::models::jax
