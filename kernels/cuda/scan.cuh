// The skeleton of the scans over time: every input is read once and every output written once, in one pass.
//
// Ownership. [batch, heads, time, dim] is cut into tiles of `rows` x kTimes times by `lanes` x kVec channels. A block
// of up to 256 threads works tile after tile. A thread owns kVec adjacent channels, 16 bytes of T, at kTimes
// consecutive times and keeps them in registers from the first read to the last write; a row of `lanes` threads covers
// adjacent channels, the rows of the block follow each other in time. Wide operands take 32 lanes x 8 rows, 512
// contiguous bytes by 64 times; narrow ones fewer lanes and more rows, so that the block spreads over time: up to 1,024
// times. Where alignment does not allow vectors, kVec is 1: the same arithmetic in the same order, so the same bits, by
// scalar accesses.
//
// A tile in four steps:
//  1. Each thread reduces its times to a segment of the operator's monoid.
//  2. An up-sweep over the rows in shared memory combines segments to the tile's total.
//  3. The total is published, and the state before the tile is found by looking back (below).
//  4. A down-sweep carries the state down the same tree, each thread runs over its times once more, from the state
//     before them, and writes.
//
// Looking back. Tiles are drawn from a counter, all channels of a chunk of time before the next chunk, so a tile waits
// for tiles only that are being worked on or done. A warp looks after 32 channels: it publishes their totals, then
// looks at up to `window` chunks before at once for the nearest whose carry is known, and applies the totals of the
// chunks between to it, oldest first: carry = advance(carry, total), the very operation by which those chunks compute
// the carry that they publish. So the bits do not depend on where a carry was found. Totals and carries lie in a ring
// of 2 x window chunks, which stays in L2 and does not grow with time; a chunk takes over a slot only after all that
// may read it have published. Flags count chunks, so a reused slot is not mistaken. Carries are as wide as the operator
// wants (fp64), inside a tile all is fp32.
//
// Bytes in flight. On devices that have it (sm_90) the copy engine brings the inputs of a tile into shared memory, one
// copy a time step. As soon as a tile is in registers the next one is asked for: while a tile is reduced, waits for its
// carry and is written, the next is on its way, and fences wait for none of it. Two blocks of 64 KiB (two inputs) a
// multiprocessor, 132 multiprocessors: 17 MB, where a memory of 4 TB/s and 1.5 us needs 6 MB. Streams are marked to
// leave L2 first, so that the ring stays. Other devices and columns of less than 128 bytes load into registers, all
// times of a thread at once.
//
// Determinism: the cut into tiles follows from dim, time and type; all orders of combination are fixed.
// Flags: the tile of the last chunk waits for the carries of the chunks before it, after which nobody reads flags, and
// clears them; the block that draws the last ticket resets the counter.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/element.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/rows.cuh"

namespace mmrec::kernels {

inline constexpr int kScanThreads = 256;
inline constexpr int kScanTimes = 8;              // of one thread
inline constexpr int kScanChunk = 1024;           // times of one tile at most
inline constexpr std::uint32_t kScanWindow = 32;  // chunks to look back at most: the lanes of a warp

/// x, but not above `most`; NaN stays.
template <class Real>
__device__ inline Real at_most(Real x, Real most) {
  return x > most ? most : x;
}

/// What shared memory holds of a channel and row: a segment, until the down-sweep replaces it by the state before it.
struct Pair {
  float x, y;
};

/// kVec adjacent channels of T in registers: 16 bytes as four words, or one element.
template <class T, int kVec>
struct Channels {
  static_assert(kVec == 1 || kVec == Vector16<T>::kSize);
  static constexpr bool kWide = kVec > 1;
  std::conditional_t<kWide, uint4, T> data;

  __device__ float operator[](int v) const {
    if constexpr (!kWide) {
      return widen(data);
    } else if constexpr (sizeof(T) == 4) {
      return __uint_as_float(word(v));
    } else if constexpr (std::is_same_v<T, BFloat16>) {
      return __uint_as_float(v % 2 == 0 ? word(v / 2) << 16 : word(v / 2) & 0xffff0000U);
    } else {
      return widen(T{static_cast<std::uint16_t>(word(v / 2) >> (v % 2 == 0 ? 0 : 16))});
    }
  }
  __device__ void fill(float x) {
    if constexpr (!kWide) {
      data = narrow<T>(x);
    } else {
      const std::uint32_t word = packed(x);
      data = make_uint4(word, word, word, word);
    }
  }
  /// Elements of 16 bits are unpacked anew from here on, instead of being kept apart in registers.
  __device__ void forget() {
    if constexpr (kWide && sizeof(T) == 2) ptx::forget(data);
  }
  /// No element above `most`, which T represents; NaN stays.
  __device__ void bound(float most) {
    if constexpr (!kWide) {
      data = narrow<T>(at_most(widen(data), most));
    } else if constexpr (sizeof(T) == 4) {
      const auto bounded = [most](std::uint32_t word) { return __float_as_uint(at_most(__uint_as_float(word), most)); };
      data = make_uint4(bounded(data.x), bounded(data.y), bounded(data.z), bounded(data.w));
    } else {
      const std::uint32_t pair = packed(most);
      data = make_uint4(ptx::min_pair<T>(data.x, pair), ptx::min_pair<T>(data.y, pair), ptx::min_pair<T>(data.z, pair),
                        ptx::min_pair<T>(data.w, pair));
    }
  }
  /// Past L1: rows.cuh says why.
  __device__ void load(const T* from) {
    if constexpr (kWide) {
      data = __ldcg(reinterpret_cast<const uint4*>(from));
    } else if constexpr (sizeof(T) == 4) {
      data = __ldcg(from);
    } else {
      data.bits = __ldcg(&from->bits);
    }
  }

 private:
  __device__ std::uint32_t word(int i) const { return i == 0 ? data.x : i == 1 ? data.y : i == 2 ? data.z : data.w; }
  /// A word of this value alone.
  static __device__ std::uint32_t packed(float x) {
    if constexpr (sizeof(T) == 4) {
      return __float_as_uint(x);
    } else {
      return narrow<T>(x).bits * 0x10001U;
    }
  }
};

/// Rounds kVec channels to T and writes them.
template <int kVec, class T>
__device__ inline void store_channels(T* to, const float (&x)[kVec]) {
  if constexpr (kVec == 1) {
    *to = narrow<T>(x[0]);
  } else {
    constexpr int kSize = Vector16<T>::kSize;
    static_assert(kVec % kSize == 0);
#pragma unroll
    for (int first = 0; first < kVec; first += kSize) {
      Vector16<T> vector;
#pragma unroll
      for (int i = 0; i < kSize; ++i) vector.values[i] = narrow<T>(x[first + i]);
      ptx::store_streaming(to + first, vector.bits);
    }
  }
}

/// fp64 as two published words.
__device__ inline void put_double(double x, std::uint32_t* words) {
  const auto bits = std::bit_cast<std::uint64_t>(x);
  words[0] = static_cast<std::uint32_t>(bits);
  words[1] = static_cast<std::uint32_t>(bits >> 32);
}
__device__ inline double get_double(const std::uint32_t* words) {
  return std::bit_cast<double>(std::uint64_t{words[1]} << 32 | words[0]);
}

/// How a launch is cut.
struct ScanPlan {
  std::int64_t time = 0;
  std::uint32_t heads = 1, dim = 0;
  std::uint32_t first_column = 0;  // a column: `lanes` x kVec channels of one sequence
  std::uint32_t row_columns = 0;   // columns of one sequence
  std::uint32_t columns = 0;       // of this launch
  std::uint32_t chunks = 0;
  std::uint32_t tiles = 0;
  int lanes = 0, rows = 0;  // powers of two
  std::uint32_t window = 0, ring = 0;
  bool tickets = false;            // there are more tiles than blocks
  std::uint32_t* flags = nullptr;  // the counter; from kScanFirstFlag on [chain][ring]
  std::uint32_t* slots = nullptr;  // [chain][ring][word][channel]
};
inline constexpr std::size_t kScanFirstFlag = 32;  // flags of a chain begin on a cache line

/// A tile, in shared memory.
struct ScanTile {
  std::uint32_t index;
  std::uint32_t chunk;
  std::uint32_t column;         // of the launch
  std::uint32_t first_channel;  // of the column
  std::uint32_t batch, head;
};

/// The part of a tile that a thread owns.
struct ScanPlace {
  std::uint32_t batch, head;
  std::uint32_t channel;  // first
  std::int64_t time;      // first
  int count;              // times that exist
};

/// Where an operand has the thread's first element.
template <class T>
__device__ inline T* at(const SequenceView<T, Device>& view, const ScanPlace& p) {
  return view.at(p.batch, p.head, p.time) + p.channel;
}

/// Op:
///   Element, kInputs, in[kInputs]        inputs; identity(i) is what input i is where there is none
///   Thread<kVec>                         what a thread keeps: take(n, inputs of time n), reduce(segments),
///                                        emit(op, place, states)
///   Pair combine(Pair, Pair)             segments, the earlier first
///   Pair advance(Pair state, Pair)       the state after a segment
///   Total total(Pair)                    a tile's segment as it is published, kTotalWords words
///   Carry advance(Carry, Total)          the state between chunks, kCarryWords words
///   Carry load(i), void store(i, Carry)  carry_in and carry_out of flat channel i
///   Pair state(Carry)                    the carry inside a tile
///
/// kAhead: inputs come through shared memory, asked for a tile ahead.
template <class Op, int kVec, bool kAhead>
class ScanBlock {
 public:
  using T = typename Op::Element;
  using Thread = typename Op::template Thread<kVec>;
  static constexpr int kWords = Op::kTotalWords + Op::kCarryWords;

  /// Shared memory of a block, in bytes: tiles and barrier, inputs [input][time][lane], the planes of the tree.
  static constexpr std::size_t shared_bytes(int lanes, int rows) {
    const auto vectors = static_cast<std::size_t>(lanes * rows);
    return kHeader + (kAhead ? vectors * kScanTimes * Op::kInputs * sizeof(uint4) : 0) + vectors * kVec * sizeof(Pair);
  }

  __device__ ScanBlock(const Op& op, const ScanPlan& plan)
      : op_(op),
        plan_(plan),
        barrier_(ptx::shared_memory<std::uint64_t>()),
        tiles_(reinterpret_cast<ScanTile*>(barrier_ + 1)),
        inputs_(ptx::shared_memory<uint4>() + kHeader / sizeof(uint4)),
        x_(reinterpret_cast<float*>(inputs_ + (kAhead ? plan.rows * plan.lanes * kScanTimes * Op::kInputs : 0))),
        y_(x_ + plan.rows * plan.lanes * kVec),
        row_(static_cast<int>(threadIdx.x) / plan.lanes),
        lane_(static_cast<int>(threadIdx.x) % plan.lanes),
        warp_lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ void run() {
    if (threadIdx.x == 0) {
      tiles_[0] = locate(plan_.tickets ? draw() : blockIdx.x);
      if constexpr (kAhead) {
        ptx::mbarrier_init(barrier_, 1);
        ptx::mbarrier_init_fence();
      }
    }
    __syncthreads();
    ask(tiles_[0]);
    for (std::uint32_t round = 0; plan_.tiles > tile(round).index; ++round) {
      // What follows from these three is computed anew for each tile: in registers it would leave too few for the
      // inputs.
      ptx::forget(row_);
      ptx::forget(lane_);
      ptx::forget(warp_lane_);
      // The next ticket is drawn, and the ring waited for, while the inputs are on their way.
      if (threadIdx.x == 0) tile(round + 1) = locate(plan_.tickets ? draw() : plan_.tiles);
      wait_for_slot(tile(round));
      Thread thread;
      if constexpr (kAhead) ptx::mbarrier_wait(barrier_, round & 1U);
      read(place(tile(round)), thread);
      Pair pairs[kVec];
      thread.reduce(pairs);
      if (row_ < plan_.rows) {
#pragma unroll
        for (int v = 0; v < kVec; v += kGroup) put(row_, v, pairs + v);
      }
      __syncthreads();
      ask(tile(round + 1));
      up_sweep();
      hand_on(tile(round));
      __syncthreads();
      down_sweep();
      const ScanPlace p = place(tile(round));
      if (p.count == 0) continue;
#pragma unroll
      for (int v = 0; v < kVec; v += kGroup) get(row_, v, pairs + v);
      thread.emit(op_, p, pairs);
    }
  }

 private:
  /// The next tile's number. The last of all draws, when each block has drawn once in vain, leaves the counter as it
  /// was found.
  __device__ std::uint32_t draw() {
    const std::uint32_t ticket = atomicAdd(plan_.flags, 1U);
    if (ticket == plan_.tiles + gridDim.x - 1) *plan_.flags = 0;
    return ticket;
  }

  __device__ ScanTile locate(std::uint32_t index) const {
    ScanTile t;
    t.index = index;
    t.chunk = index / plan_.columns;
    t.column = index - t.chunk * plan_.columns;
    const std::uint32_t column = plan_.first_column + t.column;
    const std::uint32_t sequence = column / plan_.row_columns;
    t.first_channel = (column - sequence * plan_.row_columns) * static_cast<std::uint32_t>(width());
    t.batch = sequence / plan_.heads;
    t.head = sequence - t.batch * plan_.heads;
    return t;
  }
  /// Of the block's round: the one before may still be read, the one after is being written.
  __device__ ScanTile& tile(std::uint32_t round) const { return tiles_[round % kTiles]; }

  __device__ ScanPlace place(const ScanTile& t) const {
    ScanPlace p;
    p.batch = t.batch;
    p.head = t.head;
    p.channel = t.first_channel + static_cast<std::uint32_t>(lane_ * kVec);
    p.time = (std::int64_t{t.chunk} * plan_.rows + row_) * kScanTimes;
    const bool inside = p.channel < plan_.dim && row_ < plan_.rows && p.time < plan_.time;
    p.count = inside ? static_cast<int>(min(plan_.time - p.time, std::int64_t{kScanTimes})) : 0;
    return p;
  }

  /// Asks for the inputs of a tile; the first warp does.
  __device__ void ask(const ScanTile& t) {
    if constexpr (kAhead) {
      if (threadIdx.x >= 32 || t.index >= plan_.tiles) return;
      const int rows = plan_.rows * kScanTimes;
      const std::int64_t first = std::int64_t{t.chunk} * rows;
      const auto times = static_cast<int>(min(plan_.time - first, std::int64_t{rows}));
      const unsigned bytes = min(static_cast<unsigned>(width()), plan_.dim - t.first_channel) * sizeof(T);
      if (warp_lane_ == 0) ptx::mbarrier_arrive_expect(barrier_, Op::kInputs * static_cast<unsigned>(times) * bytes);
      const std::uint64_t hint = ptx::evict_first();
#pragma unroll
      for (int i = 0; i < Op::kInputs; ++i) {
        const T* const from = op_.in[i].at(t.batch, t.head, first) + t.first_channel;
#pragma unroll 1
        for (int n = warp_lane_; n < times; n += 32) {
          ptx::bulk_copy(inputs_ + (i * rows + n) * plan_.lanes, from + n * op_.in[i].time_stride, bytes, barrier_,
                         hint);
        }
      }
    }
  }

  __device__ void read(const ScanPlace& p, Thread& thread) {
    Channels<T, kVec> x[kScanTimes][Op::kInputs];
#pragma unroll
    for (int i = 0; i < Op::kInputs; ++i) {
      const uint4* here = inputs_ + ((i * plan_.rows + row_) * kScanTimes * plan_.lanes + lane_);
      const T* from = at(op_.in[i], p);
#pragma unroll
      for (int n = 0; n < kScanTimes; ++n) {
        if (n >= p.count) {
          x[n][i].fill(Op::identity(i));
        } else if constexpr (kAhead) {
          x[n][i].data = here[n * plan_.lanes];
        } else {
          x[n][i].load(from);
          from += op_.in[i].time_stride;
        }
        x[n][i].forget();
      }
    }
#pragma unroll
    for (int n = 0; n < kScanTimes; ++n) thread.take(n, x[n]);
  }

  // The tree over the rows: row r of the planes x_ and y_ is [lanes x kVec] floats, of which a thread takes kGroup at a
  // time.
  static constexpr int kGroup = kVec == 1 ? 1 : 4;

  __device__ int position(int row, int v) const { return (row * plan_.lanes + lane_) * kVec + v; }

  __device__ void put(int row, int v, const Pair* pairs) {
    if constexpr (kGroup == 1) {
      x_[position(row, v)] = pairs[0].x;
      y_[position(row, v)] = pairs[0].y;
    } else {
      *reinterpret_cast<float4*>(x_ + position(row, v)) = make_float4(pairs[0].x, pairs[1].x, pairs[2].x, pairs[3].x);
      *reinterpret_cast<float4*>(y_ + position(row, v)) = make_float4(pairs[0].y, pairs[1].y, pairs[2].y, pairs[3].y);
    }
  }
  __device__ void get(int row, int v, Pair* pairs) const {
    if constexpr (kGroup == 1) {
      pairs[0] = {x_[position(row, v)], y_[position(row, v)]};
    } else {
      const float4 x = *reinterpret_cast<const float4*>(x_ + position(row, v));
      const float4 y = *reinterpret_cast<const float4*>(y_ + position(row, v));
      pairs[0] = {x.x, y.x}, pairs[1] = {x.y, y.y}, pairs[2] = {x.z, y.z}, pairs[3] = {x.w, y.w};
    }
  }

  /// Segments of the rows are there; leaves that of the tile in the last row, and those that the down-sweep needs.
  __device__ void up_sweep() {
    for (int d = 1; d < plan_.rows; d *= 2) {
      if ((row_ & (2 * d - 1)) == 2 * d - 1 && row_ < plan_.rows) {
#pragma unroll
        for (int v = 0; v < kVec; v += kGroup) {
          Pair left[kGroup];
          Pair right[kGroup];
          get(row_ - d, v, left);
          get(row_, v, right);
#pragma unroll
          for (int i = 0; i < kGroup; ++i) right[i] = Op::combine(left[i], right[i]);
          put(row_, v, right);
        }
      }
      __syncthreads();
    }
  }

  /// The last row holds the state before the tile; leaves in every row the state before it.
  __device__ void down_sweep() {
    for (int d = plan_.rows / 2; d >= 1; d /= 2) {
      if ((row_ & (2 * d - 1)) == 2 * d - 1 && row_ < plan_.rows) {
#pragma unroll
        for (int v = 0; v < kVec; v += kGroup) {
          Pair left[kGroup];
          Pair state[kGroup];
          get(row_ - d, v, left);
          get(row_, v, state);
          put(row_ - d, v, state);
#pragma unroll
          for (int i = 0; i < kGroup; ++i) state[i] = Op::advance(state[i], left[i]);
          put(row_, v, state);
        }
      }
      __syncthreads();
    }
  }

  // Between chunks: a chain is 32 adjacent channels of a column (fewer in narrow columns), looked after by one warp.

  static __device__ std::uint32_t has_total(std::uint32_t chunk) { return 2 * chunk + 2; }
  static __device__ std::uint32_t has_carry(std::uint32_t chunk) { return 2 * chunk + 3; }

  __device__ int width() const { return plan_.lanes * kVec; }
  __device__ std::uint32_t chain(const ScanTile& t, int first) const {
    return t.column * static_cast<std::uint32_t>((width() + 31) / 32) + static_cast<std::uint32_t>(first / 32);
  }
  __device__ std::uint32_t* flag(std::uint32_t chain, std::uint32_t chunk) const {
    return plan_.flags + kScanFirstFlag + std::size_t{chain} * plan_.ring + (chunk & (plan_.ring - 1));
  }
  __device__ std::uint32_t* slot(std::uint32_t chain, std::uint32_t chunk) const {
    const std::size_t index = std::size_t{chain} * plan_.ring + (chunk & (plan_.ring - 1));
    return plan_.slots + index * static_cast<std::size_t>(kWords * min(width(), 32)) + warp_lane_;
  }

  template <int kFirst, int kCount>
  __device__ void write_words(std::uint32_t* slot, const std::uint32_t (&words)[kCount]) const {
    if (warp_lane_ >= width()) return;
#pragma unroll
    for (int w = 0; w < kCount; ++w) __stcg(slot + (kFirst + w) * min(width(), 32), words[w]);
  }
  template <int kFirst, int kCount>
  __device__ void read_words(const std::uint32_t* slot, std::uint32_t (&words)[kCount]) const {
    const bool mine = warp_lane_ < width();
#pragma unroll
    for (int w = 0; w < kCount; ++w) words[w] = mine ? __ldcg(slot + (kFirst + w) * min(width(), 32)) : 0;
  }
  __device__ void publish(std::uint32_t chain, std::uint32_t chunk, std::uint32_t value) const {
    __syncwarp();
    if (warp_lane_ == 0) ptx::store_release(flag(chain, chunk), value);
  }

  /// Until chunks [first, first + count) of the chain have published their carries; count <= 32.
  __device__ void wait_for_carries(std::uint32_t chain, std::uint32_t first, std::uint32_t count) const {
    const std::uint32_t chunk = first + static_cast<std::uint32_t>(warp_lane_);
    const bool look = static_cast<std::uint32_t>(warp_lane_) < count;
    while (!__all_sync(0xffffffffU, !look || ptx::load_acquire(flag(chain, chunk)) >= has_carry(chunk))) {
      ptx::spin_pause();
    }
    __syncwarp();
  }

  /// Until nobody can read any more what this tile's slot of the ring held before: chunk - ring was read by the
  /// `window` chunks after it.
  __device__ void wait_for_slot(const ScanTile& t) const {
    if (t.chunk < plan_.ring) return;
    for (int first = static_cast<int>(threadIdx.x) - warp_lane_; first < width();
         first += static_cast<int>(blockDim.x)) {
      wait_for_carries(chain(t, first), t.chunk - plan_.ring + 1, plan_.window);
    }
  }

  /// The carry before `chunk`.
  __device__ typename Op::Carry look_back(std::uint32_t chain, std::uint32_t chunk) const {
    const auto back = static_cast<std::uint32_t>(warp_lane_) + 1;
    const bool look = back <= min(chunk, plan_.window);
    int nearest;
    for (;;) {
      const std::uint32_t value = look ? ptx::load_acquire(flag(chain, chunk - back)) : 0;
      const unsigned totals = __ballot_sync(0xffffffffU, look && value >= has_total(chunk - back));
      const unsigned carries = __ballot_sync(0xffffffffU, look && value >= has_carry(chunk - back));
      nearest = __ffs(static_cast<int>(carries)) - 1;
      if (nearest >= 0 && (~totals & ((1U << nearest) - 1)) == 0) break;
      ptx::spin_pause();
    }
    __syncwarp();  // orders every lane's reads below after all lanes' acquires
    std::uint32_t words[Op::kCarryWords];
    read_words<Op::kTotalWords>(slot(chain, chunk - 1 - static_cast<std::uint32_t>(nearest)), words);
    typename Op::Carry carry = Op::get_carry(words);
#pragma unroll 4
    for (int i = nearest - 1; i >= 0; --i) {
      std::uint32_t total[Op::kTotalWords];
      read_words<0>(slot(chain, chunk - 1 - static_cast<std::uint32_t>(i)), total);
      carry = Op::advance(carry, Op::get_total(total));
    }
    return carry;
  }

  /// Turns the segment in the last row into the state before the tile, and hands the carry on.
  __device__ void hand_on(const ScanTile& t) {
    const int last = (plan_.rows - 1) * width();
    for (int first = static_cast<int>(threadIdx.x) - warp_lane_; first < width();
         first += static_cast<int>(blockDim.x)) {
      const int c = first + warp_lane_;
      const bool exists = c < width();
      const std::uint32_t channel = t.first_channel + static_cast<std::uint32_t>(c);
      const std::int64_t sequence = std::int64_t{t.batch} * plan_.heads + t.head;
      const std::int64_t flat = exists && channel < plan_.dim ? sequence * plan_.dim + channel : -1;
      const std::uint32_t chain = this->chain(t, first);
      const bool hands_on = t.chunk + 1 < plan_.chunks;

      const typename Op::Total total = Op::total(exists ? Pair{x_[last + c], y_[last + c]} : Pair{0.0F, 0.0F});
      if (t.chunk != 0 && hands_on) {
        std::uint32_t words[Op::kTotalWords];
        Op::put_total(total, words);
        write_words<0>(slot(chain, t.chunk), words);
        publish(chain, t.chunk, has_total(t.chunk));
      }
      const typename Op::Carry before = t.chunk == 0 ? op_.load(flat) : look_back(chain, t.chunk);
      const typename Op::Carry after = Op::advance(before, total);
      if (hands_on) {
        std::uint32_t words[Op::kCarryWords];
        Op::put_carry(after, words);
        write_words<Op::kTotalWords>(slot(chain, t.chunk), words);
        publish(chain, t.chunk, has_carry(t.chunk));
      } else {
        op_.store(flat, after);
        clear(chain, t.chunk);
      }
      if (exists) {
        const Pair state = Op::state(before);
        x_[last + c] = state.x;
        y_[last + c] = state.y;
      }
    }
  }

  /// After the last chunk: waits until the chunks before it have their carries and so read no flags, and clears the
  /// chain's ring.
  __device__ void clear(std::uint32_t chain, std::uint32_t last) const {
    for (std::uint32_t done = 1; done <= min(last, plan_.ring); done += 32) {
      const std::uint32_t count = min(min(last, plan_.ring) - done + 1, 32U);
      wait_for_carries(chain, last + 1 - done - count, count);
    }
    for (auto i = static_cast<std::uint32_t>(warp_lane_); i < min(last, plan_.ring); i += 32) *flag(chain, i) = 0;
  }

  static constexpr int kTiles = 4;
  static constexpr int kHeader = 128;  // bytes of barrier and tiles
  static_assert(sizeof(std::uint64_t) + kTiles * sizeof(ScanTile) <= kHeader);

  const Op& op_;
  const ScanPlan& plan_;
  std::uint64_t* const barrier_;
  ScanTile* const tiles_;
  uint4* const inputs_;
  float* const x_;
  float* const y_;
  int row_, lane_, warp_lane_;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr bool kHasCopyEngine = false;
#else
inline constexpr bool kHasCopyEngine = true;
#endif

template <class Op, int kVec, bool kAhead>
__global__ void __launch_bounds__(kScanThreads, 2)
    scan_kernel(const __grid_constant__ Op op, const __grid_constant__ ScanPlan plan) {
  if constexpr (!kAhead || kHasCopyEngine) {
    ptx::wait_for_predecessor();
    ptx::allow_successor();
    ScanBlock<Op, kVec, kAhead>(op, plan).run();
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Host
// ---------------------------------------------------------------------------------------------------------------------

struct ScanShape {
  std::int64_t batch = 0, heads = 0, time = 0, dim = 0;
  std::int64_t channels() const { return batch * heads * dim; }
};

/// Throws std::invalid_argument unless the view can be walked and has this shape.
template <class T>
void check_scan_view(const char* op, const char* name, const SequenceView<T, Device>& v, const ScanShape& shape) {
  const auto fail = [&](const char* what) { throw std::invalid_argument(std::string(op) + ": " + name + " " + what); };
  if (v.batch < 0 || v.heads < 0 || v.time < 0 || v.dim < 0) fail("has a negative size");
  if (v.batch != shape.batch || v.heads != shape.heads || v.time != shape.time || v.dim != shape.dim) {
    fail("differs in shape from the first operand");
  }
  if (v.batch >> 31 != 0 || v.heads >> 31 != 0 || v.dim >> 31 != 0) fail("has a size beyond 2^31");
  if (v.data == nullptr && shape.channels() != 0 && shape.time != 0) fail("is null");
}

/// True if vectors at all multiples of 16 bytes of channels are aligned.
template <class T>
bool takes_scan_vectors(const SequenceView<T, Device>& v) {
  const auto strides = static_cast<std::uintptr_t>(v.batch_stride | v.head_stride | v.time_stride);
  return (reinterpret_cast<std::uintptr_t>(v.data) | strides * sizeof(T)) % 16 == 0;
}

/// Heads that lie next to each other are channels.
template <class... Views>
void merge_heads(Views&... views) {
  if (!((views.heads == 1 || views.head_stride == views.dim) && ...)) return;
  ((views.dim *= views.heads, views.heads = 1), ...);
}

/// The cut into tiles. Rows follow from the shape of one sequence and from T alone: they decide the bits.
template <class Op>
ScanPlan scan_plan(const ScanShape& shape, int vec) {
  using T = typename Op::Element;
  constexpr std::int64_t kVector = Vector16<T>::kSize;
  const auto power = [](std::int64_t x) { return std::bit_ceil(static_cast<std::uint64_t>(x)); };
  const auto across = std::max(ceil_div(shape.dim, kVector), std::min<std::int64_t>(shape.dim, 8));
  const auto times = static_cast<std::uint64_t>(std::max<std::int64_t>(ceil_div(shape.time, kScanTimes), 1));
  std::uint64_t rows = kScanThreads / power(std::min<std::int64_t>(across, 32));
  rows = std::min({rows, std::uint64_t{kScanChunk / kScanTimes}, std::bit_ceil(times)});
  const std::uint64_t lanes = std::min({kScanThreads / rows, power(ceil_div(shape.dim, vec)), std::uint64_t{32}});

  ScanPlan plan;
  plan.heads = static_cast<std::uint32_t>(shape.heads);
  plan.time = shape.time;
  plan.dim = static_cast<std::uint32_t>(shape.dim);
  plan.lanes = static_cast<int>(lanes);
  plan.rows = static_cast<int>(rows);
  plan.row_columns = static_cast<std::uint32_t>(ceil_div(shape.dim, plan.lanes * vec));
  const std::int64_t chunks = std::max<std::int64_t>(ceil_div(shape.time, plan.rows * kScanTimes), 1);
  if (chunks >= std::int64_t{1} << 30) throw std::invalid_argument("scan: more than 2^36 times");
  plan.chunks = static_cast<std::uint32_t>(chunks);
  return plan;
}

template <class Op, int kVec, bool kAhead>
void launch_scan(Cuda& cuda, const Op& op, const ScanShape& shape, ScanPlan plan) {
  using Block = ScanBlock<Op, kVec, kAhead>;
  const int threads = std::max(plan.lanes * plan.rows, 32);
  const std::int64_t width = plan.lanes * kVec;
  const std::int64_t all = shape.batch * shape.heads * plan.row_columns;
  if (all >> 31 != 0) throw std::invalid_argument("scan: more than 2^31 columns of channels");
  const std::int64_t most_blocks = std::int64_t{cuda.processors()} * std::max(2 * kScanThreads / threads, 1);

  // As far back as tiles are in work: twice as many as blocks, spread over the columns.
  const std::int64_t depth = 2 * most_blocks / std::max<std::int64_t>(all, 1) + 2;
  plan.window = std::clamp(std::bit_ceil(static_cast<std::uint32_t>(std::min<std::int64_t>(depth, kScanWindow))), 4U,
                           kScanWindow);
  plan.ring = 2 * plan.window;
  plan.flags = cuda.flags();
  plan.slots = static_cast<std::uint32_t*>(cuda.scratch());

  // Columns of one launch: what flags and scratch suffice for, and tiles that 32 bits count.
  const std::int64_t chains = ceil_div(width, 32);
  std::int64_t columns = ((std::int64_t{1} << 31) / plan.chunks);
  if (plan.chunks > 1) {
    const auto flags = static_cast<std::int64_t>(Cuda::kFlagWords - kScanFirstFlag) / (chains * plan.ring);
    const std::int64_t words = chains * plan.ring * Block::kWords * std::min<std::int64_t>(width, 32);
    const auto slots = static_cast<std::int64_t>(Cuda::kScratchBytes / sizeof(std::uint32_t)) / words;
    columns = std::min({columns, flags, slots});
  }
  for (std::int64_t first = 0; first < all; first += columns) {
    plan.first_column = static_cast<std::uint32_t>(first);
    plan.columns = static_cast<std::uint32_t>(std::min(columns, all - first));
    plan.tiles = plan.columns * plan.chunks;
    const std::int64_t blocks = std::min<std::int64_t>(plan.tiles, most_blocks);
    plan.tickets = plan.tiles > blocks;
    LaunchConfig config = overlapping(cuda, dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)));
    config.shared_bytes = Block::shared_bytes(plan.lanes, plan.rows);
    launch(cuda.stream(), config, scan_kernel<Op, kVec, kAhead>, op, plan);
  }
}

/// Enqueues the scan; `vectors` if all operands can be accessed by 16 bytes.
template <class Op>
void run_scan(Cuda& cuda, const Op& op, const ScanShape& shape, bool vectors) {
  if (shape.channels() == 0) return;
  constexpr int kVector = Vector16<typename Op::Element>::kSize;
  constexpr int kLanesAhead = 8;  // narrower columns are too small for the copy engine
  if (!vectors || shape.dim % kVector != 0) {
    launch_scan<Op, 1, false>(cuda, op, shape, scan_plan<Op>(shape, 1));
    return;
  }
  const ScanPlan plan = scan_plan<Op>(shape, kVector);
  if (cuda.compute_capability() >= 90 && plan.lanes >= kLanesAhead) {
    launch_scan<Op, kVector, true>(cuda, op, shape, plan);
  } else {
    launch_scan<Op, kVector, false>(cuda, op, shape, plan);
  }
}

}  // namespace mmrec::kernels
