// One block of finish_segments (finish_segments.cu): its shared memory, and the stages of a tile of rows.
#pragma once

#include <bit>
#include <cmath>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/exchange.cuh"
#include "kernels/cuda/memory_attention.cuh"
#include "kernels/cuda/ptx.cuh"

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
  int hidden;  // kRows operands of W_2, before them of W_o, before them what attention works on
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

struct Pair {
  double x = 0.0;
  double y = 0.0;
};

/// Byte `byte` of row `row` of `pitch` bytes of an operand.
__device__ inline int place(int row, int pitch, int byte) { return row * pitch + (byte ^ (row % 2 * kStep)); }

/// kKnown: the sizes are kKnownSizes.
template <class A, bool kKnown>
class Block {
 public:
  __device__ Block(const Params<A>& p, std::byte* shared)
      : p_(p),
        op_(p.op),
        shared_(shared),
        rank_(static_cast<int>(blockIdx.x) % kTeam),
        index_(static_cast<int>(blockIdx.x) / kTeam % p.teams),
        sequence_(static_cast<int>(blockIdx.x) / kTeam / p.teams),
        owns_head_(rank_ < p.op.heads),
        counters_(p.counters + blockIdx.x / kTeam * kCounterWords),
        exchange_(p.exchange + std::int64_t{blockIdx.x / kTeam} * kPlaces * p.places.bytes) {
    const int item = static_cast<int>(threadIdx.x);
    const int columns = share() / kGroup;  // groups of 4 channels in a share
    row_ = item < kRows * columns ? item / columns : kRows;
    channel_ = rank_ * share() + item % columns * kGroup;
    query_row_ = item / (width() / kGroup);
    const int hidden = ffn_share() / kGroup;
    hidden_row_ = item / hidden, hidden_column_ = item % hidden;
    hidden_rows_ = kThreads / hidden, hidden_columns_ = kThreads % hidden;
  }

  __device__ void run() {
    keep_weights(op_.memory_out, share(), 0);
    keep_weights(op_.ffn_in, ffn_share(), p_.plan.ffn_in);
    keep_weights(op_.ffn_out, share(), p_.plan.ffn_out);
    keep(op_.norm, dim(), p_.plan.norm);
    keep(op_.ffn_in_bias == nullptr ? nullptr : op_.ffn_in_bias + rank_ * ffn_share(), ffn_share(), p_.plan.bias);
    if (owns_head_) load_slots();
    load4(op_.memory_out_bias, memory_bias_);
    load4(op_.ffn_out_bias, ffn_bias_);
    Task task = next(-1, p_.tiles);
    fetch(task);
    for (int place = 0; place < kPlaces; ++place) blank(place);
    if (owns_head_) attend_kept(task);
    meet();
    while (task.piece.number < p_.pieces) task = finish_tile(task);
    if (index_ == 0) close();
    leave();
  }

 private:
  // At most, of what they say above.
  static constexpr int kQueries = kKnown ? kRows * kKnownSizes.width / kGroup / kThreads : kMostQueries;
  static constexpr int kLanePairs = kKnown ? (kKnownSizes.width + 63) / 64 : kMostPairs;
  static constexpr int kDim = kKnown ? kKnownSizes.dim : kMostDim;

  struct Piece {
    int number = 0;
    int first = 0;  // time
    int tokens = 0;
    int tiles = 0;
    int slots = 0;   // that are filled
    int newest = 0;  // the last one of them
  };
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

  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int warp() { return static_cast<int>(threadIdx.x / 32); }
  __device__ static int lane() { return static_cast<int>(threadIdx.x % 32); }
  template <class T>
  __device__ T* at(int offset) const {
    return reinterpret_cast<T*>(shared_ + offset);
  }
  __device__ bool owns_row() const { return row_ < kRows; }

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
  __device__ static float4 widened(uint2 v) {
    const auto low = [](std::uint32_t pair) { return widen(A{static_cast<std::uint16_t>(pair)}); };
    const auto high = [](std::uint32_t pair) { return widen(A{static_cast<std::uint16_t>(pair >> 16)}); };
    return make_float4(low(v.x), high(v.x), low(v.y), high(v.y));
  }

  __device__ void load4(const float* from, float (&to)[kGroup]) const {
    const float4 v = from != nullptr && owns_row() ? __ldg(reinterpret_cast<const float4*>(from + channel_))
                                                   : make_float4(0, 0, 0, 0);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  }

  __device__ void keep_weights(const WeightView<Device>& weight, int rows, int offset) {
    const auto pieces = static_cast<int>(weight.cols) * 2 / 16;  // of a row
    const auto* from = static_cast<const uint4*>(weight.data) + std::int64_t{rank_} * rows * pieces;
#pragma unroll 8
    for (int i = thread(); i < rows * pieces; i += kThreads) {
      *at<uint4>(offset + place(i / pieces, pieces * 16, i % pieces * 16)) = __ldg(from + i);
    }
  }

  /// `count` floats, or zeros.
  __device__ void keep(const float* from, int count, int offset) {
    for (int i = thread(); i < count / kGroup; i += kThreads) {
      *(at<float4>(offset) + i) =
          from == nullptr ? make_float4(0, 0, 0, 0) : __ldg(reinterpret_cast<const float4*>(from) + i);
    }
  }

  // --- Slots ---------------------------------------------------------------------------------------------------------

  /// Vector `i` of slot `slot` of this block's head. Vectors change places within 8, so that 8 lanes that read the same
  /// vector of 8 slots meet no bank twice.
  __device__ float4* slot_vector(int slot, int i) const {
    return at<float4>(p_.plan.work) + slot * (width() / kGroup) + (i ^ (slot % 8));
  }
  __device__ float* ring(int slot) const {
    return op_.memory + (sequence_ * op_.memory_slots + slot) * dim() + rank_ * width();
  }
  __device__ void load_slots() {
    const int vectors = width() / kGroup;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int slot = (thread() + k * kThreads) / vectors;
      const int i = (thread() + k * kThreads) % vectors;
      held_at_[k] = slot < p_.slots ? static_cast<int>(slot_vector(slot, i) - slot_vector(0, 0)) : -1;
      held_[k] = slot < p_.filled ? __ldcg(reinterpret_cast<const float4*>(ring(slot)) + i) : make_float4(0, 0, 0, 0);
    }
  }

  __device__ ulonglong2* tile_sums(int piece, int tile) const {
    return p_.sums + ((std::int64_t{sequence_} * p_.pieces + piece) * p_.tiles + tile) * (dim() / 2);
  }
  /// Adds up the piece's tiles for `pairs` pairs of channels from pair `first` on: to[group][pair].
  __device__ void gather(const Piece& piece, int first, int pairs, int group, int pair, Pair* to) const {
    if (group >= kGroups) return;
    constexpr int kAhead = 4;
    Pair sum;
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
  __device__ Pair total(const Piece& piece, const Pair* gathered, int first, int pairs, int pair) const {
    Pair sum;
    if (piece.number == 0) {
      const double* before = op_.sum + std::int64_t{sequence_} * dim() + 2 * (first + pair);
      sum = {__ldcg(before), __ldcg(before + 1)};
    }
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      sum.x += gathered[group * pairs + pair].x;
      sum.y += gathered[group * pairs + pair].y;
    }
    return sum;
  }

  // --- Attention -----------------------------------------------------------------------------------------------------

  /// Attention of a warp's two rows, of the lane's pairs of channels.
  using Attended = Softmax<2 * kLanePairs>;

  /// Whether vector `k` of the thread's share is one of slot `slot`.
  __device__ bool holds(int k, int slot) const {
    const auto vectors = static_cast<unsigned>(width() / kGroup);
    return static_cast<unsigned>(held_at_[k]) - static_cast<unsigned>(slot) * vectors < vectors;
  }

  /// This block's head of the tile that fetch() has asked for, but for a slot that is yet to be made. The newest slot
  /// comes last. Nobody else uses the slots' and the queries' memory meanwhile.
  __device__ void attend_kept(const Task& task) {
    const Piece& piece = task.piece;
    if (piece.number >= p_.pieces) return;
    auto* q = at<float>(p_.plan.hidden);
    const int vectors = width() / kGroup;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      // Nothing, not even what is no number, is left of the slot that the new one replaces.
      const bool gone = task.fresh && holds(k, piece.newest);
      if (held_at_[k] >= 0) *(slot_vector(0, 0) + held_at_[k]) = gone ? make_float4(0, 0, 0, 0) : held_[k];
    }
    const float scale = 1.4426950408889634F / sqrtf(static_cast<float>(width()));
#pragma unroll
    for (int k = 0; k < kQueries; ++k) {
      const int i = thread() + k * kThreads;
      const float4 v = widened(fetched_.q[k]);
      if (i < kRows * vectors) {
        *(reinterpret_cast<float4*>(q) + i) = make_float4(v.x * scale, v.y * scale, v.z * scale, v.w * scale);
      }
    }
    __syncthreads();
    attended_[0] = {}, attended_[1] = {};
    if (piece.slots > 0) {
      const int pairs = width() / 2;
      const float* const rows[2] = {q + 2 * warp() * width(), q + (2 * warp() + 1) * width()};
      if (pairs <= 32) {
        attend_all<1>(rows, piece.slots, piece.newest);
      } else {
        attend_all<kLanePairs>(rows, piece.slots, piece.newest);
      }
      float2 newest[kLanePairs] = {};
#pragma unroll
      for (int i = 0; i < kLanePairs; ++i) {
        const int pair = lane() + 32 * i;
        queries_[0][i] = queries_[1][i] = make_float2(0, 0);
        if (pair >= pairs) continue;
        queries_[0][i] = reinterpret_cast<const float2*>(rows[0])[pair];
        queries_[1][i] = reinterpret_cast<const float2*>(rows[1])[pair];
        newest[i] = reinterpret_cast<const float2*>(slot_vector(piece.newest, pair / 2))[pair % 2];
      }
      if (!task.fresh) attend_newest(newest);
    }
    __syncthreads();
  }

  /// The first `slots` slots but `left_out`, a lane a slot for the scores and kPairs pairs of channels for the values.
  template <int kPairs>
  __device__ void attend_all(const float* const (&rows)[2], int slots, int left_out) {
    constexpr int kSlots = 8;  // at once
    for (int first = 0; first < slots; first += 32) {
      const int slot = min(first + lane(), slots - 1);
      float scores[2] = {};
#pragma unroll 8
      for (int i = 0; i < width() / kGroup; ++i) {
        const float4 k = *slot_vector(slot, i);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const float4 v = reinterpret_cast<const float4*>(rows[n])[i];
          scores[n] = __fmaf_rn(v.x, k.x, scores[n]);
          scores[n] = __fmaf_rn(v.y, k.y, scores[n]);
          scores[n] = __fmaf_rn(v.z, k.z, scores[n]);
          scores[n] = __fmaf_rn(v.w, k.w, scores[n]);
        }
      }
      float weights[2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const bool counts = first + lane() < slots && slot != left_out;
        float most = counts ? scores[n] : kNothing;
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) {
          most = fmaxf(most, __shfl_xor_sync(0xffffffffU, most, offset));
        }
        most = fmaxf(most, attended_[n].max);
        const float kept = weight_of(attended_[n].max, most);
        weights[n] = counts ? weight_of(scores[n], most) : 0.0F;
        float sum = weights[n];
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffU, sum, offset);
        attended_[n].max = most;
        attended_[n].sum = __fmaf_rn(attended_[n].sum, kept, sum);
#pragma unroll
        for (float& value : attended_[n].values) value *= kept;
      }
      // The last slot stands in, with weight 0, for those past it; a lane without channels repeats the last ones.
      for (int begin = first; begin < min(slots, first + 32); begin += kSlots) {
#pragma unroll
        for (int j = 0; j < kSlots; ++j) {
          const float weight[2] = {__shfl_sync(0xffffffffU, weights[0], begin - first + j),
                                   __shfl_sync(0xffffffffU, weights[1], begin - first + j)};
#pragma unroll
          for (int i = 0; i < kPairs; ++i) {
            const int pair = min(lane() + 32 * i, width() / 2 - 1);
            const float2 v =
                reinterpret_cast<const float2*>(slot_vector(min(begin + j, slots - 1), pair / 2))[pair % 2];
#pragma unroll
            for (int n = 0; n < 2; ++n) {
              attended_[n].values[2 * i] = __fmaf_rn(weight[n], v.x, attended_[n].values[2 * i]);
              attended_[n].values[2 * i + 1] = __fmaf_rn(weight[n], v.y, attended_[n].values[2 * i + 1]);
            }
          }
        }
      }
    }
  }

  /// The newest slot, of the lane's channels; zeros where it has none.
  __device__ void attend_newest(const float2 (&slot)[kLanePairs]) {
    float scores[2] = {};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < kLanePairs; ++i) {
        scores[n] = __fmaf_rn(queries_[n][i].x, slot[i].x, scores[n]);
        scores[n] = __fmaf_rn(queries_[n][i].y, slot[i].y, scores[n]);
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) scores[n] += __shfl_xor_sync(0xffffffffU, scores[n], offset);
      Attended part;
      part.max = scores[n];
      part.sum = weight_of(scores[n], scores[n]);  // 1, or NaN
#pragma unroll
      for (int i = 0; i < kLanePairs; ++i) {
        part.values[2 * i] = part.sum * slot[i].x;
        part.values[2 * i + 1] = part.sum * slot[i].y;
      }
      merge(attended_[n], part);
    }
  }

  /// Makes the piece's newest slot, in each warp, and attends to it.
  __device__ void attend_made(const Piece& piece, float2 (&slot)[kLanePairs]) {
    auto* gathered = at<Pair>(p_.plan.work);
    const int pairs = width() / 2;
    const Piece before = piece_of(piece.number - 1);
    const int shift = 31 - __clz(pairs);  // a power of two
    gather(before, rank_ * pairs, pairs, thread() >> shift, thread() & (pairs - 1), gathered);
    __syncthreads();
    const auto segment = static_cast<double>(op_.segment);
#pragma unroll
    for (int i = 0; i < kLanePairs; ++i) {
      const int pair = lane() + 32 * i;
      if (pair >= pairs) break;
      const Pair sum = total(before, gathered, rank_ * pairs, pairs, pair);
      const auto mean = [&](double v) { return static_cast<float>(p_.inverse != 0 ? v * p_.inverse : v / segment); };
      slot[i] = make_float2(mean(sum.x), mean(sum.y));
    }
    attend_newest(slot);
  }
  /// Keeps it for the block's threads and for later ops.
  __device__ void store_made(const Piece& piece, const float2 (&slot)[kLanePairs]) const {
    const int pairs = width() / 2;
    if (warp() != 0) return;
#pragma unroll
    for (int i = 0; i < kLanePairs; ++i) {
      const int pair = lane() + 32 * i;
      if (pair >= pairs) break;
      at<float2>(p_.plan.normed)[pair] = slot[i];
      if (index_ == 0) reinterpret_cast<float2*>(ring(piece.newest))[pair] = slot[i];
    }
  }
  /// Takes it into the threads' shares, after a barrier.
  __device__ void hold_made(const Piece& piece) {
    const int vectors = width() / kGroup;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (holds(k, piece.newest))
        held_[k] = *(at<float4>(p_.plan.normed) + ((thread() + k * kThreads) & (vectors - 1)));
    }
  }

  /// Gives the team the warp's rows of this block's head. Of neighbouring lanes one takes the first row's four
  /// channels, the other the second's.
  __device__ void share_attended() const {
    const bool odd = lane() % 2 != 0;
    float inverse[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) inverse[n] = attended_[n].sum == 0.0F ? 0.0F : 1.0F / attended_[n].sum;
#pragma unroll
    for (int i = 0; i < kLanePairs; ++i) {
      const int pair = lane() + 32 * i;
      const std::uint32_t low =
          ptx::to_pair<A>(attended_[0].values[2 * i] * inverse[0], attended_[0].values[2 * i + 1] * inverse[0]);
      const std::uint32_t high =
          ptx::to_pair<A>(attended_[1].values[2 * i] * inverse[1], attended_[1].values[2 * i + 1] * inverse[1]);
      const std::uint32_t other = __shfl_xor_sync(0xffffffffU, odd ? low : high, 1);
      if (pair >= width() / 2) continue;
      const int row = 2 * warp() + (odd ? 1 : 0);
      give(p_.places.attended + attended_place(row, pair / 2), odd ? make_uint2(other, high) : make_uint2(low, other));
    }
  }

  // --- Stages --------------------------------------------------------------------------------------------------------

  /// Once, after the places are blank: waits for the other blocks of the team.
  __device__ void meet() const {
    __syncthreads();
    if (thread() == 0) {
      ptx::add_release(counters_, 1);
      while (ptx::load_acquire(counters_) < kTeam) ptx::spin_pause();
    }
    __syncthreads();
  }
  /// The last block to leave sets the counters to zero again.
  __device__ void leave() const {
    if (thread() != 0 || ptx::add_acq_rel(counters_ + 1, 1) != kTeam - 1) return;
    counters_[0] = 0;
    counters_[1] = 0;
  }

  // Where this block writes in the place of the team's tile, in bytes: vectors of its head, and of its shares.
  __device__ int attended_place(int row, int vector) const {
    return p_.places.attended + place(row, 2 * dim(), 2 * (rank_ * width() + vector * kGroup));
  }
  __device__ int mixed_place() const { return p_.places.mixed + 4 * (row_ * dim() + channel_); }
  __device__ int hidden_place(int row, int vector) const {
    return p_.places.hidden + place(row, 2 * ffn(), 2 * (rank_ * ffn_share() + vector * kGroup));
  }
  __device__ std::byte* place_of(int tile) const { return exchange_ + tile % kPlaces * p_.places.bytes; }

  /// What a word is given as: all ones, two 16-bit numbers that are one NaN or a float, as another NaN.
  __device__ static std::uint32_t written(std::uint32_t word) {
    return word == kUnwritten<float> ? kUnwritten<float> / 2 : word;
  }
  /// Writes 8 or 16 bytes for the team.
  __device__ void give(int offset, uint2 v) const {
    ptx::store_relaxed(reinterpret_cast<uint2*>(place_of(count_) + offset), make_uint2(written(v.x), written(v.y)));
  }
  __device__ void give(int offset, const float (&y)[kGroup]) const {
    const auto pair = [](float low, float high) {
      return std::uint64_t{written(__float_as_uint(high))} << 32 | written(__float_as_uint(low));
    };
    ptx::store_relaxed_pair(reinterpret_cast<ulonglong2*>(place_of(count_) + offset),
                            {pair(y[0], y[1]), pair(y[2], y[3])});
  }
  /// Makes what this block writes in a place all ones again.
  __device__ void blank(int tile) const {
    constexpr uint2 kOnes = {kUnwritten<float>, kUnwritten<float>};
    std::byte* to = place_of(tile);
    const auto write = [&](int offset) { ptx::store_relaxed(reinterpret_cast<uint2*>(to + offset), kOnes); };
    if (owns_head_) {
      const int vectors = width() / kGroup;
#pragma unroll
      for (int k = 0; k < kQueries; ++k) {
        const int row = query_row_ + k * (kThreads / vectors);
        if (row < kRows) write(attended_place(row, thread() - query_row_ * vectors));
      }
    }
    if (owns_row()) ptx::store_relaxed_pair(reinterpret_cast<ulonglong2*>(to + mixed_place()), {~0ULL, ~0ULL});
    for_each_hidden([&](int row, int vector) { write(hidden_place(row, vector)); });
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
    const auto* vectors = reinterpret_cast<const uint4*>(place_of(count_) + from);
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
  __device__ static uint2 rounded(const float (&v)[kGroup]) {
    return make_uint2(ptx::to_pair<A>(v[0], v[1]), ptx::to_pair<A>(v[2], v[3]));
  }

  /// kRows operands of `bytes` bytes times the weights of `outputs` outputs. kShares warps divide k; half of them leave
  /// their sums in the work space, the other half add theirs: [kShares / 2][output tile][lane][4].
  template <int kShares>
  __device__ void multiply(int weights, int outputs, int operand, int bytes) const {
    constexpr int kAcross = kWarps / kShares;
    const int share = warp() % kShares;
    const int g = lane() / 4;
    const int swizzle = g % 2 * kStep;
    const int tiles = outputs / kTileOutputs;
    const std::byte* x = shared_ + operand + g * bytes;
    const std::byte* w = shared_ + weights + g * bytes;
    for (int first = warp() / kShares; first - warp() / kShares < tiles; first += kAcross * kTiles) {
      float sums[kTiles][2][4] = {};
#pragma unroll 3
      for (int byte = share * kStep; byte < bytes; byte += kShares * kStep) {
        const int k = (byte + lane() % 4 * 16) ^ swizzle;
        const uint4 low = *reinterpret_cast<const uint4*>(x + k);
        const uint4 high = *reinterpret_cast<const uint4*>(x + 8 * bytes + k);
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          const int tile = min(first + j * kAcross, tiles - 1);
          const uint4 b = *reinterpret_cast<const uint4*>(w + tile * kTileOutputs * bytes + k);
          ptx::mma_m16n8k16<A>(sums[j][0], {low.x, high.x, low.y, high.y}, {b.x, b.y});
          ptx::mma_m16n8k16<A>(sums[j][1], {low.z, high.z, low.w, high.w}, {b.z, b.w});
        }
      }
      auto* to = at<float4>(p_.plan.work) + share % (kShares / 2) * tiles * 32 + lane();
#pragma unroll
      for (int half = 1; half >= 0; --half) {
        if (half == 0) __syncthreads();
        if (share / (kShares / 2) != half) continue;
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          const int tile = first + j * kAcross;
          if (tile >= tiles) break;
          float4 sum = make_float4(sums[j][0][0] + sums[j][1][0], sums[j][0][1] + sums[j][1][1],
                                   sums[j][0][2] + sums[j][1][2], sums[j][0][3] + sums[j][1][3]);
          if (half == 0) {
            const float4 other = to[tile * 32];
            sum = make_float4(sum.x + other.x, sum.y + other.y, sum.z + other.z, sum.w + other.w);
          }
          to[tile * 32] = sum;
        }
      }
    }
    __syncthreads();
  }
  /// A product's outputs column..column + 3 of a row.
  template <int kShares>
  __device__ void product(int outputs, int row, int column, float (&to)[kGroup]) const {
#pragma unroll
    for (float& value : to) value = 0.0F;
#pragma unroll
    for (int share = 0; share < kShares / 2; ++share) {
      const auto* from = at<float2>(p_.plan.work) + (share * outputs / kTileOutputs + column / kTileOutputs) * 64;
      const int first = (row % 8 * 4 + column % kTileOutputs / 2) * 2 + row / 8;
      to[0] += from[first].x, to[1] += from[first].y;
      to[2] += from[first + 2].x, to[3] += from[first + 2].y;
    }
  }

  /// Returns the team's next tile, for which all that does not depend on other teams is done.
  __device__ Task finish_tile(const Task& task) {
    const Piece& piece = task.piece;
    float y[kGroup];
    residual(y);
    float2 made[kLanePairs] = {};
    if (owns_head_) {
      if (task.fresh) attend_made(piece, made);
      share_attended();
      if (task.fresh) store_made(piece, made);
    }
    // While the others' rows are on their way.
    const Task after = next(piece.number, task.tile + p_.teams);
    fetch(after);
    blank(count_ + kPlaces - 2);
    receive<3>(p_.places.attended, p_.plan.hidden, 2 * dim());
    if (owns_head_ && task.fresh) hold_made(piece);
    multiply<4>(0, share(), p_.plan.hidden, 2 * dim());
    add_product(memory_bias_, y);
    if (owns_row()) give(mixed_place(), y);
    normalise();
    multiply<2>(p_.plan.ffn_in, ffn_share(), p_.plan.normed, 2 * dim());
    share_hidden();
    __syncthreads();
    if (owns_head_) attend_kept(after);
    ptx::fence();
    receive<6>(p_.places.hidden, p_.plan.hidden, 2 * ffn());
    multiply<4>(p_.plan.ffn_out, share(), p_.plan.hidden, 2 * ffn());
    add_product(ffn_bias_, y);
    publish_sums(piece, task.tile, task.rows, y);
    if (row_ < task.rows) {
      float* x = op_.x.at(sequence_, 0, piece.first + task.tile * kRows + row_) + channel_;
      __stcg(reinterpret_cast<float4*>(x), make_float4(y[0], y[1], y[2], y[3]));
    }
    ++count_;
    return after;
  }

  /// y = x + h + 0.1 v.
  __device__ void residual(float (&y)[kGroup]) const {
    const float4 x = fetched_.x;
    const float4 h = fetched_.h;
    const float4 v = widened(fetched_.v);
    y[0] = __fmaf_rn(0.1F, v.x, x.x + h.x), y[1] = __fmaf_rn(0.1F, v.y, x.y + h.y);
    y[2] = __fmaf_rn(0.1F, v.z, x.z + h.z), y[3] = __fmaf_rn(0.1F, v.w, x.w + h.w);
  }

  __device__ void add_product(const float (&bias)[kGroup], float (&y)[kGroup]) const {
    if (!owns_row()) return;
    float sum[kGroup];
    product<4>(share(), row_, channel_ - rank_ * share(), sum);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) y[i] += sum[i] + bias[i];
  }

  /// rmsnorm of the tile's rows, 16 threads a row.
  __device__ void normalise() const {
    constexpr int kThreadsOfRow = kThreads / kRows;
    constexpr int kVectors = kDim / kGroup / kThreadsOfRow;
    const int row = thread() / kThreadsOfRow;
    const int first = thread() % kThreadsOfRow;
    const int vectors = dim() / kGroup;
    const auto* from = reinterpret_cast<const uint4*>(place_of(count_) + p_.places.mixed) + row * vectors + first;
    uint4 words[kVectors];
    await_vectors(from, kThreadsOfRow, vectors / kThreadsOfRow, words);
    float4 y[kVectors];
    double of_channels[kGroup] = {};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      y[i] = make_float4(__uint_as_float(words[i].x), __uint_as_float(words[i].y), __uint_as_float(words[i].z),
                         __uint_as_float(words[i].w));
      const auto add = [](double& sum, float v) { sum = fma(static_cast<double>(v), static_cast<double>(v), sum); };
      add(of_channels[0], y[i].x), add(of_channels[1], y[i].y);
      add(of_channels[2], y[i].z), add(of_channels[3], y[i].w);
    }
    double squares = (of_channels[0] + of_channels[1]) + (of_channels[2] + of_channels[3]);
#pragma unroll
    for (int offset = kThreadsOfRow / 2; offset > 0; offset /= 2) {
      squares += __shfl_xor_sync(0xffffffffU, squares, offset);
    }
    const double mean = squares * (1.0 / static_cast<double>(dim()));
    // The root in fp32, which a mean of squares may overflow.
    const bool large = mean > 1e38;
    const float root = sqrtf(static_cast<float>(large ? mean * 0x1p-128 : mean)) * (large ? 0x1p64F : 1.0F);
    const float inverse = 1.0F / (root + 1e-6F);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int vector = first + i * kThreadsOfRow;
      if (vector >= vectors) break;
      const float4 scale = *(at<float4>(p_.plan.norm) + vector);
      const float u[kGroup] = {y[i].x * inverse * scale.x, y[i].y * inverse * scale.y, y[i].z * inverse * scale.z,
                               y[i].w * inverse * scale.w};
      *at<uint2>(p_.plan.normed + place(row, 2 * dim(), 2 * vector * kGroup)) = rounded(u);
    }
    __syncthreads();
  }

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
  __device__ void share_hidden() const {
    for_each_hidden([&](int row, int vector) {
      const float4 bias = *(at<float4>(p_.plan.bias) + vector);
      float sum[kGroup];
      product<2>(ffn_share(), row, vector * kGroup, sum);
      const float v[kGroup] = {gelu(sum[0] + bias.x), gelu(sum[1] + bias.y), gelu(sum[2] + bias.z),
                               gelu(sum[3] + bias.w)};
      give(hidden_place(row, vector), rounded(v));
    });
  }

  __device__ void publish_sums(const Piece& piece, int tile, int count, const float (&y)[kGroup]) const {
    auto* rows = at<float>(p_.plan.normed);  // [row][channel of the share]
    if (owns_row()) *(reinterpret_cast<float4*>(rows) + thread()) = make_float4(y[0], y[1], y[2], y[3]);
    __syncthreads();
    // Four lanes a pair, each every fourth row.
    const int pairs = share() / 2;
    const int part = thread() % 4;
    if (warp() * 8 >= pairs) return;
    const int of_share = min(thread() / 4, pairs - 1);
    const auto* from = reinterpret_cast<const float2*>(rows) + of_share;
    Pair sum;
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
    const int pair = rank_ * pairs + of_share;
    ptx::store_relaxed_pair(tile_sums(piece.number, tile) + pair, {bits(sum.x), bits(sum.y)});
    // All have read the piece before the last: they have ended the last one.
    if (piece.number >= 2 && piece.number + 1 < p_.pieces && tile < piece_of(piece.number - 2).tiles) {
      ptx::store_relaxed_pair(tile_sums(piece.number - 2, tile) + pair, {0, 0});
    }
  }

  /// After the last piece, by one team of the sequence, each block its channels: the state that is left, and zeros
  /// where the sums of the last pieces were.
  __device__ void close() const {
    const Piece last = piece_of(p_.pieces - 1);
    const int pairs = share() / 2;
    const int first = rank_ * pairs;
    auto* gathered = at<Pair>(p_.plan.hidden);
    __syncthreads();
    gather(last, first, pairs, thread() / pairs, thread() % pairs, gathered);
    __syncthreads();
    const std::int64_t end = op_.position + op_.x.time;
    if (thread() < pairs) {
      const Pair sum = total(last, gathered, first, pairs, thread());
      const bool ends = end % op_.segment == 0;
      const int channel = 2 * (first + thread());
      double* left = op_.sum + std::int64_t{sequence_} * dim() + channel;
      left[0] = ends ? 0.0 : sum.x;
      left[1] = ends ? 0.0 : sum.y;
      if (ends) {
        const std::int64_t slot = (end / op_.segment - 1) % op_.memory_slots;
        float* to = op_.memory + (sequence_ * op_.memory_slots + slot) * dim() + channel;
        to[0] = static_cast<float>(sum.x / static_cast<double>(op_.segment));
        to[1] = static_cast<float>(sum.y / static_cast<double>(op_.segment));
      }
    }
    for (int number = max(p_.pieces - 3, 0); number < p_.pieces; ++number) {
      for (int i = thread(); i < piece_of(number).tiles * pairs; i += kThreads) {
        ptx::store_relaxed_pair(tile_sums(number, i / pairs) + first + i % pairs, {0, 0});
      }
    }
  }

  const Params<A>& p_;
  const FinishSegments<Device, A>& op_;
  std::byte* shared_;
  int rank_, index_, sequence_;
  bool owns_head_;
  int row_, channel_;  // this thread's 4 channels; kRows where it has none
  Fetched fetched_;
  float4 held_[kHeld];  // this thread's share of the slots, and where it lies among them in shared memory, or -1
  int held_at_[kHeld];
  int query_row_;                   // of this thread's first vector of queries
  int hidden_row_, hidden_column_;  // of the first 4 hidden units that it finishes, and the way to the next
  int hidden_rows_, hidden_columns_;
  float memory_bias_[kGroup], ffn_bias_[kGroup];
  std::uint32_t* counters_;
  std::byte* exchange_;
  Attended attended_[2];           // of the tile at hand, or of the next once it is prepared
  float2 queries_[2][kLanePairs];  // of the warp's rows, the lane's pairs of channels
  int count_ = 0;                  // of tiles that are done
};

}  // namespace mmrec::kernels::segments
