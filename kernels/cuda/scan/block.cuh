// How a block works off tiles of a scan: in registers (ScanBlock) or in a ring in shared memory (ScanRing, sm_90).
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/scan/tile.cuh"

namespace mmrec::kernels {

// --- Tiles of a scan that wait in registers: a thread reads its times once and keeps them until it writes.
//
// A barrier in shared memory for each step of a round, whose phase is the round: the rows' segments are there (an
// arrival of each thread of the rows), the states before the rows are there (one of each of the chains, all of which
// wait for the others). A thread that has seen the states of a round may read the tile of the next one. A set of
// segments is written again two rounds later: by a warp that has seen the states of the round between, which the chains
// gave after all rows had read this one's.

inline constexpr std::size_t kScanAhead = std::size_t{200} << 10;  // bytes of inputs on their way, a multiprocessor
/// Blocks of a multiprocessor, by how many registers a thread keeps its part of a tile in.
constexpr int scan_blocks(int kept) { return kept <= 32 ? 3 : 2; }

/// kAhead: inputs come through shared memory, asked for ahead of time.
template <class Op, int kVec, bool kAhead>
class ScanBlock : ScanWork<Op, kVec> {
  using Work = ScanWork<Op, kVec>;
  using typename Work::T;
  using typename Work::Thread;
  using Maps = ScanMaps<Op::kInputs>;
  using Work::box_words, Work::chains, Work::hand_on, Work::lane_, Work::locate, Work::op_, Work::place, Work::plan_,
      Work::position, Work::row_, Work::stage_words, Work::threads, Work::width;
  static constexpr int kTimes = Op::kTimes;
  static constexpr std::size_t kStageBytes = Op::kInputs * kScanThreads * kTimes * sizeof(std::uint32_t);

 public:
  static constexpr int kBlocks = scan_blocks(Thread::kKept * kTimes);
  static constexpr int kMoreThreads = 0;
  static constexpr unsigned kChainSets = 1;
  static constexpr int kTilesAhead = 1;
  static constexpr std::uint32_t kLeastWindow = 4;
  static constexpr std::uint32_t kStages = kAhead ? std::max<std::size_t>(kScanAhead / kBlocks / kStageBytes, 1) : 1;

  /// Shared memory of a block, in bytes: inputs [stage][input][time][lane], two sets of segments, barriers and tiles.
  static constexpr std::size_t shared_bytes(int threads) {
    const auto vectors = static_cast<std::size_t>(threads);
    return (kAhead ? kBoxAlignment + kStages * Op::kInputs * vectors * kTimes * sizeof(std::uint32_t) : 0) +
           2 * vectors * kVec * sizeof(Pair) + (kStages + 2) * sizeof(std::uint64_t) + kTiles * sizeof(ScanTile);
  }

  __device__ ScanBlock(const Op& op, const ScanPlan& plan, const Maps& maps)
      : Work(op, plan),
        maps_(maps),
        inputs_(kAhead ? scan_boxes() : ptx::shared_memory<std::uint32_t>()),
        pairs_(reinterpret_cast<Pair*>(inputs_ + (kAhead ? kStages * stage_words() : 0))),
        inputs_come_(reinterpret_cast<std::uint64_t*>(pairs_ + 2 * threads() * kVec)),
        segments_(inputs_come_ + kStages),
        states_(segments_ + 1),
        tiles_(reinterpret_cast<ScanTile*>(states_ + 1)) {}

  __device__ void run() {
    const int first = static_cast<int>(threadIdx.x) - threads();
    if (first == 0) start();
    __syncthreads();
    if (first < 0) {
      run_rows();
    } else {
      run_chain(first / 32 * 32, first % 32);
    }
  }

 private:
  static constexpr std::uint32_t kTiles = 8;
  static_assert(kStages < kTiles);

  /// Barriers and the first tiles, by the thread that asks for tiles.
  __device__ void start() {
    for (std::uint32_t i = 0; i < kStages; ++i) ptx::mbarrier_init(inputs_come_ + i, 1);
    ptx::mbarrier_init(segments_, static_cast<unsigned>(threads()));
    ptx::mbarrier_init(states_, 32 * chains());
    if constexpr (kAhead) ptx::mbarrier_init_fence();
    next_ = this->first_ticket();
    for (std::uint32_t round = 0; round < kStages; ++round) ask(round, locate(next_));
  }

  /// The threads that own times and channels: tile after tile, from the read to the write.
  __device__ void run_rows() {
    for (std::uint32_t round = 0; plan_.tiles > tile(round).index; ++round) {
      // What follows from these two is computed anew for each tile: in registers it would leave too few for the inputs.
      ptx::forget(row_);
      ptx::forget(lane_);
      if constexpr (kAhead) ptx::mbarrier_wait(inputs_come_ + round % kStages, round / kStages & 1U);
      Thread thread;
      read(place(tile(round)), round % kStages, thread);
      Pair mine[kVec];
      thread.reduce(mine);
#pragma unroll
      for (int v = 0; v < kVec; ++v) pairs(round)[position(v)] = mine[v];
      ptx::mbarrier_arrive(segments_);
      ptx::mbarrier_wait(states_, round & 1U);
      ptx::forget(round);  // and with it its addresses
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
    for (std::uint32_t round = 0; plan_.tiles > tile(round).index; ++round) {
      const ScanTile t = tile(round);
      const ScanChain<Op> chain(plan_.chains, t.column * chains() + static_cast<std::uint32_t>(first / 32), lane);
      chain.wait_for_records(t.chunk);
      const ScanTile coming = locate(next_);
      ptx::mbarrier_wait(segments_, round & 1U);
      if (asks) ask(round + kStages, coming);
      __syncwarp();
      hand_on(chain, t, pairs(round), first + lane);
      ptx::mbarrier_arrive(states_);
      chain.finish(t.chunk);
      ptx::mbarrier_wait(states_, round & 1U);
    }
  }

  /// Segments, then states, of a round's rows [row][channel]: the round before's may still be read.
  __device__ Pair* pairs(std::uint32_t round) const {
    return pairs_ + round % 2 * static_cast<std::uint32_t>(threads() * kVec);
  }
  /// Of the block's round: those of the rounds to come are known as far as they have been asked for.
  __device__ ScanTile& tile(std::uint32_t round) const { return tiles_[round % kTiles]; }

  /// Gives a round its tile, asks for its inputs and draws a ticket for the next one, which nobody waits for here; one
  /// thread does.
  __device__ void ask(std::uint32_t round, const ScanTile& t) {
    tile(round) = t;
    if (t.index >= plan_.tiles) return this->drawn_in_vain(t.index);
    if constexpr (kAhead) {
      this->load_boxes(maps_, t, inputs_ + round % kStages * stage_words(), inputs_come_ + round % kStages);
    }
    next_ = this->next_ticket();
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
          x[n][i].data = here[swapped_word(lane_, n)];
        } else {
          x[n][i].load(from);
          from += op_.in[i].time_stride;
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kTimes; ++n) thread.take(n, x[n]);
  }

  const Maps& maps_;
  std::uint32_t* const inputs_;
  Pair* const pairs_;
  std::uint64_t* const inputs_come_;
  std::uint64_t* const segments_;
  std::uint64_t* const states_;
  ScanTile* const tiles_;
  std::uint32_t next_ = 0;  // the tile to ask for next, known to one thread
};

// --- Tiles of a scan that wait in shared memory (sm_90): a ring of kStages boxes that are read twice.
//
// One block a multiprocessor. A thread that does nothing else draws tickets and has the copy engine fill the stages of
// the ring as they become free. The warps of the rows reduce a tile as soon as it has come, and keep nothing of it in
// registers; kLag tiles later they read the stage once more, give it back and write the outputs. The tiles between have
// a set of chain warps each, so finding a carry may take the time of kLag tiles, and the total of a tile is published
// although the carry before the last one is still awaited. kStages - kLag - 1 stages and more are always on their way:
// 64 to 96 KiB a multiprocessor, 8 to 12 MB in all, where a memory of 4 TB/s and 1.5 us needs 6 MB.
//
// All that belongs to a tile lies in its stage, the tile itself and the segments too, with four barriers whose phases
// number the stage's tiles. Each step reads and writes what the one before handed over:
//   come       the tile and its inputs (the producer, and the copy engine's bytes)
//   segments   the rows' segments (the threads of the rows)
//   states     the states before the rows, in their place (the threads of the set of chains)
//   free       nobody reads the stage any more (the threads of the rows)
// A block without a tile left hands over tiles past the last one, without inputs, one to each set of chains.
//
// Nobody waits in a circle: a stage's step waits for steps of earlier tiles of the block, and the chains for tiles of
// lower tickets.

template <class Op, int kVec>
class ScanRing : ScanWork<Op, kVec> {
  using Work = ScanWork<Op, kVec>;
  using typename Work::Thread;
  using Maps = ScanMaps<Op::kInputs>;
  using Work::box_words, Work::chains, Work::hand_on, Work::lane_, Work::locate, Work::op_, Work::place, Work::plan_,
      Work::position, Work::row_, Work::stage_words, Work::threads;
  static constexpr int kTimes = Op::kTimes;
  static constexpr std::uint32_t kStages = 6, kLag = 3;
  static_assert(Op::kReadsTwice && kLag + 1 < kStages);

 public:
  static constexpr int kBlocks = 1;
  static constexpr int kMoreThreads = 32;  // the producer's warp
  static constexpr unsigned kChainSets = kLag;
  static constexpr int kTilesAhead = kLag + 1;
  static constexpr std::uint32_t kLeastWindow = 8;

  /// Shared memory of a block, in bytes: inputs [stage][input][time][lane], segments, barriers and tiles of all stages.
  static constexpr std::size_t shared_bytes(int threads) {
    const auto vectors = static_cast<std::size_t>(threads);
    return kBoxAlignment + kStages * (Op::kInputs * vectors * kTimes * sizeof(std::uint32_t) +
                                      vectors * kVec * sizeof(Pair) + 4 * sizeof(std::uint64_t) + sizeof(ScanTile));
  }
  static_assert(shared_bytes(kScanThreads) <= std::size_t{227} << 10);

  __device__ ScanRing(const Op& op, const ScanPlan& plan, const Maps& maps)
      : Work(op, plan),
        maps_(maps),
        inputs_(scan_boxes()),
        pairs_(reinterpret_cast<Pair*>(inputs_ + kStages * stage_words())),
        come_(reinterpret_cast<std::uint64_t*>(pairs_ + kStages * static_cast<unsigned>(threads()) * kVec)),
        segments_(come_ + kStages),
        states_(segments_ + kStages),
        free_(states_ + kStages),
        tiles_(reinterpret_cast<ScanTile*>(free_ + kStages)) {}

  __device__ void run() {
    if (threadIdx.x == 0) {
      for (std::uint32_t i = 0; i < kStages; ++i) {
        ptx::mbarrier_init(come_ + i, 1);
        ptx::mbarrier_init(segments_ + i, static_cast<unsigned>(threads()));
        ptx::mbarrier_init(states_ + i, 32 * chains());
        ptx::mbarrier_init(free_ + i, static_cast<unsigned>(threads()));
      }
      ptx::mbarrier_init_fence();
    }
    __syncthreads();
    const int past = static_cast<int>(threadIdx.x) - threads();
    const unsigned chain = static_cast<unsigned>(past) / 32;
    if (past < 0) {
      run_rows();
    } else if (chain < chains() * kChainSets) {
      run_chain(chain / chains(), chain % chains(), past % 32);
    } else if (past % 32 == 0) {
      produce();
    }
  }

 private:
  static __device__ std::uint32_t phase(std::uint32_t round) { return round / kStages & 1U; }
  __device__ Pair* pairs(std::uint32_t stage) const {
    return pairs_ + stage * static_cast<std::uint32_t>(threads() * kVec);
  }

  __device__ void produce() const {
    std::uint32_t ticket = this->first_ticket();
    std::uint32_t past_last = 0;
    for (std::uint32_t round = 0;; ++round) {
      const std::uint32_t stage = round % kStages;
      const ScanTile t = locate(ticket);
      if (round >= kStages) ptx::mbarrier_wait(free_ + stage, phase(round - kStages));
      tiles_[stage] = t;
      if (t.index < plan_.tiles) {
        this->load_boxes(maps_, t, inputs_ + stage * stage_words(), come_ + stage);
        ticket = this->next_ticket();
        continue;
      }
      ptx::mbarrier_arrive(come_ + stage);
      if (++past_last == kChainSets) return this->drawn_in_vain(ticket);
    }
  }

  __device__ void run_rows() {
    std::uint32_t taken = 0;
    bool more = true;
    for (std::uint32_t round = 0;; ++round) {
      if (more) more = take(round);
      if (more) ++taken;
      if (round < kLag) continue;
      if (round - kLag == taken) return;
      finish(round - kLag);
    }
  }
  /// Reduces a round's tile, if it has one.
  __device__ bool take(std::uint32_t round) const {
    const std::uint32_t stage = round % kStages;
    ptx::mbarrier_wait(come_ + stage, phase(round));
    if (tiles_[stage].index >= plan_.tiles) return false;
    Thread thread;
    read(stage, thread);
    Pair mine[kVec];
    thread.reduce(mine);
#pragma unroll
    for (int v = 0; v < kVec; ++v) pairs(stage)[position(v)] = mine[v];
    ptx::mbarrier_arrive(segments_ + stage);
    return true;
  }
  /// Writes its outputs.
  __device__ void finish(std::uint32_t round) const {
    const std::uint32_t stage = round % kStages;
    ptx::mbarrier_wait(states_ + stage, phase(round));
    const ScanPlace p = place(tiles_[stage]);
    Pair state[kVec];
#pragma unroll
    for (int v = 0; v < kVec; ++v) state[v] = pairs(stage)[position(v)];
    Thread thread;
    std::uint32_t loaded = read(stage, thread);
#pragma unroll
    for (int v = 0; v < kVec; ++v) loaded |= __float_as_uint(state[v].x);
    ptx::mbarrier_arrive_after(free_ + stage, loaded);
    if (p.count != 0) thread.emit(op_, p, state);
  }

  /// A warp that looks after 32 channels of the tiles of every kChainSets-th round.
  __device__ void run_chain(unsigned set, unsigned number, int lane) const {
    for (std::uint32_t round = set;; round += kChainSets) {
      const std::uint32_t stage = round % kStages;
      ptx::mbarrier_wait(come_ + stage, phase(round));
      const ScanTile t = tiles_[stage];
      if (t.index >= plan_.tiles) return;
      const ScanChain<Op> chain(plan_.chains, t.column * chains() + number, lane);
      chain.wait_for_records(t.chunk);
      ptx::mbarrier_wait(segments_ + stage, phase(round));
      hand_on(chain, t, pairs(stage), static_cast<int>(number) * 32 + lane);
      ptx::mbarrier_arrive(states_ + stage);
      chain.finish(t.chunk);
    }
  }

  __device__ std::uint32_t read(std::uint32_t stage, Thread& thread) const {
    return take_boxes<Op, kVec>(inputs_ + stage * stage_words() + row_ * kTimes * plan_.lanes, box_words(), lane_,
                                thread);
  }

  const Maps& maps_;
  std::uint32_t* const inputs_;
  Pair* const pairs_;
  std::uint64_t* const come_;
  std::uint64_t* const segments_;
  std::uint64_t* const states_;
  std::uint64_t* const free_;
  ScanTile* const tiles_;
};

}  // namespace mmrec::kernels
