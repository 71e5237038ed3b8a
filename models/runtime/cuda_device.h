// GPUs as a model's loader sees them. A build without CUDA answers why there are none (cuda_stub.cpp).
#pragma once

#include <cstdint>
#include <string>

namespace mmrec::models {

/// How many GPUs CUDA shows; 0 where there is no driver.
int cuda_device_count();
/// Why this GPU cannot run models, or "" if it can. Creates no context where it says no.
std::string cuda_unusable_reason(int gpu = 0);

/// A GPU's name and memory. Requires: cuda_unusable_reason(gpu) is "".
struct CudaDeviceInfo {
  std::string name;  // "NVIDIA H200"
  std::uint64_t total_bytes = 0;
  std::uint64_t free_bytes = 0;
};
CudaDeviceInfo cuda_device_info(int gpu = 0);

}  // namespace mmrec::models
