// The stream of weights through a block's ring in shared memory: the slots, and the warps that copy into them in the
// order of use.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/isa/ptx.cuh"
#include "models/mmrec/cuda/decode/cluster_plan.cuh"
#include "models/mmrec/cuda/decode/context.cuh"

namespace mmrec::kernels {

/// Slots and their barriers. `full` completes when a slot's bytes have come: a copying warp arrives for itself. When
/// all consumer threads have read a slot, they arrive at another such barrier, or at a named one: named ones are
/// faster, but a block has only 16. Producers and consumers walk the slots in the same order, each with its own
/// position. A consumer may hold several slots, as many as there are at least.
template <bool kNamed>
class Ring {
 public:
  __device__ Ring(std::byte* shared, const DecodePlan& plan)
      : data_(shared + plan.ring),
        full_(reinterpret_cast<std::uint64_t*>(shared + plan.barriers)),
        slots_(plan.slots),
        slot_bytes_(plan.slot_bytes) {}

  /// By a lane of each warp (synccheck takes a warp's barriers for one); then a fence and a barrier of the block.
  __device__ void init() const {
    if (threadIdx.x % 32 != 0) return;
    for (int i = static_cast<int>(threadIdx.x) / 32; i < slots_; i += static_cast<int>(blockDim.x) / 32) {
      ptx::mbarrier_init(full_ + i, 32);
      if (!kNamed) ptx::mbarrier_init(full_ + slots_ + i, kConsumers);
    }
  }
  __device__ int slots() const { return slots_; }
  __device__ int number() const { return slot_; }
  __device__ std::byte* slot() const { return data_ + slot_ * slot_bytes_; }
  __device__ std::uint64_t* full() const { return full_ + slot_; }
  __device__ void wait_full() const { ptx::mbarrier_wait(full(), round_ & 1U); }
  __device__ void wait_empty() const {  // the first round passes
    if constexpr (kNamed) {
      if (round_ > 0) ptx::named_barrier_sync(kFirstNamed + slot_, kConsumers + 32);
    } else {
      ptx::mbarrier_wait(full_ + slots_ + slot_, (round_ & 1U) ^ 1U);
    }
  }
  /// Releases slot number `slot`. loaded: ptx::mbarrier_arrive_after.
  __device__ void release(int slot, std::uint32_t loaded) const {
    if constexpr (kNamed) {
      ptx::named_barrier_arrive_after(kFirstNamed + slot, kConsumers + 32, loaded);
    } else {
      ptx::mbarrier_arrive_after(full_ + slots_ + slot, loaded);
    }
  }
  __device__ void advance() {
    if (++slot_ < slots_) return;
    slot_ = 0;
    ++round_;
  }

 private:
  static constexpr int kFirstNamed = 2;
  static_assert(kFirstNamed + kClusterSlots <= 16);
  std::byte* data_;
  std::uint64_t* full_;
  int slots_, slot_bytes_;
  int slot_ = 0;
  std::uint32_t round_ = 0;
};

using L2Ring = Ring<false>;
using ClusterRing = Ring<true>;

/// Row `row` of those that a block multiplies. products: first rows, of this product and of those that it takes in.
template <class A>
__device__ const std::byte* row_of(const DecodeContext<A>& c, const ProductShape& s, const std::byte* const* products,
                                   int row) {
  int slice = 0;
  for (int count = c.owned(s.owned).count; row >= count; count = c.owned(s.others).count) {
    row -= count;
    ++slice;
  }
  return products[s.slice_bytes == 0 ? slice : 0] + slice * s.slice_bytes +
         static_cast<std::int64_t>(row) * s.row_bytes;
}

/// The one warp that copies where blocks fill the device.
class WarpStream {
 public:
  static constexpr int kWarps = 1;
  __device__ explicit WarpStream(L2Ring ring) : ring_(ring), hint_(ptx::evict_first()) {}

  /// The block's rows of a product: panel by panel, as many tiles as are multiplied at once, and of these part of k by
  /// part of k. Each lane has a row of one of these tiles.
  template <class A>
  __device__ void copy(const DecodeContext<A>& c, const ProductShape& s, const std::byte* const* products) {
    const int lane = c.lane;
    const int all = c.rows(s);
    const int together = s.tile_rows * s.tiles;  // rows, 32 at most
    for (int panel = 0; panel < s.row_bytes; panel += s.panel_bytes) {
      const int end = min(s.row_bytes, panel + s.panel_bytes);
      for (int first = 0; first < all; first += together) {
        const int rows = min(together, all - first);
        const std::byte* row = row_of(c, s, products, first + min(lane, rows - 1));
        for (int k = panel; k < end; k += s.slot_bytes) {
          const int bytes = min(s.slot_bytes, end - k);
          for (int tile = 0; tile < rows; tile += s.tile_rows) {
            const int of_tile = min(s.tile_rows, rows - tile);
            ring_.wait_empty();
            const bool copies = lane >= tile && lane < tile + of_tile;
            ptx::mbarrier_arrive_expect(ring_.full(), copies ? static_cast<unsigned>(bytes) : 0U);
            if (copies) {
              ptx::bulk_copy(ring_.slot() + (lane - tile) * s.slot_pitch, row + k, static_cast<unsigned>(bytes),
                             ring_.full(), hint_);
            }
            ring_.advance();
          }
        }
      }
    }
  }
  __device__ void drain() {}

 private:
  L2Ring ring_;
  std::uint64_t hint_;
};

/// One of the warps that copy within a cluster, a slot each in turn: one alone takes longer for a slot's instructions
/// than the bytes take.
class ClusterStream {
 public:
  static constexpr int kWarps = 4;
  __device__ explicit ClusterStream(ClusterRing ring)
      : ring_(ring), hint_(ptx::evict_first()), turn_(static_cast<int>(threadIdx.x) / 32 - kTileWarps) {}

  /// The block's rows of a product, half a unit a lane.
  template <class A>
  __device__ void copy(const DecodeContext<A>& c, const ProductShape& s, const std::byte* const* products) {
    constexpr int kRun = kUnit / 2;
    const int lane = c.lane;
    const int all = c.rows(s);
#pragma unroll 1
    for (int first = 0; first < all; first += s.tile_rows) {
      if (turn_ == 0) {
        const int in_slot = min(s.tile_rows, all - first);
        const bool copies = lane * kRun < in_slot;
        const int bytes = copies ? min(kRun, in_slot - lane * kRun) * s.row_bytes : 0;
        const std::byte* from = row_of(c, s, products, copies ? first + lane * kRun : first);
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
    turn_ = turn_ == 0 ? kWarps - 1 : turn_ - 1;
  }

  ClusterRing ring_;
  std::uint64_t hint_;
  int turn_;  // slots until the warp's next one
};

/// All weights of a model in the order of their use.
template <class Stream, class A>
__device__ void stream_model(Stream stream, const DecodeContext<A>& c) {
  constexpr auto kHead = static_cast<int>(Product::kHead);
  const auto count = static_cast<int>(c.p.op.shape.layers);
#pragma unroll 1
  for (int layer = 0; layer <= count; ++layer) {
    const bool is_layer = layer < count;
#pragma unroll 1
    for (int i = is_layer ? 0 : kHead; i < (is_layer ? kHead : kHead + 1); ++i) {
      const auto product = static_cast<Product>(i);
      const bool attends = product == Product::kMemoryQ || product == Product::kMemoryOut;
      if (attends && c.p.op.slots < 2) continue;
      stream.copy(c, c.p.plan.products[product], &c.layers[layer].rows[product]);
    }
  }
  stream.drain();
}

}  // namespace mmrec::kernels
