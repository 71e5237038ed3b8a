// The recurrence by gate-frozen sweeps, sequence after sequence and window after window.
//
// A window begins with a sweep that needs no product. Each of the others is one kernel where the
// device has it (sweep_sm90.cu), else the gates' product and gated_scan_raising. Its last block finds how many times
// from the window's start are settled (GatedCheck), from maxima that never leave the device, and writes that one number
// into device memory and into page-locked memory. The host does not wait for the sweep that it has just enqueued
// but for the one kAhead before: while it learns what that has settled and enqueues the next, the device works. A sweep
// that finds everything settled only rounds the states, which lie rounded in two places by then. Where the product is a
// library's, which looks at no such number, the host waits for every sweep. How many sweeps there are and what each
// leaves out follows from the numbers alone, never from time: same inputs, same bits.
//
// Packed runs are one sequence to all of this but for what settles (tile.cuh, operands.cuh): the word that a sweep
// leaves says in which steps of the window something moves.
//
// Lanes of a sweep take channels in pairs: an odd D, which no model wants to be fast, goes by exact steps.
//
// The scan of a sweep whose product is elsewhere, from the gates' pre-activations straight to h in one pass: a and b
// stay in registers.
//   s = σ(gate_s + b_g),  g = σ(zm + gate_g),  a = γ + μ (1 − g + γ),  b = z ⊙ (s + μ g),  h = a ⊙ h₋₁ + b
//
// A block owns a tile of 64 times and 64 channels (tile.cuh), a warp 8 of the times, so that a thread's operands
// are 16 elements, all of them under way at once. Long sweeps are several launches of up to 64 tiles of time, so that
// the walk over earlier tiles stays short.
//
// Bytes per element of [T, D]: 8 for both gates, 4 for γ, 4 for h in and 4 out, 2 sizes of A for z and zm and one for h
// rounded: 28 in fp32, 26 in 16 bits; the first sweep of a window reads neither gates nor h: 16 and 14. A warp's access
// is one row of 64 channels, 256 or 128 bytes. Two blocks of 256 threads a multiprocessor have up to 180 KB in flight.
//
// Deterministic: the order of composition follows from time and `first` alone, and maxima have no order.
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <thread>
#include <type_traits>
#include <vector>

#include "kernels/cuda/recurrence/algo.h"
#include "kernels/cuda/recurrence/tile.cuh"
#include "kernels/cuda/rows/rows.cuh"
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/cuda/runtime/launch.cuh"

namespace mmrec::kernels {
namespace {

constexpr std::int64_t kMostTimeTiles = 64;  // of a launch

/// Source of the gates: the sums of a product, or nothing in the first sweep.
enum class Gates : std::uint8_t { kProduct, kNone };

template <Gates kGates, bool kPacked>
struct ScanShape {
  static constexpr int kWarps = 8;
  static constexpr int kWarpTimes = 8;
  static constexpr int kBands = 1;
  static constexpr bool kMeasures = kGates == Gates::kProduct;
  static constexpr bool kRuns = kPacked;
};

template <class A>
struct Params {
  GatedTileOperands<A> tile;
  GatedRows<const float> gate;
  int batch;
};

template <class A, Gates kGates, bool kRuns>
__global__ void __launch_bounds__(256, 2) gated_scan_kernel(const __grid_constant__ Params<A> p) {
  using Shape = ScanShape<kGates, kRuns>;
  using Tile = GatedTile<A, Shape>;
  static_assert(Tile::kThreads == 256);
  __shared__ uint4 shared[Tile::kSharedBytes / 16];
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const int index = static_cast<int>(blockIdx.x);
  const int across = p.tile.channel_tiles;
  const GatedPlace place{index / across % p.batch, index / across / p.batch * Tile::kTimes,
                         index % across * Tile::kChannels};
  Tile tile(p.tile, place, reinterpret_cast<std::byte*>(shared), 1);

  if constexpr (kRuns) tile.begin_runs(~0U);
  tile.load_inputs(0);
  GateSums sums[Shape::kWarpTimes] = {};
  if constexpr (kGates == Gates::kProduct) {
    const float* top = p.gate.column(place.batch, tile.clamped_channel(0));
#pragma unroll
    for (int i = 0; i < Shape::kWarpTimes; ++i) {
      const float* from = p.gate.below(top, tile.clamped_time(i));
      sums[i] = {widen_pair(load_pair(from)), widen_pair(load_pair(from + p.tile.channels))};
    }
  } else if (place.channel == 0 && place.batch == 0 && tile.lane() < Shape::kWarpTimes) {
    const int time = tile.time_of(tile.lane());
    if (time < p.tile.times) p.tile.change[time] = p.tile.magnitude[time] = 0.0F;
  }
  tile.load_states(0);
  Step steps[Shape::kWarpTimes][2];
  tile.compute_steps(
      0, [&](int i) { return sums[i]; },
      [&](int i, const Step(&pair)[2]) {
        steps[i][0] = pair[0];
        steps[i][1] = pair[1];
      });
  tile.scan([&](int, int i, Step(&pair)[2]) {
    pair[0] = steps[i][0];
    pair[1] = steps[i][1];
  });
}

template <class A, Gates kGates>
void run_scan(Cuda& cuda, const GatedScan<Device, A>& op, const float* gate_bias, const GatedCheck& check) {
  using Tile = GatedTile<A, ScanShape<kGates, false>>;
  const GateInputs<Device, A>& in = op.in;
  GatedFlags flags{in.z.batch, kMostTimeTiles, ceil_div(in.z.dim, Tile::kChannels), in.z.dim};
  while (flags.time_tiles > 1 && !flags.fit()) --flags.time_tiles;
  for (std::int64_t first = op.first; first < in.z.time; first += flags.time_tiles * Tile::kTimes) {
    const std::int64_t count = std::min(in.z.time - first, flags.time_tiles * Tile::kTimes);
    flags.time_tiles = ceil_div(count, Tile::kTimes);
    Params<A> params{.tile = gated_tile_operands(cuda, op, in.h_rounded, gate_bias, check, first, count, flags),
                     .gate = {},
                     .batch = static_cast<int>(in.z.batch)};
    if constexpr (kGates == Gates::kProduct) params.gate = gated_rows(op.gate, first);
    const dim3 grid = dims(flags.time_tiles * in.z.batch * flags.channel_tiles);
    launch(cuda.stream(), overlapping(cuda, grid, dim3(Tile::kThreads)),
           check.runs.of_row != nullptr ? gated_scan_kernel<A, kGates, true> : gated_scan_kernel<A, kGates, false>,
           params);
  }
}

constexpr int kAhead = 1;  // sweeps enqueued beyond the one that the host waits for
constexpr int kSlots = kAhead + 1;

/// What no sweep reports.
constexpr std::uint32_t kNothing = ~std::uint32_t{0};

/// What the sweep writes into `report`. It is there before the kernel has ended; nothing that the stream would have to
/// do for it stands between one sweep and the next. Other threads may have the processor meanwhile: where processors
/// are few, they launch other parts of a text.
std::uint32_t await_report(Cuda& cuda, std::uint32_t* report) {
  constexpr std::chrono::milliseconds kPatience(1);
  const std::atomic_ref<std::uint32_t> word(*report);
  const auto start = std::chrono::steady_clock::now();
  for (;;) {
    for (int i = 0; i < 64; ++i) {
      const std::uint32_t value = word.load(std::memory_order_acquire);
      if (value != kNothing) return value;
    }
    if (std::chrono::steady_clock::now() - start > kPatience) break;
    std::this_thread::yield();
  }
  cuda.synchronize();  // throws what went wrong, if it did
  return word.load(std::memory_order_acquire);
}

/// Rows [first, first + count) of a single sequence.
template <class T>
MatrixView<T, Device> rows_of(const SequenceView<T, Device>& s, std::int64_t first, std::int64_t count) {
  return {s.at(0, 0, first), count, s.dim, s.time_stride};
}

/// The runs with rows in [begin, end).
GatedRuns runs_between(const PackedRuns<Device>& runs, std::int64_t begin, std::int64_t end) {
  const auto first = std::upper_bound(runs.end_on_host.begin(), runs.end_on_host.end(), begin);
  const auto last = std::lower_bound(runs.first_on_host.begin(), runs.first_on_host.end(), end);
  const auto number = first - runs.end_on_host.begin();
  return {.of_row = runs.of_row + begin,
          .end = runs.end,
          .settled = runs.settled,
          .moving = runs.moving,
          .first = static_cast<int>(number),
          .count = static_cast<int>(last - runs.first_on_host.begin() - number),
          .base = static_cast<int>(begin),
          .window_begin = static_cast<int>(begin),
          .window_end = static_cast<int>(end)};
}

/// One window of one sequence, or of packed runs.
template <class A>
class Window {
 public:
  Window(Cuda& cuda, const GatedSweeps<Device, A>& op, const GateInputs<Device, A>& in, std::optional<SweepAlgo> asked,
         const GatedRuns& runs)
      : cuda_(cuda),
        op_(op),
        in_(in),
        runs_(runs),
        times_(in.z.time),
        change_(op.change),
        magnitude_(op.change + op.gate.rows),
        // Where one kernel does it all, the gates' memory is free. The word comes after it and its row for the carry.
        other_rounded_(reinterpret_cast<A*>(op.gate.data), 1, times_ + 1, in.z.dim),
        algo_(asked.value_or(choose_sweep(cuda, one_sweep(0, 0)))),
        one_kernel_(algo_ != SweepAlgo::kProductAndScan) {
    if (one_kernel_ && asked && choose_sweep(cuda, one_sweep(0, 0)) == SweepAlgo::kProductAndScan) {
      throw std::invalid_argument("gated_sweeps: one kernel is not for these operands");
    }
  }

  /// True if all times have settled; else those from settled() on have not, or of packed runs, those from settled of
  /// each.
  bool run(SweepCounts& counts) {
    counts.windows += 1;
    if (in_.z.dim % 2 != 0) {
      counts.fallbacks += 1;
      return false;
    }
    // A sweep that needs no product: its gates see 0 instead of h_{t-1}, the carry included, so it settles nothing. It
    // reads neither gates nor previous states, and sets change and magnitude to 0.
    run_scan<A, Gates::kNone>(cuda_,
                              GatedScan<Device, A>{.in = in_, .gate = {}, .change = change_, .magnitude = magnitude_},
                              op_.gate_bias, {.runs = runs_});
    const bool packed = runs_.of_row != nullptr;
    const int ahead = one_kernel_ ? kAhead : 0;
    std::int64_t left_out = 0;  // times, by the newest sweep that did something
    std::int64_t leaves_out = 0;
    std::int64_t settled = 0;
    int enqueued = 0;
    int done = 0;
    for (; done < op_.max_sweeps && settled < times_; ++done) {
      left_out = leaves_out;
      for (; enqueued < op_.max_sweeps && enqueued <= done + ahead; ++enqueued) {
        report(enqueued)[0] = kNothing;
        sweep(one_kernel_ ? 0 : settled, enqueued);
      }
      const std::uint32_t word = await_report(cuda_, report(done));
      counts.token_sweeps += times_ - left_out;
      if (packed) {
        settled = word == 0 ? times_ : 0;
        leaves_out = one_kernel_ ? std::max<std::int64_t>(times_ - std::popcount(word) * kGatedSweepStep, 0) : 0;
      } else {
        settled = word;
        leaves_out = one_kernel_ ? settled / kGatedSweepStep * kGatedSweepStep : settled;
      }
    }
    if (one_kernel_ && enqueued == done) {
      // The newest sweep has left its rows in one of the two places, the others are in either; and no sweep has come
      // after it to round them all.
      const std::int64_t stale = packed ? times_ : done % 2 != 0 ? settled : std::min(settled, left_out);
      if (stale != 0) copy_rows<A>(cuda_, rows_of(in_.h, 1, stale), rows_of(in_.h_rounded, 1, stale));
    }
    settled_ = settled;
    if (settled != times_) counts.fallbacks += 1;
    return settled == times_;
  }
  std::int64_t settled() const { return settled_; }

  void finish_exactly(std::int64_t first, std::int64_t end) {
    gated_recurrence(
        cuda_, GatedRecurrence<Device, A>{
                   .in = in_.slice(0, first, end - first), .gate_weight = op_.gate_weight, .gate_bias = op_.gate_bias});
  }

 private:
  /// Sweep `index` of the window, from 0.
  GatedSweep<Device, A> one_sweep(std::int64_t first, int index) const {
    GatedSweep<Device, A> sweep{.in = in_,
                                .h_rounded_next = index % 2 == 0 ? other_rounded_ : in_.h_rounded,
                                .gate_weight = op_.gate_weight,
                                .gate_bias = op_.gate_bias,
                                .first = first,
                                .change = change_,
                                .magnitude = magnitude_};
    if (index % 2 != 0) sweep.in.h_rounded = other_rounded_;
    return sweep;
  }

  void sweep(std::int64_t first, int index) {
    if constexpr (!std::is_same_v<A, float>) {
      if (one_kernel_)
        return gated_sweep_sm90(cuda_, one_sweep(first, index), algo_, check(first, index), in_.h_rounded);
    }
    const std::int64_t dim = in_.z.dim;
    SequenceView<float, Device> gate(op_.gate.data, 1, times_, 2 * dim);
    gate.time_stride = op_.gate.stride;
    const Linear<Device, A, float> product{.x = rows_of(in_.h_rounded, first, times_ - first),
                                           .weight = op_.gate_weight,
                                           .y = rows_of(gate, first, times_ - first)};
    linear(cuda_, std::span<const Linear<Device, A, float>>(&product, 1));
    gated_scan_raising(
        cuda_,
        GatedScan<Device, A>{.in = in_, .gate = gate, .first = first, .change = change_, .magnitude = magnitude_},
        op_.gate_bias, check(first, index));
  }

  GatedCheck check(std::int64_t first, int index) const {
    return {.first = static_cast<int>(first),
            .times = static_cast<int>(times_),
            .tolerance = op_.tolerance,
            .begins = index == 0 || !one_kernel_,
            .settled = settled_word(),
            .report = report(index),
            .runs = runs_};
  }

  std::uint32_t* report(int index) const { return cuda_.report() + index % kSlots; }

  /// How many times are settled, on the device, for sweeps by one kernel.
  std::uint32_t* settled_word() const {
    return one_kernel_ ? reinterpret_cast<std::uint32_t*>(other_rounded_.data + (times_ + 1) * in_.z.dim) : nullptr;
  }

  Cuda& cuda_;
  const GatedSweeps<Device, A>& op_;
  const GateInputs<Device, A> in_;
  const GatedRuns runs_;
  const std::int64_t times_;
  std::int64_t settled_ = 0;
  float* const change_;
  float* const magnitude_;
  const SequenceView<A, Device> other_rounded_;  // where every other sweep by one kernel leaves h rounded
  const SweepAlgo algo_;
  const bool one_kernel_;
};

}  // namespace

template <class A>
void gated_scan_raising(Cuda& cuda, const GatedScan<Device, A>& op, const float* gate_bias, const GatedCheck& check) {
  run_scan<A, Gates::kProduct>(cuda, op, gate_bias, check);
}

template <class A>
SweepCounts gated_sweeps(Cuda& cuda, const GatedSweeps<Device, A>& op, std::optional<SweepAlgo> algo) {
  SweepCounts counts;
  for (std::int64_t b = 0; b < op.in.z.batch; ++b) {
    for (std::int64_t first = 0; first < op.in.z.time; first += op.gate.rows) {
      const std::int64_t times = std::min(op.gate.rows, op.in.z.time - first);
      Window<A> window(cuda, op, op.in.slice(b, first, times), algo, {});
      if (!window.run(counts)) window.finish_exactly(window.settled(), times);
    }
  }
  return counts;
}

template <class A>
SweepCounts packed_sweeps(Cuda& cuda, const PackedSweeps<Device, A>& op, std::optional<SweepAlgo> algo) {
  SweepCounts counts;
  const std::int64_t rows = op.sweeps.in.z.time;
  std::vector<std::int32_t> settled;
  for (std::int64_t first = 0; first < rows; first += op.sweeps.gate.rows) {
    const std::int64_t end = std::min(first + op.sweeps.gate.rows, rows);
    const GatedRuns runs = runs_between(op.runs, first, end);
    Window<A> window(cuda, op.sweeps, op.sweeps.in.slice(0, first, end - first), algo, runs);
    if (window.run(counts)) continue;
    settled.resize(op.runs.end_on_host.size());
    cuda.download(op.runs.settled, settled.data(), settled.size());
    for (int run = runs.first; run < runs.first + runs.count; ++run) {
      const auto at = static_cast<std::size_t>(run);
      const std::int64_t run_end = std::min<std::int64_t>(op.runs.end_on_host[at], end);
      if (settled[at] >= run_end) continue;
      window.finish_exactly(settled[at] - first, run_end - first);
      settled[at] = static_cast<std::int32_t>(run_end);
    }
    cuda.upload(settled.data(), op.runs.settled, settled.size());
  }
  return counts;
}

#define MMREC_INSTANTIATE(A)                                                                             \
  template void gated_scan_raising(Cuda&, const GatedScan<Device, A>&, const float*, const GatedCheck&); \
  template SweepCounts gated_sweeps(Cuda&, const GatedSweeps<Device, A>&, std::optional<SweepAlgo>);     \
  template SweepCounts packed_sweeps(Cuda&, const PackedSweeps<Device, A>&, std::optional<SweepAlgo>);
MMREC_FOR_EACH_TYPE(MMREC_INSTANTIATE)

}  // namespace mmrec::kernels
