// Tiles of a scan that wait in shared memory (sm_90): a ring of kStages boxes that are read twice.
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
#pragma once

#include <cstdint>

#include "kernels/cuda/scan/tile.cuh"

namespace mmrec::kernels {

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
    read(stage, thread);
    ptx::mbarrier_arrive(free_ + stage);
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
    }
  }

  __device__ void read(std::uint32_t stage, Thread& thread) const {
    take_boxes<Op, kVec>(inputs_ + stage * stage_words() + row_ * kTimes * plan_.lanes, box_words(), lane_, thread);
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
