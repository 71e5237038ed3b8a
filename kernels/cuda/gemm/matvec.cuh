// What the kernels for 1 to 8 rows share (matvec.cu, matvec_advance.cu): a warp's sums of 8 outputs along a share of k.
//
// Lane 4g + t loads pieces of 16 bytes of weight row g: a step is 4 pieces, 64 contiguous bytes of each of 8 rows.
// Several steps are in flight per warp, and the first of them before the kernel waits for its predecessor, which has no
// part in the weights: in a chain of products a matrix is on its way while the vector it will meet is still being
// computed.
//
// 16-bit operands meet in the tensor core: x is the left operand, 8 tokens with the first half of every piece in its
// rows 0..7 and the same tokens with the second half in rows 8..15; the 8 weight rows are the columns of the right one,
// one half at a time. A piece holds consecutive elements of k where the instruction's layout wants pairs from two
// places; as both operands are permuted alike, the products are the same. All of 1..8 tokens run the same instructions,
// each in rows of its own. fp32 operands are multiplied by ordinary fused multiply-adds, to full precision.
//
// Order of a sum: a lane's elements in order (the tensor core's own order within 16), the lanes of a row (fp32).
#pragma once

#include "kernels/cuda/gemm/algo.h"
#include "kernels/cuda/gemm/operands.cuh"
#include "kernels/cuda/rows/scaled.cuh"

namespace mmrec::kernels {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlockOutputs = 8;
constexpr int kAhead = 8;  // steps of weights in flight
constexpr int kFewSteps = 4;
static_assert(kTileColumns == 8);

template <class A>
constexpr int kPiece = 16 / static_cast<int>(sizeof(A));  // elements
template <class A>
constexpr int kStep = 4 * kPiece<A>;

/// The products of a warp's steps, a lane's part of them. kRows is the number of rows, or one above it.
template <class A, int kRows>
struct Products {
  static constexpr int kFragments = 1;  // pieces of x that a lane needs for one step
  static constexpr int kAheadX = 4;     // steps of x in flight
  float low[4] = {};                    // of the first 8 bytes of every piece, in the product's rows 0..7
  float high[4] = {};                   // of the last 8 bytes, in its rows 8..15

  /// x holds row g.
  __device__ void add(const uint4& w, const uint4 (&x)[1]) {
    const std::uint32_t a[4] = {x[0].x, x[0].z, x[0].y, x[0].w};
    ptx::mma_m16n8k16<A>(low, a, {w.x, w.y});
    ptx::mma_m16n8k16<A>(high, a, {w.z, w.w});
  }
  __device__ void finish(float (&partial)[kTileColumns][kBlockOutputs], int g, int t) const {
    partial[g][2 * t] = low[0] + high[2];
    partial[g][2 * t + 1] = low[1] + high[3];
  }
};

template <int kRows>
struct Products<float, kRows> {
  static constexpr int kFragments = kRows;
  static constexpr int kAheadX = kRows <= 2 ? 4 : 8 / kRows;
  float sums[kRows] = {};

  /// x holds all rows.
  __device__ void add(const uint4& w, const uint4 (&x)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      sums[r] = __fmaf_rn(__uint_as_float(w.x), __uint_as_float(x[r].x), sums[r]);
      sums[r] = __fmaf_rn(__uint_as_float(w.y), __uint_as_float(x[r].y), sums[r]);
      sums[r] = __fmaf_rn(__uint_as_float(w.z), __uint_as_float(x[r].z), sums[r]);
      sums[r] = __fmaf_rn(__uint_as_float(w.w), __uint_as_float(x[r].w), sums[r]);
    }
  }
  __device__ void finish(float (&partial)[kTileColumns][kBlockOutputs], int g, int t) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float sum = sums[r];
      sum += __shfl_xor_sync(0xffffffffU, sum, 1);
      sum += __shfl_xor_sync(0xffffffffU, sum, 2);
      if (t == r % 4) partial[r][g] = sum;
    }
  }
};

/// How a kernel goes through a warp's share: at most kFewSteps, all in flight at once; any number, kAhead in flight;
/// any number of steps of operands without alignment, kFewSteps in flight.
enum class Pace : std::uint8_t { kAtOnce, kStream, kUnaligned };

/// A warp's part of 8 outputs: the share [first, end) of k, whose weights' first steps are on their way from the start.
/// ReadX, ReadW: how x and the weights are read.
template <class A, int kRows, Pace kPace, class ReadX = PastL1, class ReadW = ReadOnce>
class WarpProduct {
 public:
  /// weight: the first output's row; of `outputs` that exist the last is repeated, and nobody takes those sums. x,
  /// which a kernel before may write, has `rows` rows.
  __device__ WarpProduct(const A* weight, int outputs, int in, int first, int end, const A* x, std::int64_t x_stride,
                         int rows)
      : x_stride_(x_stride),
        weight_(weight + std::int64_t{min(g(), outputs - 1)} * in + (first + t() * kPiece<A>)),
        // 16-bit operands: the lane's row is g. fp32: the lane needs all rows.
        x_(x + (first + t() * kPiece<A>)+(sizeof(A) == 2 ? g() : 0) * x_stride),
        left_(min(in, end) - first - t() * kPiece<A>),
        steps_((min(in, end) - first + kStep<A> - 1) / kStep<A>),
        rows_(sizeof(A) == 2 ? rows - g() : rows) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) w_[i] = weight_piece(i);
  }
  /// When x is there.
  __device__ void load_x() {
#pragma unroll
    for (int i = 0; i < Sums::kAheadX; ++i) load_x(i, fragments_[i]);
  }
  __device__ void multiply(float (&partial)[kTileColumns][kBlockOutputs]) {
    Sums sums;
    for (; steps_ > 0; steps_ -= kSteps) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        if (i >= steps_) break;
        sums.add(w_[i], fragments_[i % Sums::kAheadX]);
        if constexpr (kPace != Pace::kAtOnce) w_[i] = weight_piece(i + kSteps);
        if constexpr (kPace != Pace::kAtOnce || Sums::kAheadX < kSteps) {
          load_x(i + Sums::kAheadX, fragments_[i % Sums::kAheadX]);
        }
      }
      if constexpr (kPace == Pace::kAtOnce) break;
      weight_ += kSteps * kStep<A>;
      x_ += kSteps * kStep<A>;
      left_ -= kSteps * kStep<A>;
    }
    sums.finish(partial, g(), t());
  }

 private:
  using Sums = Products<A, kRows>;
  static constexpr bool kAligned = kPace != Pace::kUnaligned;
  static constexpr int kSteps = kPace == Pace::kStream ? kAhead : kFewSteps;

  __device__ static int g() { return static_cast<int>(threadIdx.x) / 4 % 8; }
  __device__ static int t() { return static_cast<int>(threadIdx.x) % 4; }
  __device__ uint4 weight_piece(int ahead) const {
    return load_fragment<ReadW, kAligned>(weight_ + ahead * kStep<A>, left_ - ahead * kStep<A>);
  }
  __device__ void load_x(int ahead, uint4 (&to)[Sums::kFragments]) const {
#pragma unroll
    for (int r = 0; r < Sums::kFragments; ++r) {
      to[r] = load_fragment<ReadX, kAligned>(x_ + r * x_stride_ + ahead * kStep<A>,
                                             r < rows_ ? left_ - ahead * kStep<A> : 0);
    }
  }

  std::int64_t x_stride_;
  const A* weight_;
  const A* x_;
  int left_;  // elements from the lane's first one to the end of the share
  int steps_;
  int rows_;
  uint4 w_[kSteps];
  uint4 fragments_[Sums::kAheadX][Sums::kFragments];
};

/// Blocks of a multiprocessor that registers have to suffice for: as many as what is in flight leaves room for.
template <class A>
constexpr unsigned blocks_per_processor(int rows, Pace pace) {
  if (pace == Pace::kUnaligned || (sizeof(A) == 4 && rows >= (pace == Pace::kStream ? 2 : 4))) return 2;
  return pace == Pace::kAtOnce ? 4 : 3;
}

}  // namespace mmrec::kernels
