// Compact rows (compact.h) of plain ones, once for each matrix of a model: a block for each row.
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/gemm/compact.h"
#include "kernels/cuda/runtime/launch.cuh"

namespace mmrec::kernels {
namespace {

constexpr int kThreads = 128;

/// The nearest number to x / scale as a byte: of kF8, or of kI8 or kI4 as a signed one, with 4 bits in the upper half.
__device__ std::uint32_t number_of(DType code, float x, float scale) {
  const bool is_half = code == DType::kI4;
  const float number = scale == 0.0F ? 0.0F : x / scale;
  if (code == DType::kF8) return from_float<Float8>(number).bits;
  const float nearest = rintf(fminf(fmaxf(number, is_half ? -8.0F : -127.0F), is_half ? 7.0F : 127.0F));
  return static_cast<std::uint32_t>(static_cast<int>(nearest) * (is_half ? 16 : 1)) & 0xffU;
}

__global__ void __launch_bounds__(kThreads) compact_kernel(CompactRows op) {
  auto* largest_of_warp = ptx::shared_memory<std::uint32_t>();
  const auto thread = static_cast<int>(threadIdx.x);
  const auto cols = static_cast<int>(op.from.cols);
  const WeightFormat format = op.rows.format;
  const auto row = static_cast<std::int64_t>(blockIdx.x);
  const bool has_scales = op.scales != nullptr && row < op.rows.own_rows;
  const DType code = row < op.rows.own_rows ? format.code : DType::kI8;
  const BFloat16* const from = static_cast<const BFloat16*>(op.from.data) + row * cols;
  const int scales = static_cast<int>(scales_of({format.code, op.group}, cols));
  std::uint32_t largest = 0;  // the bits of |x|, which have its order
  for (int k = thread; k < cols; k += kThreads) largest = max(largest, __float_as_uint(fabsf(widen(from[k]))));
  largest = ptx::warp_max(largest);
  if (thread % 32 == 0) largest_of_warp[thread / 32] = largest;
  __syncthreads();
  for (int w = 0; w < kThreads / 32; ++w) largest = max(largest, largest_of_warp[w]);
  const float own = __uint_as_float(largest) / (code == DType::kI4 ? 7.0F : code == DType::kF8 ? 448.0F : 127.0F);
  const auto scale_at = [&](int k) {
    const float scale = !has_scales ? 0.0F : op.scales[row * scales + (op.group == 0 ? 0 : k / op.group)];
    return scale == 0.0F ? own : scale;
  };

  const int groups = cols / kCompactGroup;
  const int group_bytes = compact_group_bytes(format);
  const int words = group_bytes / 4;  // of a group
  std::byte* const to = op.to + row * op.rows.row_bytes;
  for (int i = thread; i < groups * words; i += kThreads) {
    const int group = i / words;
    const int word = i % words;
    const int lane = word / (words / 4);
    std::uint32_t bits = 0;
    for (int b = 0; b < 4; ++b) {
      const auto number = [&](int m, int part) {
        const int k = group * kCompactGroup + 32 * m + 8 * lane + 4 * part + b;
        return number_of(code, widen(from[k]), scale_at(k));
      };
      const std::uint32_t byte =
          code == DType::kI4 ? number(0, word % 2) | number(1, word % 2) >> 4 : number(word % 2, word % 4 / 2);
      bits |= byte << (8 * b);
    }
    reinterpret_cast<std::uint32_t*>(to + compact_group_at(format, group))[word] = bits;
  }
  for (int group = thread; group < groups; group += kThreads) {
    const int in_chunk = group % kCompactChunkGroups;
    const int of_chunk = min(kCompactChunkGroups, groups - (group - in_chunk));
    if (format.group == 0 && in_chunk != 0) continue;
    const int chunk_at = compact_group_at(format, group - in_chunk);
    auto* const behind = reinterpret_cast<float*>(to + chunk_at + of_chunk * group_bytes);
    behind[in_chunk] = scale_at(group * kCompactGroup) * (code == DType::kI4 ? 0.0625F : 1.0F);
  }
}

}  // namespace

void compact_rows(Cuda& cuda, const CompactRows& op) {
  launch(cuda.stream(), {.grid = dims(op.from.rows), .block = dim3(kThreads), .shared_bytes = kThreads / 32 * 4},
         compact_kernel, op);
}

}  // namespace mmrec::kernels
