// Tiles of a scan: what a block works on, and the parts of the work that do not depend on how inputs arrive.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/rows/rows.cuh"
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/cuda/runtime/tensor_map.h"
#include "kernels/cuda/scan/chain.cuh"

namespace mmrec::kernels {

inline constexpr int kScanThreads = 256;  // of the rows of a tile, at most

/// x, but not above `most`; NaN stays.
template <class Real>
__device__ inline Real at_most(Real x, Real most) {
  return x > most ? most : x;
}

/// A segment or a state of one channel.
struct Pair {
  float x, y;
};

/// kVec adjacent channels of T in a register: a word, or one element of 16 bits.
template <class T, int kVec>
struct Channels {
  static constexpr bool kWord = kVec * sizeof(T) == 4;
  static_assert(kWord || kVec == 1);
  std::conditional_t<kWord, std::uint32_t, T> data;

  __device__ float operator[](int v) const {
    if constexpr (!kWord) {
      return widen(data);
    } else {
      return widen_part<T>(data, v);
    }
  }
  __device__ void fill(float x) {
    if constexpr (kWord) {
      data = packed(x);
    } else {
      data = narrow<T>(x);
    }
  }
  /// Elements of 16 bits are unpacked anew from here on, instead of being kept apart in registers: the compiler does
  /// not know that a block is one thread deep.
  __device__ void forget() {
    if constexpr (kVec > 1) data ^= blockDim.z - 1U;
  }
  /// No element above `most`, which T represents; NaN stays.
  __device__ void bound(float most) {
    if constexpr (kVec > 1) {
      data = ptx::min_pair<T>(data, packed(most));
    } else {
      fill(at_most((*this)[0], most));
    }
  }
  /// Past L1: rows.cuh says why.
  __device__ void load(const T* from) {
    if constexpr (kWord) {
      data = __ldcg(reinterpret_cast<const std::uint32_t*>(from));
    } else {
      data.bits = __ldcg(&from->bits);
    }
  }

 private:
  /// A word of this value alone.
  static __device__ std::uint32_t packed(float x) {
    if constexpr (sizeof(T) == 4) {
      return __float_as_uint(x);
    } else {
      return narrow<T>(x).bits * 0x10001U;
    }
  }
};

/// Rounds kVec channels to T and writes them, first to leave L2.
template <int kVec, class T>
__device__ inline void store_channels(T* to, const float (&x)[kVec]) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int v = 0; v < kVec; ++v) __stcs(to + v, x[v]);
  } else if constexpr (kVec == 1) {
    *to = narrow<T>(x[0]);
  } else {
    __stcs(reinterpret_cast<std::uint32_t*>(to), ptx::to_pair<T>(x[0], x[1]));
  }
}

/// What a launch goes over.
struct ScanExtent {
  std::int64_t time = 0;
  std::uint32_t heads = 1, dim = 0;
  std::uint32_t row_columns = 0;  // columns of one sequence
  std::uint32_t columns = 0;      // of this launch
};
/// How it is cut. A column is `lanes` x kVec channels of one sequence.
struct ScanPlan : ScanExtent {
  std::int64_t sequences = 0;  // of the op
  std::uint32_t first_column = 0;
  std::uint32_t tiles = 0;
  int lanes = 0, rows = 0;           // powers of two
  bool tickets = false;              // there are more tiles than blocks
  std::uint32_t* counter = nullptr;  // zero
  ScanChains chains;
};

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

/// kTimes times in row `row` of a sequence.
template <int kTimes>
__device__ inline ScanPlace place_in(const ScanExtent& extent, std::uint32_t batch, std::uint32_t head,
                                     std::uint32_t channel, std::int64_t row) {
  const std::int64_t time = row * kTimes;
  const bool exists = channel < extent.dim && time < extent.time;
  return {batch, head, channel, time, exists ? static_cast<int>(min(extent.time - time, std::int64_t{kTimes})) : 0};
}

/// Where an operand has the thread's first element.
template <class T>
__device__ inline T* at(const SequenceView<T, Device>& view, const ScanPlace& p) {
  return view.at(p.batch, p.head, p.time) + p.channel;
}

/// The carry of an operator whose state is a number, fp64 between chunks and fp32 outside, 0 where there is none.
struct NumberCarry {
  using Carry = double;
  const float* carry_in;
  float* carry_out;

  __device__ Carry load(std::int64_t i) const {
    return carry_in == nullptr || i < 0 ? 0.0 : static_cast<double>(__ldcg(carry_in + i));
  }
  __device__ void store(std::int64_t i, Carry x) const {
    if (carry_out != nullptr && i >= 0) carry_out[i] = static_cast<float>(x);
  }
  static __device__ uint4 put_carry(Carry x) {
    uint4 record = {};
    put_double(x, record.y, record.z);
    return record;
  }
  static __device__ Carry get_carry(const uint4& record) { return get_double(record.y, record.z); }
};

/// What the copy engine knows of the inputs: columns of words' halves, times, sequences.
template <int kInputs>
struct ScanMaps {
  TensorMap inputs[kInputs];
};

inline constexpr std::size_t kBoxAlignment = 1024;  // of the swizzle's pattern
/// Dynamic shared memory from where boxes can lie.
__device__ inline std::uint32_t* scan_boxes() {
  auto* const shared = ptx::shared_memory<std::byte>();
  const std::size_t past = reinterpret_cast<std::uintptr_t>(shared) % kBoxAlignment;
  return reinterpret_cast<std::uint32_t*>(shared + (kBoxAlignment - past) % kBoxAlignment);
}
/// Word of a row's time n in its box of 32 lanes: the copy engine has swapped pieces of 4 words, that of lane 4 k is
/// where k ^ (n % 8) says.
__device__ inline int swapped_word(int lane, int n) { return n * 32 + (lane ^ (n % 8 * 4)); }
/// Hands a thread its times from the boxes of the inputs, `box_words` apart, in which its row begins at `row`. What
/// lies outside of the operands has come as zeros, the identity. Returns what ptx::mbarrier_arrive_after wants.
template <class Op, int kVec, class Thread>
__device__ inline std::uint32_t take_boxes(const std::uint32_t* row, std::uint32_t box_words, int lane,
                                           Thread& thread) {
  Channels<typename Op::Element, kVec> x[Op::kTimes][Op::kInputs];
  std::uint32_t loaded = 0;
#pragma unroll
  for (int n = 0; n < Op::kTimes; ++n) {
#pragma unroll
    for (int i = 0; i < Op::kInputs; ++i) {
      x[n][i].data = row[i * box_words + swapped_word(lane, n)];
      loaded |= x[n][i].data;
    }
  }
#pragma unroll
  for (int n = 0; n < Op::kTimes; ++n) thread.take(n, x[n]);
  return loaded;
}

/// The segment of all rows of a tile, of the channel whose rows' segments are `width` apart.
template <class Op>
__device__ inline Pair add_rows(const Pair* segments, int rows, int width) {
  Pair all = segments[0];
#pragma unroll 8
  for (int row = 1; row < rows; ++row) all = Op::combine(all, segments[row * width]);
  return all;
}
/// Turns them into the states before the rows.
template <class Op>
__device__ inline void carry_down(Pair state, Pair* segments, int rows, int width) {
#pragma unroll 8
  for (int row = 0; row < rows; ++row) {
    const Pair segment = segments[row * width];
    segments[row * width] = state;
    state = Op::advance(state, segment);
  }
}

/// Every thread arrives at the barriers that its reads and writes of shared memory stand behind, though one of a warp
/// would do after __syncwarp(): that is the order that racecheck sees.
///
/// Op:
///   Element, kInputs, in[kInputs]        inputs; identity(i) is what input i is where there is none
///   kTimes                               times of a thread: 16 or 32
///   Thread<kVec>                         what a thread keeps, kKept registers for each time: take(n, inputs of time
///                                        n), in order of n, reduce(segments), emit(op, place, states)
///   Pair combine(Pair, Pair)             segments, the earlier first
///   Pair advance(Pair state, Pair)       the state after a segment
///   Total total(Pair)                    a tile's segment as it is published: put_total, get_total
///   Total combine(Total, Total)          the same of consecutive tiles
///   Carry advance(Carry, Total)          the state between chunks: put_carry, get_carry
///   Carry load(i), void store(i, Carry)  carry_in and carry_out of flat channel i, or none if i < 0
///   Pair state(Carry)                    the carry inside a tile
///   kReadsTwice                          inputs are read again for emit, from shared memory, instead of being kept in
///                                        registers; identity(i) is 0, which is what the copy engine fills up with
template <class Op, int kVec>
class ScanWork {
 protected:
  using T = typename Op::Element;
  using Thread = typename Op::template Thread<kVec>;
  static constexpr int kTimes = Op::kTimes;

  __device__ ScanWork(const Op& op, const ScanPlan& plan)
      : op_(op),
        plan_(plan),
        row_(static_cast<int>(threadIdx.x) / plan.lanes),
        lane_(static_cast<int>(threadIdx.x) % plan.lanes) {}

  /// Those of the rows; after them come the warps of the chains.
  __device__ int threads() const { return max(plan_.lanes * plan_.rows, 32); }
  /// Warps of the chains: one for 32 channels.
  __device__ unsigned chains() const { return static_cast<unsigned>((width() + 31) / 32); }
  __device__ int width() const { return plan_.lanes * kVec; }
  __device__ int position(int v) const { return row_ * width() + lane_ * kVec + v; }
  __device__ std::uint32_t box_words() const { return static_cast<std::uint32_t>(plan_.rows * kTimes * plan_.lanes); }
  __device__ std::uint32_t stage_words() const { return Op::kInputs * box_words(); }
  /// Asks the copy engine for the inputs of a tile.
  __device__ void load_boxes(const ScanMaps<Op::kInputs>& maps, const ScanTile& t, std::uint32_t* to,
                             std::uint64_t* barrier) const {
    const std::uint64_t hint = ptx::evict_first();
    ptx::mbarrier_arrive_expect(barrier, stage_words() * static_cast<std::uint32_t>(sizeof(std::uint32_t)));
#pragma unroll
    for (int i = 0; i < Op::kInputs; ++i) {
      ptx::load_box(to + i * box_words(), &maps.inputs[i], barrier, static_cast<int>(t.first_channel * (sizeof(T) / 2)),
                    static_cast<int>(t.chunk) * plan_.rows * kTimes, static_cast<int>(t.batch * plan_.heads + t.head),
                    hint);
    }
  }
  /// The next tile's number. When each block has drawn once in vain, the counter is left as it was found.
  __device__ std::uint32_t first_ticket() const { return plan_.tickets ? atomicAdd(plan_.counter, 1U) : blockIdx.x; }
  __device__ std::uint32_t next_ticket() const { return plan_.tickets ? atomicAdd(plan_.counter, 1U) : plan_.tiles; }
  __device__ void drawn_in_vain(std::uint32_t ticket) const {
    if (ticket == plan_.tiles + gridDim.x - 1 && plan_.tickets) *plan_.counter = 0;
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
  __device__ ScanPlace place(const ScanTile& t) const {
    return place_in<kTimes>(plan_, t.batch, t.head, t.first_channel + static_cast<std::uint32_t>(lane_ * kVec),
                            std::int64_t{t.chunk} * plan_.rows + row_);
  }

  /// Turns the segments of the rows of channel c into the states before them, and hands the carry on.
  __device__ void hand_on(const ScanChain<Op>& chain, const ScanTile& t, Pair* pairs, int c) const {
    const bool exists = c < width();
    const std::uint32_t channel = t.first_channel + static_cast<std::uint32_t>(c);
    const std::int64_t sequence = std::int64_t{t.batch} * plan_.heads + t.head;
    const std::int64_t flat = exists && channel < plan_.dim ? sequence * plan_.dim + channel : -1;

    const Pair all = exists ? add_rows<Op>(pairs + c, plan_.rows, width()) : Pair{0.0F, 0.0F};
    const typename Op::Carry before = chain.hand_on(op_, t.chunk, Op::total(all), flat);
    if (exists) carry_down<Op>(Op::state(before), pairs + c, plan_.rows, width());
  }

  const Op& op_;
  const ScanPlan& plan_;
  int row_, lane_;
};

}  // namespace mmrec::kernels
