// What a GPU can do.
#include "apps/bench/peaks.h"

#include <algorithm>
#include <cstddef>

#include "apps/bench/kernels.h"
#include "kernels/cuda/runtime/cublaslt.h"
#include "models/weights/host.h"

namespace mmrec::apps {
namespace {

using kernels::DType;

constexpr int kRounds = 9;
constexpr std::size_t kCopyBytes = std::size_t{1} << 30;  // each way: far beyond any L2
constexpr auto kCopyFloats = static_cast<std::int64_t>(kCopyBytes / sizeof(float));

double median_seconds(DeviceTimer& timer, int calls, const std::function<void()>& work) {
  timer.seconds(3, work);
  std::vector<double> times;
  for (int i = 0; i < kRounds; ++i) times.push_back(timer.seconds(calls, work));
  return median_of(times);
}

/// y = x Wᵀ by the matrix library, [rows, size] by [size, size].
double product_rate(kernels::Cuda& cuda, DeviceTimer& timer, DType type, std::int64_t rows, std::int64_t size) {
  const auto operand = [&](std::int64_t count, std::uint32_t seed) {
    kernels::DeviceBuffer<std::byte> bytes(static_cast<std::size_t>(count) * kernels::size_of(type));
    fill_random(cuda, type, bytes.data(), count, -1.0F, 1.0F, seed);
    return bytes;
  };
  const auto x = operand(rows * size, 1);
  const auto w = operand(size * size, 2);
  kernels::DeviceBuffer<std::byte> y(static_cast<std::size_t>(rows * size) * kernels::size_of(type));
  const kernels::Matmul job{.x = x.data(),
                            .x_stride = size,
                            .w = w.data(),
                            .y = y.data(),
                            .y_stride = size,
                            .m = rows,
                            .n = size,
                            .k = size,
                            .in = type,
                            .out = type};
  const double seconds = median_seconds(timer, 2, [&] { kernels::matmul(cuda, job); });
  return 2.0 * static_cast<double>(rows) * static_cast<double>(size * size) / seconds;
}

}  // namespace

Peaks measure_device(Precision precision, int gpu) {
  kernels::Cuda cuda(gpu);
  DeviceTimer timer(cuda);
  Peaks peaks;
  {
    kernels::DeviceBuffer<std::byte> from(kCopyBytes);
    kernels::DeviceBuffer<std::byte> to(kCopyBytes);
    fill_random(cuda, DType::kF32, from.data(), kCopyFloats, -1.0F, 1.0F, 3);
    const auto seconds = [&](auto work) { return median_seconds(timer, 4, work); };
    const double copy = std::min(seconds([&] { copy_by_kernel(cuda, from.data(), to.data(), kCopyBytes); }),
                                 seconds([&] { copy_by_runtime(cuda, from.data(), to.data(), kCopyBytes); }));
    peaks.copy_bytes_per_second = 2.0 * static_cast<double>(kCopyBytes) / copy;
    peaks.read_bytes_per_second =
        static_cast<double>(kCopyBytes) / seconds([&] { read_by_kernel(cuda, from.data(), kCopyBytes); });
  }
  const DType type = models::type_of(precision);
  const std::int64_t size = type == DType::kF32 ? 4096 : 8192;
  for (const std::int64_t rows : {size / 2, size}) {
    peaks.product_flops = std::max(peaks.product_flops, product_rate(cuda, timer, type, rows, size));
  }
  return peaks;
}

}  // namespace mmrec::apps
