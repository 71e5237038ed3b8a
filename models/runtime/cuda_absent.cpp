// The twin of cuda/device.cpp in a build without CUDA.
#include <stdexcept>

#include "models/runtime/cuda_device.h"

namespace mmrec::models {

int cuda_device_count() { return 0; }
std::string cuda_unusable_reason(int /*gpu*/) { return "this build has no CUDA backend"; }
CudaDeviceInfo cuda_device_info(int gpu) { throw std::runtime_error(cuda_unusable_reason(gpu)); }

}  // namespace mmrec::models
