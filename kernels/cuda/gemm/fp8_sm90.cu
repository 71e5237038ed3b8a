// Products of fp8 for many rows: x Wᵀ with W as it is stored and x rounded to fp8, each row by a scale of its own that
// takes its largest number to 448. The product is many_rows_sm90.cu's, which reads W as compact rows (compact.h) and
// multiplies sums by both scales.
//
// Rounding reads 2 bytes and writes 1 of an element of x, by as many rows at a time as have room in Cuda::parts().
// Numbers are written in the order of a compact row's groups: W has the same, so products add up to the same.
//
// Tensor cores keep about 14 bits of a sum of fp8 while they add to it: of 8,192 products it errs by up to 1e-3 of the
// sum of their absolute values.
#include "kernels/cuda/gemm/algo.h"
#include "kernels/cuda/gemm/compact.h"
#include "kernels/cuda/gemm/operands.cuh"

namespace mmrec::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kPiece = 16;      // inputs
constexpr int kMostPieces = 8;  // of a thread
constexpr float kLargest = 448.0F;

struct Rounding {
  MatrixView<const BFloat16, Device> x;
  std::byte* to;  // [rows, cols]
  float* scales;
};

/// A block rounds a row. A thread's piece is 16 bytes of a group, inputs 8 t .. 8 t + 7 of both of its halves.
template <int kPieces>
__global__ void __launch_bounds__(kThreads) round_kernel(Rounding op) {
  auto* const largest_of_warp = ptx::shared_memory<std::uint32_t>();
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const auto thread = static_cast<int>(threadIdx.x);
  const auto row = static_cast<std::int64_t>(blockIdx.x);
  const auto pieces = static_cast<int>(op.x.cols) / kPiece;
  uint4 low[kPieces] = {}, high[kPieces] = {};
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int piece = thread + i * kThreads;
    if (piece >= pieces) break;
    const BFloat16* const from = op.x.row(row) + piece / 4 * kCompactGroup + piece % 4 * 8;
    low[i] = __ldcg(reinterpret_cast<const uint4*>(from));
    high[i] = __ldcg(reinterpret_cast<const uint4*>(from + kCompactGroup / 2));
  }
  // The bits of |x| have its order, and those of a NaN are the largest.
  std::uint32_t largest = 0;
  const auto raise = [&](std::uint32_t pair) {
    largest = max(largest, max(pair << 16 & 0x7fff0000U, pair & 0x7fff0000U));
  };
  const auto raise_all = [&](const uint4& v) { raise(v.x), raise(v.y), raise(v.z), raise(v.w); };
#pragma unroll
  for (int i = 0; i < kPieces; ++i) raise_all(low[i]), raise_all(high[i]);
  largest = ptx::warp_max(largest);
  if (thread % 32 == 0) largest_of_warp[thread / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) largest = max(largest, largest_of_warp[w]);
  const float scale = __uint_as_float(largest) / kLargest;
  if (thread == 0) op.scales[row] = scale;
  const auto round = [&](std::uint32_t first, std::uint32_t second) {
    float four[4] = {widen_part<BFloat16>(first, 0), widen_part<BFloat16>(first, 1), widen_part<BFloat16>(second, 0),
                     widen_part<BFloat16>(second, 1)};
#pragma unroll
    for (float& x : four) x = scale == 0.0F ? 0.0F : x / scale;
    return ptx::to_float8_quad(four);
  };
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int piece = thread + i * kThreads;
    if (piece >= pieces) break;
    __stcg(reinterpret_cast<uint4*>(op.to + row * op.x.cols + piece * kPiece),
           make_uint4(round(low[i].x, low[i].y), round(high[i].x, high[i].y), round(low[i].z, low[i].w),
                      round(high[i].z, high[i].w)));
  }
}

void round(Cuda& cuda, const Rounding& op) {
  const LaunchConfig config = {.grid = dims(op.x.rows),
                               .block = dim3(kThreads),
                               .shared_bytes = kThreads / 32 * sizeof(std::uint32_t),
                               .overlap_predecessor = true};
  const std::int64_t pieces = ceil_div(op.x.cols, kThreads * kPiece);
  const auto kernel = pieces <= 1 ? round_kernel<1> : pieces <= 4 ? round_kernel<4> : round_kernel<kMostPieces>;
  launch(cuda.stream(), config, kernel, op);
}

constexpr std::int64_t bytes_of_row(std::int64_t cols) { return cols + std::int64_t{sizeof(float)}; }

}  // namespace

bool linear_fp8_supported(const Cuda& cuda, MatrixView<const BFloat16, Device> x, const WeightView<Device>& weight) {
  return weight.compact.data != nullptr && weight.compact.format.code == DType::kF8 &&
         weight.compact.own_rows >= weight.rows && x.cols % 128 == 0 && x.cols <= kThreads * kPiece * kMostPieces &&
         rows_at_once(x.rows, bytes_of_row(x.cols), Cuda::kPartsBytes) != 0 && gemm_sm90_supported(cuda, x, weight);
}

template <class Y>
void linear_fp8_sm90(Cuda& cuda, std::span<const Linear<Device, BFloat16, Y>> jobs) {
  auto* const rounded = reinterpret_cast<Float8*>(cuda.parts());
  float* scales = nullptr;
  by_rows_of_x(
      jobs, rounded, bytes_of_row, Cuda::kPartsBytes,
      [&](MatrixView<const BFloat16, Device> x) {
        scales = reinterpret_cast<float*>(rounded + x.rows * x.cols);
        round(cuda, {x, reinterpret_cast<std::byte*>(rounded), scales});
      },
      [&](std::span<Linear<Device, Float8, Y>> products) {
        linear_many_rows_sm90<Float8, Y>(cuda, products, GemmTile::kAuto, {.scales = scales});
      });
}

template void linear_fp8_sm90(Cuda&, std::span<const Linear<Device, BFloat16, BFloat16>>);
template void linear_fp8_sm90(Cuda&, std::span<const Linear<Device, BFloat16, float>>);

}  // namespace mmrec::kernels
