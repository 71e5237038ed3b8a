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
// 4 TB/s and 1.5 us needs 6 MB. choose_scan says which way a scan goes: what was computed of the inputs waits in
// registers, in two or three blocks a multiprocessor, and as soon as a tile is in registers its place in shared memory
// is given to one of the tiles to come (block.cuh); or the inputs wait in shared memory and are read twice, in one
// block (ring.cuh); or a column belongs to a block or to a group of them, which carry its state along instead of
// looking back (columns.cuh). Where there is no copy engine, or operands do not suit it, all times of a thread are
// loaded into registers at once. All ways compute the same bits.
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
#include <string>
#include <type_traits>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/rows/rows.cuh"
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/cuda/runtime/launch.cuh"
#include "kernels/cuda/runtime/tensor_map.h"
#include "kernels/cuda/scan/block.cuh"
#include "kernels/cuda/scan/choose.h"
#include "kernels/cuda/scan/columns.cuh"
#include "kernels/cuda/scan/ring.cuh"

namespace mmrec::kernels {

inline constexpr int kScanChunk = 1024;  // times of one tile at most
/// Words across up to which more than a window of a chain is in work at once.
inline constexpr std::int64_t kLongChains = 128;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr bool kHasCopyEngine = false;
#else
inline constexpr bool kHasCopyEngine = true;
#endif

template <class Op, int kVec, ScanWay kWay>
using ScanBlockOf =
    std::conditional_t<kWay == ScanWay::kRing, ScanRing<Op, kVec>, ScanBlock<Op, kVec, kWay == ScanWay::kAhead>>;

template <class Op, int kVec, ScanWay kWay>
__global__ void __launch_bounds__(kScanThreads + 32 * kVec * ScanBlockOf<Op, kVec, kWay>::kChainSets +
                                      ScanBlockOf<Op, kVec, kWay>::kMoreThreads,
                                  ScanBlockOf<Op, kVec, kWay>::kBlocks)
    scan_kernel(const __grid_constant__ Op op, const __grid_constant__ ScanPlan plan,
                const __grid_constant__ ScanMaps<Op::kInputs> maps) {
  if constexpr (kWay == ScanWay::kLoad || kHasCopyEngine) {
    ptx::wait_for_predecessor();
    ptx::allow_successor();
    ScanBlockOf<Op, kVec, kWay>(op, plan, maps).run();
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

/// A scan that is ready to go.
template <class Op>
struct ScanJob {
  Op op;
  ScanShape shape;
  bool words = true;  // all operands can be accessed by words

  /// Checks the operands, op.each_view(use) calling use(name, view) for each of them. Heads that lie next to each other
  /// become channels.
  ScanJob(const char* name, const Op& from)
      : op(from), shape{from.in[0].batch, from.in[0].heads, from.in[0].time, from.in[0].dim} {
    bool adjacent = true;
    op.each_view([&](const char* operand, const auto& view) {
      check_scan_view(name, operand, view, shape);
      adjacent = adjacent && (view.heads == 1 || view.head_stride == view.dim);
      words = words && takes_scan_words(view);
    });
    if (!adjacent) return;
    op.each_view([](const char*, auto& view) { view.dim *= view.heads, view.heads = 1; });
    shape.dim *= shape.heads, shape.heads = 1;
  }
};

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

template <class Op, int kVec, ScanWay kWay>
void launch_scan(Cuda& cuda, const Op& op, const ScanShape& shape, ScanPlan plan, const ScanMaps<Op::kInputs>& maps) {
  using Block = ScanBlockOf<Op, kVec, kWay>;
  // Words between the counter and the records, which are written 16 bytes at a time.
  constexpr std::int64_t kFirstRecord = 32, kRecordWords = sizeof(uint4) / sizeof(std::uint32_t);
  const int threads = std::max(plan.lanes * plan.rows, 32);
  const std::int64_t width = plan.lanes * kVec, chains = ceil_div(width, 32);
  const std::int64_t all = shape.batch * shape.heads * plan.row_columns;
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
        overlapping(cuda, dim3(static_cast<unsigned>(blocks)),
                    dim3(static_cast<unsigned>(threads + 32 * chains * Block::kChainSets + Block::kMoreThreads)));
    config.shared_bytes = Block::shared_bytes(threads);
    launch(cuda.stream(), config, scan_kernel<Op, kVec, kWay>, op, plan, maps);
  }
}

/// Maps of the inputs for boxes of `rows` times; `wide` as make_tensor_map says.
template <class Op>
ScanMaps<Op::kInputs> scan_maps(const Op& op, int rows, bool wide) {
  ScanMaps<Op::kInputs> maps;
  for (int i = 0; i < Op::kInputs; ++i) maps.inputs[i] = make_tensor_map(scan_stack(op.in[i]), rows, 1, wide);
  return maps;
}

/// Columns of one launch, and how well they fill the device.
struct ScanColumnCut {
  ScanColumnPlan plan;
  int halves = 0;           // of a column; 0 where the shape has no such cut
  std::int64_t groups = 0;  // at once
  double share = 0.0;       // of the multiprocessors that is at work
};

/// The cut by one of the ways of columns.
template <class Op, int kVec>
ScanColumnCut cut_columns(const Cuda& cuda, const ScanShape& shape, const ScanPlan& cut, ScanWay way) {
  using Block = ScanColumns<Op, kVec, 1>;
  constexpr double kLeastGain = 0.95;  // rounds of a larger group, of those of a smaller one
  constexpr double kLeastRounds = 16;  // of larger groups than two: their launch does not overlap its predecessor
  // Halves that a group shares: in fp32 two (H200: 93 % of a copy's rate, 80 % with one), in 16 bits one (90 and 86 %),
  // since two have twice the channels to tell each other of.
  const bool shared = way == ScanWay::kGroups;
  const int halves = way == ScanWay::kWideColumns || (shared && kVec == 1) ? 2 : 1;
  // Chains of a few words hand on in groups of chunks, which other bits come of.
  if (shape.dim <= kLongChains * kVec || cut.rows * Op::kTimes != Block::kChunk) return {};
  const std::int64_t sequences = shape.batch * shape.heads, row_columns = ceil_div(cut.row_columns, halves);
  const std::int64_t columns = sequences * row_columns, chunks = cut.chains.chunks;
  const std::int64_t blocks = cuda.processors();
  const bool fits = blocks <= Block::kWordsOfDone &&
                    Block::flag_words(blocks, halves) <= static_cast<std::int64_t>(Cuda::kFlagWords) &&
                    columns >> 31 == 0;
  if (!fits) return {};

  ScanColumnCut to{.plan = {}, .halves = halves};
  ScanColumnPlan& plan = to.plan;
  auto fewest = std::numeric_limits<double>::infinity();
  const std::int64_t most_group = shared ? kMostColumnGroup : 1;
  for (std::int64_t group = 1; group <= std::min({blocks, chunks, most_group}); group *= 2) {
    const std::int64_t at_once = std::min(columns, blocks / group);
    const auto rounds = static_cast<double>(ceil_div(columns, at_once) * ceil_div(chunks, group));
    if (rounds > kLeastGain * fewest || (group > 2 && rounds < kLeastRounds)) continue;
    fewest = rounds;
    to.groups = at_once;
    plan.group = static_cast<std::uint32_t>(group);
  }
  to.share =
      static_cast<double>(sequences * cut.row_columns * chunks) / halves / (fewest * static_cast<double>(blocks));
  plan.time = shape.time;
  plan.heads = static_cast<std::uint32_t>(shape.heads);
  plan.dim = static_cast<std::uint32_t>(shape.dim);
  plan.row_columns = static_cast<std::uint32_t>(row_columns);
  plan.columns = static_cast<std::uint32_t>(columns);
  plan.chunks = static_cast<std::uint32_t>(chunks);
  plan.in_flight = plan.group == 1 ? 2 : halves == 1 ? 3 : Block::kStages;
  return to;
}

template <class Op, int kVec, int kHalves>
void launch_columns(Cuda& cuda, const Op& op, const ScanColumnCut& cut) {
  using Block = ScanColumns<Op, kVec, kHalves>;
  ScanColumnPlan plan = cut.plan;
  plan.done = cuda.flags();
  plan.records = reinterpret_cast<uint4*>(cuda.flags() + Block::kWordsOfDone);
  LaunchConfig config = overlapping(cuda, dim3(static_cast<unsigned>(cut.groups * plan.group)), dim3(Block::kThreads));
  config.shared_bytes = Block::kSharedBytes;
  if (plan.group > 1) {
    config.cooperative = true;
    config.overlap_predecessor = false;
  }
  launch(cuda.stream(), config, scan_columns_kernel<Op, kVec, kHalves>, op, plan,
         scan_maps(op, Block::kChunk, /*wide=*/true));
}

/// One function decides.
template <class Op, int kVec>
ScanWay choose_scan(const Cuda& cuda, const ScanJob<Op>& job, const ScanPlan& plan, bool engine) {
  // Where words or the copy engine cannot be used, and operands of up to 64 bytes across.
  if (!engine) return ScanWay::kLoad;
  // Where much is computed of the inputs, that is not done twice.
  if constexpr (!Op::kReadsTwice) {
    return ScanWay::kAhead;
  } else {
    // Columns, where they keep nearly all multiprocessors at work. H200: a block alone reaches 95 % of a copy's rate
    // with halves, 94 % without, groups 90 to 93 %.
    constexpr double kLeastShare = 0.85;
    for (const ScanWay way : {ScanWay::kWideColumns, ScanWay::kColumns, ScanWay::kGroups}) {
      if (cut_columns<Op, kVec>(cuda, job.shape, plan, way).share >= kLeastShare) return way;
    }
    // Else inputs wait in shared memory: 7 to 26 % faster than threads that load where columns leave multiprocessors
    // idle.
    return ScanWay::kRing;
  }
}

/// Enqueues the scan by the way that is asked for, or chosen; returns it. Throws std::invalid_argument where it cannot
/// go that way.
template <class Op>
ScanWay run_scan(Cuda& cuda, const ScanJob<Op>& job, std::optional<ScanWay> asked) {
  const Op& op = job.op;
  const ScanShape& shape = job.shape;
  constexpr int kVec = sizeof(std::uint32_t) / sizeof(typename Op::Element);
  const bool words = job.words && shape.dim % kVec == 0;
  const ScanPlan plan = words ? scan_plan<Op>(shape, kVec) : scan_plan<Op>(shape, 1);
  bool engine = words && cuda.compute_capability() >= 90 && plan.lanes == 32;
  for (const auto& in : op.in) engine = engine && has_tensor_map(scan_stack(in));
  const ScanWay way = asked.value_or(choose_scan<Op, kVec>(cuda, job, plan, engine));
  if (shape.channels() == 0) return way;

  const int rows = plan.rows * Op::kTimes;
  if (way == ScanWay::kLoad) {
    if (words) {
      launch_scan<Op, kVec, ScanWay::kLoad>(cuda, op, shape, plan, {});
    } else {
      launch_scan<Op, 1, ScanWay::kLoad>(cuda, op, shape, plan, {});
    }
    return way;
  }
  if (engine && way == ScanWay::kAhead) {
    launch_scan<Op, kVec, ScanWay::kAhead>(cuda, op, shape, plan, scan_maps(op, rows, /*wide=*/true));
    return way;
  }
  if constexpr (Op::kReadsTwice) {
    if (engine && way == ScanWay::kRing) {
      // What lies beside the rows of a tile is another block's, and may leave L2 before that wants it.
      launch_scan<Op, kVec, ScanWay::kRing>(cuda, op, shape, plan, scan_maps(op, rows, /*wide=*/false));
      return way;
    }
    const ScanColumnCut cut = cut_columns<Op, kVec>(cuda, shape, plan, way);
    if (engine && cut.halves == 2) {
      launch_columns<Op, kVec, 2>(cuda, op, cut);
      return way;
    }
    if (engine && cut.halves == 1) {
      launch_columns<Op, kVec, 1>(cuda, op, cut);
      return way;
    }
  }
  throw std::invalid_argument("scan: this way is not for these operands");
}

}  // namespace mmrec::kernels
