// How a warp of a block in a cluster (cluster.cuh) multiplies: a stage's weights come into registers, often
// before the vector is there, and are multiplied with the warp's steps of it by the tensor core. Warps' sums meet in
// shared memory; those of a stage and of the next one have memory of their own.
#pragma once

#include "models/mmrec/cuda/decode/stream.cuh"

namespace mmrec::kernels {

template <class A>
class ClusterProduct {
  /// From the sums with the first vector of a pair to those with the second one: in other banks.
  static constexpr int kSecondSums = kClusterPass / 2 * kTileWarps + 4;

 public:
  __device__ __forceinline__ ClusterProduct(const DecodeContext<A>& context, ClusterRing ring)
      : c_(context), ring_(ring), sums_(reinterpret_cast<float*>(context.shared + context.p.plan.sums)) {}

  /// Sums of one stage or pass and of the next have memory of their own.
  __device__ __forceinline__ void turn() { turn_ ^= 1; }
  /// With the second vector of a pair, if `second`.
  __device__ __forceinline__ float sum(int row, bool second = false) const {
    return total(sums() + (second ? kSecondSums : 0), row, 0, 1);
  }

  /// A warp's weights of a stage: its steps of every tile; lane 4g + t has the t-th piece of row g.
  template <int kTiles, int kSteps>
  struct Weights {
    uint4 at[kTiles][kSteps];
  };
  /// Takes the next `tiles` units from the ring, at most kInSlot of which are in a slot; what a slot lacks is as it may
  /// be. What is not taken is zero, so that nothing has to be kept in registers from one stage to the next.
  template <int kInSlot, int kTiles, int kSteps>
  __device__ __forceinline__ void take(Weights<kTiles, kSteps>& weights, int row_bytes, int tiles) {
    static_assert(kTiles % kInSlot == 0);
    const int mine = is_odd_row() * run_bytes(row_bytes) + (c_.lane >> 3) * row_bytes + (c_.lane & 3) * kPieceBytes +
                     c_.warp * kStepBytes;
    const int unit = 2 * run_bytes(row_bytes);
    const int steps = row_bytes / kStepBytes;
#pragma unroll
    for (int first = 0; first < kTiles; first += kInSlot) {
      const bool exists = first < tiles;
      if (exists) ring_.wait_full();
      const std::byte* pieces = ring_.slot() + mine;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        if (exists && has_step(i, steps)) {
#pragma unroll
          for (int t = 0; t < kInSlot; ++t) {
            weights.at[first + t][i] = *reinterpret_cast<const uint4*>(pieces + t * unit + i * kTileWarps * kStepBytes);
          }
        } else {
#pragma unroll
          for (int t = 0; t < kInSlot; ++t) weights.at[first + t][i] = make_uint4(0, 0, 0, 0);
        }
      }
      if (!exists) continue;
      ring_.release();
      ring_.advance();
    }
  }
  /// The warp's steps of one or two vectors `pitch` apart, as SingleProduct::multiply wants them.
  template <int kSteps>
  struct Steps {
    std::uint32_t words[kSteps][2];
  };
  template <int kSteps>
  __device__ __forceinline__ Steps<kSteps> read(const std::byte* vectors, int steps, int pitch) const {
    const std::byte* x = vectors + ((c_.lane >> 3) & 1) * pitch + (c_.lane & 3) * kPieceBytes +
                         ((c_.lane >> 2) & 1) * 4 + c_.warp * kStepBytes;
    Steps<kSteps> read;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      read.words[i][0] = read.words[i][1] = 0;
      if (!has_step(i, steps)) continue;
      const auto* words = reinterpret_cast<const std::uint32_t*>(x + i * kTileWarps * kStepBytes);
      read.words[i][0] = words[0];
      read.words[i][1] = words[2];
    }
    return read;
  }
  /// The warp's sums of units, to row `to` on: with one vector, or with either of a pair. between() is called after
  /// every second product, and once more.
  template <int kTiles, bool kPair, int kHeld, int kSteps, class Between, int kCount = kSteps>
  __device__ __forceinline__ void multiply(const Weights<kHeld, kSteps>& weights, const Steps<kSteps>& x, int steps,
                                           int to, Between between) const {
    if constexpr (kCount > 0) {
      if (!has_step(kCount - 1, steps)) {
        multiply<kTiles, kPair, kHeld, kSteps, Between, kCount - 1>(weights, x, steps, to, between);
        return;
      }
    }
    const int column = c_.lane & 3;
    const int row = to + is_odd_row() * (kUnit / 2) + (c_.lane >> 3);
    float* const mine = sums() + column * kSecondSums + row * kTileWarps + c_.warp;
    TileSums tile[kTiles];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const uint4 w = weights.at[t][i];
        ptx::mma_m16n8k16<A>(tile[t].chains[0], {w.x, w.y, w.z, w.w}, {x.words[i][0], x.words[i][1]});
        if (t % 2 == 1) between(false);
      }
    }
    between(true);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const auto& chains = tile[t].chains[0];
      if (column < (kPair ? 2 : 1)) mine[t * kUnit * kTileWarps] = chains[0] + chains[3];
    }
  }

 private:
  __device__ __forceinline__ bool has_step(int i, int steps) const { return c_.warp + i * kTileWarps < steps; }
  /// Row g of a tile is row g / 2 of the first half of its unit for even g, of the second half for odd g: those lie
  /// where they share no banks.
  __device__ __forceinline__ int is_odd_row() const { return (c_.lane >> 2) & 1; }

  __device__ __forceinline__ float* sums() const { return sums_ + turn_ * kClusterPass * kTileWarps; }

  const DecodeContext<A>& c_;
  ClusterRing ring_;
  float* sums_;
  int turn_ = 0;
};

}  // namespace mmrec::kernels
