// The stream of weights through a block's ring in shared memory: who owns which rows, the producer that copies them in
// the order of use, and the product that consumes them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/decode_plan.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/tile_product.cuh"

namespace mmrec::kernels {

struct Range {
  int first, count;
};
/// This block's part of `total` rows; parts differ by one row at most.
__device__ inline Range share_of(std::int64_t total) {
  const std::int64_t first = total * blockIdx.x / gridDim.x;
  return {static_cast<int>(first), static_cast<int>(total * (blockIdx.x + 1) / gridDim.x - first)};
}

/// The rows of one matrix that a block multiplies: `count` rows of each of `slices` slices.
struct Segment {
  const std::byte* first;    // row
  std::int64_t slice_bytes;  // from a slice to the next
  int count, slices;
  int row_bytes;
  int slot_bytes;   // of a row in one slot
  int panel_bytes;  // of a row that are multiplied before the next tile of rows
  __device__ int rows() const { return count * slices; }
  __device__ const std::byte* row(int i) const {
    return first + i / count * slice_bytes + static_cast<std::int64_t>(i % count) * row_bytes;
  }
};

/// Rows `rows` of each of `slices` matrices of [total, in], stacked; nothing if there is no weight.
template <class A>
__device__ inline Segment segment(const A* weight, Range rows, int slices, std::int64_t total, std::int64_t in) {
  const int row_bytes = static_cast<int>(in) * static_cast<int>(sizeof(A));
  return {.first = reinterpret_cast<const std::byte*>(weight) + std::int64_t{rows.first} * row_bytes,
          .slice_bytes = total * row_bytes,
          .count = weight == nullptr ? 0 : rows.count,
          .slices = slices,
          .row_bytes = row_bytes,
          .slot_bytes = slot_row_bytes(slices * most_of(total, static_cast<int>(gridDim.x))),
          .panel_bytes = row_bytes};
}

enum class Product : std::uint8_t {  // in the order of the stream
  kGate,
  kQvzk,
  kGateZ,
  kGammaIn,
  kContextIn,
  kGammaUp,
  kContextUp,
  kMemoryQ,
  kMemoryOut,
  kFfnIn,
  kFfnOut,
  kCount
};

/// What this block owns: channels, units of the hidden layers, rows of the head.
struct Share {
  Range channels, hidden, ffn, vocab;
  __device__ explicit Share(const DecodeShape& s)
      : channels(share_of(s.dim)), hidden(share_of(s.gate_hidden)), ffn(share_of(s.ffn)), vocab(share_of(s.vocab)) {}

  template <class A>
  __device__ Segment of(Product product, const DecodeLayer<Device, A>& w, const DecodeShape& s, int panel_bytes) const {
    switch (product) {
      case Product::kGate:
        return segment(w.gate, channels, 2, s.dim, s.dim);
      case Product::kQvzk:
        return segment(w.qvzk, channels, s.dpg ? 3 : 4, s.dim, s.dim);
      case Product::kGateZ:
        return segment(w.gate_z, channels, 1, s.dim, s.dim);
      case Product::kGammaIn:
        return segment(w.gamma_in, hidden, 1, s.gate_hidden, s.dim);
      case Product::kContextIn:
        return segment(w.context_in, hidden, 1, s.gate_hidden, s.dim);
      case Product::kGammaUp:
        return segment(w.gamma_up, channels, 1, s.dim, s.gate_hidden);
      case Product::kContextUp:
        return segment(w.context_up, channels, 1, s.dim, s.gate_hidden);
      case Product::kMemoryQ:
        return segment(w.memory_q, channels, 1, s.dim, s.dim);
      case Product::kMemoryOut:
        return segment(w.memory_out, channels, 1, s.dim, s.dim);
      case Product::kFfnIn:
        return segment(w.ffn_in, ffn, 1, s.ffn, s.dim);
      case Product::kFfnOut:
      case Product::kCount:
        break;
    }
    Segment out = segment(w.ffn_out, channels, 1, s.dim, s.ffn);
    out.panel_bytes = panel_bytes;
    return out;
  }
};

/// Slots and their barriers. `full` completes when a slot's bytes have come, `empty` when every consumer warp has read
/// them. Producer and consumers walk the slots in the same order, each with a position of its own.
class Ring {
 public:
  __device__ Ring(std::byte* shared, const DecodePlan& plan)
      : data_(shared), full_(reinterpret_cast<std::uint64_t*>(shared + plan.barriers)), slots_(plan.slots) {}

  /// By one thread, then mbarrier_init_fence() and a barrier of the block.
  __device__ void init() const {
    for (int i = 0; i < slots_; ++i) {
      ptx::mbarrier_init(full_ + i, 1);
      ptx::mbarrier_init(full_ + slots_ + i, kTileWarps);
    }
    ptx::mbarrier_init_fence();
  }
  __device__ std::byte* slot() const { return data_ + slot_ * kSlotBytes; }
  __device__ std::uint64_t* full() const { return full_ + slot_; }
  __device__ std::uint64_t* empty() const { return full_ + slots_ + slot_; }
  __device__ void wait_full() const { ptx::mbarrier_wait(full(), round_ & 1U); }
  __device__ void wait_empty() const { ptx::mbarrier_wait(empty(), (round_ & 1U) ^ 1U); }  // the first round passes
  __device__ void advance() {
    if (++slot_ < slots_) return;
    slot_ = 0;
    ++round_;
  }

 private:
  std::byte* data_;
  std::uint64_t* full_;
  int slots_;
  int slot_ = 0;
  std::uint32_t round_ = 0;
};

/// Copies a segment into the ring: panel by panel, tile by tile, slot by slot. By one warp.
__device__ inline void stream(const Segment& s, Ring& ring, std::uint64_t hint) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int panel = 0; panel < s.row_bytes; panel += s.panel_bytes) {
    const int end = min(s.row_bytes, panel + s.panel_bytes);
    for (int tile = 0; tile < s.rows(); tile += kTileRows) {
      const int rows = min(kTileRows, s.rows() - tile);
      const std::byte* row = s.row(tile + min(lane, rows - 1));
      for (int k = panel; k < end; k += s.slot_bytes) {
        const int bytes = min(s.slot_bytes, end - k);
        ring.wait_empty();
        if (lane == 0) ptx::mbarrier_arrive_expect(ring.full(), static_cast<unsigned>(rows * bytes));
        __syncwarp();
        if (lane < rows) {
          ptx::bulk_copy(ring.slot() + lane * (s.slot_bytes + kRowPadding), row + k, static_cast<unsigned>(bytes),
                         ring.full(), hint);
        }
        ring.advance();
      }
    }
  }
}

/// Vectors in shared memory: vector b's steps at data + b * pitch, step_bytes apart.
struct Operand {
  const std::byte* data;
  int pitch;
  int step_bytes;
};

/// A warp's unfinished sums of `rows` rows from row `first` on, to memory or back: the chains' are `apart` rows apart.
template <bool kStore>
__device__ inline void move_chains(float* sums, TileSums& tile, int first, int rows, int columns, int apart) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  for_each_value(rows, columns, [&](int i, int row, int column) {
#pragma unroll
    for (int chain = 0; chain < 2; ++chain) {
      float& there = warp_sums(sums, first + row + chain * apart, column, columns)[warp];
      if constexpr (kStore) {
        there = tile.chains[chain][i];
      } else {
        tile.chains[chain][i] = there;
      }
    }
  });
}

/// Consumes rows [first, last) of one panel of a segment and writes the warps' sums of them from row `to` on. Sums that
/// a panel leaves unfinished wait there in two parts, `parked` rows apart, so that the order of additions does not
/// depend on panels.
template <class A>
__device__ inline void multiply(const Segment& s, int panel, int first, int last, const Operand& x, int batch,
                                Ring& ring, float* sums, int to, int parked) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int g = lane / 4;
  const int piece = lane % 4 * kPieceBytes;
  const int pitch = s.slot_bytes + kRowPadding;
  const int end = min(s.row_bytes, panel + s.panel_bytes);
  for (int tile = first; tile < last; tile += kTileRows) {
    const int rows = min(kTileRows, last - tile);
    TileSums tile_sums;
    if (panel > 0) move_chains<false>(sums, tile_sums, to + tile - first, rows, batch, parked);
    for (int k = panel; k < end; k += s.slot_bytes) {
      const int bytes = min(s.slot_bytes, end - k);
      ring.wait_full();
      // Rows that the tile lacks repeat its last one; nobody takes their sums.
      const std::byte* low = ring.slot() + min(g, rows - 1) * pitch + piece;
      const std::byte* high = ring.slot() + min(g + 8, rows - 1) * pitch + piece;
      const std::byte* in = x.data + min(g, batch - 1) * x.pitch + (k - panel) / kStepBytes * x.step_bytes + piece;
#pragma unroll 2
      for (int step = warp; step * kStepBytes < bytes; step += kTileWarps) {
        uint4 a = make_uint4(0, 0, 0, 0);
        uint4 b = a;
        uint4 v = a;
        const int at = step * kStepBytes;
        if (at + piece < bytes) {
          a = *reinterpret_cast<const uint4*>(low + at);
          b = *reinterpret_cast<const uint4*>(high + at);
          if (g < batch) v = *reinterpret_cast<const uint4*>(in + step * x.step_bytes);
        }
        multiply_step<A>(tile_sums, a, b, v, batch);
      }
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(ring.empty());
      ring.advance();
    }
    if (end < s.row_bytes) {
      move_chains<true>(sums, tile_sums, to + tile - first, rows, batch, parked);
    } else {
      store_sums(sums, tile_sums, to + tile - first, rows, batch);
    }
  }
}

}  // namespace mmrec::kernels
