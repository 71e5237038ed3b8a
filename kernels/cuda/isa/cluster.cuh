// Clusters of blocks and the shared memory of each other (sm_90).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/isa/barrier.cuh"

namespace mmrec::kernels::ptx {

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
/// The same, and what threads have written to shared memory before it may be read by all of the cluster after it.
__device__ inline void cluster_sync_memory() {
  asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}

/// cluster_sync_memory() in two halves: all threads of the cluster call both, in turn.
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

/// Arrives once at the barrier at the same place in the shared memory of block `rank` of the cluster.
__device__ inline void mbarrier_arrive_at(std::uint64_t* barrier, unsigned rank) {
  asm volatile(
      "{\n\t"
      ".reg .b32 remote;\n\t"
      "mapa.shared::cluster.u32 remote, %0, %1;\n\t"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n\t"
      "}" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}

/// The 16 bytes at the same place in the shared memory of block `rank` of the cluster.
__device__ inline float4 load_from_cluster(const float4* at, unsigned rank) {
  float4 v;
  asm volatile(
      "{\n\t"
      ".reg .b32 remote;\n\t"
      "mapa.shared::cluster.u32 remote, %4, %5;\n\t"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n\t"
      "}"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "r"(shared_address(at)), "r"(rank)
      : "memory");
  return v;
}

/// The same of 4 and 8 bytes.
__device__ inline std::uint32_t load_from_cluster(const std::uint32_t* at, unsigned rank) {
  std::uint32_t v;
  asm volatile(
      "{\n\t"
      ".reg .b32 remote;\n\t"
      "mapa.shared::cluster.u32 remote, %1, %2;\n\t"
      "ld.shared::cluster.u32 %0, [remote];\n\t"
      "}"
      : "=r"(v)
      : "r"(shared_address(at)), "r"(rank)
      : "memory");
  return v;
}
__device__ inline unsigned long long load_from_cluster(const unsigned long long* at, unsigned rank) {
  unsigned long long v;
  asm volatile(
      "{\n\t"
      ".reg .b32 remote;\n\t"
      "mapa.shared::cluster.u32 remote, %1, %2;\n\t"
      "ld.shared::cluster.u64 %0, [remote];\n\t"
      "}"
      : "=l"(v)
      : "r"(shared_address(at)), "r"(rank)
      : "memory");
  return v;
}

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

/// Writes 16 or 8 bytes to a multiple of as many, on its own, and reports them to `barrier`, which lies in the same
/// block: who has waited for that sees them.
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

}  // namespace mmrec::kernels::ptx
