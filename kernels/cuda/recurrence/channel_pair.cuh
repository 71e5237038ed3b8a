// Two neighbouring channels of a row, as a lane of a sweep reads and writes them: in one access, for pairs are aligned
// in all operands.
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

/// Past L1.
template <class T>
__device__ inline Pair<T> load_pair(const T* from) {
  if constexpr (sizeof(T) == 4) {
    const float2 v = __ldcg(reinterpret_cast<const float2*>(from));
    return {v.x, v.y};
  } else {
    const std::uint32_t v = __ldcg(reinterpret_cast<const std::uint32_t*>(from));
    return {T{static_cast<std::uint16_t>(v)}, T{static_cast<std::uint16_t>(v >> 16)}};
  }
}

/// fp32, and rounded where A has 16 bits.
template <class A>
__device__ inline void store_pair(float* to, A* rounded, float2 h) {
  *reinterpret_cast<float2*>(to) = h;
  if constexpr (sizeof(A) == 2) {
    *reinterpret_cast<std::uint32_t*>(rounded) =
        static_cast<std::uint32_t>(narrow<A>(h.x).bits) | static_cast<std::uint32_t>(narrow<A>(h.y).bits) << 16;
  }
}

/// Bits of the larger of |x| and |y|, 0 where there are no such channels. As integers they are in the order of the
/// floats, NaN above infinity.
__device__ inline std::uint32_t magnitude_bits(float x, float y, bool exist) {
  const std::uint32_t mask = exist ? 0x7fffffffU : 0U;
  return max(__float_as_uint(x) & mask, __float_as_uint(y) & mask);
}

}  // namespace mmrec::kernels
