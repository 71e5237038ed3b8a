// The twin of cuda/executor.cpp in a build without CUDA.
#include <stdexcept>

#include "models/mmrec100m/executors.h"
#include "models/runtime/cuda_device.h"

namespace mmrec::models {

class CudaWeights100m {};

std::shared_ptr<const CudaWeights100m> upload_weights(const HostWeights100m& /*weights*/, Precision /*precision*/,
                                                      int gpu) {
  throw std::runtime_error(cuda_unusable_reason(gpu));
}
std::uint64_t device_bytes(const CudaWeights100m& /*weights*/) { return 0; }
Precision precision_of(const CudaWeights100m& /*weights*/) { return Precision::kAuto; }

std::shared_ptr<Executor> make_cuda_executor(const Config100m& /*config*/,
                                             // NOLINTNEXTLINE(performance-unnecessary-value-param): as its twin
                                             std::shared_ptr<const CudaWeights100m> /*weights*/) {
  throw std::runtime_error(cuda_unusable_reason());
}

}  // namespace mmrec::models
