// y = weight ⊙ x / (‖x‖₂/√D + 1e-6) per row, rounded to A; squares are summed in fp64.
//
// A block owns a row, a thread every blockDim-th group of 4 channels. The block is sized by D so that up to D = 8192 a
// thread has at most two groups, which stay in registers between the sum and the product; of longer rows the rest is
// read again from L2. Bytes per channel: 4 read, the size of A written. The norm's weight does not depend on the kernel
// before, so it is on its way before that one ends. The order of the sum follows from D alone: within a thread, over
// the lanes of a warp, over warps in order.
#include "kernels/cuda/rows.cuh"

namespace mmrec::kernels {
namespace {

constexpr int kHeld = 2;  // groups of a thread in registers
constexpr int kMostThreads = 1024;

__device__ inline double add_squares(const float (&x)[kGroup], double sum) {
#pragma unroll
  for (const float value : x) sum = fma(static_cast<double>(value), static_cast<double>(value), sum);
  return sum;
}

/// The sum of all threads' values, to every thread.
__device__ inline double block_sum(double value) {
  __shared__ double of_warp[kMostThreads / 32];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffU, value, offset);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  double sum = 0.0;
  for (unsigned w = 0; w < blockDim.x / 32; ++w) sum += of_warp[w];
  return sum;
}

template <class A, bool kVectors>
__global__ void __launch_bounds__(kMostThreads) rmsnorm_kernel(MatrixView<const float, Device> x, double inverse_cols,
                                                               const float* weight, MatrixView<A, Device> y) {
  ptx::allow_successor();
  const std::int64_t cols = x.cols;
  const std::int64_t step = blockDim.x;
  const float* from = x.row(blockIdx.x);
  A* to = y.row(blockIdx.x);
  float scale[kHeld][kGroup];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) load_group<kVectors>(weight, threadIdx.x + i * step, cols, scale[i]);
  ptx::wait_for_predecessor();

  float held[kHeld][kGroup];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) load_group<kVectors>(from, threadIdx.x + i * step, cols, held[i]);
  double squares = 0.0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) squares = add_squares(held[i], squares);
  for (std::int64_t group = threadIdx.x + kHeld * step; group * kGroup < cols; group += step) {
    float value[kGroup];
    load_group<kVectors>(from, group, cols, value);
    squares = add_squares(value, squares);
  }

  // The root in fp32, which a mean of squares may overflow.
  const double mean = block_sum(squares) * inverse_cols;
  const bool large = mean > 1e38;
  const float root = sqrtf(static_cast<float>(large ? mean * 0x1p-128 : mean)) * (large ? 0x1p64F : 1.0F);
  const float inverse = 1.0F / (root + 1e-6F);
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
#pragma unroll
    for (int c = 0; c < kGroup; ++c) held[i][c] = held[i][c] * inverse * scale[i][c];
    store_group<kVectors>(to, threadIdx.x + i * step, cols, held[i]);
  }
  for (std::int64_t group = threadIdx.x + kHeld * step; group * kGroup < cols; group += step) {
    float value[kGroup];
    float factor[kGroup];
    load_group<kVectors>(from, group, cols, value);
    load_group<kVectors>(weight, group, cols, factor);
#pragma unroll
    for (int c = 0; c < kGroup; ++c) value[c] = value[c] * inverse * factor[c];
    store_group<kVectors>(to, group, cols, value);
  }
}

}  // namespace

template <class A>
void rmsnorm(Cuda& cuda, MatrixView<const float, Device> x, const float* weight, MatrixView<A, Device> y) {
  const std::int64_t groups = ceil_div(x.cols, kGroup);
  const std::int64_t threads = std::min<std::int64_t>(ceil_div(ceil_div(groups, kHeld), 32) * 32, kMostThreads);
  if (threads == 0) return;
  const LaunchConfig config =
      overlapping(cuda, dim3(static_cast<unsigned>(x.rows)), dim3(static_cast<unsigned>(threads)));
  const bool vectors = takes_vectors(x) && takes_vectors(y) && takes_vectors(weight, 0);
  launch(cuda.stream(), config, vectors ? rmsnorm_kernel<A, true> : rmsnorm_kernel<A, false>, x,
         1.0 / static_cast<double>(x.cols), weight, y);
}

template void rmsnorm<float>(Cuda&, MatrixView<const float, Device>, const float*, MatrixView<float, Device>);
template void rmsnorm<BFloat16>(Cuda&, MatrixView<const float, Device>, const float*, MatrixView<BFloat16, Device>);
template void rmsnorm<Float16>(Cuda&, MatrixView<const float, Device>, const float*, MatrixView<Float16, Device>);

}  // namespace mmrec::kernels
