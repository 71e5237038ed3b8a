// Instructions that CUDA C++ has no portable spelling for, one thin function each. Everything in inline assembly or
// behind an intrinsic of a data type's header lives in this file and in mma.cuh, so the rest of the device code is
// plain C++. Include this file alone: the emulated device replaces it.
//
// Long, because it is one list: barriers, clusters, the copy engine, memory, arithmetic.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/runtime/tensor_map.h"
#include "kernels/tensor.h"

namespace mmrec::kernels::ptx {

// --- Waiting: for the kernel before, for other blocks, at barriers in shared memory (sm_90; most of it sm_80) and at
// numbered ones.

/// Waits until the previous kernel on the stream has finished and its writes are visible (LaunchConfig::
/// overlap_predecessor); and lets the next such kernel start. No effect before sm_90.
__device__ inline void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ inline void allow_successor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/// Called inside a loop that waits for another block.
__device__ inline void spin_pause() {
#if __CUDA_ARCH__ >= 700
  __nanosleep(20);
#endif
}
/// The same for waits of less than a microsecond: it does not sleep.
__device__ inline void spin_briefly() {}

/// An address in shared memory, as the instructions below take it.
__device__ inline std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

/// A barrier in shared memory, 8 bytes. Its phases are numbered 0, 1, 2, …; a phase completes when `arrivals` have
/// arrived and all bytes announced for it have come, and the next begins at once. Bytes may come before they are
/// announced (the balance is signed), as long as an arrival is still missing. One thread makes it, then
/// mbarrier_init_fence() and a barrier of the block or cluster let others use it.
__device__ inline void mbarrier_init(std::uint64_t* barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ inline void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

/// Announces bytes for the current phase and arrives once.
__device__ inline void mbarrier_arrive_expect(std::uint64_t* barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

/// Arrives once. What the thread has read and written before is done when the phase completes, but loads that
/// race with the copy engine need mbarrier_arrive_after.
__device__ inline void mbarrier_arrive(std::uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

/// Returns when the newest phase whose number has this parity (0 or 1) has completed: at once if the current phase has
/// the other parity. A new barrier is in phase 0, so parity 1 passes and parity 0 waits.
__device__ inline void mbarrier_wait(std::uint64_t* barrier, std::uint32_t parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define MMREC_TRY_WAIT "mbarrier.test_wait"
#else
#define MMREC_TRY_WAIT "mbarrier.try_wait"  // may sleep
#endif
  std::uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n\t"
        ".reg .pred p;\n\t" MMREC_TRY_WAIT
        ".parity.shared::cta.b64 p, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t"
        "}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
#undef MMREC_TRY_WAIT
}

/// Barrier `id` (1..15) of `threads` threads of the block, a multiple of 32: sync arrives and waits, arrive does not
/// wait. Both order memory accesses, but those of the copy engine (named_barrier_arrive_after).
__device__ inline void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// For threads that have loaded shared memory which the copy engine overwrites after the arrival. `loaded` is an OR of
/// one word of each such load. The other arrivals order ordinary accesses, not the copy engine's. They do not wait for
/// loads: ptxas waits for a load only where its register is used, and a load may queue behind loads from global memory
/// for longer than the copy takes. Seen on an H100: wrong numbers. So these arrivals use `loaded`: its bits become a
/// zero. The compiler does not know that a block is one thread deep, so it cannot leave them out.
__device__ inline std::uint32_t zero_after(std::uint32_t loaded) { return loaded & (blockDim.z - 1U); }
__device__ inline void mbarrier_arrive_after(std::uint64_t* barrier, std::uint32_t loaded) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier) + zero_after(loaded))
               : "memory");
}
__device__ inline void named_barrier_arrive_after(int id, int threads, std::uint32_t loaded) {
  named_barrier_arrive(id + static_cast<int>(zero_after(loaded)), threads);
}

// --- Clusters of blocks and the shared memory of each other (sm_90).

/// This block's number in its cluster (LaunchConfig::cluster consecutive blocks along x).
__device__ inline unsigned cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

/// A barrier of all threads of the cluster. It orders no memory accesses but those that mbarrier_init_fence covers.
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.relaxed;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}
/// The same, and it orders memory: all of the cluster may then read what its threads wrote to shared memory before.
__device__ inline void cluster_sync_memory() {
  asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}

/// cluster_sync_memory() in two halves: all threads of the cluster call both, in turn.
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

/// A place in the shared memory of a block of the cluster; adding n moves it by n bytes.
struct ClusterPlace {
  std::uint32_t address;
};
__device__ inline ClusterPlace operator+(ClusterPlace place, int bytes) {
  return {place.address + static_cast<std::uint32_t>(bytes)};
}
/// The place in block `rank` that corresponds to `at` here.
__device__ inline ClusterPlace place_in_cluster(const void* at, unsigned rank) {
  ClusterPlace place;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(place.address) : "r"(shared_address(at)), "r"(rank));
  return place;
}

/// Arrives once at the barrier at the same place in the shared memory of block `rank` of the cluster.
__device__ inline void mbarrier_arrive_at(std::uint64_t* barrier, unsigned rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(place_in_cluster(barrier, rank).address)
               : "memory");
}

/// What lies at the same place in the shared memory of block `rank` of the cluster: 16, 4 or 8 bytes.
__device__ inline float4 load_from_cluster(const float4* at, unsigned rank) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(place_in_cluster(at, rank).address)
               : "memory");
  return v;
}
__device__ inline std::uint32_t load_from_cluster(const std::uint32_t* at, unsigned rank) {
  std::uint32_t v;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(place_in_cluster(at, rank).address) : "memory");
  return v;
}
__device__ inline unsigned long long load_from_cluster(const unsigned long long* at, unsigned rank) {
  unsigned long long v;
  asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(v) : "r"(place_in_cluster(at, rank).address) : "memory");
  return v;
}

/// Writes 16 or 8 bytes to a multiple of as many, on its own, and reports them to `barrier`, which lies in the same
/// block: threads that have waited for it see them.
__device__ inline void store_async(ClusterPlace to, uint4 v, ClusterPlace barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to.address),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier.address)
      : "memory");
}
__device__ inline void store_async(ClusterPlace to, uint2 v, ClusterPlace barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(to.address),
               "r"(v.x), "r"(v.y), "r"(barrier.address)
               : "memory");
}

// --- The copy engine, which works on its own: runs of bytes and boxes of tensors into shared memory (sm_90).

/// A hint for copies of data that is read once: L2 evicts it first.
__device__ inline std::uint64_t evict_first() {
  std::uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

/// Copies `bytes` from global memory into this block's shared memory and reports them to `barrier`. Both addresses and
/// `bytes` are multiples of 16. One thread calls it; the copy runs on its own.
__device__ inline void bulk_copy(void* to, const void* from, unsigned bytes, std::uint64_t* barrier,
                                 std::uint64_t hint) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(hint)
      : "memory");
}

__device__ inline void prefetch_tensor_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/// Copies the box of the tensor that begins at element (x, y, z) into this block's shared memory at `to`, element by
/// element in the order of the box, x fastest, and reports its bytes to `barrier`. Elements outside of the tensor
/// arrive as zeros and count. A row of the box is n = 8, 4, 2 or 1 pieces of 16 bytes, and the swizzle stores the piece
/// that would be at shared address s with i = s / 16 % n as piece i ^ (s / 128 % n); `to` is 128 n-byte aligned. One
/// thread calls it; the copy runs on its own.
__device__ inline void load_box(void* to, const TensorMap* map, std::uint64_t* barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}

/// load_box with a hint for L2 (evict_first).
__device__ inline void load_box(void* to, const TensorMap* map, std::uint64_t* barrier, int x, int y, int z,
                                std::uint64_t hint) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "l"(hint)
      : "memory");
}

/// The same into every block of the cluster whose bit is set in `ranks`, at the same place of its shared memory,
/// reporting to the barrier at the same place there.
__device__ inline void load_box_multicast(void* to, const TensorMap* map, std::uint64_t* barrier, int x, int y, int z,
                                          std::uint16_t ranks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "h"(ranks)
      : "memory");
}

// --- Loads and stores of global memory with cache hints or an order, and dynamic shared memory.

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

/// Two 64-bit words each read or written whole, without order to other accesses; 16-byte aligned, seen by all blocks.
__device__ inline ulonglong2 load_relaxed_pair(const ulonglong2* from) {
  ulonglong2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(v.x), "=l"(v.y) : "l"(from) : "memory");
  return v;
}
__device__ inline void store_relaxed_pair(ulonglong2* to, ulonglong2 v) {
  asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(v.x), "l"(v.y) : "memory");
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

// --- Arithmetic of one instruction, and what hides a value from the compiler.

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
/// The sum and the product of each of two BFloat16 in a register, rounded to nearest even. sm_90.
__device__ inline std::uint32_t add_pair(std::uint32_t a, std::uint32_t b) {
  std::uint32_t y;
  asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
__device__ inline std::uint32_t mul_pair(std::uint32_t a, std::uint32_t b) {
  std::uint32_t y;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
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
/// Four Float8, the first in the lowest byte: rounded to nearest even, at most 448; NaN stays NaN. sm_89.
__device__ inline std::uint32_t to_float8_quad(const float (&x)[4]) {
  std::uint16_t low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(x[1]), "f"(x[0]));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(x[3]), "f"(x[2]));
  return low | static_cast<std::uint32_t>(high) << 16;
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

/// The largest and the smallest x of the warp's 32 lanes, which all call it, and their sum modulo 2^32. sm_80.
#define MMREC_OF_WARP(name, operation)                                                   \
  __device__ inline std::uint32_t name(std::uint32_t x) {                                \
    std::uint32_t y;                                                                     \
    asm volatile("redux.sync." operation ".u32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x)); \
    return y;                                                                            \
  }
MMREC_OF_WARP(warp_max, "max")
MMREC_OF_WARP(warp_min, "min")
MMREC_OF_WARP(warp_sum, "add")
#undef MMREC_OF_WARP

/// Does nothing, but what was computed from v before is no longer known to be so: the compiler computes it again rather
/// than keep it in registers.
__device__ inline void forget(std::uint32_t& v) { asm volatile("" : "+r"(v)); }
__device__ inline void forget(int& v) { asm volatile("" : "+r"(v)); }

/// The same for a value: returns x, but the compiler no longer knows its origin.
__device__ inline int opaque(int x) {
  forget(x);
  return x;
}

}  // namespace mmrec::kernels::ptx

#include "kernels/cuda/isa/mma.cuh"  // which stands on the functions above
