// MMRec100M's executor on a GPU.
#include "models/runtime/cuda/executor.h"

#include <memory>
#include <utility>

#include "models/mmrec/cuda/chunk_plan.h"
#include "models/mmrec/cuda/ops.h"
#include "models/mmrec100m/companion.h"
#include "models/mmrec100m/executors.h"
#include "models/mmrec100m/net.h"
#include "models/runtime/cuda/upload.h"

namespace mmrec::models {

/// A stream each, the first one the main one. A thread drives the second where sweeps make the host wait.
template <>
class Sides<kernels::Cuda> {
 public:
  explicit Sides(kernels::Cuda& main) : main_(main) {}

  kernels::Cuda& of(std::size_t side) {
    if (side == 0) return main_;
    if (!second_) second_.emplace(main_.device());
    return *second_;
  }
  template <class Run>
  void run(bool waits, const Run& run) {
    kernels::Cuda& second = of(1);
    second.follow(main_);
    if (waits) {
      companion_.run([&] { run(std::size_t{0}); },
                     [&] {
                       second.make_current();
                       run(std::size_t{1});
                     });
    } else {
      run(std::size_t{0});
      run(std::size_t{1});
    }
    main_.follow(second);
  }

 private:
  kernels::Cuda& main_;
  std::optional<kernels::Cuda> second_;
  Companion companion_;
};

class CudaWeights100m : public DeviceWeights<View100m<kernels::Device>> {
 public:
  CudaWeights100m(const HostWeights100m& weights, Precision precision, int gpu)
      : DeviceWeights(
            weights, empty_view<kernels::Device>(weights),
            [](const auto& visit, auto&... models) { visit_100m(visit, models...); }, common_dtype(weights), precision,
            gpu) {}
};

namespace {

using CudaModel = BoundModel<Config100m, CudaWeights100m>;

template <class A>
struct CudaLane {
  using Model = CudaModel;
  using Element = A;
  using Forward = models::Forward<Net100m<kernels::Cuda, A>>;
  explicit CudaLane(const CudaModel& model)
      : backend(model.gpu()),
        sides(backend),
        forward(model.config, model.weights->view(), backend, sides,
                cuda_plan(model.config.stack(), backend.processors())) {}
  kernels::Cuda backend;
  Sides<kernels::Cuda> sides;
  Forward forward;
};

}  // namespace

std::shared_ptr<const CudaWeights100m> upload_weights(const HostWeights100m& weights, Precision precision, int gpu) {
  return std::make_shared<const CudaWeights100m>(weights, precision, gpu);
}
std::uint64_t device_bytes(const CudaWeights100m& weights) { return weights.bytes(); }
Precision precision_of(const CudaWeights100m& weights) { return precision_of(weights.type()); }

std::shared_ptr<Executor> make_cuda_executor(const Config100m& config, std::shared_ptr<const CudaWeights100m> weights) {
  return cuda_executor_of<CudaLane>(config, std::move(weights));
}

}  // namespace mmrec::models
