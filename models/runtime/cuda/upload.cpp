// GPUs as a model's loader sees them, and numbers on their way there.
#include "models/runtime/cuda/upload.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <stdexcept>
#include <string>

#include "kernels/cpu/bytes.h"
#include "models/files/elements.h"
#include "models/runtime/cuda_device.h"

namespace mmrec::models {
namespace {

using kernels::DType;

/// Throws if rounding made a finite number infinite.
void check_fits(const std::byte* from, DType from_type, const std::byte* to, DType type, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const float x = element(from, i, from_type);
    if (std::isfinite(x) && !std::isfinite(element(to, i, type))) {
      throw std::runtime_error("precision fp16: a weight of " + std::to_string(x) +
                               " does not fit, expected at most 65504; use bf16 or fp32");
    }
  }
}

}  // namespace

int cuda_device_count() { return kernels::cuda_device_count(); }
std::string cuda_unusable_reason(int gpu) { return kernels::cuda_unusable_reason(gpu); }

CudaDeviceInfo cuda_device_info(int gpu) {
  const kernels::DeviceMemory memory = kernels::device_memory(gpu);
  return {kernels::device_name(gpu), memory.total, memory.free};
}

void send(const Numbers& from, DType type, std::byte* to, kernels::Staging& staging) {
  const std::size_t from_size = kernels::size_of(from.dtype), size = kernels::size_of(type);
  const std::size_t most = kernels::Staging::kBlockBytes / size;
  for (std::size_t first = 0; first < from.count; first += most) {
    const std::size_t count = std::min(most, from.count - first);
    const std::byte* source = from.data + first * from_size;
    std::byte* block = staging.block();
    convert(source, count, from.dtype, block, type);
    if (type != from.dtype && !kernels::all_finite({block, count * size}, type))
      check_fits(source, from.dtype, block, type, count);
    staging.send(to + first * size, count * size);
  }
}

}  // namespace mmrec::models
