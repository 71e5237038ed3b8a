// What takes the place of everything on a GPU in a build without CUDA.
#include <stdexcept>

#include "models/mmrec/mmrec.h"
#include "models/mmrec100m/mmrec100m.h"
#include "models/mmrec_jax/mmrec_jax.h"
#include "models/runtime/cuda_device.h"
#include "models/runtime/cuda_model.h"

namespace mmrec::models {

int cuda_device_count() { return 0; }
std::string cuda_unusable_reason(int /*gpu*/) { return "this build has no CUDA backend"; }
CudaDeviceInfo cuda_device_info(int gpu) { throw std::runtime_error(cuda_unusable_reason(gpu)); }

template <class Arch>
CudaModel<Arch>::CudaModel(const WeightsOf<Arch>& /*weights*/, Precision /*precision*/, int gpu) {
  throw std::runtime_error(cuda_unusable_reason(gpu));
}
template <class Arch>
std::uint64_t CudaModel<Arch>::bytes() const {
  return 0;
}
template <class Arch>
Precision CudaModel<Arch>::precision() const {
  return Precision::kAuto;
}
template <class Arch>
std::shared_ptr<Executor> CudaModel<Arch>::executor(const typename Arch::Config& /*config*/) const {
  throw std::runtime_error(cuda_unusable_reason());
}

template class CudaModel<Mmrec>;
template class CudaModel<Mmrec100m>;
template class CudaModel<jax::MmrecJax>;

}  // namespace mmrec::models
