// Sums and maxima over the lanes of a warp, by a butterfly: every lane receives the same bits.
#pragma once

#include <cstdint>

namespace mmrec::kernels {

/// Over groups of kLanes neighbours, farthest lanes first.
template <int kLanes = 32, class T>
__device__ inline T warp_sum(T x) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffU, x, distance);
  return x;
}
/// NaN is passed by.
__device__ inline float warp_max(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffU, x, distance));
  return x;
}

}  // namespace mmrec::kernels
