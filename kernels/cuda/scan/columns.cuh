// Columns of a scan that belong to blocks (sm_90), one block on a multiprocessor.
//
// A block takes a column through all of time, tile after tile, then its next column, and hands the states on to itself.
// Or the blocks of a group, up to sixteen, share a column, a time of tiles each in turn; all are resident (a
// cooperative launch), tell each other the totals of their tiles by records in memory, which stay in L2, and each of
// them carries the column's state along through all totals.
//
// A column has one half of 32 words or, of a group in fp32, two: memory gives its best from 256 bytes in a row on, but
// the copy engine's boxes are 128 wide. Both are asked for at once; everything else takes them one after the other, a
// round each. They have nothing to do with each other, so each has a round more until its next state is wanted.
//
// Warps of four kinds pass rounds on through a ring of kStages stages in shared memory. A tile is brought once and read
// twice; nothing of it stays in registers. Each step reads and writes what the one before handed over, by a barrier of
// the stage whose phases number the stage's rounds:
//   fetch    one thread has the copy engine bring the inputs                                       -> come
//   work     8 warps for even rounds and 8 for odd ones reduce their times to segments             -> segments
//   sum      a warp for 32 channels adds up the rows' segments to the tile's total, publishes it   -> summed
//   carry    a warp for 32 channels of a half advances the state over the totals, tile after tile, and puts the states
//            before the rows in place of their segments                                            -> states
//   work     runs over its times once more, from the state before them, and writes                 -> free
// What writes waits for memory. So the warps that do have two rounds' time for one, and reduce the next one first.
//
// A record takes a microsecond and more to be seen, and as long to be read: more than a round may take. So a total is
// published when the inputs have come, long before the state that it is applied to is known, and the carry warps ask
// for all totals between their block's tile before and its tile at once. What follows each other from tile to tile of a
// half is one multiplication and addition for each of them. A block alone looks for nothing.
//
// Totals lie in kSlots slots, one for a round of the group. A block publishes a round's total after it has the states
// of kAhead rounds before and all earlier ones, so it has read a total of each other block that is at most kAhead +
// kHalves rounds old; those had published it after the states of kAhead rounds before that, hence read all totals that
// are 2 (kAhead + kHalves) rounds old: nobody needs any more what the slot held. Blocks read totals past a column's end
// or before its begin for that, too. A record is 16 bytes, written and read whole, and says its round, so it needs no
// fence. The last of a group's carry warps to end clears the group's records.
//
// Bytes in flight: two stages of 32 KiB, or two pairs of halves at times, 8 to 17 MB in all, where a memory of 4 TB/s
// and 1.5 us needs 6 MB. More make it slower (H200: six stages 3 to 5 %), though the ring has room, but in groups,
// where blocks wait for each other. Nothing else needs L2, so the inputs are not marked to leave it first, which costs
// bandwidth (H200: 7 %).
#pragma once

#include <cstdint>

#include "kernels/cuda/scan/tile.cuh"

namespace mmrec::kernels {

/// How a launch is cut into columns.
struct ScanColumnPlan : ScanExtent {
  std::uint32_t chunks = 0;       // tiles of a half of a column
  std::uint32_t group = 1;        // blocks of a group
  std::uint32_t in_flight = 1;    // the round that many before has come when another one's inputs are asked for
  std::uint32_t* done = nullptr;  // zero, [group]: carry warps that have ended
  uint4* records = nullptr;       // zeros, [group][slot][block][channel]
};

inline constexpr std::uint32_t kMostColumnGroup = 16;  // blocks of a group at most
template <class Op, int kVec, int kHalves>
class ScanColumns {
  using T = typename Op::Element;
  using Thread = typename Op::template Thread<kVec>;
  using Total = typename Op::Total;
  using Carry = typename Op::Carry;
  using Maps = ScanMaps<Op::kInputs>;
  static constexpr int kTimes = Op::kTimes, kWarps = kScanThreads / 32;
  static constexpr int kLanes = 32, kRows = kScanThreads / kLanes, kChains = kVec;
  static constexpr std::uint32_t kBoxWords = kScanThreads * kTimes, kStageWords = Op::kInputs * kBoxWords;
  static constexpr std::uint32_t kAhead = 4;
  static constexpr std::uint32_t kSlots = 2 * (kAhead + kHalves);

 public:
  static constexpr std::uint32_t kStages = 6;
  static constexpr int kWidth = kLanes * kVec;   // channels of a half of a column
  static constexpr int kChunk = kRows * kTimes;  // times of a tile
  static constexpr int kThreads = 2 * kScanThreads + (1 + kHalves) * 32 * kChains + 32;  // of a block
  /// Words that are zero between launches: counters of the groups, then records, for `blocks` blocks.
  static constexpr std::int64_t kWordsOfDone = 1024;
  static constexpr std::int64_t flag_words(std::int64_t blocks) { return kWordsOfDone + blocks * 4 * kSlots * kWidth; }

  /// Shared memory of a block, in bytes: inputs [stage][input][time][lane], segments [stage][row][channel], of kAhead
  /// rounds the block's own totals and the carry before the column [round][channel], barriers.
  static constexpr std::size_t kSharedBytes =
      kBoxAlignment + kStages * (kStageWords * sizeof(std::uint32_t) + kRows * kWidth * sizeof(Pair)) +
      kAhead * kWidth * (sizeof(uint4) + sizeof(Carry)) + (4 * kStages + kAhead) * sizeof(std::uint64_t);
  static_assert(kSharedBytes <= std::size_t{227} << 10);
  static_assert(Op::kReadsTwice && kAhead < kStages && kStages % kHalves == 0);

  __device__ ScanColumns(const Op& op, const ScanColumnPlan& plan, const Maps& maps)
      : op_(op),
        plan_(plan),
        maps_(maps),
        group_(blockIdx.x / plan.group),
        rank_(blockIdx.x % plan.group),
        inputs_(scan_boxes()),
        pairs_(reinterpret_cast<Pair*>(inputs_ + kStages * kStageWords)),
        totals_(reinterpret_cast<uint4*>(pairs_ + kStages * kRows * kWidth)),
        starts_(reinterpret_cast<Carry*>(totals_ + kAhead * kWidth)),
        come_(reinterpret_cast<std::uint64_t*>(starts_ + kAhead * kWidth)),
        segments_(come_ + kStages),
        states_(segments_ + kStages),
        free_(states_ + kStages),
        summed_(free_ + kStages) {}

  __device__ void run() const {
    if (threadIdx.x == 0) make_barriers();
    __syncthreads();
    ptx::wait_for_predecessor();
    ptx::allow_successor();
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int past = warp - 2 * kWarps;
    if (past < 0) {
      work(warp >= kWarps);
    } else if (past < kChains) {
      for (Walk at(*this); at.inside(); at.next()) sum(at, past * 32 + lane);
    } else if (past < (1 + kHalves) * kChains) {
      const int half = past / kChains - 1, c = past % kChains * 32 + lane;
      Carry state{};
      for (Walk at(*this); at.inside(); at.next()) {
        if (at.half == static_cast<std::uint32_t>(half)) carry(at, c, state);
      }
      if (plan_.group > 1) clear();
    } else if (lane == 0) {
      for (Walk at(*this); at.inside(); at.next()) {
        if (at.half == 0) fetch(at);
      }
    }
  }

 private:
  /// A block's rounds in its order. All blocks of a group have as many; the last chunks of a column may lie past its
  /// end, and its second half beyond the row's.
  struct Walk {
    const ScanColumns& block;
    std::uint32_t round = 0, half = 0, column, chunk, sequence = 0, channel = 0;

    __device__ explicit Walk(const ScanColumns& b) : block(b), column(b.group_) { begin(); }
    __device__ bool inside() const { return column < block.plan_.columns; }
    __device__ void next() {
      ++round;
      if (++half < kHalves) {
        channel += kWidth;
        return;
      }
      half = 0;
      channel -= (kHalves - 1) * kWidth;
      chunk += block.plan_.group;
      if (first_chunk() < block.plan_.chunks) return;
      column += gridDim.x / block.plan_.group;
      begin();
    }
    __device__ void begin() {
      chunk = block.rank_;
      sequence = column / block.plan_.row_columns;
      channel = (column - sequence * block.plan_.row_columns) * (kHalves * kWidth);
    }
    /// Of the round.
    __device__ std::uint32_t first_chunk() const { return chunk - block.rank_; }
    __device__ std::uint32_t stage() const { return round % kStages; }
    __device__ std::uint32_t phase() const { return round / kStages & 1U; }
    /// In shared memory, of what waits from sum to carry.
    __device__ std::uint32_t slot() const { return round % kAhead; }
  };

  __device__ void make_barriers() const {
    for (std::uint32_t i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(come_ + i, 1);
      ptx::mbarrier_init(segments_ + i, kScanThreads);
      ptx::mbarrier_init(states_ + i, kWidth);
      ptx::mbarrier_init(free_ + i, kScanThreads);
    }
    for (std::uint32_t i = 0; i < kAhead; ++i) ptx::mbarrier_init(summed_ + i, kWidth);
    ptx::mbarrier_init_fence();
  }
  static __device__ int row() { return static_cast<int>(threadIdx.x) % kScanThreads / kLanes; }
  static __device__ int lane() { return static_cast<int>(threadIdx.x) % kLanes; }
  /// Segments, then states, of a stage's rows [row][channel].
  __device__ Pair* pairs(std::uint32_t stage) const { return pairs_ + stage * kRows * kWidth; }
  /// The thread's first channel there.
  __device__ Pair* own_pairs(std::uint32_t stage) const { return pairs(stage) + row() * kWidth + lane() * kVec; }
  __device__ uint4* record(std::uint32_t round, std::uint32_t rank, int c) const {
    return plan_.records + ((std::size_t{group_} * kSlots + round % kSlots) * plan_.group + rank) * kWidth + c;
  }

  /// Every other round, the even or the odd ones: reduces a tile and then finishes the one before.
  __device__ void work(bool odd) const {
    Walk at(*this);
    if (odd) at.next();
    Walk before = at;
    for (; at.inside(); at.next(), at.next()) {
      reduce(at);
      if (at.round < 2) continue;
      finish(before);
      before.next();
      before.next();
    }
    if (before.inside()) finish(before);
  }

  /// Both halves of a tile; the first has round `at`.
  __device__ void fetch(const Walk& at) const {
    const std::uint32_t first = at.stage();
    if (at.round >= plan_.in_flight) {
      const std::uint32_t before = at.round - plan_.in_flight;
      ptx::mbarrier_wait(come_ + before % kStages, before / kStages & 1U);
    }
#pragma unroll
    for (std::uint32_t half = 0; half < kHalves; ++half) {
      if (at.round >= kStages) ptx::mbarrier_wait(free_ + first + half, at.phase() ^ 1U);
      ptx::mbarrier_arrive_expect(come_ + first + half,
                                  kStageWords * static_cast<std::uint32_t>(sizeof(std::uint32_t)));
    }
#pragma unroll
    for (int i = 0; i < Op::kInputs; ++i) {
#pragma unroll
      for (std::uint32_t half = 0; half < kHalves; ++half) {
        ptx::load_box(inputs_ + (first + half) * kStageWords + i * kBoxWords, &maps_.inputs[i], come_ + first + half,
                      static_cast<int>((at.channel + half * kWidth) * (sizeof(T) / 2)),
                      static_cast<int>(at.chunk) * kChunk, static_cast<int>(at.sequence));
      }
    }
  }

  __device__ void reduce(const Walk& at) const {
    const std::uint32_t stage = at.stage();
    ptx::mbarrier_wait(come_ + stage, at.phase());
    Thread thread;
    read(stage, thread);
    Pair mine[kVec];
    thread.reduce(mine);
#pragma unroll
    for (int v = 0; v < kVec; ++v) own_pairs(stage)[v] = mine[v];
    ptx::mbarrier_arrive(segments_ + stage);
  }

  __device__ void sum(const Walk& at, int c) const {
    const std::uint32_t stage = at.stage(), slot = at.slot();
    Carry start{};
    if (at.first_chunk() == 0) start = op_.load(channel(at, c));
    ptx::mbarrier_wait(segments_ + stage, at.phase());
    uint4 total = Op::put_total(Op::total(add_rows<Op>(pairs(stage) + c, kRows, kWidth)));
    total.x = at.round + 1;
    if (at.round >= kAhead) {
      const std::uint32_t before = at.round - kAhead;
      ptx::mbarrier_wait(states_ + before % kStages, before / kStages & 1U);
    }
    // carry_out may be carry_in: it is written when all totals of the column have come.
    if (at.first_chunk() == 0) starts_[slot * kWidth + c] = start;
    totals_[slot * kWidth + c] = total;
    if (plan_.group > 1) ptx::store_relaxed_quad(record(at.round, rank_, c), total);
    ptx::mbarrier_arrive(summed_ + slot);
  }

  /// state: of the half, after the block's tile before.
  __device__ void carry(const Walk& at, int c, Carry& state) const {
    ptx::mbarrier_wait(summed_ + at.slot(), at.round / kAhead & 1U);
    if (at.first_chunk() == 0) state = starts_[at.slot() * kWidth + c];
    if (plan_.group > 1) state = over_others(at, c, state);
    carry_down<Op>(Op::state(state), pairs(at.stage()) + c, kRows, kWidth);
    state = Op::advance(state, Op::get_total(totals_[at.slot() * kWidth + c]));
    ptx::mbarrier_arrive(states_ + at.stage());
    if (at.chunk + 1 == plan_.chunks) op_.store(channel(at, c), state);
  }
  /// The state after the other blocks' tiles between the block's tile before and its tile of a round, from the state
  /// before them. Up to kAtOnce of their totals are asked for at once, again and again those that have not come.
  __device__ Carry over_others(const Walk& at, int c, Carry state) const {
    constexpr std::uint32_t kAtOnce = 8;
    // The first ones are of the half's round before, those of blocks after this one.
    const std::uint32_t others = plan_.group - 1, last = others - rank_;
    const uint4* const before = record(at.round - kHalves, rank_ + 1, c);
    const uint4* const now = record(at.round, 0, c) - last * kWidth;
#pragma unroll 1
    for (std::uint32_t first = 0; first < others; first += kAtOnce) {
      uint4 found[kAtOnce];
      std::uint32_t missing = (1U << min(others - first, kAtOnce)) - 1U;
      if (at.round < kHalves && first < last) missing &= ~((1U << min(last - first, kAtOnce)) - 1U);
      while (missing != 0) {
#pragma unroll
        for (std::uint32_t k = 0; k < kAtOnce; ++k) {
          const std::uint32_t i = first + k;
          if ((missing >> k & 1U) != 0) found[k] = ptx::load_relaxed_quad((i < last ? before : now) + i * kWidth);
        }
#pragma unroll
        for (std::uint32_t k = 0; k < kAtOnce; ++k) {
          const std::uint32_t says = first + k < last ? at.round - kHalves + 1 : at.round + 1;
          if ((missing >> k & 1U) != 0 && found[k].x == says) missing &= ~(1U << k);
        }
        if (missing != 0) ptx::spin_briefly();
      }
      __syncwarp();
#pragma unroll
      for (std::uint32_t k = 0; k < kAtOnce; ++k) {
        // Of this column: its tile is that many before the block's.
        const std::uint32_t back = others - (first + k);
        if (first + k < others && back <= at.chunk) state = Op::advance(state, Op::get_total(found[k]));
      }
    }
    return state;
  }
  /// Leaves the group's records as they were found, when nobody reads them any more.
  __device__ void clear() const {
    __syncwarp();
    std::uint32_t before = 0;
    const std::uint32_t warps = plan_.group * kChains * kHalves;
    if (threadIdx.x % 32 == 0) before = ptx::add_acq_rel(plan_.done + group_, 1);
    if (__shfl_sync(0xffffffffU, before, 0) + 1 != warps) return;
    __syncwarp();  // a shuffle orders no memory
    uint4* const all = record(0, 0, 0);
    for (std::uint32_t i = threadIdx.x % 32; i < kSlots * plan_.group * kWidth; i += 32)
      all[i] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x % 32 == 0) plan_.done[group_] = 0;
  }

  /// Its inputs are read while the states are awaited.
  __device__ void finish(const Walk& at) const {
    const std::uint32_t stage = at.stage();
    const ScanPlace p = place(at);
    ptx::mbarrier_wait(come_ + stage, at.phase());
    Thread thread;
    std::uint32_t loaded = read(stage, thread);
    ptx::mbarrier_wait(states_ + stage, at.phase());
    Pair state[kVec];
#pragma unroll
    for (int v = 0; v < kVec; ++v) {
      state[v] = own_pairs(stage)[v];
      loaded |= __float_as_uint(state[v].x);
    }
    ptx::mbarrier_arrive_after(free_ + stage, loaded);
    if (p.count != 0) thread.template emit<true>(op_, p, state);
  }

  __device__ std::uint32_t read(std::uint32_t stage, Thread& thread) const {
    return take_boxes<Op, kVec>(inputs_ + stage * kStageWords + row() * kTimes * kLanes, kBoxWords, lane(), thread);
  }

  /// Channel c of a tile's column in carry_in and carry_out, or -1.
  __device__ std::int64_t channel(const Walk& at, int c) const {
    const std::uint32_t channel = at.channel + static_cast<std::uint32_t>(c);
    return channel < plan_.dim ? std::int64_t{at.sequence} * plan_.dim + channel : -1;
  }
  __device__ ScanPlace place(const Walk& at) const {
    const std::uint32_t batch = at.sequence / plan_.heads;
    return place_in<kTimes>(plan_, batch, at.sequence - batch * plan_.heads,
                            at.channel + static_cast<std::uint32_t>(lane() * kVec),
                            std::int64_t{at.chunk} * kRows + row());
  }

  const Op& op_;
  const ScanColumnPlan& plan_;
  const Maps& maps_;
  const std::uint32_t group_;  // the block's, of the launch
  const std::uint32_t rank_;   // the block's, in its group
  std::uint32_t* const inputs_;
  Pair* const pairs_;
  uint4* const totals_;
  Carry* const starts_;
  std::uint64_t* const come_;
  std::uint64_t* const segments_;
  std::uint64_t* const states_;
  std::uint64_t* const free_;
  std::uint64_t* const summed_;
};

}  // namespace mmrec::kernels
