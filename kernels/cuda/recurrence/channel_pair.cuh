// Two neighbouring channels of a row, as a lane of a sweep reads and writes them: in one access where kVectors says
// that pairs are aligned in all operands.
#pragma once

#include <cstdint>

#include "kernels/cuda/element.cuh"

namespace mmrec::kernels {

template <class T>
struct Pair {
  T x, y;
};
template <class T>
__device__ inline float2 widen_pair(Pair<T> pair) {
  return make_float2(widen(pair.x), widen(pair.y));
}

/// Past L1. The second one again is the first where there is none.
template <bool kVectors, class T>
__device__ inline Pair<T> load_pair(const T* from, bool has_second) {
  if constexpr (kVectors && sizeof(T) == 4) {
    const float2 v = __ldcg(reinterpret_cast<const float2*>(from));
    return {v.x, v.y};
  } else if constexpr (kVectors) {
    const std::uint32_t v = __ldcg(reinterpret_cast<const std::uint32_t*>(from));
    return {T{static_cast<std::uint16_t>(v)}, T{static_cast<std::uint16_t>(v >> 16)}};
  } else {
    const T* const second = from + (has_second ? 1 : 0);
    if constexpr (sizeof(T) == 4) {
      return {__ldcg(from), __ldcg(second)};
    } else {
      return {T{__ldcg(&from->bits)}, T{__ldcg(&second->bits)}};
    }
  }
}

/// One or both of a pair, `there` channels: fp32, and rounded where A has 16 bits.
template <bool kVectors, class A>
__device__ inline void store_pair(float* to, A* rounded, int there, float2 h) {
  if constexpr (kVectors) {
    if (there <= 0) return;
    *reinterpret_cast<float2*>(to) = h;
    if constexpr (sizeof(A) == 2) {
      *reinterpret_cast<std::uint32_t*>(rounded) =
          static_cast<std::uint32_t>(narrow<A>(h.x).bits) | static_cast<std::uint32_t>(narrow<A>(h.y).bits) << 16;
    }
  } else {
    if (there > 0) to[0] = h.x;
    if (there > 1) to[1] = h.y;
    if constexpr (sizeof(A) == 2) {
      if (there > 0) rounded[0] = narrow<A>(h.x);
      if (there > 1) rounded[1] = narrow<A>(h.y);
    }
  }
}

/// Bits of |x|, 0 where there is no channel. As integers they are in the order of the floats, NaN above infinity.
__device__ inline std::uint32_t magnitude_bits(float x, bool exists) {
  return __float_as_uint(x) & (exists ? 0x7fffffffU : 0U);
}

}  // namespace mmrec::kernels
