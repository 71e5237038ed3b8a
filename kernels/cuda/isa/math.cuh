// Arithmetic of one instruction: powers and logarithms, conversions, pairs of 16-bit floats, the largest of a warp; and
// what hides a value from the compiler.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kernels/tensor.h"

namespace mmrec::kernels::ptx {

/// 2^x, within 2 units in the last place; subnormal results are flushed to zero.
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// log2(x) of a positive normal x: absolute error 2^-22 for x in (1/2, 2), else relative error 2^-22.
__device__ inline float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Rounding to nearest even and exact widening, by one instruction each.
__device__ inline BFloat16 to_bfloat16(float x) {
  BFloat16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
__device__ inline Float16 to_float16(float x) {
  Float16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
__device__ inline float from_float16(Float16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
/// Both rounded to nearest even, `low` in the lower half. sm_80.
template <class T>
__device__ inline std::uint32_t to_pair(float low, float high) {
  static_assert(std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>);
  std::uint32_t y;
  if constexpr (std::is_same_v<T, BFloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  }
  return y;
}

/// The smaller of each of two BFloat16 or Float16 in a register; NaN if either is NaN.
template <class T>
__device__ inline std::uint32_t min_pair(std::uint32_t a, std::uint32_t b) {
  static_assert(std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>);
  std::uint32_t y;
  if constexpr (std::is_same_v<T, BFloat16>) {
    asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  } else {
    asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  }
  return y;
}

/// The larger of each; of a number and a NaN the number. sm_80.
template <class T>
__device__ inline std::uint32_t max_pair(std::uint32_t a, std::uint32_t b) {
  std::uint32_t y;
  if constexpr (std::is_same_v<T, BFloat16>) {
    asm("max.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  } else {
    asm("max.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  }
  return y;
}

/// The largest x of the warp's 32 lanes, which all call it. sm_80.
__device__ inline std::uint32_t warp_max(std::uint32_t x) {
  std::uint32_t y;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
  return y;
}

/// The smallest x, and the sum modulo 2^32.
__device__ inline std::uint32_t warp_min(std::uint32_t x) {
  std::uint32_t y;
  asm volatile("redux.sync.min.u32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
  return y;
}
__device__ inline std::uint32_t warp_sum(std::uint32_t x) {
  std::uint32_t y;
  asm volatile("redux.sync.add.u32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
  return y;
}

/// Does nothing, but what was computed from v before is no longer known to be so: the compiler computes it again rather
/// than keep it in registers.
__device__ inline void forget(uint4& v) { asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)); }
__device__ inline void forget(std::uint32_t& v) { asm volatile("" : "+r"(v)); }
__device__ inline void forget(int& v) { asm volatile("" : "+r"(v)); }

/// The same for a value: x, of which the compiler no longer knows where it comes from.
__device__ inline int opaque(int x) {
  forget(x);
  return x;
}

}  // namespace mmrec::kernels::ptx
