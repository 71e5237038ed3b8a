// The exchanges of a block of finish_segments (finish_segments.cu). Three times a tile it gives its rows' channels to
// the blocks of its team. It gives the sums over time to all teams of its sequence. A reader sees from each word itself
// whether it has been written.
#pragma once

#include <bit>

#include "kernels/cuda/element.cuh"
#include "models/mmrec/cuda/segments/plan.cuh"

namespace mmrec::kernels::segments {

/// Both exchanges. The object has no state of its own.
template <class A, bool kKnown>
class BlockExchange {
  using Context = BlockTasks<A, kKnown>;
  using Piece = typename Context::Piece;

 public:
  __device__ explicit BlockExchange(const Context& context) : c_(context) {}

  // --- A team --------------------------------------------------------------------------------------------------------

  /// Once, after the places are blank: waits for the other blocks of the team.
  __device__ void meet() const {
    __syncthreads();
    if (thread() == 0) {
      ptx::add_release(c_.counters, 1);
      while (ptx::load_acquire(c_.counters) < kTeam) ptx::spin_pause();
    }
    __syncthreads();
  }
  /// The last block to leave sets the counters to zero again.
  __device__ void leave() const {
    if (thread() != 0 || ptx::add_acq_rel(c_.counters + 1, 1) != kTeam - 1) return;
    c_.counters[0] = 0;
    c_.counters[1] = 0;
  }

  // Where this block writes in the place of the team's tile, in bytes: vectors of its head, and of its shares.
  __device__ int attended_place(int row, int vector) const {
    return c_.p.places.attended + place(row, 2 * c_.dim(), 2 * (c_.rank * c_.width() + vector * kGroup));
  }
  __device__ int mixed_place() const { return c_.p.places.mixed + 4 * (c_.own_row * c_.dim() + c_.own_channel); }
  __device__ int hidden_place(int row, int vector) const {
    return c_.p.places.hidden + place(row, 2 * c_.ffn(), 2 * (c_.rank * c_.ffn_share() + vector * kGroup));
  }
  __device__ std::byte* place_of(int tile) const { return c_.exchange + tile % kPlaces * c_.p.places.bytes; }

  /// The word as it is written. All ones, which is a NaN, means unwritten, so another NaN stands for it.
  __device__ static std::uint32_t written(std::uint32_t word) {
    return word == kUnwritten<float> ? kUnwritten<float> / 2 : word;
  }
  /// Writes 8 or 16 bytes for the team.
  __device__ void give(int offset, uint2 v) const {
    ptx::store_relaxed(reinterpret_cast<uint2*>(place_of(c_.count) + offset), make_uint2(written(v.x), written(v.y)));
  }
  __device__ void give(int offset, const float (&y)[kGroup]) const {
    const auto pair = [](float low, float high) {
      return std::uint64_t{written(__float_as_uint(high))} << 32 | written(__float_as_uint(low));
    };
    ptx::store_relaxed_pair(reinterpret_cast<ulonglong2*>(place_of(c_.count) + offset),
                            {pair(y[0], y[1]), pair(y[2], y[3])});
  }
  /// Makes what this block writes in a place all ones again.
  __device__ void blank(int tile) const {
    constexpr uint2 kOnes = {kUnwritten<float>, kUnwritten<float>};
    std::byte* to = place_of(tile);
    const auto write = [&](int offset) { ptx::store_relaxed(reinterpret_cast<uint2*>(to + offset), kOnes); };
    if (c_.owns_head) {
      const int vectors = c_.width() / kGroup;
#pragma unroll
      for (int k = 0; k < Context::kQueries; ++k) {
        const int row = c_.query_row + k * (kThreads / vectors);
        if (row < kRows) write(attended_place(row, thread() - c_.query_row * vectors));
      }
    }
    if (c_.owns_row()) ptx::store_relaxed_pair(reinterpret_cast<ulonglong2*>(to + mixed_place()), {~0ULL, ~0ULL});
    c_.for_each_hidden([&](int row, int vector) { write(hidden_place(row, vector)); });
  }

  /// to[k] = from[k stride] for k < count, once others have written it. All are asked for at once, then those that
  /// were not there.
  template <int kCount>
  __device__ static void await_vectors(const uint4* from, int stride, int count, uint4 (&to)[kCount]) {
    const auto is_missing = [](const uint4& v) { return max(max(v.x, v.y), max(v.z, v.w)) == kUnwritten<float>; };
    std::uint32_t missing = (1U << min(count, kCount)) - 1;
#pragma unroll
    for (uint4& v : to) v = make_uint4(0, 0, 0, 0);
    while (true) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) ptx::load_relaxed_if((missing >> k & 1U) != 0, from + k * stride, to[k]);
      missing = 0;
#pragma unroll
      for (int k = 0; k < kCount; ++k) missing |= is_missing(to[k]) ? 1U << k : 0U;
      if (missing == 0) return;
      ptx::spin_briefly();
    }
  }
  /// kRows operands of `bytes` bytes, as they lie in the tile's place; kAhead vectors of a thread at once.
  template <int kAhead>
  __device__ void receive(int from, int to, int bytes) const {
    const auto* vectors = reinterpret_cast<const uint4*>(place_of(c_.count) + from);
    const int count = kRows * bytes / 16;
    for (int begin = 0; begin < count; begin += kAhead * kThreads) {
      const int first = begin + thread();
      const int left = count - begin;
      const int mine = min(left / kThreads + (thread() < left % kThreads ? 1 : 0), kAhead);
      uint4 v[kAhead];
      await_vectors(vectors + first, kThreads, mine, v);
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        if (k < mine) *(at<uint4>(to) + first + k * kThreads) = v[k];
      }
    }
    __syncthreads();
  }

  // --- Sums over time ------------------------------------------------------------------------------------------------

  __device__ ulonglong2* tile_sums(int piece, int tile) const {
    return c_.p.sums + ((std::int64_t{c_.sequence} * c_.p.pieces + piece) * c_.p.tiles + tile) * (c_.dim() / 2);
  }
  /// Adds up the tile's `count` rows for all teams; y is the thread's part of them.
  __device__ void publish_sums(const Piece& piece, int tile, int count, const float (&y)[kGroup]) const {
    auto* rows = at<float>(c_.p.plan.normed);  // [row][channel of the share]
    if (c_.owns_row()) *(reinterpret_cast<float4*>(rows) + thread()) = make_float4(y[0], y[1], y[2], y[3]);
    __syncthreads();
    // Four lanes a pair, each every fourth row.
    const int pairs = c_.share() / 2;
    const int part = thread() % 4;
    if (warp() * 8 >= pairs) return;
    const int of_share = min(thread() / 4, pairs - 1);
    const auto* from = reinterpret_cast<const float2*>(rows) + of_share;
    double2 sum = {};
#pragma unroll
    for (int row = 0; row < kRows; row += 4) {
      const float2 v = row + part < count ? from[(row + part) * pairs] : make_float2(0, 0);
      sum.x += static_cast<double>(v.x);
      sum.y += static_cast<double>(v.y);
    }
#pragma unroll
    for (int offset = 1; offset < 4; offset *= 2) {
      sum.x += __shfl_xor_sync(0xffffffffU, sum.x, offset);
      sum.y += __shfl_xor_sync(0xffffffffU, sum.y, offset);
    }
    if (part != 0 || thread() / 4 >= pairs) return;
    const auto bits = [](double v) {
      const auto word = std::bit_cast<unsigned long long>(v);
      return word == 0 ? 1ULL << 63 : word;
    };
    const int pair = c_.rank * pairs + of_share;
    ptx::store_relaxed_pair(tile_sums(piece.number, tile) + pair, {bits(sum.x), bits(sum.y)});
    // All blocks have ended the last piece, so they have read the sums of the piece before it.
    if (piece.number >= 2 && piece.number + 1 < c_.p.pieces && tile < c_.piece_of(piece.number - 2).tiles) {
      ptx::store_relaxed_pair(tile_sums(piece.number - 2, tile) + pair, {0, 0});
    }
  }
  /// Adds up the piece's tiles for `pairs` pairs of channels from pair `first` on: to[group][pair].
  __device__ void gather(const Piece& piece, int first, int pairs, int group, int pair, double2* to) const {
    if (group >= kGroups) return;
    constexpr int kAhead = 4;
    double2 sum = {};
    for (int begin = group; begin < piece.tiles; begin += kAhead * kGroups) {
      ulonglong2 words[kAhead];
      while (true) {
        bool written = true;
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const int tile = min(begin + i * kGroups, piece.tiles - 1);
          words[i] = ptx::load_relaxed_pair(tile_sums(piece.number, tile) + first + pair);
          written = written && words[i].x != 0 && words[i].y != 0;
        }
        if (written) break;
        ptx::spin_briefly();
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (begin + i * kGroups >= piece.tiles) break;
        sum.x += std::bit_cast<double>(words[i].x);
        sum.y += std::bit_cast<double>(words[i].y);
      }
    }
    to[group * pairs + pair] = sum;
  }
  /// A pair of channels' sum since the segment began, after gather() and a barrier.
  __device__ double2 total(const Piece& piece, const double2* gathered, int first, int pairs, int pair) const {
    double2 sum = {};
    if (piece.number == 0) {
      const double* before = bytes_further(c_.op.sum, c_.sequence * c_.op.slot_bytes) + 2 * (first + pair);
      sum = {__ldcg(before), __ldcg(before + 1)};
    }
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      sum.x += gathered[group * pairs + pair].x;
      sum.y += gathered[group * pairs + pair].y;
    }
    return sum;
  }

  /// Called after the last piece by one team of the sequence. Each block stores the state of its channels, and sets the
  /// sums of the last pieces to zero.
  __device__ void close() const {
    const Piece last = c_.piece_of(c_.p.pieces - 1);
    const int pairs = c_.share() / 2;
    const int first = c_.rank * pairs;
    auto* gathered = at<double2>(c_.p.plan.hidden);
    __syncthreads();
    gather(last, first, pairs, thread() / pairs, thread() % pairs, gathered);
    __syncthreads();
    const std::int64_t end = c_.op.position + c_.op.x.time;
    if (thread() < pairs) {
      const double2 sum = total(last, gathered, first, pairs, thread());
      const bool ends = end % c_.op.segment == 0;
      const int channel = 2 * (first + thread());
      double* left = bytes_further(c_.op.sum, c_.sequence * c_.op.slot_bytes) + channel;
      left[0] = ends ? 0.0 : sum.x;
      left[1] = ends ? 0.0 : sum.y;
      if (ends) {
        const std::int64_t slot = (end / c_.op.segment - 1) % c_.op.memory_slots;
        float* to = bytes_further(c_.op.memory, c_.sequence * c_.op.slot_bytes) + slot * c_.dim() + channel;
        to[0] = static_cast<float>(sum.x / static_cast<double>(c_.op.segment));
        to[1] = static_cast<float>(sum.y / static_cast<double>(c_.op.segment));
      }
    }
    for (int number = max(c_.p.pieces - 3, 0); number < c_.p.pieces; ++number) {
      for (int i = thread(); i < c_.piece_of(number).tiles * pairs; i += kThreads) {
        ptx::store_relaxed_pair(tile_sums(number, i / pairs) + first + i % pairs, {0, 0});
      }
    }
  }

 private:
  const Context& c_;
};

}  // namespace mmrec::kernels::segments
