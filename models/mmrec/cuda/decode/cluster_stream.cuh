// The stream of weights through the ring of a block in a cluster (cluster.cuh): the slots, and the warps that
// copy into them in the order of use.
#pragma once

#include <cstddef>
#include <cstdint>

#include "models/mmrec/cuda/decode/base.cuh"
#include "models/mmrec/cuda/decode/cluster_plan.cuh"

namespace mmrec::kernels {

/// Warps that copy weights into the ring, a slot each in turn: one alone takes longer for a slot's instructions than
/// the bytes take.
inline constexpr int kCopyWarps = 4;
inline constexpr int kClusterThreads = 32 * (kTileWarps + kCopyWarps);

/// Slots of weights: `full` completes when a slot's bytes have come; a named barrier for each lets the warp that fills
/// it know that all others have read it. Producers and consumers walk the slots in the same order.
class ClusterRing {
 public:
  __device__ ClusterRing(std::byte* shared, const DecodePlan& plan)
      : data_(shared + plan.ring),
        full_(reinterpret_cast<std::uint64_t*>(shared + plan.barriers)),
        slots_(plan.slots),
        slot_bytes_(plan.slot_bytes) {}

  __device__ void init() const {
    if (threadIdx.x % 32 == 0) {
      for (int i = static_cast<int>(threadIdx.x) / 32; i < slots_; i += kClusterThreads / 32) {
        ptx::mbarrier_init(full_ + i, 32);
      }
    }
  }
  __device__ std::byte* slot() const { return data_ + slot_ * slot_bytes_; }
  __device__ std::uint64_t* full() const { return full_ + slot_; }
  __device__ void wait_full() const { ptx::mbarrier_wait(full(), round_ & 1U); }
  __device__ void wait_empty() const {
    if (round_ > 0) ptx::named_barrier_sync(kFirstBarrier + slot_, kConsumers + 32);
  }
  __device__ void release() const { ptx::named_barrier_arrive(kFirstBarrier + slot_, kConsumers + 32); }
  __device__ void advance() {
    if (++slot_ < slots_) return;
    slot_ = 0;
    ++round_;
  }
  __device__ int slots() const { return slots_; }

 private:
  static constexpr int kFirstBarrier = 2;
  static_assert(kFirstBarrier + kClusterSlots <= 16);
  std::byte* data_;
  std::uint64_t* full_;
  int slots_, slot_bytes_;
  int slot_ = 0;
  std::uint32_t round_ = 0;
};

/// One of the warps that copy.
class ClusterStream {
 public:
  __device__ explicit ClusterStream(ClusterRing ring)
      : ring_(ring), hint_(ptx::evict_first()), turn_(static_cast<int>(threadIdx.x) / 32 - kTileWarps) {}

  /// Copies the block's rows of a product, half a unit a lane.
  __device__ void copy(const Segment s, const std::byte* const* products) {
    constexpr int kRun = kUnit / 2;
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
    for (int first = 0; first < s.rows; first += s.tile_rows) {
      if (turn_ == 0) {
        const int in_slot = min(s.tile_rows, s.rows - first);
        const bool copies = lane * kRun < in_slot;
        int row = copies ? first + lane * kRun : first;
        int slice = 0;
        for (int count = s.count; row >= count; count = s.others) {
          row -= count;
          ++slice;
        }
        const std::byte* from = products[s.slice_bytes == 0 ? slice : 0] + slice * s.slice_bytes +
                                static_cast<std::int64_t>(row) * s.row_bytes;
        const int bytes = copies ? min(kRun, in_slot - lane * kRun) * s.row_bytes : 0;
        ring_.wait_empty();
        ptx::mbarrier_arrive_expect(ring_.full(), static_cast<unsigned>(bytes));
        if (copies) {
          ptx::bulk_copy(ring_.slot() + lane * run_bytes(s.row_bytes), from, static_cast<unsigned>(bytes), ring_.full(),
                         hint_);
        }
      }
      advance();
    }
  }
  /// Waits until the slots have been read for the last time, so that no barrier is left half full.
  __device__ void drain() {
    for (int i = 0; i < ring_.slots(); ++i) {
      if (turn_ == 0) ring_.wait_empty();
      advance();
    }
  }

 private:
  __device__ void advance() {
    ring_.advance();
    turn_ = turn_ == 0 ? kCopyWarps - 1 : turn_ - 1;
  }

  ClusterRing ring_;
  std::uint64_t hint_;
  int turn_;  // slots until the warp's next one
};

}  // namespace mmrec::kernels
