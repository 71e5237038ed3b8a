// What takes the place of everything on a GPU in a build without CUDA.
#include <stdexcept>
#include <tuple>

#include "models/architectures.h"

namespace mmrec::models {

int cuda_device_count() { return 0; }
std::string cuda_unusable_reason(int /*gpu*/) { return "this build has no CUDA backend"; }
CudaDeviceInfo cuda_device_info(int gpu) { throw std::runtime_error(cuda_unusable_reason(gpu)); }

template <class Config>
CudaModel make_cuda_executor(const Config& /*config*/, const WeightsOf<typename Config::Arch>& /*weights*/,
                             Precision /*precision*/, int gpu, bool /*batch_invariant*/) {
  throw std::runtime_error(cuda_unusable_reason(gpu));
}
template <class... Arch>
constexpr auto stubs(const std::tuple<Arch...>* /*all*/) {
  return std::tuple(&make_cuda_executor<typename Arch::Config>...);
}
[[gnu::used]] constexpr auto kStubs = stubs(static_cast<const Architectures*>(nullptr));  // makes them

}  // namespace mmrec::models
