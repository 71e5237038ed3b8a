// The skeleton of the scans over time: every input is read once and every output written once, in one pass.
//
// Ownership. [batch, heads, time, dim] is cut into tiles of `rows` x kTimes times by `lanes` x kVec channels. A
// block of up to 256 threads and the warps of the chains works tile after tile. A thread owns one word of 32 bits, kVec
// adjacent channels, at kTimes consecutive times and keeps them in registers from the first read to the last write;
// a row of `lanes` threads covers adjacent channels, the rows of the block follow each other in time. Wide operands
// take 32 lanes x 8 rows: 128 contiguous bytes by 128 or 256 times; narrow ones fewer lanes and more rows, up to 1,024
// times. Tiles are narrow and long because all that is done between tiles is done once a channel and tile. Where
// alignment does not allow words or the copy engine, the same arithmetic runs in the same order on what scalar accesses
// bring: the same bits.
//
// A tile in four steps:
//  1. Each thread reduces its times to a segment of the operator's monoid.
//  2. A warp of its own for 32 channels, a lane a channel, adds up the rows' segments and publishes the tile's total.
//  3. The same warp finds the state before the tile by looking back (scan_chain.cuh) and carries it down the rows.
//  4. Each thread runs over its times once more, from the state before them, and writes.
// The warps of the chains hold no inputs, so looking back has registers of its own, and they issue no other stores.
//
// Bytes in flight. On devices that have it (sm_90) the copy engine brings the inputs of a tile into shared memory, a
// box of an input by one instruction. As soon as a tile is in registers, its place is given to one of the tiles to
// come: while a tile is reduced, waits for its carry and is written, the next ones are on their way. That is 192 KiB a
// multiprocessor, 25 MB in all, where a memory of 4 TB/s and 1.5 us needs 6 MB. Half as much waits in registers for
// carries, in two or three blocks. Streams are marked to leave L2 first, so that the records of the chains stay. On
// other devices, and where operands are unaligned or at most 64 bytes wide, all times of a thread are loaded into
// registers at once.
//
// Tiles are drawn from a counter, all columns of a chunk of time before the next chunk, so a tile waits for tiles only
// that are being worked on or done.
//
// Determinism: the cut into tiles follows from dim, time and type; all orders of combination are fixed.
// The block that drew the last ticket resets the counter.
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
#include "kernels/cuda/scan_chain.cuh"
#include "kernels/cuda/tensor_map.h"

namespace mmrec::kernels {

inline constexpr int kScanThreads = 256;
inline constexpr int kScanChunk = 1024;                            // times of one tile at most
inline constexpr std::size_t kScanAhead = std::size_t{200} << 10;  // bytes of inputs on their way, a multiprocessor
/// Blocks of a multiprocessor, by how many registers a thread keeps its part of a tile in.
constexpr int scan_blocks(int kept) { return kept <= 32 ? 3 : 2; }

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
    } else if constexpr (sizeof(T) == 4) {
      return __uint_as_float(data);
    } else if constexpr (std::is_same_v<T, BFloat16>) {
      return __uint_as_float(v == 0 ? data << 16 : data & 0xffff0000U);
    } else {
      return widen(T{static_cast<std::uint16_t>(v == 0 ? data : data >> 16)});
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

/// How a launch is cut.
struct ScanPlan {
  std::int64_t time = 0;
  std::uint32_t heads = 1, dim = 0;
  std::uint32_t first_column = 0;  // a column: `lanes` x kVec channels of one sequence
  std::uint32_t row_columns = 0;   // columns of one sequence
  std::uint32_t columns = 0;       // of this launch
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

/// Where an operand has the thread's first element.
template <class T>
__device__ inline T* at(const SequenceView<T, Device>& view, const ScanPlace& p) {
  return view.at(p.batch, p.head, p.time) + p.channel;
}

/// What the copy engine knows of the inputs: columns of words' halves, times, sequences.
template <int kInputs>
struct ScanMaps {
  TensorMap inputs[kInputs];
};

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
///
/// kAhead: inputs come through shared memory, asked for ahead of time.
template <class Op, int kVec, bool kAhead>
class ScanBlock {
 public:
  using T = typename Op::Element;
  using Thread = typename Op::template Thread<kVec>;
  using Maps = ScanMaps<Op::kInputs>;
  static constexpr int kTimes = Op::kTimes;
  static constexpr int kBlocks = scan_blocks(Thread::kKept * kTimes);
  static constexpr std::size_t kStageBytes = Op::kInputs * kScanThreads * kTimes * sizeof(std::uint32_t);
  static constexpr std::uint32_t kStages = kAhead ? std::max<std::size_t>(kScanAhead / kBlocks / kStageBytes, 1) : 1;

  /// Shared memory of a block, in bytes: inputs [stage][input][time][lane], two sets of segments, barriers and tiles.
  static constexpr std::size_t shared_bytes(int threads) {
    const auto vectors = static_cast<std::size_t>(threads);
    return (kAhead ? kAlignment + kStages * Op::kInputs * vectors * kTimes * sizeof(std::uint32_t) : 0) +
           2 * vectors * kVec * sizeof(Pair) + kStages * sizeof(std::uint64_t) + kTiles * sizeof(ScanTile);
  }

  __device__ ScanBlock(const Op& op, const ScanPlan& plan, const Maps& maps)
      : op_(op),
        plan_(plan),
        maps_(maps),
        inputs_(window()),
        pairs_(reinterpret_cast<Pair*>(inputs_ + (kAhead ? kStages * stage_words() : 0))),
        barriers_(reinterpret_cast<std::uint64_t*>(pairs_ + 2 * threads() * kVec)),
        tiles_(reinterpret_cast<ScanTile*>(barriers_ + kStages)),
        row_(static_cast<int>(threadIdx.x) / plan.lanes),
        lane_(static_cast<int>(threadIdx.x) % plan.lanes) {}

  __device__ void run() {
    const int first = static_cast<int>(threadIdx.x) - threads();
    if (first < 0) {
      run_rows();
    } else {
      run_chain(first / 32 * 32, first % 32);
    }
  }

 private:
  static constexpr std::uint32_t kTiles = 8;
  static_assert(kStages < kTiles);
  static constexpr std::size_t kAlignment = 1024;  // of the swizzle's pattern

  // Barriers of the block: the rows' segments are there; the states before the rows are.
  static constexpr int kSegments = 1, kStates = 2;

  /// The threads that own times and channels: tile after tile, from the read to the write.
  __device__ void run_rows() {
    ptx::named_barrier_sync(kStates, blockDim_x());  // barriers and the first tiles
    for (std::uint32_t round = 0; plan_.tiles > tile(round).index; ++round) {
      // What follows from these two is computed anew for each tile: in registers it would leave too few for the inputs.
      ptx::forget(row_);
      ptx::forget(lane_);
      if constexpr (kAhead) ptx::mbarrier_wait(barriers_ + round % kStages, round / kStages & 1U);
      Thread thread;
      read(place(tile(round)), round % kStages, thread);
      Pair mine[kVec];
      thread.reduce(mine);
#pragma unroll
      for (int v = 0; v < kVec; ++v) pairs(round)[position(v)] = mine[v];
      ptx::named_barrier_arrive(kSegments, blockDim_x());
      ptx::named_barrier_sync(kStates, blockDim_x());
      const ScanPlace p = place(tile(round));
      if (p.count == 0) continue;
#pragma unroll
      for (int v = 0; v < kVec; ++v) mine[v] = pairs(round)[position(v)];
      thread.emit(op_, p, mine);
    }
  }

  /// A warp that looks after channels [first, first + 32) of the tiles; the first one asks for tiles, too.
  __device__ void run_chain(int first, int lane) {
    const bool asks = first == 0 && lane == 0;
    if (asks) {
      if constexpr (kAhead) {
        for (std::uint32_t i = 0; i < kStages; ++i) ptx::mbarrier_init(barriers_ + i, 1);
        ptx::mbarrier_init_fence();
      }
      next_ = plan_.tickets ? atomicAdd(plan_.counter, 1U) : blockIdx.x;
      for (std::uint32_t round = 0; round < kStages; ++round) ask(round, locate(next_));
    }
    __syncwarp();
    ptx::named_barrier_sync(kStates, blockDim_x());
    for (std::uint32_t round = 0; plan_.tiles > tile(round).index; ++round) {
      const ScanTile t = tile(round);
      const std::uint32_t chains = static_cast<std::uint32_t>((width() + 31) / 32);
      const ScanChain<Op> chain(plan_.chains, t.column * chains + static_cast<std::uint32_t>(first / 32), lane);
      chain.wait_for_records(t.chunk);
      const ScanTile coming = locate(next_);
      ptx::named_barrier_sync(kSegments, blockDim_x());
      if (asks) ask(round + kStages, coming);
      __syncwarp();
      hand_on(chain, t, pairs(round), first + lane);
      ptx::named_barrier_sync(kStates, blockDim_x());
    }
  }

  static __device__ int blockDim_x() { return static_cast<int>(blockDim.x); }
  /// Those of the rows; after them come the warps of the chains.
  __device__ int threads() const { return max(plan_.lanes * plan_.rows, 32); }
  __device__ int width() const { return plan_.lanes * kVec; }
  /// Segments, then states, of a round's rows [row][channel]: the round before's may still be read.
  __device__ Pair* pairs(std::uint32_t round) const {
    return pairs_ + round % 2 * static_cast<std::uint32_t>(threads() * kVec);
  }
  __device__ int position(int v) const { return row_ * width() + lane_ * kVec + v; }
  __device__ std::uint32_t box_words() const { return static_cast<std::uint32_t>(plan_.rows * kTimes * plan_.lanes); }
  __device__ std::uint32_t stage_words() const { return Op::kInputs * box_words(); }
  static __device__ std::uint32_t* window() {
    auto* const shared = ptx::shared_memory<std::byte>();
    if constexpr (!kAhead) return reinterpret_cast<std::uint32_t*>(shared);
    const std::size_t past = reinterpret_cast<std::uintptr_t>(shared) % kAlignment;
    return reinterpret_cast<std::uint32_t*>(shared + (kAlignment - past) % kAlignment);
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
  /// Of the block's round: those of the rounds to come are known as far as they have been asked for.
  __device__ ScanTile& tile(std::uint32_t round) const { return tiles_[round % kTiles]; }

  /// Gives a round its tile, asks for its inputs and draws a ticket for the next one, which nobody waits for here; one
  /// thread does. When each block has drawn once in vain, the counter is left as it was found.
  __device__ void ask(std::uint32_t round, const ScanTile& t) {
    tile(round) = t;
    if (t.index >= plan_.tiles) {
      if (t.index == plan_.tiles + gridDim.x - 1 && plan_.tickets) *plan_.counter = 0;
      return;
    }
    if constexpr (kAhead) {
      std::uint32_t* const to = inputs_ + round % kStages * stage_words();
      std::uint64_t* const barrier = barriers_ + round % kStages;
      const std::uint64_t hint = ptx::evict_first();
      ptx::mbarrier_arrive_expect(barrier, stage_words() * sizeof(std::uint32_t));
#pragma unroll
      for (int i = 0; i < Op::kInputs; ++i) {
        ptx::load_box(
            to + i * box_words(), &maps_.inputs[i], barrier, static_cast<int>(t.first_channel * (sizeof(T) / 2)),
            static_cast<int>(t.chunk) * plan_.rows * kTimes, static_cast<int>(t.batch * plan_.heads + t.head), hint);
      }
    }
    next_ = plan_.tickets ? atomicAdd(plan_.counter, 1U) : plan_.tiles;
  }

  __device__ ScanPlace place(const ScanTile& t) const {
    ScanPlace p;
    p.batch = t.batch;
    p.head = t.head;
    p.channel = t.first_channel + static_cast<std::uint32_t>(lane_ * kVec);
    p.time = (std::int64_t{t.chunk} * plan_.rows + row_) * kTimes;
    const bool inside = p.channel < plan_.dim && p.time < plan_.time;
    p.count = inside ? static_cast<int>(min(plan_.time - p.time, std::int64_t{kTimes})) : 0;
    return p;
  }

  __device__ void read(const ScanPlace& p, std::uint32_t stage, Thread& thread) const {
    Channels<T, kVec> x[kTimes][Op::kInputs];
#pragma unroll
    for (int i = 0; i < Op::kInputs; ++i) {
      const std::uint32_t* const here = inputs_ + stage * stage_words() + i * box_words() + row_ * kTimes * plan_.lanes;
      const T* from = at(op_.in[i], p);
#pragma unroll
      for (int n = 0; n < kTimes; ++n) {
        if (n >= p.count) {
          x[n][i].fill(Op::identity(i));
        } else if constexpr (kAhead) {
          // The copy engine has swapped pieces of 4 words: that of lane 4 k is where k ^ (time % 8) says.
          x[n][i].data = here[n * 32 + (lane_ ^ (n % 8 * 4))];
        } else {
          x[n][i].load(from);
          from += op_.in[i].time_stride;
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kTimes; ++n) thread.take(n, x[n]);
  }

  /// Turns the segments of the rows of channel c into the states before them, and hands the carry on.
  __device__ void hand_on(const ScanChain<Op>& chain, const ScanTile& t, Pair* pairs, int c) const {
    const bool exists = c < width();
    const std::uint32_t channel = t.first_channel + static_cast<std::uint32_t>(c);
    const std::int64_t sequence = std::int64_t{t.batch} * plan_.heads + t.head;
    const std::int64_t flat = exists && channel < plan_.dim ? sequence * plan_.dim + channel : -1;

    Pair all = {0.0F, 0.0F};
    if (exists) {
      all = pairs[c];
#pragma unroll 8
      for (int row = 1; row < plan_.rows; ++row) all = Op::combine(all, pairs[row * width() + c]);
    }
    const typename Op::Carry before = chain.hand_on(op_, t.chunk, Op::total(all), flat);
    if (exists) {
      Pair state = Op::state(before);
#pragma unroll 8
      for (int row = 0; row < plan_.rows; ++row) {
        Pair& here = pairs[row * width() + c];
        const Pair segment = here;
        here = state;
        state = Op::advance(state, segment);
      }
    }
  }

  const Op& op_;
  const ScanPlan& plan_;
  const Maps& maps_;
  std::uint32_t* const inputs_;
  Pair* const pairs_;
  std::uint64_t* const barriers_;
  ScanTile* const tiles_;
  int row_, lane_;
  std::uint32_t next_ = 0;  // the tile to ask for next, known to one thread
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr bool kHasCopyEngine = false;
#else
inline constexpr bool kHasCopyEngine = true;
#endif

template <class Op, int kVec, bool kAhead>
__global__ void __launch_bounds__(kScanThreads + 32 * kVec, ScanBlock<Op, kVec, kAhead>::kBlocks)
    scan_kernel(const __grid_constant__ Op op, const __grid_constant__ ScanPlan plan,
                const __grid_constant__ ScanMaps<Op::kInputs> maps) {
  if constexpr (!kAhead || kHasCopyEngine) {
    ptx::wait_for_predecessor();
    ptx::allow_successor();
    ScanBlock<Op, kVec, kAhead>(op, plan, maps).run();
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

/// True if words at all multiples of 4 bytes of channels are aligned.
template <class T>
bool takes_scan_words(const SequenceView<T, Device>& v) {
  const auto strides = static_cast<std::uintptr_t>(v.batch_stride | v.head_stride | v.time_stride);
  return (reinterpret_cast<std::uintptr_t>(v.data) | strides * sizeof(T)) % 4 == 0;
}

/// Heads that lie next to each other are channels.
template <class... Views>
void merge_heads(Views&... views) {
  if (!((views.heads == 1 || views.head_stride == views.dim) && ...)) return;
  ((views.dim *= views.heads, views.heads = 1), ...);
}

/// An input as the copy engine sees it, in elements of 16 bits; columns of 0 if it has more dimensions than three.
template <class T>
MatrixStack scan_stack(const SequenceView<T, Device>& v) {
  constexpr std::int64_t kHalves = sizeof(T) / 2;
  MatrixStack s{v.data, v.dim * kHalves, v.time, v.batch * v.heads, v.time_stride * kHalves, 0};
  if (v.heads == 1) {
    s.depth_stride = v.batch_stride * kHalves;
  } else if (v.batch == 1 || v.batch_stride == v.heads * v.head_stride) {
    s.depth_stride = v.head_stride * kHalves;
  } else {
    s.columns = 0;
  }
  return s;
}

/// The cut into tiles. Rows follow from the shape of one sequence and from T alone: they decide the bits.
template <class Op>
ScanPlan scan_plan(const ScanShape& shape, int vec) {
  using T = typename Op::Element;
  constexpr std::int64_t kLongChains =
      128;  // words across up to which more than a window of a chain is in work at once
  const auto power = [](std::int64_t x) { return std::bit_ceil(static_cast<std::uint64_t>(x)); };
  const std::int64_t words = ceil_div(shape.dim * static_cast<std::int64_t>(sizeof(T)), 4);
  const auto times = static_cast<std::uint64_t>(std::max<std::int64_t>(ceil_div(shape.time, Op::kTimes), 1));
  std::uint64_t rows = kScanThreads / power(std::min<std::int64_t>(words, 32));
  rows = std::min({rows, std::uint64_t{kScanChunk / Op::kTimes}, std::bit_ceil(times)});
  const std::uint64_t lanes = std::min({kScanThreads / rows, power(ceil_div(shape.dim, vec)), std::uint64_t{32}});

  ScanPlan plan;
  plan.heads = static_cast<std::uint32_t>(shape.heads);
  plan.time = shape.time;
  plan.dim = static_cast<std::uint32_t>(shape.dim);
  plan.lanes = static_cast<int>(lanes);
  plan.rows = static_cast<int>(rows);
  plan.row_columns = static_cast<std::uint32_t>(ceil_div(shape.dim, plan.lanes * vec));
  const std::int64_t chunks = std::max<std::int64_t>(ceil_div(shape.time, plan.rows * Op::kTimes), 1);
  if (chunks >= std::int64_t{1} << 30) throw std::invalid_argument("scan: more than 2^37 times");
  plan.chains.chunks = static_cast<std::uint32_t>(chunks);
  plan.chains.group = words <= kLongChains && chunks > std::int64_t{2} * kScanWindow ? kScanGroup : 1;
  return plan;
}

template <class Op, int kVec, bool kAhead>
void launch_scan(Cuda& cuda, const Op& op, const ScanShape& shape, ScanPlan plan,
                 const ScanMaps<Op::kInputs>& maps = {}) {
  using Block = ScanBlock<Op, kVec, kAhead>;
  // Words between the counter and the records, which are written 16 bytes at a time.
  constexpr std::int64_t kFirstRecord = 32, kRecordWords = sizeof(uint4) / sizeof(std::uint32_t);
  const int threads = std::max(plan.lanes * plan.rows, 32);
  const std::int64_t width = plan.lanes * kVec, chains = ceil_div(width, 32);
  const std::int64_t all = shape.batch * shape.heads * plan.row_columns;
  if (all >> 31 != 0) throw std::invalid_argument("scan: more than 2^31 columns of channels");
  const std::int64_t most_blocks = std::int64_t{cuda.processors()} * (Block::kBlocks * kScanThreads / threads);

  // As far back as tiles are in work: as many as blocks, spread over the columns.
  const std::int64_t depth = most_blocks / (std::max<std::int64_t>(all, 1) * plan.chains.group) + 2;
  plan.chains.window = static_cast<std::uint32_t>(std::clamp<std::int64_t>(depth, 4, kScanWindow));
  plan.chains.ring = std::bit_ceil(std::min(2 * plan.chains.window, plan.chains.chunks));
  plan.chains.width = static_cast<std::uint32_t>(std::min<std::int64_t>(width, 32));
  plan.counter = cuda.flags();
  plan.chains.records = reinterpret_cast<uint4*>(cuda.flags() + kFirstRecord);

  // Columns of one launch: those whose records there is room for, and tiles that 32 bits count.
  std::int64_t columns = (std::int64_t{1} << 31) / plan.chains.chunks;
  if (plan.chains.chunks > 1) {
    const std::int64_t words = kRecordWords * chains * plan.chains.ring * plan.chains.group * plan.chains.width;
    columns = std::min(columns, (static_cast<std::int64_t>(Cuda::kFlagWords) - kFirstRecord) / words);
  }
  for (std::int64_t first = 0; first < all; first += columns) {
    plan.first_column = static_cast<std::uint32_t>(first);
    plan.columns = static_cast<std::uint32_t>(std::min(columns, all - first));
    plan.tiles = plan.columns * plan.chains.chunks;
    const std::int64_t blocks = std::min<std::int64_t>(plan.tiles, most_blocks);
    plan.tickets = plan.tiles > blocks;
    LaunchConfig config =
        overlapping(cuda, dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads + 32 * chains)));
    config.shared_bytes = Block::shared_bytes(threads);
    launch(cuda.stream(), config, scan_kernel<Op, kVec, kAhead>, op, plan, maps);
  }
}

/// Enqueues the scan; `words` if all operands can be accessed by words.
template <class Op>
void run_scan(Cuda& cuda, const Op& op, const ScanShape& shape, bool words) {
  if (shape.channels() == 0) return;
  constexpr int kVec = sizeof(std::uint32_t) / sizeof(typename Op::Element);
  if (!words || shape.dim % kVec != 0) {
    launch_scan<Op, 1, false>(cuda, op, shape, scan_plan<Op>(shape, 1));
    return;
  }
  const ScanPlan plan = scan_plan<Op>(shape, kVec);
  bool ahead = cuda.compute_capability() >= 90 && plan.lanes == 32;
  for (const auto& in : op.in) ahead = ahead && has_tensor_map(scan_stack(in));
  if (!ahead) {
    launch_scan<Op, kVec, false>(cuda, op, shape, plan);
    return;
  }
  ScanMaps<Op::kInputs> maps;
  for (int i = 0; i < Op::kInputs; ++i) {
    maps.inputs[i] = make_tensor_map(scan_stack(op.in[i]), plan.rows * Op::kTimes);
  }
  launch_scan<Op, kVec, true>(cuda, op, shape, plan, maps);
}

}  // namespace mmrec::kernels
