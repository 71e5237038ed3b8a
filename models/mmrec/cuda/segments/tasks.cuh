// What a block of finish_segments (finish_segments.cu) is to do: its place in its team, its threads' shares of a tile
// of rows, the tiles of its team and their order, and what it asks memory for before a tile.
#pragma once

#include "kernels/cuda/rows/rows.cuh"
#include "models/mmrec/cuda/segments/plan.cuh"

namespace mmrec::kernels::segments {

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
  /// What a tile needs of memory.
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
