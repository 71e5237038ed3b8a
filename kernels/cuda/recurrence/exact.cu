// The exact recurrence, token after token:
//   s = σ(W_g h₋₁ + b_g),  g = σ(zm + W_mh h₋₁),  a = γ + μ (1 − g + γ),  b = z ⊙ (s + μ g),  h = a ⊙ h₋₁ + b
//
// A block owns a run of channels: their rows of both gates and their h. All blocks stay resident for all tokens, and a
// token's h goes from block to block through h_rounded itself: its rows, which lie side by side, are filled with ones
// before the kernel, every element is written once, and a reader polls it until it is there (element.cuh).
// There is no barrier of the grid. A warp needs only its own steps of k (tile_product.cuh), and asks for them alone.
//
// The gate rows of a block stay in shared memory for all tokens as far as they fit: all of them for D up to 2048 in 16
// bits on devices with 227 KB a block. The rest is read from L2 for every token. A single token of up to 8 sequences
// reads every weight once and straight from memory, in a plain launch that overlaps its predecessor.
//
// Bytes of a token: h, once per block from L2; z, zm, γ and h once. They are asked for a token ahead. One token takes
// at least a trip to L2 and back plus the products' latency: of D = 1024 in 16 bits a warp has 4 steps of one tile.
//
// Sequences come in groups of 8, the columns of a tile. The order of every sum follows from D alone: bits do not depend
// on the batch, on the number of blocks or on how tokens are cut into calls.
// Many sequences' single tokens have a faster op, kernels/cuda/rows/norms.cu: here their groups go through the
// weights one after the other.
#include <cuda_runtime.h>

#include <algorithm>
#include <cassert>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/gemm/operands.cuh"
#include "kernels/cuda/gemm/tile_product.cuh"
#include "kernels/cuda/recurrence/equations.cuh"
#include "kernels/cuda/rows/rows.cuh"
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/cuda/runtime/launch.cuh"

namespace mmrec::kernels {
namespace {

constexpr int kThreads = 32 * kTileWarps;
constexpr int kAhead = 4;          // steps of h that a warp asks for at once
constexpr int kLeastChannels = 4;  // of a block: fewer blocks pass h on sooner
/// Row tiles that are multiplied per reading of h.
template <class A>
constexpr int kTiles = sizeof(A) == 2 ? 4 : 2;
template <class A>
constexpr int kPiece = kPieceBytes / static_cast<int>(sizeof(A));  // elements

template <class A>
struct Params {
  GateInputs<Device, A> in;
  const A* weight;
  const float* bias;
  int resident;    // weight rows of a block in shared memory
  int sums_bytes;  // of shared memory before them
};

/// What a thread needs for one channel of one token besides the products.
struct Operands {
  float bias, z, zm, gamma, h;
};

template <class A, bool kAligned>
class Recurrence {
 public:
  __device__ explicit Recurrence(const Params<A>& p)
      : p_(p),
        sums_(ptx::shared_memory<float>()),
        resident_(ptx::shared_memory<std::byte>() + p.sums_bytes),
        dim_(static_cast<int>(p.in.z.dim)),
        batch_(static_cast<int>(p.in.z.batch)),
        first_(static_cast<int>(std::int64_t{dim_} * blockIdx.x / gridDim.x)),
        channels_(static_cast<int>(std::int64_t{dim_} * (blockIdx.x + 1) / gridDim.x) - first_) {}

  __device__ void run() {
    hold_weights();
    ptx::wait_for_predecessor();
    float* sums = sums_;
    const std::int64_t tokens = p_.in.z.time;
    // This thread's outputs of a group of sequences: number thread() and every kThreads-th after it, channels fastest.
    const Output own = output(thread());
    Operands operands = operands_of(0, 0, own);
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (int b = 0; b < batch_; b += kTileColumns) {
        const int columns = min(kTileColumns, batch_ - b);
        for (int tile = 0; tile < 2 * channels_; tile += kTiles<A> * kTileRows) multiply(t, b, columns, tile, sums);
        __syncthreads();
        if (own.column < columns) advance(t, b, columns, own, sums, operands);
        for (int i = thread() + kThreads; i < channels_ * columns; i += kThreads) {
          advance(t, b, columns, output(i), sums, operands_of(t, b, output(i)));
        }
        const bool last = b + kTileColumns >= batch_;
        if (!last || t + 1 < tokens) operands = operands_of(last ? t + 1 : t, last ? 0 : b + kTileColumns, own);
        // The other half: a thread that is a round ahead has waited until all have read this one.
        sums = sums == sums_ ? sums_ + p_.sums_bytes / 8 : sums_;
      }
    }
  }

 private:
  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ int row_bytes() const { return dim_ * static_cast<int>(sizeof(A)); }

  /// Row `row` of the block's 2 channels_: its rows of W_g, then those of W_mh.
  __device__ const A* weight_row(int row) const {
    return p_.weight + (first_ + (row < channels_ ? row : dim_ + row - channels_)) * std::int64_t{dim_};
  }

  __device__ void hold_weights() {
    const int pieces = (dim_ + kPiece<A> - 1) / kPiece<A>;
    const int resident = min(p_.resident, 2 * channels_);
    for (int row = 0; row < resident; ++row) {
      auto* to = reinterpret_cast<uint4*>(resident_ + row * padded_row(row_bytes()));
      for (int i = thread(); i < pieces; i += kThreads) {
        to[i] = load_fragment<ReadOnly, kAligned>(weight_row(row) + i * kPiece<A>, dim_ - i * kPiece<A>);
      }
    }
    constexpr int kLine = 128;  // bytes
    for (int row = resident; row < 2 * channels_; ++row) {
      for (int i = thread() * kLine; i < row_bytes(); i += kThreads * kLine) {
        ptx::prefetch_l2(reinterpret_cast<const std::byte*>(weight_row(row)) + i);
      }
    }
    __syncthreads();
  }

  __device__ uint4 weight_piece(int row, int element) const {
    if (element >= dim_) return make_uint4(0, 0, 0, 0);
    if (row < p_.resident) {
      const std::byte* from = resident_ + row * padded_row(row_bytes()) + element * static_cast<int>(sizeof(A));
      return *reinterpret_cast<const uint4*>(from);
    }
    return load_fragment<ReadOnly, kAligned>(weight_row(row) + element, dim_ - element);
  }

  /// h_{t-1} of sequence b as the products see it.
  __device__ const A* state(std::int64_t b, std::int64_t t) const {
    if constexpr (sizeof(A) == 4) {
      return p_.in.h.at(b, 0, t);
    } else {
      return p_.in.h_rounded.at(b, 0, t);
    }
  }

  /// The steps' pieces of this lane's sequence, all in flight at once; null where it has none. Row 0, the carry, is
  /// there from the start; later ones come from other blocks.
  __device__ void read_state(const A* row, const int (&element)[kAhead], bool wait, uint4 (&to)[kAhead]) const {
    if constexpr (kAligned) {
      const A* from[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) from[i] = row != nullptr && element[i] < dim_ ? row + element[i] : nullptr;
      if (wait) return await<A>(from, to);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        to[i] = from[i] == nullptr ? make_uint4(0, 0, 0, 0) : load_shared_by_blocks(from[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        Vector16<A> piece(make_uint4(0, 0, 0, 0));
#pragma unroll
        for (int j = 0; j < kPiece<A>; ++j) {
          if (row == nullptr || element[i] + j >= dim_) continue;
          const A* from = row + element[i] + j;
          piece.values[j] = wait ? await_element(from) : PastL1::element(from);
        }
        to[i] = piece.bits;
      }
    }
  }

  /// Writes this warp's sums of kTiles row tiles from row `tile` on.
  __device__ void multiply(std::int64_t t, int b, int columns, int tile, float* sums) const {
    const int warp = thread() / 32;
    const int column = thread() / 4 % 8;
    const int piece = thread() % 4 * kPiece<A>;
    constexpr int kStep = kStepBytes / static_cast<int>(sizeof(A));
    const A* row = column < columns ? state(b + column, t) : nullptr;
    const int rows = 2 * channels_;
    TileSums tiles[kTiles<A>];
    for (int first = warp * kStep; first < dim_; first += kAhead * kTileWarps * kStep) {
      int element[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) element[i] = first + i * kTileWarps * kStep + piece;
      uint4 x[kAhead];
      read_state(row, element, t > 0, x);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (element[i] - piece >= dim_) break;
#pragma unroll
        for (int j = 0; j < kTiles<A>; ++j) {
          const int at = tile + j * kTileRows;
          if (at >= rows) break;
          const uint4 low = weight_piece(min(at + column, rows - 1), element[i]);
          const uint4 high = weight_piece(min(at + column + 8, rows - 1), element[i]);
          multiply_step<A>(tiles[j], low, high, x[i], columns);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kTiles<A>; ++j) {
      const int at = tile + j * kTileRows;
      if (at < rows) store_sums(sums, tiles[j], at, min(kTileRows, rows - at), columns);
    }
  }

  struct Output {
    int column;   // sequence of the group; kTileColumns for none
    int channel;  // of the block
  };
  __device__ Output output(int i) const {
    if (i >= channels_ * kTileColumns) return {kTileColumns, 0};
    return {i / channels_, i % channels_};
  }

  __device__ Operands operands_of(std::int64_t t, int b, const Output& o) const {
    if (o.column >= min(kTileColumns, batch_ - b)) return {};
    const int c = first_ + o.channel;
    const std::int64_t sequence = b + o.column;
    const GateInputs<Device, A>& in = p_.in;
    return {p_.bias == nullptr ? 0.0F : __ldg(p_.bias + c), read(in.z.at(sequence, 0, t) + c),
            read(in.zm.at(sequence, 0, t) + c), read(in.gamma.at(sequence, 0, t) + c),
            read(in.h.at(sequence, 0, t) + c)};
  }

  __device__ void advance(std::int64_t t, int b, int columns, const Output& o, float* sums, const Operands& x) const {
    const float s = total(sums, o.channel, o.column, columns) + x.bias;
    const float g = x.zm + total(sums, channels_ + o.channel, o.column, columns);
    const float h = gated_step(s, g, x.z, x.gamma, p_.in.mdi_mix)(x.h);
    const int c = first_ + o.channel;
    float* to = p_.in.h.at(b + o.column, 0, t + 1) + c;
    if constexpr (sizeof(A) == 4) {
      publish(to, h);
    } else {
      publish(p_.in.h_rounded.at(b + o.column, 0, t + 1) + c, narrow<A>(h));
      *to = h;
    }
  }

  const Params<A>& p_;
  float* sums_;  // two halves
  std::byte* resident_;
  int dim_, batch_, first_, channels_;
};

template <class A, bool kAligned>
__global__ void __launch_bounds__(kThreads, 1) recurrence_kernel(const __grid_constant__ Params<A> p) {
  ptx::allow_successor();
  Recurrence<A, kAligned>(p).run();
}

}  // namespace

template <class A>
void gated_recurrence(Cuda& cuda, const GatedRecurrence<Device, A>& op) {
  const std::int64_t batch = op.in.z.batch;
  const std::int64_t time = op.in.z.time;
  const std::int64_t dim = op.in.z.dim;
  if (batch == 0 || time == 0 || dim == 0) return;
  SequenceView<A, Device> state;
  if constexpr (sizeof(A) == 4) {
    state = op.in.h;
  } else {
    state = op.in.h_rounded;
  }
  const bool waits = time > 1;
  const auto row_size = static_cast<std::size_t>(dim) * sizeof(A);
  if (waits) {  // all ones but into the last rows, for which nobody waits
    assert(state.time_stride == dim);
    const auto pitch = batch == 1 ? row_size * static_cast<std::size_t>(time)
                                  : static_cast<std::size_t>(state.batch_stride) * sizeof(A);
    check_cuda(cudaMemset2DAsync(state.at(0, 0, 1), pitch, 0xff, row_size * static_cast<std::size_t>(time - 1),
                                 static_cast<std::size_t>(batch), cuda.stream()),
               "cudaMemset2DAsync");
  }

  const std::int64_t blocks = std::min<std::int64_t>(cuda.processors(), ceil_div(dim, kLeastChannels));
  const std::int64_t rows = 2 * ceil_div(dim, blocks);
  const std::int64_t columns = std::min<std::int64_t>(batch, kTileColumns);
  const std::int64_t sums_bytes = 2 * rows * columns * kTileWarps * static_cast<std::int64_t>(sizeof(float));
  const std::int64_t row_bytes = padded_row(static_cast<int>(row_size));
  const auto shared = static_cast<std::int64_t>(cuda.shared_memory_per_block());
  const bool reread = waits || batch > kTileColumns;
  const std::int64_t resident = reread ? std::min(rows, (shared - sums_bytes) / row_bytes) : 0;

  const Params<A> params = {.in = op.in,
                            .weight = op.gate_weight.template as<A>(),
                            .bias = op.gate_bias,
                            .resident = static_cast<int>(resident),
                            .sums_bytes = static_cast<int>(sums_bytes)};
  const bool aligned =
      takes_16_bytes(state) && takes_16_bytes(op.gate_weight.data, static_cast<std::int64_t>(row_size));
  const LaunchConfig config = {.grid = dims(blocks),
                               .block = dim3(kThreads),
                               .shared_bytes = static_cast<std::size_t>(sums_bytes + resident * row_bytes),
                               .cooperative = waits,
                               .overlap_predecessor = !waits && cuda.compute_capability() >= 90};
  launch(cuda.stream(), config, aligned ? recurrence_kernel<A, true> : recurrence_kernel<A, false>, params);
}

#define MMREC_INSTANTIATE(A) template void gated_recurrence(Cuda&, const GatedRecurrence<Device, A>&);
MMREC_FOR_EACH_TYPE(MMREC_INSTANTIATE)

}  // namespace mmrec::kernels
