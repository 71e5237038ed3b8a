// The product that kernels with few columns share: 16 rows of a matrix with up to 8 vectors (kTileColumns), cut along k
// among the warps of a block.
//
// A step is 64 bytes of k: lane 4g + t of a warp holds the t-th 16 bytes of matrix rows g and g + 8 and of vector g.
// 16-bit elements meet in the tensor core. Its layout wants pairs of k from two places where a lane has consecutive
// ones; as both operands are permuted alike the products are the same. fp32 elements are multiplied by fused
// multiply-adds: lanes pass the vectors around, and the four lanes of a row add up.
//
// Order of a sum: a warp takes every kTileWarps-th step from its own number on, in order, in two chains (of the
// even and of the odd words of a piece; fp32 has one); then the warps' sums are added as a tree. It follows from k
// alone, so a vector's results do not depend on its neighbours, and every kernel that uses this file gets the same.
#pragma once

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/isa/ptx.cuh"
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/tensor.h"

namespace mmrec::kernels {

inline constexpr int kTileRows = 16;
inline constexpr int kTileWarps = 8;
inline constexpr int kStepBytes = 64;
inline constexpr int kPieceBytes = 16;
/// Rows in shared memory are this far from a multiple of 128 bytes apart, so that 8 lanes which read 16 bytes each, 4
/// of one row and 4 of the next, touch all banks once.
inline constexpr int kRowPadding = 64;

/// Bytes from one row of `bytes` to the next in shared memory.
MMREC_HOST_DEVICE constexpr int padded_row(int bytes) { return (bytes + 127) / 128 * 128 + kRowPadding; }

/// What a warp has summed up: lane 4g + t holds rows g (values 0 and 1) and g + 8, columns 2t and 2t + 1.
struct TileSums {
  float chains[2][4] = {};
};

/// sums += one step. Only `columns` vectors are meant; the others are zeros or repeat one of them.
template <class A>
__device__ inline void multiply_step(TileSums& sums, const uint4& low, const uint4& high, const uint4& x, int columns) {
  if constexpr (sizeof(A) == 2) {
    ptx::mma_m16n8k16<A>(sums.chains[0], {low.x, high.x, low.z, high.z}, {x.x, x.z});
    ptx::mma_m16n8k16<A>(sums.chains[1], {low.y, high.y, low.w, high.w}, {x.y, x.w});
  } else {
    const int t = static_cast<int>(threadIdx.x) % 4;
    const auto product = [](const uint4& w, const float(&v)[4]) {
      float p = __uint_as_float(w.x) * v[0];
      p = __fmaf_rn(__uint_as_float(w.y), v[1], p);
      p = __fmaf_rn(__uint_as_float(w.z), v[2], p);
      p = __fmaf_rn(__uint_as_float(w.w), v[3], p);
      p += __shfl_xor_sync(0xffffffffU, p, 1);
      return p + __shfl_xor_sync(0xffffffffU, p, 2);
    };
#pragma unroll
    for (int column = 0; column < kTileColumns; ++column) {
      if (column >= columns) break;
      const int source = 4 * column + t;
      const float v[4] = {__shfl_sync(0xffffffffU, __uint_as_float(x.x), source),
                          __shfl_sync(0xffffffffU, __uint_as_float(x.y), source),
                          __shfl_sync(0xffffffffU, __uint_as_float(x.z), source),
                          __shfl_sync(0xffffffffU, __uint_as_float(x.w), source)};
      const float of_low = product(low, v);
      const float of_high = product(high, v);
      if (t == column / 2) {
        sums.chains[0][column % 2] += of_low;
        sums.chains[0][2 + column % 2] += of_high;
      }
    }
  }
}

/// The warps' sums side by side, [row][column][warp].
__device__ inline float* warp_sums(float* sums, int row, int column, int columns) {
  return sums + (row * columns + column) * kTileWarps;
}

/// f(i, row, column) for those of a lane's four values that lie in the first `rows` rows and `columns` columns.
template <class F>
__device__ inline void for_each_value(int rows, int columns, F f) {
  const int g = static_cast<int>(threadIdx.x) / 4 % 8;
  const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = g + i / 2 * 8;
    const int column = 2 * t + i % 2;
    if (row < rows && column < columns) f(i, row, column);
  }
}

/// Writes a warp's sums of `rows` rows from row `first` on.
__device__ inline void store_sums(float* sums, const TileSums& tile, int first, int rows, int columns) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  for_each_value(rows, columns, [&](int i, int row, int column) {
    warp_sums(sums, first + row, column, columns)[warp] = tile.chains[0][i] + tile.chains[1][i];
  });
}

/// The sum over all warps, after a barrier.
__device__ inline float total(float* sums, int row, int column, int columns) {
  const auto* of_warps = reinterpret_cast<const float4*>(warp_sums(sums, row, column, columns));
  const float4 a = of_warps[0];
  const float4 b = of_warps[1];
  return ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
}

}  // namespace mmrec::kernels
