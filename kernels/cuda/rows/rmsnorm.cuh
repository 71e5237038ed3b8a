// The kernel of rmsnorm over rows that come from memory or from a computation: y = weight ⊙ x / (‖x‖₂/√D + 1e-6),
// rounded to A; squares are summed in fp64.
//
// A block owns a row, a thread every blockDim-th group of 4 channels, of which the first kHeld stay in registers
// between the sum and the product; the rest is read again from L2. The norm's weight does not depend on the kernel
// before, so it is on its way before that one ends. The order of the sum follows from D alone: within a thread, over
// the lanes of a warp, over warps in order.
//
// A SOURCE of rows is a class with
//   kVectors                                   whether rows are whole vectors of 4 channels, y's and the weight too
//   Operands fetch(row, group, cols)           starts what the group's channels are computed from
//   void apply(row, group, cols, operands, x)  computes them, and may write them and others
//   void again(row, group, cols, x)            gives them once more
// and, if other blocks are to do something beside the norms,
//   unsigned asides()                          how many of them for a row
//   void aside(number, row, cols)              by all threads of such a block
#pragma once

#include "kernels/cuda/recurrence/equations.cuh"
#include "kernels/cuda/rows/rows.cuh"

namespace mmrec::kernels {

inline constexpr int kMostNormThreads = 1024;

/// Rows of a matrix.
template <bool kInVectors>
struct MatrixRows {
  static constexpr bool kVectors = kInVectors;
  MatrixView<const float, Device> x;

  struct Operands {
    float x[kGroup];
  };
  __device__ Operands fetch(std::int64_t row, std::int64_t group, std::int64_t cols) const {
    Operands operands;
    load_group<kVectors>(x.row(row), group, cols, operands.x);
    return operands;
  }
  __device__ void apply(std::int64_t /*row*/, std::int64_t /*group*/, std::int64_t /*cols*/, const Operands& operands,
                        float (&to)[kGroup]) const {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) to[i] = operands.x[i];
  }
  __device__ void again(std::int64_t row, std::int64_t group, std::int64_t cols, float (&to)[kGroup]) const {
    load_group<kVectors>(x.row(row), group, cols, to);
  }
};

template <class Source>
inline constexpr bool kHasAsides = requires(const Source& source) {
  source.asides();
};

__device__ inline double add_squares(const float (&x)[kGroup], double sum) {
#pragma unroll
  for (const float value : x) sum = fma(static_cast<double>(value), static_cast<double>(value), sum);
  return sum;
}

/// The sum of all threads' values, to every thread.
__device__ inline double block_sum(double value) {
  __shared__ double of_warp[kMostNormThreads / 32];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffU, value, offset);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  double sum = 0.0;
  for (unsigned w = 0; w < blockDim.x / 32; ++w) sum += of_warp[w];
  return sum;
}

template <int kHeld, class Source, class A>
__global__ void __launch_bounds__(kMostNormThreads)
    norm_rows_kernel(const __grid_constant__ Source source, double inverse_cols, const float* weight,
                     MatrixView<A, Device> y) {
  constexpr bool kVectors = Source::kVectors;
  ptx::allow_successor();
  const std::int64_t cols = y.cols;
  const std::int64_t row = blockIdx.x;
  const std::int64_t step = blockDim.x;
  A* to = y.row(row);
  float scale[kHeld][kGroup];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) load_group<kVectors>(weight, threadIdx.x + i * step, cols, scale[i]);
  ptx::wait_for_predecessor();
  if constexpr (kHasAsides<Source>) {
    if (blockIdx.y != 0) return source.aside(blockIdx.y - 1, row, cols);
  }

  typename Source::Operands operands[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    operands[i] = source.fetch(row, threadIdx.x + i * step, cols);
  }
  float held[kHeld][kGroup];
  double squares = 0.0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    source.apply(row, threadIdx.x + i * step, cols, operands[i], held[i]);
    squares = add_squares(held[i], squares);
  }
  for (std::int64_t group = threadIdx.x + kHeld * step; group * kGroup < cols; group += step) {
    float value[kGroup];
    source.apply(row, group, cols, source.fetch(row, group, cols), value);
    squares = add_squares(value, squares);
  }

  const float inverse = norm_factor(block_sum(squares) * inverse_cols);
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
#pragma unroll
    for (int c = 0; c < kGroup; ++c) held[i][c] = held[i][c] * inverse * scale[i][c];
    store_group<kVectors>(to, threadIdx.x + i * step, cols, held[i]);
  }
  for (std::int64_t group = threadIdx.x + kHeld * step; group * kGroup < cols; group += step) {
    float value[kGroup];
    float factor[kGroup];
    source.again(row, group, cols, value);
    load_group<kVectors>(weight, group, cols, factor);
#pragma unroll
    for (int c = 0; c < kGroup; ++c) value[c] = value[c] * inverse * factor[c];
    store_group<kVectors>(to, group, cols, value);
  }
}

/// Normalises y.rows rows of the source.
template <int kHeld, class Source, class A>
void norm_rows(Cuda& cuda, const Source& source, const float* weight, MatrixView<A, Device> y) {
  const std::int64_t groups = ceil_div(y.cols, kGroup);
  const std::int64_t threads = std::min<std::int64_t>(ceil_div(ceil_div(groups, kHeld), 32) * 32, kMostNormThreads);
  if (threads == 0) return;
  dim3 grid(static_cast<unsigned>(y.rows));
  if constexpr (kHasAsides<Source>) grid.y += source.asides();
  launch(cuda.stream(), overlapping(cuda, grid, dim3(static_cast<unsigned>(threads))),
         norm_rows_kernel<kHeld, Source, A>, source, 1.0 / static_cast<double>(y.cols), weight, y);
}

}  // namespace mmrec::kernels
