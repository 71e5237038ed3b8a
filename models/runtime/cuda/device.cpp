// GPUs as a model's loader sees them, in a build with CUDA.
#include "kernels/cuda/runtime/cuda.h"
#include "models/runtime/cuda_device.h"

namespace mmrec::models {

int cuda_device_count() { return kernels::cuda_device_count(); }
std::string cuda_unusable_reason(int gpu) { return kernels::cuda_unusable_reason(gpu); }

CudaDeviceInfo cuda_device_info(int gpu) {
  const kernels::DeviceMemory memory = kernels::device_memory(gpu);
  return {kernels::device_name(gpu), memory.total, memory.free};
}

}  // namespace mmrec::models
