// What takes the place of everything on a GPU in a build without CUDA.
#include <stdexcept>

#include "models/mmrec/mmrec.h"
#include "models/mmrec100m/mmrec100m.h"
#include "models/mmrec_jax/mmrec_jax.h"
#include "models/runtime/cuda_device.h"

namespace mmrec::models {

int cuda_device_count() { return 0; }
std::string cuda_unusable_reason(int /*gpu*/) { return "this build has no CUDA backend"; }
CudaDeviceInfo cuda_device_info(int gpu) { throw std::runtime_error(cuda_unusable_reason(gpu)); }

template <class Config>
CudaModel make_cuda_executor(const Config& /*config*/, const WeightsOf<typename Config::Arch>& /*weights*/,
                             Precision /*precision*/, int gpu) {
  throw std::runtime_error(cuda_unusable_reason(gpu));
}
template CudaModel make_cuda_executor(const Config&, const HostWeights&, Precision, int);
template CudaModel make_cuda_executor(const Config100m&, const HostWeights100m&, Precision, int);
template CudaModel make_cuda_executor(const jax::Config&, const jax::HostWeights&, Precision, int);

}  // namespace mmrec::models
