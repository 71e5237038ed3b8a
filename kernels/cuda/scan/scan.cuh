// The skeleton of the scans over time: every input is read once and every output written once, in one pass.
//
// Ownership. [batch, heads, time, dim] is cut into tiles of `rows` x kTimes times by `lanes` x kVec channels. A
// block of up to 256 threads and the warps of the chains works tile after tile. A thread owns one word of 32 bits, kVec
// adjacent channels, at kTimes consecutive times; a row of `lanes` threads covers adjacent channels, the rows of the
// block follow each other in time. Warps and the copy engine hand tiles over by barriers in shared memory. Wide
// operands take 32 lanes x 8 rows: 128 contiguous bytes by 128 or 256 times; narrow ones fewer lanes and more rows, up
// to 1,024 times. Tiles are narrow and long because all that is done between tiles is done once a channel and tile.
// Where alignment does not allow words or the copy engine, the same arithmetic runs in the same order on what scalar
// accesses bring: the same bits.
//
// A tile in four steps:
//  1. Each thread reduces its times to a segment of the operator's monoid.
//  2. A warp of its own for 32 channels, a lane a channel, adds up the rows' segments and publishes the tile's total.
//  3. The same warp finds the state before the tile by looking back (chain.cuh) and carries it down the rows.
//  4. Each thread runs over its times once more, from the state before them, and writes.
// The warps of the chains hold no inputs, so looking back has registers of its own, and they issue no other stores.
//
// Bytes in flight. On devices that have it (sm_90) the copy engine brings the inputs of a tile into shared memory, a
// box of an input by one instruction, ahead of time: up to 192 KiB a multiprocessor, 25 MB in all, where a memory of
// 4 TB/s and 1.5 us needs 6 MB. choose_scan chooses the algorithm: what was computed of the inputs waits in
// registers, in two or three blocks a multiprocessor, and as soon as a tile is in registers its place in shared memory
// is given to one of the tiles to come (block.cuh); or the inputs wait in shared memory and are read twice, in one
// block (ScanRing there); or a column belongs to a block or to a group of them, which carry its state along instead of
// looking back (columns.cuh). Where there is no copy engine, or operands do not suit it, all times of a thread are
// loaded into registers at once. All algorithms compute the same bits.
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
#include <optional>
#include <stdexcept>
#include <type_traits>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/rows/rows.cuh"
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/cuda/runtime/launch.cuh"
#include "kernels/cuda/runtime/tensor_map.h"
#include "kernels/cuda/scan/algo.h"
#include "kernels/cuda/scan/block.cuh"
#include "kernels/cuda/scan/columns.cuh"

namespace mmrec::kernels {

inline constexpr int kScanChunk = 1024;  // times of one tile at most
/// Words across up to which more than a window of a chain is in work at once.
inline constexpr std::int64_t kLongChains = 128;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr bool kHasCopyEngine = false;
#else
inline constexpr bool kHasCopyEngine = true;
#endif

/// kStaged: the copy engine brings the inputs, else threads load them.
template <class Op, int kVec, bool kStaged>
using ScanBlockOf = std::conditional_t<kStaged && Op::kReadsTwice, ScanRing<Op, kVec>, ScanBlock<Op, kVec, kStaged>>;

template <class Op, int kVec, bool kStaged>
__global__ void __launch_bounds__(kScanThreads + 32 * kVec * ScanBlockOf<Op, kVec, kStaged>::kChainSets +
                                      ScanBlockOf<Op, kVec, kStaged>::kMoreThreads,
                                  ScanBlockOf<Op, kVec, kStaged>::kBlocks)
    scan_kernel(const __grid_constant__ Op op, const __grid_constant__ ScanPlan plan,
                const __grid_constant__ ScanMaps<Op::kInputs> maps) {
  if constexpr (!kStaged || kHasCopyEngine) {
    ptx::wait_for_predecessor();
    ptx::allow_successor();
    ScanBlockOf<Op, kVec, kStaged>(op, plan, maps).run();
  }
}

template <class Op, int kVec, int kHalves>
__global__ void __launch_bounds__(ScanColumns<Op, kVec, kHalves>::kThreads, 1)
    scan_columns_kernel(const __grid_constant__ Op op, const __grid_constant__ ScanColumnPlan plan,
                        const __grid_constant__ ScanMaps<Op::kInputs> maps) {
  if constexpr (kHasCopyEngine) ScanColumns<Op, kVec, kHalves>(op, plan, maps).run();
}

// ---------------------------------------------------------------------------------------------------------------------
// Host
// ---------------------------------------------------------------------------------------------------------------------

/// True if words at all multiples of 4 bytes of channels are aligned.
template <class T>
bool takes_scan_words(const SequenceView<T, Device>& v) {
  const auto strides = static_cast<std::uintptr_t>(v.batch_stride | v.head_stride | v.time_stride);
  return (reinterpret_cast<std::uintptr_t>(v.data) | strides * sizeof(T)) % 4 == 0;
}

/// Makes heads that lie next to each other in all operands channels of one head.
template <class Op>
void join_heads(Op& op) {
  bool adjacent = true;
  op.each_view([&](const auto& view) { adjacent = adjacent && (view.heads == 1 || view.head_stride == view.dim); });
  if (adjacent) op.each_view([](auto& view) { view.dim *= view.heads, view.heads = 1; });
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

/// Maps of the inputs for boxes of `rows` times; `wide` as make_tensor_map says.
template <class Op>
ScanMaps<Op::kInputs> scan_maps(const Op& op, int rows, bool wide) {
  ScanMaps<Op::kInputs> maps;
  for (int i = 0; i < Op::kInputs; ++i) maps.inputs[i] = make_tensor_map(scan_stack(op.in[i]), rows, 1, wide);
  return maps;
}

/// The cut into tiles. Rows follow from the shape of one sequence and from T alone: they decide the bits.
template <class Op>
ScanPlan scan_plan(const Op& op, int vec) {
  using T = typename Op::Element;
  const auto& shape = op.in[0];
  if (shape.batch >> 31 != 0 || shape.heads >> 31 != 0 || shape.dim >> 31 != 0) {
    throw std::invalid_argument("scan: a size beyond 2^31");
  }
  const auto power = [](std::int64_t x) { return std::bit_ceil(static_cast<std::uint64_t>(x)); };
  const std::int64_t words = ceil_div(shape.dim * static_cast<std::int64_t>(sizeof(T)), 4);
  const auto times = static_cast<std::uint64_t>(std::max<std::int64_t>(ceil_div(shape.time, Op::kTimes), 1));
  std::uint64_t rows = kScanThreads / power(std::min<std::int64_t>(words, 32));
  rows = std::min({rows, std::uint64_t{kScanChunk / Op::kTimes}, std::bit_ceil(times)});
  const std::uint64_t lanes = std::min({kScanThreads / rows, power(ceil_div(shape.dim, vec)), std::uint64_t{32}});

  ScanPlan plan;
  plan.sequences = shape.batch * shape.heads;
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

template <class Op, int kVec, bool kStaged>
void launch_scan(Cuda& cuda, const Op& op, ScanPlan plan) {
  using Block = ScanBlockOf<Op, kVec, kStaged>;
  // Words between the counter and the records, which are written 16 bytes at a time.
  constexpr std::int64_t kFirstRecord = 32, kRecordWords = sizeof(uint4) / sizeof(std::uint32_t);
  const int threads = std::max(plan.lanes * plan.rows, 32);
  const std::int64_t width = plan.lanes * kVec, chains = ceil_div(width, 32);
  const std::int64_t all = plan.sequences * plan.row_columns;
  if (all >> 31 != 0) throw std::invalid_argument("scan: more than 2^31 columns of channels");
  const std::int64_t most_blocks = std::int64_t{cuda.processors()} * (Block::kBlocks * kScanThreads / threads);

  // As far back as carries are looked for, one a set of chain warps, spread over the columns; records for as many tiles
  // as may be in work.
  const std::int64_t columns_at_once = std::max<std::int64_t>(all, 1) * plan.chains.group;
  plan.chains.window = static_cast<std::uint32_t>(std::clamp<std::int64_t>(
      most_blocks * Block::kChainSets / columns_at_once + 2, Block::kLeastWindow, kScanWindow));
  std::int64_t ring = 2 * std::int64_t{plan.chains.window};
  if (Block::kTilesAhead > 1) {
    ring = std::max(ring, plan.chains.window + 2 * (most_blocks * Block::kTilesAhead / columns_at_once + 2));
  }
  plan.chains.ring = std::bit_ceil(static_cast<std::uint32_t>(std::min<std::int64_t>(ring, plan.chains.chunks)));
  plan.chains.width = static_cast<std::uint32_t>(std::min<std::int64_t>(width, 32));
  plan.counter = cuda.flags();
  plan.chains.records = reinterpret_cast<uint4*>(cuda.flags() + kFirstRecord);

  LaunchConfig config = overlapping(cuda, {}, dims(threads + 32 * chains * Block::kChainSets + Block::kMoreThreads));
  config.shared_bytes = Block::shared_bytes(threads);
  // In a ring: what lies beside the rows of a tile is another block's, and may leave L2 before that wants it.
  constexpr bool kWide = !Op::kReadsTwice;
  const auto maps = kStaged ? scan_maps(op, plan.rows * Op::kTimes, kWide) : ScanMaps<Op::kInputs>{};

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
    config.grid.x = static_cast<unsigned>(std::min<std::int64_t>(plan.tiles, most_blocks));
    plan.tickets = plan.tiles > config.grid.x;
    launch(cuda.stream(), config, scan_kernel<Op, kVec, kStaged>, op, plan, maps);
  }
}

/// Columns of one launch, shared by groups of up to `most_group` blocks.
struct ScanColumnCut {
  ScanColumnPlan plan;
  std::int64_t groups = 0;  // at once; 0 where the shape has no such cut
  double share = 0.0;       // of the multiprocessors that is at work
};

template <class Op, int kVec, int kHalves>
ScanColumnCut cut_columns(const Cuda& cuda, const ScanPlan& cut, std::int64_t most_group) {
  using Block = ScanColumns<Op, kVec, kHalves>;
  constexpr double kLeastGain = 0.95;  // rounds of a larger group, of those of a smaller one
  constexpr double kLeastRounds = 16;  // of larger groups than two: their launch does not overlap its predecessor
  const std::int64_t row_columns = ceil_div(cut.row_columns, kHalves), columns = cut.sequences * row_columns;
  const std::int64_t chunks = cut.chains.chunks, blocks = cuda.processors();
  // Chains of a few words hand on in groups of chunks, which other bits come of.
  const bool fits = cut.dim > kLongChains * kVec && cut.rows * Op::kTimes == Block::kChunk && columns >> 31 == 0 &&
                    blocks <= Block::kWordsOfDone &&
                    Block::flag_words(blocks) <= static_cast<std::int64_t>(Cuda::kFlagWords);
  if (!fits) return {};

  ScanColumnCut to{.plan = {static_cast<const ScanExtent&>(cut)}};
  ScanColumnPlan& plan = to.plan;
  auto fewest = std::numeric_limits<double>::infinity();
  for (std::int64_t group = 1; group <= std::min({blocks, chunks, most_group}); group *= 2) {
    const std::int64_t at_once = std::min(columns, blocks / group);
    const auto rounds = static_cast<double>(ceil_div(columns, at_once) * ceil_div(chunks, group));
    if (rounds > kLeastGain * fewest || (group > 2 && rounds < kLeastRounds)) continue;
    fewest = rounds;
    to.groups = at_once;
    plan.group = static_cast<std::uint32_t>(group);
  }
  to.share =
      static_cast<double>(cut.sequences * cut.row_columns * chunks) / kHalves / (fewest * static_cast<double>(blocks));
  plan.row_columns = static_cast<std::uint32_t>(row_columns);
  plan.columns = static_cast<std::uint32_t>(columns);
  plan.chunks = cut.chains.chunks;
  plan.in_flight = plan.group == 1 ? 2 : kHalves == 1 ? 3 : Block::kStages;
  return to;
}

template <class Op, int kVec, int kHalves>
void launch_columns(Cuda& cuda, const Op& op, const ScanColumnCut& cut) {
  using Block = ScanColumns<Op, kVec, kHalves>;
  if (cut.groups == 0) throw std::invalid_argument("scan: the shape has no such columns");
  ScanColumnPlan plan = cut.plan;
  plan.done = cuda.flags();
  plan.records = reinterpret_cast<uint4*>(cuda.flags() + Block::kWordsOfDone);
  LaunchConfig config = overlapping(cuda, dims(cut.groups * plan.group), dim3(Block::kThreads));
  config.shared_bytes = Block::kSharedBytes;
  if (plan.group > 1) {
    config.cooperative = true;
    config.overlap_predecessor = false;
  }
  launch(cuda.stream(), config, scan_columns_kernel<Op, kVec, kHalves>, op, plan,
         scan_maps(op, Block::kChunk, /*wide=*/true));
}

/// Halves of a column: where a block owns it one (H200, fp32: 94 % of a copy's rate, 95 % with two), where a group
/// shares it in fp32 two (93 %, 80 % with one), in 16 bits one (90 %, 86 % with two, which have twice the channels to
/// tell each other of).
template <int kVec>
inline constexpr int kGroupHalves = kVec == 1 ? 2 : 1;

/// One function decides.
template <class Op, int kVec>
ScanAlgo choose_scan(const Cuda& cuda, const ScanPlan& plan, bool engine) {
  // Where words or the copy engine cannot be used, and operands of up to 64 bytes across.
  if (!engine) return ScanAlgo::kLoad;
  // Where much is computed of the inputs, that is not done twice: there are no columns.
  if constexpr (Op::kReadsTwice) {
    // Columns, where they keep nearly all multiprocessors at work. H200: a block alone reaches 94 % of a copy's rate,
    // groups 90 to 93 %.
    constexpr double kLeastShare = 0.85;
    if (cut_columns<Op, kVec, 1>(cuda, plan, 1).share >= kLeastShare) return ScanAlgo::kColumns;
    if (cut_columns<Op, kVec, kGroupHalves<kVec>>(cuda, plan, kMostColumnGroup).share >= kLeastShare) {
      return ScanAlgo::kGroups;
    }
  }
  // Of inputs that are read twice 7 to 26 % faster than threads that load, where columns leave multiprocessors idle.
  return ScanAlgo::kStaged;
}

/// Enqueues the scan by the algorithm that is asked for, or chosen, and returns it. Throws std::invalid_argument where
/// the operands or the device do not allow it.
template <class Op>
ScanAlgo run_scan(Cuda& cuda, Op op, std::optional<ScanAlgo> asked) {
  constexpr int kVec = sizeof(std::uint32_t) / sizeof(typename Op::Element);
  join_heads(op);
  const auto& shape = op.in[0];
  bool words = shape.dim % kVec == 0;
  op.each_view([&](const auto& view) { words = words && takes_scan_words(view); });
  const ScanPlan plan = scan_plan(op, words ? kVec : 1);
  bool engine = words && cuda.compute_capability() >= 90 && plan.lanes == 32;
  for (const auto& in : op.in) engine = engine && has_tensor_map(scan_stack(in));
  const ScanAlgo algo = asked.value_or(choose_scan<Op, kVec>(cuda, plan, engine));
  if (plan.sequences * shape.dim == 0) return algo;

  if (algo == ScanAlgo::kLoad) {
    words ? launch_scan<Op, kVec, false>(cuda, op, plan) : launch_scan<Op, 1, false>(cuda, op, plan);
    return algo;
  }
  if (!engine || (!Op::kReadsTwice && algo != ScanAlgo::kStaged)) {
    throw std::invalid_argument("scan: this algorithm is not for these operands");
  }
  if (algo == ScanAlgo::kStaged) {
    launch_scan<Op, kVec, true>(cuda, op, plan);
  } else if constexpr (Op::kReadsTwice) {
    if (algo == ScanAlgo::kColumns) {
      launch_columns<Op, kVec, 1>(cuda, op, cut_columns<Op, kVec, 1>(cuda, plan, 1));
    } else {
      constexpr int kHalves = kGroupHalves<kVec>;
      launch_columns<Op, kVec, kHalves>(cuda, op, cut_columns<Op, kVec, kHalves>(cuda, plan, kMostColumnGroup));
    }
  }
  return algo;
}

}  // namespace mmrec::kernels
