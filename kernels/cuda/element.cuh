// Elements on the device: widening, rounding and 16-byte vectors of a storage type; the functions of one value that
// gates and activations are made of; sums and maxima over a warp.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/isa/ptx.cuh"
#include "kernels/tensor.h"

namespace mmrec::kernels {

__device__ inline float widen(float x) { return x; }
__device__ inline float widen(BFloat16 x) { return __uint_as_float(static_cast<std::uint32_t>(x.bits) << 16); }
__device__ inline float widen(Float16 x) { return ptx::from_float16(x); }
/// Element v of the one of 32 bits or the two of 16 in a word.
template <class T>
__device__ inline float widen_part(std::uint32_t word, int v) {
  if constexpr (sizeof(T) == 4) {
    return __uint_as_float(word);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return __uint_as_float(v == 0 ? word << 16 : word & 0xffff0000U);
  } else {
    return widen(T{static_cast<std::uint16_t>(v == 0 ? word : word >> 16)});
  }
}

/// Rounds to nearest even. Float16 overflows to infinity.
template <class T>
__device__ inline T narrow(float x);
template <>
__device__ inline float narrow<float>(float x) {
  return x;
}
template <>
__device__ inline BFloat16 narrow<BFloat16>(float x) {
  return ptx::to_bfloat16(x);
}
template <>
__device__ inline Float16 narrow<Float16>(float x) {
  return ptx::to_float16(x);
}

/// 16 bytes of T: 4 floats or 8 halves.
template <class T>
struct Vector16 {
  static constexpr int kSize = 16 / static_cast<int>(sizeof(T));
  union {
    uint4 bits;
    T values[kSize];
  };
  __device__ Vector16() {}
  __device__ explicit Vector16(uint4 b) : bits(b) {}
};

/// eˣ by the hardware's 2ˣ: relative error about 2⁻²² (1 + |x|/4), 0 below -87.
__device__ inline float fast_exp(float x) { return ptx::exp2_approx(x * 1.4426950408889634F); }
/// σ(x) = 1 / (1 + e⁻ˣ); exact limits at ±∞.
__device__ inline float sigmoid(float x) { return __fdividef(1.0F, 1.0F + fast_exp(-x)); }
/// max(x, 0); NaN stays NaN.
__device__ inline float relu(float x) { return x < 0.0F ? 0.0F : x; }
/// x Φ(x) = max(x, 0) − |x| Φ(−|x|), within 6e-8 + 2⁻²⁴ |y|. Φ(−u) is 2 to a polynomial in u, fitted to the least
/// largest error of u Φ(−u) over [0, 9.5]; from 10 on the product is 0 to any float's precision.
__device__ inline float gelu(float x) {
  const float u = fminf(fabsf(x), 10.0F);
  float p = -1.902064e-06F;
  p = __fmaf_rn(p, u, 2.8056918e-05F);
  p = __fmaf_rn(p, u, -0.0001314731F);
  p = __fmaf_rn(p, u, -0.00027207602F);
  p = __fmaf_rn(p, u, 0.007245422F);
  p = __fmaf_rn(p, u, -0.05262761F);
  p = __fmaf_rn(p, u, -0.45916215F);
  p = __fmaf_rn(p, u, -1.151111F);
  p = __fmaf_rn(p, u, -1.0F);
  return __fmaf_rn(-u, ptx::exp2_approx(p), relu(x));
}
/// x σ(2 √(2/π) (x + 0.044715 x³)): the tanh form of gelu without its cancellation.
__device__ inline float gelu_tanh(float x) {
  constexpr float kTwoRoots = 1.5957691216057308F;  // 2 √(2/π)
  return x * sigmoid(x * __fmaf_rn(x * x, 0.044715F * kTwoRoots, kTwoRoots));
}

// --- Sums and maxima over the lanes of a warp, by a butterfly: every lane receives the same bits.

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
