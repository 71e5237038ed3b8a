// What a block of finish_segments (finish_segments.cu) is to do: its place in its team, its threads' shares of a tile
// of rows, the tiles of its team and their order, and what it asks memory for before a tile.
#pragma once

#include "kernels/cuda/rows/rows.cuh"
#include "models/mmrec/cuda/segments/plan.cuh"

namespace mmrec::kernels::segments {

/// kKnown: the sizes are kKnownSizes.
template <class A, bool kKnown>
class BlockTasks {
 protected:
  __device__ explicit BlockTasks(const Params<A>& p)
      : p_(p),
        op_(p.op),
        rank_(static_cast<int>(blockIdx.x) % kTeam),
        index_(static_cast<int>(blockIdx.x) / kTeam % p.teams),
        sequence_(static_cast<int>(blockIdx.x) / kTeam / p.teams),
        owns_head_(rank_ < p.op.heads),
        counters_(p.counters + blockIdx.x / kTeam * kCounterWords),
        exchange_(p.exchange + std::int64_t{blockIdx.x / kTeam} * kPlaces * p.places.bytes) {
    const int columns = share() / kGroup;  // groups of 4 channels in a share
    row_ = thread() < kRows * columns ? thread() / columns : kRows;
    channel_ = rank_ * share() + thread() % columns * kGroup;
    query_row_ = thread() / (width() / kGroup);  // NOLINT(cppcoreguidelines-prefer-member-initializer): as the others
    const int hidden = ffn_share() / kGroup;
    hidden_row_ = thread() / hidden, hidden_column_ = thread() % hidden;
    hidden_rows_ = kThreads / hidden, hidden_columns_ = kThreads % hidden;
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
    Piece piece;  // number p_.pieces: none
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

  __device__ int dim() const { return kKnown ? kKnownSizes.dim : p_.sizes.dim; }
  __device__ int ffn() const { return kKnown ? kKnownSizes.ffn : p_.sizes.ffn; }
  __device__ int width() const { return kKnown ? kKnownSizes.width : p_.sizes.width; }
  __device__ int share() const { return dim() / kTeam; }  // a block's outputs
  __device__ int ffn_share() const { return ffn() / kTeam; }

  __device__ bool owns_row() const { return row_ < kRows; }
  /// f(row, vector) for this thread's vectors of the block's hidden units.
  template <class F>
  __device__ void for_each_hidden(F f) const {
    const int columns = ffn_share() / kGroup;
    for (int row = hidden_row_, column = hidden_column_; row < kRows;) {
      f(row, column);
      column += hidden_columns_;
      row += hidden_rows_ + (column >= columns ? 1 : 0);
      if (column >= columns) column -= columns;
    }
  }

  __device__ Piece piece_of(int number) const {
    const int first = number == 0 ? 0 : number * p_.segment - p_.into_segment;
    const int tokens = min(p_.time - first, number == 0 ? p_.segment - p_.into_segment : p_.segment);
    return {number,
            first,
            tokens,
            (tokens + kRows - 1) / kRows,
            min(p_.filled + number, p_.slots),
            static_cast<int>(static_cast<unsigned>(p_.next_slot + number + p_.slots - 1) %
                             static_cast<unsigned>(p_.slots))};
  }

  /// The first of this team's tiles from tile `tile` of the piece on; of piece -1, from the beginning.
  __device__ Task next(int number, int tile) const {
    while (true) {
      if (number >= 0) {
        const Piece piece = piece_of(number);
        if (tile < piece.tiles) {
          return {piece, tile, min(piece.tokens - tile * kRows, kRows), number > 0 && tile == index_};
        }
      }
      tile = index_;
      if (++number >= p_.pieces) return {.piece = {.number = p_.pieces}};
    }
  }
  __device__ void fetch(const Task& task) {
    fetched_ = {};
    const std::int64_t time = task.piece.first + task.tile * kRows;
    if (row_ < task.rows) {
      fetched_.x = __ldcg(reinterpret_cast<const float4*>(op_.x.at(sequence_, 0, time + row_) + channel_));
      fetched_.h = __ldcg(reinterpret_cast<const float4*>(op_.h.at(sequence_, 0, time + row_) + channel_));
      fetched_.v = __ldcg(reinterpret_cast<const uint2*>(op_.v.at(sequence_, 0, time + row_) + channel_));
    }
    if (!owns_head_ || task.piece.slots < 2) return;
    const int vectors = width() / kGroup;
    const A* q = op_.q.at(sequence_, 0, time) + rank_ * width() + (thread() - query_row_ * vectors) * kGroup;
#pragma unroll
    for (int k = 0; k < kQueries; ++k) {
      const int row = query_row_ + k * (kThreads / vectors);
      if (row < task.rows) fetched_.q[k] = __ldcg(reinterpret_cast<const uint2*>(q + row * op_.q.time_stride));
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

  const Params<A>& p_;
  const FinishSegments<Device, A>& op_;
  int rank_, index_, sequence_;  // in the team, of the team among the sequence's, of the launch's
  bool owns_head_;
  std::uint32_t* counters_;  // the team's, and its places
  std::byte* exchange_;
  int row_, channel_;               // this thread's 4 channels; kRows where it has none
  int query_row_;                   // of this thread's first vector of queries
  int hidden_row_, hidden_column_;  // of the first 4 hidden units that it finishes, and the way to the next
  int hidden_rows_, hidden_columns_;
  Fetched fetched_;
};

}  // namespace mmrec::kernels::segments
