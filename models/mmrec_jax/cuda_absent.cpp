// The twin of cuda/executor.cpp in a build without CUDA.
#include <stdexcept>

#include "models/mmrec_jax/executors.h"
#include "models/runtime/cuda_device.h"

namespace mmrec::models::jax {

class CudaWeights {};

std::shared_ptr<const CudaWeights> upload_weights(const HostWeights& /*weights*/, Precision /*precision*/, int gpu) {
  throw std::runtime_error(cuda_unusable_reason(gpu));
}
std::uint64_t device_bytes(const CudaWeights& /*weights*/) { return 0; }
Precision precision_of(const CudaWeights& /*weights*/) { return Precision::kAuto; }

std::shared_ptr<Executor> make_cuda_executor(const Config& /*config*/,
                                             // NOLINTNEXTLINE(performance-unnecessary-value-param): as its twin
                                             std::shared_ptr<const CudaWeights> /*weights*/) {
  throw std::runtime_error(cuda_unusable_reason());
}

}  // namespace mmrec::models::jax
