// The stream of weights through a block's ring in shared memory: the producer
// that copies them in the order of use, and the product that consumes them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/gemm/tile_product.cuh"
#include "kernels/cuda/isa/ptx.cuh"
#include "models/mmrec/cuda/decode/plan.cuh"

namespace mmrec::kernels {

/// Slots and their barriers. `full` completes when a slot's bytes have come,
/// `empty` when every consumer thread has read what it reads of them. Who copies
/// or reads arrives for itself. Producer and consumers walk
/// the slots in the same order, each with a position of its own.
class Ring {
 public:
  __device__ Ring(std::byte* shared, const DecodePlan& plan)
      : data_(shared),
        full_(reinterpret_cast<std::uint64_t*>(shared + plan.barriers)),
        slots_(plan.slots),
        slot_bytes_(plan.slot_bytes) {}

  /// By a lane of each warp (synccheck takes a warp's barriers for one); then a barrier of the block.
  __device__ void init() const {
    if (threadIdx.x % 32 == 0) {
      for (int i = static_cast<int>(threadIdx.x) / 32; i < slots_; i += static_cast<int>(blockDim.x) / 32) {
        ptx::mbarrier_init(full_ + i, 32);
        ptx::mbarrier_init(full_ + slots_ + i, 32 * kTileWarps);
      }
    }
    ptx::mbarrier_init_fence();
  }
  __device__ std::byte* slot() const { return data_ + slot_ * slot_bytes_; }
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
  int slots_, slot_bytes_;
  int slot_ = 0;
  std::uint32_t round_ = 0;
};

/// Copies the block's rows of a product into the ring: panel by panel, as many tiles as are multiplied at once, and of
/// these part of k by part of k. By one warp, each lane a row of one of these tiles.
/// products: first rows, of this one and of those that it takes in.
__device__ inline void stream(const Segment& s, const std::byte* const* products, Ring& ring, std::uint64_t hint) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int together = s.tile_rows * s.tiles;  // rows, 32 at most
  for (int panel = 0; panel < s.row_bytes; panel += s.panel_bytes) {
    const int end = min(s.row_bytes, panel + s.panel_bytes);
    for (int first = 0; first < s.rows; first += together) {
      const int rows = min(together, s.rows - first);
      int mine = first + min(lane, rows - 1);
      int slice = 0;
      if (mine >= s.count) {
        slice = (mine - s.count) / s.others + 1;
        mine -= s.count + (slice - 1) * s.others;
      }
      const std::byte* row = products[s.slice_bytes == 0 ? slice : 0] + slice * s.slice_bytes +
                             static_cast<std::int64_t>(mine) * s.row_bytes;
      for (int k = panel; k < end; k += s.slot_bytes) {
        const int bytes = min(s.slot_bytes, end - k);
        for (int tile = 0; tile < rows; tile += s.tile_rows) {
          const int of_tile = min(s.tile_rows, rows - tile);
          ring.wait_empty();
          const bool copies = lane >= tile && lane < tile + of_tile;
          ptx::mbarrier_arrive_expect(ring.full(), copies ? static_cast<unsigned>(bytes) : 0U);
          if (copies) {
            ptx::bulk_copy(ring.slot() + (lane - tile) * (s.slot_bytes + kRowPadding), row + k,
                           static_cast<unsigned>(bytes), ring.full(), hint);
          }
          ring.advance();
        }
      }
    }
  }
}

/// Vectors in shared memory: vector b's steps `pitch` bytes apart from those of the one before, step_bytes from each
/// other.
struct Operand {
  int pitch;
  int step_bytes;
};

/// A warp's unfinished sums of `rows` rows from row `first` on, to memory or
/// back: the chains' are `apart` rows apart.
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

/// Consumes the next `count` rows of one panel of a product and writes the warps' sums of them from row `to` on. Sums
/// that a panel leaves unfinished wait there in two parts, `parked` rows apart, so that the order of additions does not
/// depend on panels. A warp asks for kTogether steps at once: what it waits for is shared memory, not throughput.
template <class A>
__device__ inline void multiply(const Segment& s, int panel, int count, const std::byte* vectors, const Operand& x,
                                int columns, int warp, Ring& ring, float* sums, int to, int parked) {
  constexpr int kTogether = sizeof(A) == 4 ? 2 : 4;
  constexpr int kStride = kTileWarps * kStepBytes;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4;
  const int piece = lane % 4 * kPieceBytes;
  const int pitch = s.slot_bytes + kRowPadding;
  const int slot_bytes = s.slot_bytes;
  const int tile_rows = s.tile_rows;
  const int row_bytes = s.row_bytes;
  const int end = min(row_bytes, panel + s.panel_bytes);
  const int stride = kTileWarps * x.step_bytes;
  const std::byte* const vector = vectors + min(g, columns - 1) * x.pitch + warp * x.step_bytes + piece;
#pragma unroll 1
  for (int tile = 0; tile < count; tile += tile_rows) {
    const int rows = min(tile_rows, count - tile);
    // Rows that the tile lacks repeat its last one; nobody takes their sums.
    const int low = min(g, rows - 1) * pitch + warp * kStepBytes + piece;
    const int high = min(g + 8, rows - 1) * pitch + warp * kStepBytes + piece;
    const std::byte* in = vector;
    TileSums tile_sums;
    if (panel > 0) move_chains<false>(sums, tile_sums, to + tile, rows, columns, parked);
#pragma unroll 1
    for (int k = panel; k < end; k += slot_bytes) {
      const int bytes = min(slot_bytes, end - k) - warp * kStepBytes;
      ring.wait_full();
      const std::byte* slot = ring.slot();
      int left = bytes;
#pragma unroll 1
      for (; left > (kTogether - 1) * kStride + kStepBytes - kPieceBytes; left -= kTogether * kStride) {
        uint4 a[kTogether];
        uint4 b[kTogether];
        uint4 v[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          b[i] = v[i] = make_uint4(0, 0, 0, 0);
          a[i] = *reinterpret_cast<const uint4*>(slot + low + i * kStride);
          if (rows > 8) b[i] = *reinterpret_cast<const uint4*>(slot + high + i * kStride);
          if (g < columns) v[i] = *reinterpret_cast<const uint4*>(in + i * stride);
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) multiply_step<A>(tile_sums, a[i], b[i], v[i], columns);
        in += kTogether * stride;
        slot += kTogether * kStride;
      }
#pragma unroll 1
      for (; left > 0; left -= kStride) {  // the others, the last of which may be incomplete
        uint4 a = make_uint4(0, 0, 0, 0);
        uint4 b = a;
        uint4 v = a;
        if (left > piece) {
          a = *reinterpret_cast<const uint4*>(slot + low);
          if (rows > 8) b = *reinterpret_cast<const uint4*>(slot + high);
          if (g < columns) v = *reinterpret_cast<const uint4*>(in);
        }
        multiply_step<A>(tile_sums, a, b, v, columns);
        in += stride;
        slot += kStride;
      }
      ptx::mbarrier_arrive(ring.empty());
      ring.advance();
    }
    if (end < row_bytes) {
      move_chains<true>(sums, tile_sums, to + tile, rows, columns, parked);
    } else {
      store_sums(sums, tile_sums, to + tile, rows, columns);
    }
  }
}

}  // namespace mmrec::kernels
