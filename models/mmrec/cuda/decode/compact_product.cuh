// A group of compact rows (kernels/cuda/gemm/compact.h) meets a vector of integers (l2_inputs.cuh): exact products of
// 8-bit integers by the tensor core.
#pragma once

#include <cstdint>

#include "kernels/cuda/gemm/compact.h"
#include "kernels/cuda/isa/ptx.cuh"

namespace mmrec::kernels {

/// A lane's numbers of a row and group, of 4 bits in the first two words: in the upper halves of bytes.
__device__ inline uint4 widen_halves(const uint4& pairs) {
  constexpr std::uint32_t kUpper = 0xf0f0f0f0U;
  return make_uint4(pairs.x & kUpper, pairs.x << 4 & kUpper, pairs.y & kUpper, pairs.y << 4 & kUpper);
}

/// d += 16 rows times 8 columns; low: a lane's numbers of row lane / 4, high: of that row + 8, x: of column lane / 4.
__device__ inline void multiply_group(int (&d)[4], const uint4& low, const uint4& high, const uint4& x) {
  ptx::mma_m16n8k32(d, {low.x, high.x, low.z, high.z}, {x.x, x.y});
  ptx::mma_m16n8k32(d, {low.y, high.y, low.w, high.w}, {x.z, x.w});
}

/// Upper and lower bytes' sums are of 256 upper + lower, times scale.
__device__ inline void add_scaled(float& sum, int upper, int lower, float scale) {
  sum = __fmaf_rn(static_cast<float>(upper * 256 + lower), scale, sum);
}

}  // namespace mmrec::kernels
