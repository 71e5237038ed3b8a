// How a warp of a decode step of one sequence multiplies: its steps of a slot's 8 rows come into registers, often
// before the vector is there, and are multiplied with it by the tensor core.
#pragma once

#include "models/mmrec/cuda/decode/stream.cuh"

namespace mmrec::kernels {

template <class A>
class SingleProduct {
  static_assert(sizeof(A) == 2);

 public:
  static constexpr int kSteps = kSlotRowBytes[0] / kStepBytes / kTileWarps;  // of a warp in a slot at most

  __device__ __forceinline__ SingleProduct(const DecodeContext<A>& context, L2Ring ring)
      : c_(context), ring_(ring), sums_(reinterpret_cast<float*>(context.shared + context.p.plan.sums)) {}

  /// Sums of one stage or pass and of the next have memory of their own.
  __device__ __forceinline__ void turn() { turn_ ^= 1; }
  __device__ __forceinline__ float sum(int row) const { return total(sums(), row, 0, 1); }

  /// A warp's steps of one slot: lane 4g + t has the t-th piece of row g.
  struct Weights {
    uint4 steps[kSteps] = {};
  };
  /// Of the slot whose turn it is, whose `rows` rows have `steps` steps. It may then be filled again.
  __device__ __forceinline__ void take(Weights& w, int rows, int steps) {
    // Rows that the tile lacks repeat its last one; nobody takes their sums.
    const int row = min(c_.lane >> 2, rows - 1) * (c_.p.plan.slot_row_bytes + kRowPadding);
    ring_.wait_full();
    const std::byte* slot = ring_.slot() + row + (c_.lane & 3) * kPieceBytes;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {  // the last one again where the warp has no such
      const int step = min(c_.warp + i * kTileWarps, steps - 1) * kStepBytes;
      w.steps[i] = *reinterpret_cast<const uint4*>(slot + step);
    }
    ring_.release();
    ring_.advance();
  }
  /// sums[t] += the steps of tile t; x: the vectors from there on. The tensor core's 16 rows are a tile's 8
  /// rows' even and odd words, and of a vector's two columns one has its even words and one its odd ones, so that
  /// operands are multiplied as they lie and both chains of a sum (tile_product.cuh) come out of one instruction.
  /// between(i) is called after the i-th step, for what depends on nothing here.
  template <int kTiles, class Between>
  __device__ __forceinline__ void multiply(TileSums (&sums)[kTiles], const Weights (&w)[kTiles], int tiles, int steps,
                                           const std::byte* x, int pitch, int vectors, Between between) const {
    const int piece = (c_.lane & 3) * kPieceBytes;
    x += ((c_.lane >> 3) & (vectors - 1)) * pitch + piece + ((c_.lane >> 2) & 1) * 4;
    std::uint32_t v[kSteps][2];
    const auto read = [&](int i) {
      const auto* words = reinterpret_cast<const std::uint32_t*>(x + (c_.warp + i * kTileWarps) * kStepBytes);
      v[i][0] = words[0];
      v[i][1] = words[2];
    };
    const auto multiply_step = [&](int i) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const uint4 row = w[t].steps[i];
        if (t < tiles) ptx::mma_m16n8k16<A>(sums[t].chains[0], {row.x, row.y, row.z, row.w}, {v[i][0], v[i][1]});
      }
    };
    if (c_.warp + (kSteps - 1) * kTileWarps < steps) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) read(i);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        multiply_step(i);
        between(i);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        if (c_.warp + i * kTileWarps < steps) {
          read(i);
          multiply_step(i);
        }
        between(i);
      }
    }
  }
  /// The warp's sums of a tile; rows from `split` on take the second vector's.
  template <bool kPair>
  __device__ __forceinline__ void store_tile(const TileSums& tile, int first, int split) const {
    const int row = first + (c_.lane >> 2);
    const bool is_second = kPair && row >= split;
    if ((c_.lane & 3) == static_cast<int>(is_second)) {
      sums()[row * kTileWarps + c_.warp] = tile.chains[0][0] + tile.chains[0][3];
    }
  }

 private:
  __device__ __forceinline__ float* sums() const { return sums_ + turn_ * c_.p.plan.sums_rows * kTileWarps; }

  const DecodeContext<A>& c_;
  L2Ring ring_;
  float* sums_;
  int turn_ = 0;
};

}  // namespace mmrec::kernels
