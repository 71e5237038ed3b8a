// One block of finish_segments (finish_segments.cu): its shared memory, and the stages of a tile of rows.
#pragma once

#include <bit>
#include <cmath>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/element.cuh"
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
inline constexpr int kQueries = 2;      // vectors of a thread's share of the queries
inline constexpr int kLanePairs = 2;    // of a lane's share of a head
inline constexpr int kGroups = 4;       // that divide the tiles whose sums are added up

/// Where things lie in a block's shared memory, in bytes.
struct Plan {
  int ffn_in;  // after memory_out's rows
  int ffn_out;
  int hidden;  // kRows operands of W_2, before them of W_o, before them what attention works on
  int normed;  // kRows operands of W_1; staging
  int work;    // slots of a head, partial sums of products
  int bytes;
};

/// Where things lie in a team's memory, in bytes: kRows operands of W_o, of the norm (fp32) and of W_2.
struct Exchange {
  int attended;
  int mixed;
  int hidden;
  int bytes;
};

/// A team's counters, in a line of their own: blocks that have arrived at its meetings, and that have left.
inline constexpr int kCounterWords = 32;

template <class A>
struct Params {
  FinishSegments<Device, A> op;
  ulonglong2* sums;         // [B][pieces][tiles][D / 2]
  std::uint32_t* counters;  // [team][kCounterWords]
  std::byte* exchange;      // [team]
  Exchange places;
  Plan plan;
  int time;
  int segment;
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

template <class A>
class Block {
 public:
  __device__ Block(const Params<A>& p, std::byte* shared)
      : p_(p),
        op_(p.op),
        shared_(shared),
        rank_(static_cast<int>(blockIdx.x) % kTeam),
        index_(static_cast<int>(blockIdx.x) / kTeam % p.teams),
        sequence_(static_cast<int>(blockIdx.x) / kTeam / p.teams),
        dim_(static_cast<int>(p.op.x.dim)),
        ffn_(static_cast<int>(p.op.ffn_in.rows)),
        share_(dim_ / kTeam),
        ffn_share_(ffn_ / kTeam),
        width_(dim_ / static_cast<int>(p.op.heads)),
        owns_head_(rank_ < p.op.heads),
        columns_(share_ / kGroup),
        counters_(p.counters + blockIdx.x / kTeam * kCounterWords),
        exchange_(p.exchange + std::int64_t{blockIdx.x / kTeam} * p.places.bytes) {
    const int item = static_cast<int>(threadIdx.x);
    row_ = item < kRows * columns_ ? item / columns_ : kRows;
    channel_ = rank_ * share_ + item % columns_ * kGroup;
    query_row_ = item / (width_ / kGroup);
    const int hidden = ffn_share_ / kGroup;
    hidden_row_ = item / hidden, hidden_column_ = item % hidden;
    hidden_rows_ = kThreads / hidden, hidden_columns_ = kThreads % hidden;
  }

  __device__ void run() {
    keep_weights(op_.memory_out, share_, 0);
    keep_weights(op_.ffn_in, ffn_share_, p_.plan.ffn_in);
    keep_weights(op_.ffn_out, share_, p_.plan.ffn_out);
    if (owns_head_) load_slots();
    load4(op_.memory_out_bias, memory_bias_);
    load4(op_.ffn_out_bias, ffn_bias_);
    Task task = next(-1, p_.tiles);
    fetch(task);
    while (task.piece.number < p_.pieces) {
      const Task after = next(task.piece.number, task.tile + p_.teams);
      finish_tile(task, after);
      task = after;
    }
    if (index_ == 0) close();
    leave();
  }

 private:
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
  };
  /// What a tile needs of memory.
  struct Fetched {
    float4 x, h;
    uint2 v;
    uint2 q[kQueries];
  };

  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int warp() { return thread() / 32; }
  __device__ static int lane() { return thread() % 32; }
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
        if (tile < piece.tiles) return {piece, tile, min(piece.tokens - tile * kRows, kRows)};
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
    const int vectors = width_ / kGroup;
    const A* q = op_.q.at(sequence_, 0, time) + rank_ * width_ + (thread() - query_row_ * vectors) * kGroup;
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

  // --- Slots ---------------------------------------------------------------------------------------------------------

  /// Vector `i` of slot `slot` of this block's head. Vectors change places within 8, so that 8 lanes that read the same
  /// vector of 8 slots meet no bank twice.
  __device__ float4* slot_vector(int slot, int i) const {
    return at<float4>(p_.plan.work) + slot * (width_ / kGroup) + (i ^ (slot % 8));
  }
  __device__ float* ring(int slot) const {
    return op_.memory + (sequence_ * op_.memory_slots + slot) * dim_ + rank_ * width_;
  }
  __device__ void load_slots() {
    const int vectors = width_ / kGroup;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int slot = (thread() + k * kThreads) / vectors;
      const int i = (thread() + k * kThreads) % vectors;
      held_at_[k] = slot < p_.slots ? static_cast<int>(slot_vector(slot, i) - slot_vector(0, 0)) : -1;
      held_[k] = slot < p_.filled ? __ldcg(reinterpret_cast<const float4*>(ring(slot)) + i) : make_float4(0, 0, 0, 0);
    }
  }

  __device__ ulonglong2* tile_sums(int piece, int tile) const {
    return p_.sums + ((std::int64_t{sequence_} * p_.pieces + piece) * p_.tiles + tile) * (dim_ / 2);
  }
  /// Adds up the piece's tiles for `pairs` pairs of channels from pair `first` on: to[group][pair].
  __device__ void gather(const Piece& piece, int first, int pairs, Pair* to) const {
    if (thread() >= kGroups * pairs) return;
    const int group = thread() / pairs;
    const int pair = thread() % pairs;
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
        ptx::spin_pause();
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
      const double* before = op_.sum + std::int64_t{sequence_} * dim_ + 2 * (first + pair);
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

  /// This block's head of the tile; the newest slot comes last. `fresh`: it is yet to be made, from the sums of the
  /// piece before, and kept.
  __device__ void attend(const Piece& piece, bool fresh, Attended (&state)[2]) {
    auto* q = at<float>(p_.plan.hidden);
    auto* gathered = reinterpret_cast<Pair*>(q + kRows * width_);
    const int vectors = width_ / kGroup;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      // Nothing, not even what is no number, is left of the slot that the new one replaces.
      const bool gone = fresh && static_cast<unsigned>(held_at_[k] - piece.newest * vectors) < unsigned(vectors);
      if (held_at_[k] >= 0) *(slot_vector(0, 0) + held_at_[k]) = gone ? make_float4(0, 0, 0, 0) : held_[k];
    }
    const float scale = 1.4426950408889634F / sqrtf(static_cast<float>(width_));
#pragma unroll
    for (int k = 0; k < kQueries; ++k) {
      const int i = thread() + k * kThreads;
      const float4 v = widened(fetched_.q[k]);
      if (i < kRows * vectors) {
        *(reinterpret_cast<float4*>(q) + i) = make_float4(v.x * scale, v.y * scale, v.z * scale, v.w * scale);
      }
    }
    __syncthreads();
    const int pairs = width_ / 2;
    const float* const rows[2] = {q + 2 * warp() * width_, q + (2 * warp() + 1) * width_};
    if (piece.slots == 0) return;
    attend_kept(rows, piece.slots, piece.newest, state);

    if (fresh) {
      const Piece before = piece_of(piece.number - 1);
      gather(before, rank_ * pairs, pairs, gathered);
      __syncthreads();
      if (warp() == 0) {
        for (int pair = lane(); pair < pairs; pair += 32) {
          const Pair sum = total(before, gathered, rank_ * pairs, pairs, pair);
          const auto segment = static_cast<double>(op_.segment);
          const float2 slot = make_float2(static_cast<float>(sum.x / segment), static_cast<float>(sum.y / segment));
          reinterpret_cast<float2*>(slot_vector(piece.newest, pair / 2))[pair % 2] = slot;
          if (index_ == 0) reinterpret_cast<float2*>(ring(piece.newest))[pair] = slot;
        }
      }
      __syncthreads();
    }
    float2 slot[kLanePairs] = {};
    float scores[2] = {};
#pragma unroll
    for (int i = 0; i < kLanePairs; ++i) {
      const int pair = lane() + 32 * i;
      if (pair >= pairs) break;
      slot[i] = reinterpret_cast<const float2*>(slot_vector(piece.newest, pair / 2))[pair % 2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        scores[n] = __fmaf_rn(rows[n][2 * pair], slot[i].x, scores[n]);
        scores[n] = __fmaf_rn(rows[n][2 * pair + 1], slot[i].y, scores[n]);
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
      merge(state[n], part);
    }
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (held_at_[k] >= 0) held_[k] = *(slot_vector(0, 0) + held_at_[k]);
    }
  }

  /// The first `slots` slots but `left_out`, a lane a slot for the scores and a pair of channels for the values.
  __device__ void attend_kept(const float* const (&rows)[2], int slots, int left_out, Attended (&state)[2]) const {
    for (int first = 0; first < slots; first += 32) {
      const int slot = min(first + lane(), slots - 1);
      float scores[2] = {};
#pragma unroll 8
      for (int i = 0; i < width_ / kGroup; ++i) {
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
        most = fmaxf(most, state[n].max);
        const float kept = weight_of(state[n].max, most);
        weights[n] = counts ? weight_of(scores[n], most) : 0.0F;
        float sum = weights[n];
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffU, sum, offset);
        state[n].max = most;
        state[n].sum = __fmaf_rn(state[n].sum, kept, sum);
#pragma unroll
        for (float& value : state[n].values) value *= kept;
      }
      const int count = min(slots - first, 32);
#pragma unroll 4
      for (int j = 0; j < count; ++j) {
        const float weight[2] = {__shfl_sync(0xffffffffU, weights[0], j), __shfl_sync(0xffffffffU, weights[1], j)};
#pragma unroll
        for (int i = 0; i < kLanePairs; ++i) {
          const int pair = lane() + 32 * i;
          if (pair >= width_ / 2) break;
          const float2 v = reinterpret_cast<const float2*>(slot_vector(first + j, pair / 2))[pair % 2];
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            state[n].values[2 * i] = __fmaf_rn(weight[n], v.x, state[n].values[2 * i]);
            state[n].values[2 * i + 1] = __fmaf_rn(weight[n], v.y, state[n].values[2 * i + 1]);
          }
        }
      }
    }
  }

  /// Gives the team the warp's rows of this block's head. Of neighbouring lanes one takes the first row's four
  /// channels, the other the second's.
  __device__ void share_attended(const Attended (&state)[2]) const {
    const bool odd = lane() % 2 != 0;
    float inverse[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) inverse[n] = state[n].sum == 0.0F ? 0.0F : 1.0F / state[n].sum;
#pragma unroll
    for (int i = 0; i < kLanePairs; ++i) {
      const int pair = lane() + 32 * i;
      const std::uint32_t low =
          ptx::to_pair<A>(state[0].values[2 * i] * inverse[0], state[0].values[2 * i + 1] * inverse[0]);
      const std::uint32_t high =
          ptx::to_pair<A>(state[1].values[2 * i] * inverse[1], state[1].values[2 * i + 1] * inverse[1]);
      const std::uint32_t other = __shfl_xor_sync(0xffffffffU, odd ? low : high, 1);
      if (pair >= width_ / 2) continue;
      const int row = 2 * warp() + (odd ? 1 : 0);
      give(p_.places.attended + place(row, 2 * dim_, 2 * (rank_ * width_ + pair / 2 * kGroup)),
           odd ? make_uint2(other, high) : make_uint2(low, other));
    }
  }

  // --- Stages --------------------------------------------------------------------------------------------------------

  /// Waits for the other blocks of the team: what all have written to memory before may be read past L1.
  __device__ void meet() {
    __syncthreads();
    ++meetings_;
    if (thread() == 0) {
      ptx::add_release(counters_, 1);
      while (ptx::load_acquire(counters_) < kTeam * meetings_) ptx::spin_pause();
    }
    __syncthreads();
  }
  /// The last block to leave sets the counters to zero again.
  __device__ void leave() const {
    if (thread() != 0 || ptx::add_acq_rel(counters_ + 1, 1) != kTeam - 1) return;
    counters_[0] = 0;
    counters_[1] = 0;
  }
  /// kRows operands of `bytes` bytes, as they lie in the team's memory.
  __device__ void receive(int from, int to, int bytes) const {
    const auto* vectors = reinterpret_cast<const uint4*>(exchange_ + from);
#pragma unroll 6
    for (int i = thread(); i < kRows * bytes / 16; i += kThreads) *(at<uint4>(to) + i) = __ldcg(vectors + i);
    __syncthreads();
  }
  /// Writes 8 bytes to the team's memory.
  __device__ void give(int offset, uint2 value) const { __stcg(reinterpret_cast<uint2*>(exchange_ + offset), value); }
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

  __device__ void finish_tile(const Task& task, const Task& after) {
    const Piece& piece = task.piece;
    float y[kGroup];
    residual(y);
    Attended attended[2];
    if (owns_head_) {
      attend(piece, piece.number > 0 && task.tile == index_, attended);
      share_attended(attended);
    }
    meet();
    receive(p_.places.attended, p_.plan.hidden, 2 * dim_);
    multiply<4>(0, share_, p_.plan.hidden, 2 * dim_);
    add_product(memory_bias_, y);
    if (owns_row()) {
      __stcg(reinterpret_cast<float4*>(exchange_ + p_.places.mixed) + (row_ * dim_ + channel_) / kGroup,
             make_float4(y[0], y[1], y[2], y[3]));
    }
    meet();
    normalise();
    multiply<2>(p_.plan.ffn_in, ffn_share_, p_.plan.normed, 2 * dim_);
    share_hidden();
    fetch(after);
    meet();
    receive(p_.places.hidden, p_.plan.hidden, 2 * ffn_);
    multiply<4>(p_.plan.ffn_out, share_, p_.plan.hidden, 2 * ffn_);
    add_product(ffn_bias_, y);
    if (row_ < task.rows) {
      float* x = op_.x.at(sequence_, 0, piece.first + task.tile * kRows + row_) + channel_;
      __stcg(reinterpret_cast<float4*>(x), make_float4(y[0], y[1], y[2], y[3]));
    }
    publish_sums(piece, task.tile, task.rows, y);
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
    product<4>(share_, row_, channel_ - rank_ * share_, sum);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) y[i] += sum[i] + bias[i];
  }

  /// rmsnorm of the tile's rows, 16 threads a row.
  __device__ void normalise() const {
    constexpr int kThreadsOfRow = kThreads / kRows;
    constexpr int kVectors = kMostDim / kGroup / kThreadsOfRow;
    const int row = thread() / kThreadsOfRow;
    const int first = thread() % kThreadsOfRow;
    const int vectors = dim_ / kGroup;
    const auto* from = reinterpret_cast<const float4*>(exchange_ + p_.places.mixed) + row * vectors;
    float4 y[kVectors];
    float4 scale[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int vector = first + i * kThreadsOfRow;
      y[i] = vector < vectors ? __ldcg(from + vector) : make_float4(0, 0, 0, 0);
      scale[i] = vector < vectors ? __ldg(reinterpret_cast<const float4*>(op_.norm) + vector) : make_float4(0, 0, 0, 0);
    }
    double squares = 0.0;
#pragma unroll
    for (const float4& v : y) {
      squares = fma(static_cast<double>(v.x), static_cast<double>(v.x), squares);
      squares = fma(static_cast<double>(v.y), static_cast<double>(v.y), squares);
      squares = fma(static_cast<double>(v.z), static_cast<double>(v.z), squares);
      squares = fma(static_cast<double>(v.w), static_cast<double>(v.w), squares);
    }
#pragma unroll
    for (int offset = kThreadsOfRow / 2; offset > 0; offset /= 2) {
      squares += __shfl_xor_sync(0xffffffffU, squares, offset);
    }
    const double mean = squares * (1.0 / static_cast<double>(dim_));
    // The root in fp32, which a mean of squares may overflow.
    const bool large = mean > 1e38;
    const float root = sqrtf(static_cast<float>(large ? mean * 0x1p-128 : mean)) * (large ? 0x1p64F : 1.0F);
    const float inverse = 1.0F / (root + 1e-6F);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int vector = first + i * kThreadsOfRow;
      if (vector >= vectors) break;
      const float u[kGroup] = {y[i].x * inverse * scale[i].x, y[i].y * inverse * scale[i].y,
                               y[i].z * inverse * scale[i].z, y[i].w * inverse * scale[i].w};
      *at<uint2>(p_.plan.normed + place(row, 2 * dim_, 2 * vector * kGroup)) = rounded(u);
    }
    __syncthreads();
  }

  __device__ void share_hidden() const {
    const int columns = ffn_share_ / kGroup;
    for (int row = hidden_row_, group = hidden_column_; row < kRows;) {
      const int column = group * kGroup;
      float4 bias = make_float4(0, 0, 0, 0);
      if (op_.ffn_in_bias != nullptr) {
        bias = __ldg(reinterpret_cast<const float4*>(op_.ffn_in_bias + rank_ * ffn_share_ + column));
      }
      float sum[kGroup];
      product<2>(ffn_share_, row, column, sum);
      const float v[kGroup] = {gelu(sum[0] + bias.x), gelu(sum[1] + bias.y), gelu(sum[2] + bias.z),
                               gelu(sum[3] + bias.w)};
      give(p_.places.hidden + place(row, 2 * ffn_, 2 * (rank_ * ffn_share_ + column)), rounded(v));
      group += hidden_columns_;
      row += hidden_rows_ + (group >= columns ? 1 : 0);
      if (group >= columns) group -= columns;
    }
  }

  __device__ void publish_sums(const Piece& piece, int tile, int count, const float (&y)[kGroup]) const {
    auto* rows = at<float>(p_.plan.normed);  // [row][channel of the share]
    if (owns_row()) *(reinterpret_cast<float4*>(rows) + thread()) = make_float4(y[0], y[1], y[2], y[3]);
    __syncthreads();
    const int pairs = share_ / 2;
    if (thread() >= pairs) return;
    const auto* from = reinterpret_cast<const float2*>(rows) + thread();
    Pair sum;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (row >= count) break;
      const float2 v = from[row * pairs];
      sum.x += static_cast<double>(v.x);
      sum.y += static_cast<double>(v.y);
    }
    const auto bits = [](double v) {
      const auto word = std::bit_cast<unsigned long long>(v);
      return word == 0 ? 1ULL << 63 : word;
    };
    const int pair = rank_ * pairs + thread();
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
    const int pairs = share_ / 2;
    const int first = rank_ * pairs;
    auto* gathered = at<Pair>(p_.plan.hidden);
    __syncthreads();
    gather(last, first, pairs, gathered);
    __syncthreads();
    const std::int64_t end = op_.position + op_.x.time;
    if (thread() < pairs) {
      const Pair sum = total(last, gathered, first, pairs, thread());
      const bool ends = end % op_.segment == 0;
      const int channel = 2 * (first + thread());
      double* left = op_.sum + std::int64_t{sequence_} * dim_ + channel;
      left[0] = ends ? 0.0 : sum.x;
      left[1] = ends ? 0.0 : sum.y;
      if (ends) {
        const std::int64_t slot = (end / op_.segment - 1) % op_.memory_slots;
        float* to = op_.memory + (sequence_ * op_.memory_slots + slot) * dim_ + channel;
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
  int dim_, ffn_, share_, ffn_share_;  // shares: a block's outputs
  int width_;                          // of a head
  bool owns_head_;
  int columns_;        // groups of 4 channels in a share
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
  unsigned meetings_ = 0;
};

}  // namespace mmrec::kernels::segments
