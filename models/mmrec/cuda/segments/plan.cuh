// The plan of finish_segments (finish_segments.cu), computed on the host: the division of rows, products and attention,
// the layout of shared memory and of a team's exchange, and the parameters of a launch.
// And the tasks of a block: its place in its team, its threads' shares of a tile of rows, the tiles of its team in
// order, and its reads of memory before a tile.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/isa/ptx.cuh"
#include "kernels/cuda/rows/rows.cuh"
#include "models/mmrec/cuda/ops.h"

namespace mmrec::kernels::segments {

inline constexpr int kTeam = 8;   // blocks
inline constexpr int kRows = 16;  // of a tile
inline constexpr int kWarps = 8;
inline constexpr int kThreads = 32 * kWarps;
inline constexpr int kTileOutputs = 8;  // of a product's tile
inline constexpr int kTiles = 3;        // of a warp at once
inline constexpr int kStep = 64;        // bytes of k
inline constexpr int kHeld = 4;         // vectors of a thread's share of the slots
inline constexpr int kMostDim = 512;    // D
inline constexpr int kMostQueries = 2;  // vectors of a thread's share of the queries
inline constexpr int kMostPairs = 2;    // of a lane's share of a head
inline constexpr int kGroups = 4;       // that divide the tiles whose sums are added up
inline constexpr int kPlaces = 4;       // that a team's tiles take in turn to exchange what they have computed

/// Where things lie in a block's shared memory, in bytes.
struct Plan {
  int ffn_in;  // after memory_out's rows
  int ffn_out;
  int hidden;  // kRows operands of W_2, before them of W_o, before them the queries
  int normed;  // kRows operands of W_1; staging; the newest slot
  int work;    // slots of a head, partial sums of products, tiles' sums
  int norm;
  int bias;  // of the hidden units
  int bytes;
};

/// Where things lie in a place of a team's memory, in bytes: kRows operands of W_o, of the norm (fp32) and of W_2.
struct Exchange {
  int attended;
  int mixed;
  int hidden;
  int bytes;
};

/// A team's counters, in a line of their own: blocks that have begun, and that have left.
inline constexpr int kCounterWords = 32;

struct Sizes {
  int dim;
  int ffn;
  int width;  // of a head
  friend constexpr bool operator==(const Sizes&, const Sizes&) = default;
};
/// They have a kernel of their own, in which addresses and ends of loops are numbers.
inline constexpr Sizes kKnownSizes = {384, 768, 64};

template <class A>
struct Params {
  FinishSegments<Device, A> op;
  Sizes sizes;
  float scale;              // of scores, for exponents base 2
  ulonglong2* sums;         // [B][pieces][tiles][D / 2]
  std::uint32_t* counters;  // [team][kCounterWords]
  std::byte* exchange;      // [team][kPlaces]
  Exchange places;
  Plan plan;
  int time;
  int segment;
  double inverse;    // of the segment's length where it is a power of two, else 0
  int into_segment;  // of the first time
  int slots;         // of the ring
  int filled;        // of them, before the first piece
  int next_slot;     // to be filled
  int teams;         // of a sequence
  int pieces;
  int tiles;  // of the longest piece
};

__device__ inline int thread() { return static_cast<int>(threadIdx.x); }
__device__ inline int warp() { return static_cast<int>(threadIdx.x / 32); }
__device__ inline int lane() { return static_cast<int>(threadIdx.x % 32); }
/// The object at an offset of the plan.
template <class T>
__device__ inline T* at(int offset) {
  return reinterpret_cast<T*>(ptx::shared_memory<std::byte>() + offset);
}

/// Byte `byte` of row `row` of `pitch` bytes of an operand.
__device__ inline int place(int row, int pitch, int byte) { return row * pitch + (byte ^ (row % 2 * kStep)); }

/// kKnown: the sizes are kKnownSizes. It is an object beside the block, whose members refer to it and to nothing else.
template <class A, bool kKnown>
struct BlockTasks {
  __device__ explicit BlockTasks(const Params<A>& params)
      : p(params),
        op(p.op),
        rank(static_cast<int>(blockIdx.x) % kTeam),
        index(static_cast<int>(blockIdx.x) / kTeam % p.teams),
        sequence(static_cast<int>(blockIdx.x) / kTeam / p.teams),
        owns_head(rank < p.op.heads),
        counters(p.counters + blockIdx.x / kTeam * kCounterWords),
        exchange(p.exchange + std::int64_t{blockIdx.x / kTeam} * kPlaces * p.places.bytes) {
    const int columns = share() / kGroup;  // groups of 4 channels in a share
    own_row = thread() < kRows * columns ? thread() / columns : kRows;
    own_channel = rank * share() + thread() % columns * kGroup;
    query_row = thread() / (width() / kGroup);  // NOLINT(cppcoreguidelines-prefer-member-initializer): as the others
    const int hidden = ffn_share() / kGroup;
    hidden_row = thread() / hidden, hidden_column = thread() % hidden;
    hidden_rows = kThreads / hidden, hidden_columns = kThreads % hidden;
  }

  /// Vectors of a thread's share of the queries, at most.
  static constexpr int kQueries = kKnown ? kRows * kKnownSizes.width / kGroup / kThreads : kMostQueries;

  /// A stretch of time that ends where a memory segment does, or with the op.
  struct Piece {
    int number = 0;
    int first = 0;  // time
    int tokens = 0;
    int tiles = 0;
    int slots = 0;   // that are filled
    int newest = 0;  // the last one of them
  };
  /// A tile of this team.
  struct Task {
    Piece piece;  // number p.pieces: none
    int tile = 0;
    int rows = 0;
    bool fresh = false;  // the newest slot is yet to be made, from the sums of the piece before
  };
  /// A thread's values of a tile, from memory.
  struct Fetched {
    float4 x, h;
    uint2 v;
    uint2 q[kQueries];
  };

  __device__ int dim() const { return kKnown ? kKnownSizes.dim : p.sizes.dim; }
  __device__ int ffn() const { return kKnown ? kKnownSizes.ffn : p.sizes.ffn; }
  __device__ int width() const { return kKnown ? kKnownSizes.width : p.sizes.width; }
  __device__ int share() const { return dim() / kTeam; }  // a block's outputs
  __device__ int ffn_share() const { return ffn() / kTeam; }

  __device__ bool owns_row() const { return own_row < kRows; }
  /// f(row, vector) for this thread's vectors of the block's hidden units.
  template <class F>
  __device__ void for_each_hidden(F f) const {
    const int columns = ffn_share() / kGroup;
    for (int row = hidden_row, column = hidden_column; row < kRows;) {
      f(row, column);
      column += hidden_columns;
      row += hidden_rows + (column >= columns ? 1 : 0);
      if (column >= columns) column -= columns;
    }
  }

  __device__ Piece piece_of(int number) const {
    const int first = number == 0 ? 0 : number * p.segment - p.into_segment;
    const int tokens = min(p.time - first, number == 0 ? p.segment - p.into_segment : p.segment);
    return {
        number,
        first,
        tokens,
        (tokens + kRows - 1) / kRows,
        min(p.filled + number, p.slots),
        static_cast<int>(static_cast<unsigned>(p.next_slot + number + p.slots - 1) % static_cast<unsigned>(p.slots))};
  }

  /// The first of this team's tiles from tile `tile` of the piece on; of piece -1, from the beginning.
  __device__ Task next(int number, int tile) const {
    while (true) {
      if (number >= 0) {
        const Piece piece = piece_of(number);
        if (tile < piece.tiles) {
          return {piece, tile, min(piece.tokens - tile * kRows, kRows), number > 0 && tile == index};
        }
      }
      tile = index;
      if (++number >= p.pieces) return {.piece = {.number = p.pieces}};
    }
  }
  __device__ void fetch(const Task& task) {
    fetched = {};
    const std::int64_t time = task.piece.first + task.tile * kRows;
    if (own_row < task.rows) {
      fetched.x = __ldcg(reinterpret_cast<const float4*>(op.x.at(sequence, 0, time + own_row) + own_channel));
      fetched.h = __ldcg(reinterpret_cast<const float4*>(op.h.at(sequence, 0, time + own_row) + own_channel));
      fetched.v = __ldcg(reinterpret_cast<const uint2*>(op.v.at(sequence, 0, time + own_row) + own_channel));
    }
    if (!owns_head || task.piece.slots < 2) return;
    const int vectors = width() / kGroup;
    const A* q = op.q.at(sequence, 0, time) + rank * width() + (thread() - query_row * vectors) * kGroup;
#pragma unroll
    for (int k = 0; k < kQueries; ++k) {
      const int row = query_row + k * (kThreads / vectors);
      if (row < task.rows) fetched.q[k] = __ldcg(reinterpret_cast<const uint2*>(q + row * op.q.time_stride));
    }
  }

  // Four channels.
  __device__ static float4 widened(uint2 v) {
    const auto low = [](std::uint32_t pair) { return widen(A{static_cast<std::uint16_t>(pair)}); };
    const auto high = [](std::uint32_t pair) { return widen(A{static_cast<std::uint16_t>(pair >> 16)}); };
    return make_float4(low(v.x), high(v.x), low(v.y), high(v.y));
  }
  __device__ static uint2 rounded(const float (&v)[kGroup]) {
    return make_uint2(ptx::to_pair<A>(v[0], v[1]), ptx::to_pair<A>(v[2], v[3]));
  }

  const Params<A>& p;
  const FinishSegments<Device, A>& op;
  int rank, index, sequence;  // in the team, of the team among the sequence's, of the launch's
  bool owns_head;
  std::uint32_t* counters;  // the team's, and its places
  std::byte* exchange;
  int own_row, own_channel;       // this thread's 4 channels; kRows where it has none
  int query_row;                  // of this thread's first vector of queries
  int hidden_row, hidden_column;  // of the first 4 hidden units that it finishes, and the way to the next
  int hidden_rows, hidden_columns;
  int count = 0;  // of the team's tiles that are done
  Fetched fetched;
};

}  // namespace mmrec::kernels::segments
