// The twin of runner_cuda.cpp in a build without CUDA.
#include <stdexcept>

#include "models/runner_cuda.h"

namespace mmrec::models {

class CudaWeights {};

std::string cuda_unusable_reason() { return "this build has no CUDA backend"; }
CudaDeviceInfo cuda_device_info() { throw std::runtime_error(cuda_unusable_reason()); }

std::shared_ptr<const CudaWeights> upload_weights(const HostWeights& /*weights*/, Precision /*precision*/) {
  throw std::runtime_error(cuda_unusable_reason());
}
std::uint64_t device_bytes(const CudaWeights& /*weights*/) { return 0; }
Precision precision_of(const CudaWeights& /*weights*/) { return Precision::kAuto; }

std::unique_ptr<Runner> make_cuda_runner(const Config& /*config*/,
                                         // NOLINTNEXTLINE(performance-unnecessary-value-param): as its twin
                                         std::shared_ptr<const CudaWeights> /*weights*/, int /*batch*/,
                                         const RunnerOptions& /*options*/) {
  throw std::runtime_error(cuda_unusable_reason());
}

}  // namespace mmrec::models
