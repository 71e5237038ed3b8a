// Barriers in shared memory and the copies of the tensor memory accelerator that report to them.
//
// A copy is carried out when a thread of its block first waits for its barrier: what reads earlier reads stale data.
#pragma once

#include <cstddef>
#include <cstdint>

#include "execution.h"

namespace mmrec::cuda_emulation {

/// Where `data` lies in the shared memory window of the running thread's block; reports what lies elsewhere.
std::uint32_t shared_offset(const void* data, std::size_t bytes, const char* what);

void mbarrier_init(std::uint64_t* barrier, unsigned arrivals);
/// Adds `bytes` to what the current phase waits for, then arrives once.
void mbarrier_arrive(Block& block, std::uint64_t* barrier, unsigned bytes);
/// Waits until the current phase's parity is not `parity`.
void mbarrier_wait(std::uint64_t* barrier, std::uint32_t parity);

/// The block `rank` of the running thread's cluster, and the place there that corresponds to `data` here.
Block& block_of_cluster(unsigned rank);
void* at_block(Block& block, const void* data);

/// Writes `bytes` (8 or 16), which are copied now, to `to` in `block`, reporting to `barrier` there.
void store_async(Block& block, void* to, const void* from, unsigned bytes, void* barrier);

/// What the emulated cuTensorMapEncodeTiled writes into a tensor map of 128 bytes: of three dimensions of 16-bit
/// elements, as kernels/cuda/runtime/tensor_map.h makes them.
struct TensorMapFields {
  static constexpr std::uint64_t kMagic = 0x70616d726f736e74;
  static constexpr int kElementBytes = 2;
  std::uint64_t magic = 0;
  const std::byte* data = nullptr;
  std::uint64_t stride_bytes[2] = {};  // of dimensions 1 and 2
  std::uint32_t sizes[3] = {};
  std::uint16_t box[3] = {};
  std::uint8_t swizzle = 1;  // pieces of 16 bytes among which it moves one: 8, 4, 2, or 1 for none
};
static_assert(sizeof(TensorMapFields) <= 128);

/// Copies `bytes` to `to` in the running thread's block, reporting to `barrier` there.
void bulk_copy(void* to, const void* from, unsigned bytes, std::uint64_t* barrier);
/// Copies the box that begins at `coordinates` to `to` in the shared memory of `block`, reporting to `barrier` there.
void load_box(Block& block, void* to, const void* map, std::uint64_t* barrier, const int (&coordinates)[3]);

}  // namespace mmrec::cuda_emulation
