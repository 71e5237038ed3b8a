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
/// The sums of kCount values, a power of two up to 32, by kCount + log2(32 / kCount) - 1 exchanges: lane l receives
/// that of value l * kCount / 32. `values` is used up.
template <int kCount>
__device__ inline float warp_sums(float (&values)[kCount]) {
  static_assert(kCount > 0 && kCount <= 32 && (kCount & (kCount - 1)) == 0);
  int distance = 16;
#pragma unroll
  for (int half = kCount / 2; half > 0; half /= 2, distance /= 2) {
    const bool is_upper = (threadIdx.x & static_cast<unsigned>(distance)) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float given = is_upper ? values[i] : values[i + half];
      const float kept = is_upper ? values[i + half] : values[i];
      values[i] = kept + __shfl_xor_sync(0xffffffffU, given, distance);
    }
  }
#pragma unroll
  for (; distance > 0; distance /= 2) values[0] += __shfl_xor_sync(0xffffffffU, values[0], distance);
  return values[0];
}
/// NaN is passed by.
__device__ inline float warp_max(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffU, x, distance));
  return x;
}

}  // namespace mmrec::kernels
