// Elements on the device: widening, rounding and 16-byte vectors of a storage type; the functions of one value that
// gates and activations are made of; sums and maxima over a warp; elements that blocks hand to each other.
#pragma once

#include <bit>
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

// --- What lanes have side by side, rounded to 16 bits.

/// The lane's value and the next lane's, rounded to A.
template <class A>
__device__ __forceinline__ std::uint32_t round_pair(float x) {
  return ptx::to_pair<A>(x, __shfl_down_sync(0xffffffffU, x, 1));
}
/// The values of lanes first .. first + 7, of their pairs.
__device__ __forceinline__ uint4 piece_of_lanes(std::uint32_t pair, int first) {
  const auto of_lane = [&](int lane) { return __shfl_sync(0xffffffffU, pair, first + lane); };
  return {of_lane(0), of_lane(2), of_lane(4), of_lane(6)};
}

// --- Vectors that the blocks of one kernel hand to each other through global memory.
//
// Before the kernel, or a phase of it that others wait out, every element is all ones; then it is written once. So an
// element itself tells whether it has been written, and a reader polls it until it has. That is one trip to
// L2 for the writer and one for the reader, where a barrier costs a fence and two trips more, and a reader waits for
// what it reads and for nothing else. A value that happens to be the NaN of all ones is written as another NaN.

/// The integer of A's size.
template <class A>
using Bits = std::conditional_t<sizeof(A) == 4, std::uint32_t, std::uint16_t>;
template <class A>
inline constexpr Bits<A> kUnwritten = static_cast<Bits<A>>(~Bits<A>{0});

/// Writes an element that others wait for.
template <class A>
__device__ inline void publish(A* to, A value) {
  constexpr auto kOtherNan = static_cast<Bits<A>>(kUnwritten<A> / 2);
  const auto bits = std::bit_cast<Bits<A>>(value);
  ptx::store_relaxed(reinterpret_cast<Bits<A>*>(to), bits == kUnwritten<A> ? kOtherNan : bits);
}

/// Several elements, once all are written; zeros where from[i] is null. All are asked for at once.
template <class A, int kCount>
__device__ inline void await_elements(const A* const (&from)[kCount], A (&to)[kCount]) {
  while (true) {
    Bits<A> bits[kCount];
    bool written = true;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      bits[i] = from[i] == nullptr ? Bits<A>{0} : ptx::load_relaxed(reinterpret_cast<const Bits<A>*>(from[i]));
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      written = written && bits[i] != kUnwritten<A>;
      to[i] = std::bit_cast<A>(bits[i]);
    }
    if (written) return;
    ptx::spin_briefly();
  }
}

template <class A>
__device__ inline A await_element(const A* from) {
  const A* const one[] = {from};
  A element[1];
  await_elements(one, element);
  return element[0];
}

/// 16 bytes, each element as it is now: one that has been written, or still all ones.
__device__ inline uint4 load_shared_by_blocks(const void* from) {
  const ulonglong2 v = ptx::load_relaxed_pair(static_cast<const ulonglong2*>(from));
  return make_uint4(static_cast<std::uint32_t>(v.x), static_cast<std::uint32_t>(v.x >> 32),
                    static_cast<std::uint32_t>(v.y), static_cast<std::uint32_t>(v.y >> 32));
}

/// Whether all elements of 16 bytes have been written.
template <class A>
__device__ inline bool is_written(uint4 v) {
  if constexpr (sizeof(A) == 4) {
    return v.x != kUnwritten<A> && v.y != kUnwritten<A> && v.z != kUnwritten<A> && v.w != kUnwritten<A>;
  } else {
    // (u - 0x00010001) & ~u & 0x80008000 is 0 exactly if no half of u is 0; here u = ~w.
    const auto ones = [](std::uint32_t w) { return (~w - 0x00010001U) & w & 0x80008000U; };
    return (ones(v.x) | ones(v.y) | ones(v.z) | ones(v.w)) == 0;
  }
}

/// to[i] = the 16 bytes at from(i) once they are written; zeros where that is null. All are asked for at once.
template <class A, int kCount, class From>
__device__ inline void await_each(uint4 (&to)[kCount], From from) {
  while (true) {
    bool written = true;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const A* const at = from(i);
      to[i] = at == nullptr ? make_uint4(0, 0, 0, 0) : load_shared_by_blocks(at);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) written = written && is_written<A>(to[i]);
    if (written) return;
    ptx::spin_briefly();
  }
}
/// The same of pointers.
template <class A, int kCount>
__device__ inline void await(const A* const (&from)[kCount], uint4 (&to)[kCount]) {
  await_each<A>(to, [&](int i) { return from[i]; });
}

}  // namespace mmrec::kernels
