// MM-Rec's executor on a GPU.
#include "models/runtime/cuda/executor.h"

#include <memory>
#include <utility>

#include "models/mmrec/cuda/chunk_plan.h"
#include "models/mmrec/cuda/ops.h"
#include "models/mmrec/cuda/weights.h"
#include "models/mmrec/executors.h"
#include "models/mmrec/net.h"

namespace mmrec::models {
namespace {

using CudaModel = BoundModel<Config, CudaWeights>;

template <class A>
struct CudaLane {
  using Model = CudaModel;
  using Element = A;
  using Forward = models::Forward<Net<kernels::Cuda, A>>;
  explicit CudaLane(const CudaModel& model)
      : backend(model.gpu()),
        forward(model.config, model.weights->view(), backend, cuda_plan(model.config, backend.processors())) {}
  kernels::Cuda backend;
  Forward forward;
};

}  // namespace

std::shared_ptr<const CudaWeights> upload_weights(const HostWeights& weights, Precision precision, int gpu) {
  return std::make_shared<const CudaWeights>(weights, precision, gpu);
}
std::uint64_t device_bytes(const CudaWeights& weights) { return weights.bytes(); }
Precision precision_of(const CudaWeights& weights) { return precision_of(weights.type()); }

std::shared_ptr<Executor> make_cuda_executor(const Config& config, std::shared_ptr<const CudaWeights> weights) {
  return cuda_executor_of<CudaLane>(config, std::move(weights));
}

}  // namespace mmrec::models
