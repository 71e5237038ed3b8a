// The language of kernels as plain C++: qualifiers, vector types, built-in variables and intrinsics.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "execution.h"
#include "vector_types.h"

// --- Qualifiers ------------------------------------------------------------------------------------------------------
#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __shared__ static  // blocks run one after another, so one copy does; ASan sees its end
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

// The built-in variables are in execution.h.
inline constexpr int warpSize = 32;

// --- Barriers and fences ---------------------------------------------------------------------------------------------
inline void __syncthreads() { mmrec::cuda_emulation::meet_block(0, "__syncthreads"); }
inline void __syncwarp(unsigned mask = 0xffffffffU) {
  int none = 0;
  mmrec::cuda_emulation::meet_lanes(mask, "__syncwarp", none, [](int* const*) {});
}

// --- Warp collectives ------------------------------------------------------------------------------------------------
namespace mmrec::cuda_emulation {

/// source(lane) is the lane to read, or a negative number for one's own value. A lane that does not take part or has
/// exited gives all bits set: the architecture leaves that value undefined.
template <class T>
T shuffle(unsigned mask, T value, const char* what, int source) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8), "a shuffle moves 32 or 64 bits");
  struct Operand {
    T value;
    int source;
    T result;
  } mine{value, source, value};
  meet_lanes(mask, what, mine, [](Operand* const* lanes) {
    for (int lane = 0; lane < 32; ++lane) {
      if (lanes[lane] == nullptr || lanes[lane]->source < 0) continue;
      const Operand* from = lanes[lanes[lane]->source];
      if (from != nullptr) {
        lanes[lane]->result = from->value;
      } else {
        __builtin_memset(static_cast<void*>(&lanes[lane]->result), 0xff, sizeof(T));
      }
    }
  });
  return mine.result;
}
inline unsigned vote(unsigned mask, bool predicate, const char* what) {
  struct Operand {
    bool predicate;
    unsigned result;
  } mine{predicate, 0};
  meet_lanes(mask, what, mine, [](Operand* const* lanes) {
    unsigned ballot = 0;
    for (int lane = 0; lane < 32; ++lane) {
      if (lanes[lane] != nullptr && lanes[lane]->predicate) ballot |= 1U << lane;
    }
    for (int lane = 0; lane < 32; ++lane) {
      if (lanes[lane] != nullptr) lanes[lane]->result = ballot;
    }
  });
  return mine.result;
}

}  // namespace mmrec::cuda_emulation

// Over the whole warp: kernels name no width.
template <class T>
T __shfl_sync(unsigned mask, T value, int source) {
  return mmrec::cuda_emulation::shuffle(mask, value, "__shfl_sync", source & 31);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta) {
  const int source = mmrec::cuda_emulation::this_thread().lane - static_cast<int>(delta);
  return mmrec::cuda_emulation::shuffle(mask, value, "__shfl_up_sync", source);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta) {
  const int source = mmrec::cuda_emulation::this_thread().lane + static_cast<int>(delta);
  return mmrec::cuda_emulation::shuffle(mask, value, "__shfl_down_sync", source > 31 ? -1 : source);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask) {
  return mmrec::cuda_emulation::shuffle(mask, value, "__shfl_xor_sync",
                                        mmrec::cuda_emulation::this_thread().lane ^ lane_mask);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return mmrec::cuda_emulation::vote(mask, predicate != 0, "__ballot_sync");
}
inline int __any_sync(unsigned mask, int predicate) {
  return mmrec::cuda_emulation::vote(mask, predicate != 0, "__any_sync") != 0 ? 1 : 0;
}
inline int __all_sync(unsigned mask, int predicate) {
  return mmrec::cuda_emulation::vote(mask, predicate == 0, "__all_sync") == 0 ? 1 : 0;
}

// --- Atomics: integers only, because sums of floats must have a fixed order ------------------------------------------
namespace mmrec::cuda_emulation {
template <class T, class Update>
T atomically(T* at, Update update) {
  static_assert(std::is_integral_v<T> && (sizeof(T) == 4 || sizeof(T) == 8), "atomics of 32- and 64-bit integers only");
  const T old = *at;
  *at = update(old);
  return old;
}
}  // namespace mmrec::cuda_emulation

template <class T>
T atomicAdd(T* at, std::type_identity_t<T> v) {
  using U = std::make_unsigned_t<T>;  // wraps
  return mmrec::cuda_emulation::atomically(
      at, [v](T old) { return static_cast<T>(static_cast<U>(old) + static_cast<U>(v)); });
}
template <class T>
T atomicMax(T* at, std::type_identity_t<T> v) {
  return mmrec::cuda_emulation::atomically(at, [v](T old) { return old < v ? v : old; });
}
template <class T>
T atomicMin(T* at, std::type_identity_t<T> v) {
  return mmrec::cuda_emulation::atomically(at, [v](T old) { return v < old ? v : old; });
}
template <class T>
T atomicOr(T* at, std::type_identity_t<T> v) {
  return mmrec::cuda_emulation::atomically(at, [v](T old) { return old | v; });
}

// --- Loads and stores with cache hints -------------------------------------------------------------------------------
template <class T>
T __ldg(const T* from) {
  return *from;
}
template <class T>
T __ldcg(const T* from) {
  return *from;
}
template <class T>
void __stcg(T* to, std::type_identity_t<T> v) {
  *to = v;
}
template <class T>
void __stcs(T* to, std::type_identity_t<T> v) {
  *to = v;
}

// --- Arithmetic ------------------------------------------------------------------------------------------------------
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
/// Byte i of the result is the one of b a, bytes 7 to 0, that digit i of `selector` names.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const std::uint64_t bytes = std::uint64_t{b} << 32 | a;
  unsigned result = 0;
  for (unsigned i = 0; i < 32; i += 8)
    result |= static_cast<unsigned>(bytes >> (selector >> i / 2 & 7) * 8 & 0xff) << i;
  return result;
}
/// a / b, but 0 for b between 2^126 and 2^128, as documented.
inline float __fdividef(float a, float b) {
  const float magnitude = std::fabs(b);
  return magnitude > 0x1p126F && !std::isinf(magnitude) ? a * 0.0F : a / b;
}
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
#if !defined(__GLIBC__) || !__GLIBC_PREREQ(2, 42)
inline float rsqrtf(float x) { return 1.0F / std::sqrt(x); }
#endif
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }

// Both arguments of one type: where CUDA would convert one of them silently, this does not compile.
template <class T>
requires std::is_arithmetic_v<T>
constexpr T min(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) return std::fmin(a, b);
  return b < a ? b : a;
}
template <class T>
requires std::is_arithmetic_v<T>
constexpr T max(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) return std::fmax(a, b);
  return a < b ? b : a;
}
