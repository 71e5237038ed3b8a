// Columns of a scan that belong to blocks (sm_90), one block on a multiprocessor.
//
// A block takes a column of 32 words through all of time, tile after tile, then its next column, and hands the states
// on to itself. Or the blocks of a group, up to eight, share a column, a tile each in turn, a round; all are resident
// (a cooperative launch), tell each other the totals of their tiles by records in memory, which stay in L2, and each of
// them carries the column's state along through all totals.
//
// Warps of five kinds pass tiles on through a ring of kStages stages in shared memory. A tile is brought once and read
// twice; nothing of it stays in registers. Each step reads and writes what the one before handed over, by a barrier of
// the stage whose phases number the stage's tiles:
//   fetch    one thread has the copy engine bring the inputs, as soon as a stage is free           -> come
//   reduce   8 warps reduce their times to segments                                                -> segments
//   sum      a warp for 32 channels adds up the rows' segments to the tile's total, publishes it   -> summed
//   carry    a warp for 32 channels advances the state over the totals, tile after tile, and puts
//            the states before the rows in place of their segments                                 -> passed, states
//   finish   8 warps run over their times once more, from the state before them, and write         -> free
//
// A record takes a microsecond and more to be seen, and as long to be read: more than a round may take. So a total is
// published when the inputs have come, long before the state that it is applied to is known, and kSets sets of carry
// warps take rounds in turn. A set asks for all totals between its block's tile before and its tile at once, keeps them
// in registers, and only then waits for the state of the round before (passed): what follows each other from round to
// round is one multiplication and addition a tile. A block alone has one set, which looks for nothing.
//
// Totals lie in kSlots slots, one for a round of the group. A block publishes a round's total after it has the states
// of kAhead rounds before, so it has read a total of each other block that is at most kAhead + 1 rounds old; those had
// published it after the states of kAhead rounds before that, hence read all totals that are 2 kAhead + 2 rounds old:
// nobody needs any more what the slot held. Blocks read totals past a column's end or before its begin for that, too. A
// record is 16 bytes, written and read whole, and says its round, so it needs no fence. The last of a group's carry
// warps to end clears the group's records.
//
// Bytes in flight: six stages of 32 KiB, of which one or two are being worked on: 16 MB and more in all, where a memory
// of 4 TB/s and 1.5 us needs 6 MB. Nothing else needs L2, so the inputs are not marked to leave it first, which costs
// bandwidth (H200: 7 %).
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/cuda/scan_tile.cuh"

namespace mmrec::kernels {

/// How a launch is cut into columns.
struct ScanColumnPlan {
  std::int64_t time = 0;
  std::uint32_t heads = 1, dim = 0;
  std::uint32_t row_columns = 0;  // columns of one sequence
  std::uint32_t columns = 0;
  std::uint32_t chunks = 0;       // tiles of a column
  std::uint32_t group = 1;        // blocks of a group
  std::uint32_t* done = nullptr;  // zero, [group]: carry warps that have ended
  uint4* records = nullptr;       // zeros, [group][slot][block][channel]
};

inline constexpr std::uint32_t kMostColumnGroup = 8;   // blocks of a group at most
inline constexpr std::uint32_t kSharedColumnSets = 3;  // sets of carry warps of a block that shares its column

template <class Op, int kVec, std::uint32_t kSets>
class ScanColumns {
  using T = typename Op::Element;
  using Thread = typename Op::template Thread<kVec>;
  using Total = typename Op::Total;
  using Carry = typename Op::Carry;
  using Maps = ScanMaps<Op::kInputs>;
  static constexpr int kTimes = Op::kTimes, kWarps = kScanThreads / 32;
  static constexpr int kLanes = 32, kRows = kScanThreads / kLanes, kChains = kVec;
  static constexpr std::size_t kAlignment = 1024;  // of the swizzle's pattern
  static constexpr std::uint32_t kBoxWords = kScanThreads * kTimes, kStageWords = Op::kInputs * kBoxWords;
  static constexpr std::uint32_t kStages = 6, kAhead = 4, kSlots = 2 * kAhead + 2;
  static_assert(Op::kReadsTwice && kAhead < kStages);

 public:
  static constexpr int kWidth = kLanes * kVec;                                         // channels of a column
  static constexpr int kChunk = kRows * kTimes;                                        // times of a tile
  static constexpr int kThreads = 2 * kScanThreads + (1 + kSets) * 32 * kChains + 32;  // of a block
  /// Words that are zero between launches: counters of the groups, then records, for so many blocks.
  static constexpr std::int64_t kWordsOfDone = 1024;
  static constexpr std::int64_t flag_words(std::int64_t blocks) { return kWordsOfDone + blocks * 4 * kSlots * kWidth; }

  /// Shared memory of a block, in bytes: inputs [stage][input][time][lane], segments [stage][row][channel], of kAhead
  /// rounds the block's own totals and the carry before the column [round][channel], the states after rounds
  /// [set][channel], barriers.
  static constexpr std::size_t kSharedBytes =
      kAlignment + kStages * (kStageWords * sizeof(std::uint32_t) + kRows * kWidth * sizeof(Pair)) +
      kAhead * kWidth * (sizeof(uint4) + sizeof(Carry)) + kSets * kWidth * sizeof(Carry) +
      (4 * kStages + kAhead + kSets) * sizeof(std::uint64_t);
  static_assert(kSharedBytes <= std::size_t{227} << 10);

  __device__ ScanColumns(const Op& op, const ScanColumnPlan& plan, const Maps& maps)
      : op_(op),
        plan_(plan),
        maps_(maps),
        group_(blockIdx.x / plan.group),
        rank_(blockIdx.x % plan.group),
        inputs_(boxes()),
        pairs_(reinterpret_cast<Pair*>(inputs_ + kStages * kStageWords)),
        totals_(reinterpret_cast<uint4*>(pairs_ + kStages * kRows * kWidth)),
        starts_(reinterpret_cast<Carry*>(totals_ + kAhead * kWidth)),
        carries_(starts_ + kAhead * kWidth),
        come_(reinterpret_cast<std::uint64_t*>(carries_ + kSets * kWidth)),
        segments_(come_ + kStages),
        states_(segments_ + kStages),
        free_(states_ + kStages),
        summed_(free_ + kStages),
        passed_(summed_ + kAhead) {}

  __device__ void run() const {
    if (threadIdx.x == 0) make_barriers();
    __syncthreads();
    ptx::wait_for_predecessor();
    ptx::allow_successor();
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int past = warp - 2 * kWarps;
    if (warp < kWarps) {
      for (Walk at(*this); at.inside(); at.next()) reduce(at);
    } else if (past < 0) {
      for (Walk at(*this); at.inside(); at.next()) finish(at);
    } else if (past < kChains) {
      for (Walk at(*this); at.inside(); at.next()) sum(at, past * 32 + lane);
    } else if (past < static_cast<int>(1 + kSets) * kChains) {
      const int set = past / kChains - 1, c = past % kChains * 32 + lane;
      for (Walk at(*this); at.inside(); at.next()) {
        if (at.round % kSets == static_cast<std::uint32_t>(set)) carry(at, c);
      }
      if (plan_.group > 1) clear();
    } else if (lane == 0) {
      for (Walk at(*this); at.inside(); at.next()) fetch(at);
    }
  }

 private:
  /// A block's tiles in its order. All blocks of a group have as many rounds; the last chunks of a column may lie
  /// past its end.
  struct Walk {
    const ScanColumns& block;
    std::uint32_t round = 0, column, chunk, sequence = 0, channel = 0;

    __device__ explicit Walk(const ScanColumns& b) : block(b), column(b.group_) { begin(); }
    __device__ bool inside() const { return column < block.plan_.columns; }
    __device__ void next() {
      ++round;
      chunk += block.plan_.group;
      if (first_chunk() < block.plan_.chunks) return;
      column += gridDim.x / block.plan_.group;
      begin();
    }
    __device__ void begin() {
      chunk = block.rank_;
      sequence = column / block.plan_.row_columns;
      channel = (column - sequence * block.plan_.row_columns) * kWidth;
    }
    /// Of the round.
    __device__ std::uint32_t first_chunk() const { return chunk - block.rank_; }
    __device__ std::uint32_t stage() const { return round % kStages; }
    __device__ std::uint32_t phase() const { return round / kStages & 1U; }
    /// In shared memory, of what waits from sum to carry.
    __device__ std::uint32_t slot() const { return round % kAhead; }
  };

  static __device__ std::uint32_t* boxes() {
    auto* const shared = ptx::shared_memory<std::byte>();
    const std::size_t past = reinterpret_cast<std::uintptr_t>(shared) % kAlignment;
    return reinterpret_cast<std::uint32_t*>(shared + (kAlignment - past) % kAlignment);
  }
  __device__ void make_barriers() const {
    for (std::uint32_t i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(come_ + i, 1);
      ptx::mbarrier_init(segments_ + i, kScanThreads);
      ptx::mbarrier_init(states_ + i, kWidth);
      ptx::mbarrier_init(free_ + i, kScanThreads);
    }
    for (std::uint32_t i = 0; i < kAhead; ++i) ptx::mbarrier_init(summed_ + i, kWidth);
    for (std::uint32_t i = 0; i < kSets; ++i) ptx::mbarrier_init(passed_ + i, kWidth);
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

  __device__ void fetch(const Walk& at) const {
    const std::uint32_t stage = at.stage();
    if (at.round >= kStages) ptx::mbarrier_wait(free_ + stage, at.phase() ^ 1U);
    ptx::mbarrier_arrive_expect(come_ + stage, kStageWords * static_cast<std::uint32_t>(sizeof(std::uint32_t)));
#pragma unroll
    for (int i = 0; i < Op::kInputs; ++i) {
      ptx::load_box(inputs_ + stage * kStageWords + i * kBoxWords, &maps_.inputs[i], come_ + stage,
                    static_cast<int>(at.channel * (sizeof(T) / 2)), static_cast<int>(at.chunk) * kChunk,
                    static_cast<int>(at.sequence));
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
    Pair all = pairs(stage)[c];
#pragma unroll
    for (int row = 1; row < kRows; ++row) all = Op::combine(all, pairs(stage)[row * kWidth + c]);
    uint4 total = Op::put_total(Op::total(all));
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

  __device__ void carry(const Walk& at, int c) const {
    ptx::mbarrier_wait(summed_ + at.slot(), at.round / kAhead & 1U);
    Totals others;
    if constexpr (kSets > 1) others.gather(*this, at, c);
    const Total own = Op::get_total(totals_[at.slot() * kWidth + c]);
    const std::uint32_t before = at.round - 1, set = at.round % kSets;
    if (at.round != 0) ptx::mbarrier_wait(passed_ + before % kSets, before / kSets & 1U);
    Carry carry = at.first_chunk() == 0 ? starts_[at.slot() * kWidth + c] : carries_[before % kSets * kWidth + c];
    if constexpr (kSets > 1) carry = others.advance(carry, plan_.group, at.chunk);
    const Carry after = Op::advance(carry, own);
    carries_[set * kWidth + c] = after;
    ptx::mbarrier_arrive(passed_ + set);
    Pair* const here = pairs(at.stage()) + c;
    Pair state = Op::state(carry);
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const Pair segment = here[row * kWidth];
      here[row * kWidth] = state;
      state = Op::advance(state, segment);
    }
    ptx::mbarrier_arrive(states_ + at.stage());
    if (at.chunk + 1 == plan_.chunks) op_.store(channel(at, c), after);
  }
  /// The totals of the other blocks' tiles between the block's tile of the round before and its tile of a round, in
  /// order of time.
  struct Totals {
    static constexpr std::uint32_t kMost = kMostColumnGroup - 1;
    uint4 found[kMost];

    /// All are asked for at once, again and again those that have not come.
    __device__ void gather(const ScanColumns& block, const Walk& at, int c) {
      // The first ones are of the round before, those of blocks after this one.
      const std::uint32_t group = block.plan_.group, last = group - 1 - block.rank_;
      const uint4* const before = block.record(at.round - 1, block.rank_ + 1, c);
      const uint4* const now = block.record(at.round, 0, c) - last * kWidth;
      std::uint32_t missing = (1U << (group - 1)) - 1U;
      if (at.round == 0) missing &= ~((1U << last) - 1U);
      while (missing != 0) {
#pragma unroll
        for (std::uint32_t i = 0; i < kMost; ++i) {
          if ((missing >> i & 1U) != 0) found[i] = ptx::load_relaxed_quad((i < last ? before : now) + i * kWidth);
        }
#pragma unroll
        for (std::uint32_t i = 0; i < kMost; ++i) {
          const std::uint32_t says = i < last ? at.round : at.round + 1;
          if ((missing >> i & 1U) != 0 && found[i].x == says) missing &= ~(1U << i);
        }
        if (missing != 0) ptx::spin_briefly();
      }
      __syncwarp();
    }
    /// Over those of the column of the block's tile `chunk`.
    __device__ Carry advance(Carry carry, std::uint32_t group, std::uint32_t chunk) const {
#pragma unroll
      for (std::uint32_t i = 0; i < kMost; ++i) {
        if (i + 1 < group && chunk + i + 1 >= group) carry = Op::advance(carry, Op::get_total(found[i]));
      }
      return carry;
    }
  };
  /// Leaves the group's records as they were found, when nobody reads them any more.
  __device__ void clear() const {
    __syncwarp();
    std::uint32_t before = 0;
    const std::uint32_t warps = plan_.group * kChains * kSets;
    if (threadIdx.x % 32 == 0) before = ptx::add_acq_rel(plan_.done + group_, 1);
    if (__shfl_sync(0xffffffffU, before, 0) + 1 != warps) return;
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
    read(stage, thread);
    ptx::mbarrier_wait(states_ + stage, at.phase());
    Pair state[kVec];
#pragma unroll
    for (int v = 0; v < kVec; ++v) state[v] = own_pairs(stage)[v];
    ptx::mbarrier_arrive(free_ + stage);
    if (p.count != 0) thread.template emit<true>(op_, p, state);
  }

  /// What lies outside of the operands has come as zeros, the identity. The copy engine has swapped pieces of 4 words:
  /// that of lane 4 k is where k ^ (time % 8) says.
  __device__ void read(std::uint32_t stage, Thread& thread) const {
    Channels<T, kVec> x[kTimes][Op::kInputs];
    const std::uint32_t* const here = inputs_ + stage * kStageWords + row() * kTimes * kLanes;
#pragma unroll
    for (int n = 0; n < kTimes; ++n) {
#pragma unroll
      for (int i = 0; i < Op::kInputs; ++i) x[n][i].data = here[i * kBoxWords + n * kLanes + (lane() ^ (n % 8 * 4))];
    }
#pragma unroll
    for (int n = 0; n < kTimes; ++n) thread.take(n, x[n]);
  }

  /// Channel c of a tile's column in carry_in and carry_out, or -1.
  __device__ std::int64_t channel(const Walk& at, int c) const {
    const std::uint32_t channel = at.channel + static_cast<std::uint32_t>(c);
    return channel < plan_.dim ? std::int64_t{at.sequence} * plan_.dim + channel : -1;
  }
  __device__ ScanPlace place(const Walk& at) const {
    ScanPlace p;
    p.batch = at.sequence / plan_.heads;
    p.head = at.sequence - p.batch * plan_.heads;
    p.channel = at.channel + static_cast<std::uint32_t>(lane() * kVec);
    p.time = (std::int64_t{at.chunk} * kRows + row()) * kTimes;
    const bool inside = p.channel < plan_.dim && p.time < plan_.time;
    p.count = inside ? static_cast<int>(min(plan_.time - p.time, std::int64_t{kTimes})) : 0;
    return p;
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
  Carry* const carries_;
  std::uint64_t* const come_;
  std::uint64_t* const segments_;
  std::uint64_t* const states_;
  std::uint64_t* const free_;
  std::uint64_t* const summed_;
  std::uint64_t* const passed_;
};

}  // namespace mmrec::kernels
