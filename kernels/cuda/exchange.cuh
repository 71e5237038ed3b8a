// Vectors that the blocks of one kernel hand to each other through global memory.
//
// Before the kernel, or a phase of it that others wait out, every element is all ones; then it is written once. So an
// element tells by itself whether it has been written, and whoever needs it reads it until it has. That is one trip to
// L2 for the writer and one for the reader, where a barrier costs a fence and two trips more, and a reader waits for
// what it reads and for nothing else. A value that happens to be the NaN of all ones is written as another NaN.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/isa/ptx.cuh"
#include "kernels/tensor.h"

namespace mmrec::kernels {

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

/// to[i] = the 16 bytes at from[i] once they are written; zeros where from[i] is null. All are asked for at once.
template <class A, int kCount>
__device__ inline void await(const A* const (&from)[kCount], uint4 (&to)[kCount]) {
  while (true) {
    bool written = true;
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      to[i] = from[i] == nullptr ? make_uint4(0, 0, 0, 0) : load_shared_by_blocks(from[i]);
#pragma unroll
    for (int i = 0; i < kCount; ++i) written = written && is_written<A>(to[i]);
    if (written) return;
    ptx::spin_briefly();
  }
}

}  // namespace mmrec::kernels
