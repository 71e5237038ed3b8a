// How a warp of a decode step of several sequences multiplies: 16 rows of a slot by the vectors of all of them, as
// tile_product.cuh has it.
#pragma once

#include "models/mmrec/cuda/decode/stream.cuh"

namespace mmrec::kernels {

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
/// depend on panels. Vectors lie vector_pitch bytes apart. A warp asks for kTogether steps at once: what it waits for
/// is shared memory, not throughput.
template <class A>
__device__ inline void multiply(const ProductShape& s, int panel, int count, const std::byte* vectors, int vector_pitch,
                                int columns, int warp, L2Ring& ring, float* sums, int to, int parked) {
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
  const std::byte* const vector = vectors + min(g, columns - 1) * vector_pitch + warp * kStepBytes + piece;
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
          if (g < columns) v[i] = *reinterpret_cast<const uint4*>(in + i * kStride);
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) multiply_step<A>(tile_sums, a[i], b[i], v[i], columns);
        in += kTogether * kStride;
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
        in += kStride;
        slot += kStride;
      }
      ring.release();
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
