// The copy engine, which works on its own: runs of bytes and boxes of tensors into shared memory (sm_90).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/isa/barrier.cuh"
#include "kernels/cuda/runtime/tensor_map.h"

namespace mmrec::kernels::ptx {

/// A hint for copies of what is read once: first to be evicted from L2.
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
/// arrive as zeros and count. With the 128-byte swizzle a row of the box is 128 bytes, and the 16-byte piece i of the
/// row at shared address s is stored as piece i ^ (s / 128 % 8); `to` is 1,024-byte aligned. One thread calls it; the
/// copy runs on its own.
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

}  // namespace mmrec::kernels::ptx
