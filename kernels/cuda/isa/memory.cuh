// Loads and stores of global memory with cache hints or an order, and dynamic shared memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace mmrec::kernels::ptx {

/// Dynamic shared memory of the block, 128-byte aligned.
template <class T>
__device__ inline T* shared_memory() {
  extern __shared__ __align__(128) unsigned char mmrec_shared[];
  return reinterpret_cast<T*>(mmrec_shared);
}

/// 16 bytes from global memory that nothing writes while the kernel runs and that is read once: past L1.
__device__ inline uint4 load_streaming(const void* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}
/// 16 bytes to global memory, first to be evicted from L2.
__device__ inline void store_streaming(void* to, uint4 v) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

/// Asks for the cache line at `from` to be brought into L2.
__device__ inline void prefetch_l2(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

/// Reads and writes that order the memory accesses around them at the scope of the device.
__device__ inline std::uint32_t load_acquire(const std::uint32_t* from) {
  std::uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}
/// *at += v; returns what was there. Orders the accesses before it and after it.
__device__ inline std::uint32_t add_acq_rel(std::uint32_t* at, std::uint32_t v) {
  std::uint32_t old;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(at), "r"(v) : "memory");
  return old;
}
/// *at += v, after the accesses before it and those of threads that a barrier of the block has put before it.
__device__ inline void add_release(std::uint32_t* at, std::uint32_t v) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}
/// What the thread has seen and done before comes, for all blocks, before what it does after it: with a relaxed write
/// after it here and a relaxed read of that before it there, as a release and an acquire.
__device__ inline void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

/// Reads and writes that other blocks see and that order nothing else.
__device__ inline std::uint32_t load_relaxed(const std::uint32_t* from) {
  std::uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}
__device__ inline std::uint16_t load_relaxed(const std::uint16_t* from) {
  std::uint16_t v;
  asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(v) : "l"(from) : "memory");
  return v;
}
__device__ inline void store_relaxed(std::uint32_t* to, std::uint32_t v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}
__device__ inline void store_relaxed(std::uint16_t* to, std::uint16_t v) {
  asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(to), "h"(v) : "memory");
}
/// Two words, each written whole.
__device__ inline void store_relaxed(uint2* to, uint2 v) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(v.x), "r"(v.y) : "memory");
}

/// Two 64-bit words each read or written whole, without order to other accesses; 16-byte aligned, seen by all blocks.
__device__ inline ulonglong2 load_relaxed_pair(const ulonglong2* from) {
  ulonglong2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(v.x), "=l"(v.y) : "l"(from) : "memory");
  return v;
}
__device__ inline void store_relaxed_pair(ulonglong2* to, ulonglong2 v) {
  asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(v.x), "l"(v.y) : "memory");
}

/// v = what is at `from` now, if wanted: four words each read whole; 16-byte aligned.
__device__ inline void load_relaxed_if(bool wanted, const uint4* from, uint4& v) {
  asm volatile(
      "{\n\t"
      ".reg .pred p;\n\t"
      "setp.ne.u32 p, %5, 0;\n\t"
      "@p ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];\n\t"
      "}"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(from), "r"(static_cast<std::uint32_t>(wanted))
      : "memory");
}
/// 16 bytes read or written whole, without order to other accesses; 16-byte aligned, seen by all blocks.
__device__ inline uint4 load_relaxed_quad(const uint4* from) {
  uint4 v;
  asm volatile(
      "{\n\t"
      ".reg .b128 v;\n\t"
      ".reg .b64 low, high;\n\t"
      "ld.relaxed.gpu.global.b128 v, [%4];\n\t"
      "mov.b128 {low, high}, v;\n\t"
      "mov.b64 {%0, %1}, low;\n\t"
      "mov.b64 {%2, %3}, high;\n\t"
      "}"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(from)
      : "memory");
  return v;
}
__device__ inline void store_relaxed_quad(uint4* to, uint4 v) {
  asm volatile(
      "{\n\t"
      ".reg .b128 v;\n\t"
      ".reg .b64 low, high;\n\t"
      "mov.b64 low, {%1, %2};\n\t"
      "mov.b64 high, {%3, %4};\n\t"
      "mov.b128 v, {low, high};\n\t"
      "st.relaxed.gpu.global.b128 [%0], v;\n\t"
      "}" ::"l"(to),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
      : "memory");
}

/// Writes page-locked memory of the host, which may read it while the kernel runs.
__device__ inline void store_for_host(std::uint32_t* to, std::uint32_t v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}

}  // namespace mmrec::kernels::ptx
