// One gate-frozen sweep from the gates' pre-activations straight to h, in one pass: a and b stay in registers.
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
#include <algorithm>
#include <cstdint>

#include "kernels/cuda/recurrence/algo.h"
#include "kernels/cuda/recurrence/tile.cuh"
#include "kernels/cuda/rows/rows.cuh"

namespace mmrec::kernels {
namespace {

constexpr std::int64_t kMostTimeTiles = 64;  // of a launch

/// What the gates are made of: a product's sums, or nothing in the first sweep.
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
    const dim3 grid(static_cast<unsigned>(flags.time_tiles * in.z.batch * flags.channel_tiles));
    launch(cuda.stream(), overlapping(cuda, grid, dim3(Tile::kThreads)),
           check.runs.of_row != nullptr ? gated_scan_kernel<A, kGates, true> : gated_scan_kernel<A, kGates, false>,
           params);
  }
}

}  // namespace

template <class A>
void gated_scan_raising(Cuda& cuda, const GatedScan<Device, A>& op, const float* gate_bias, const GatedCheck& check) {
  run_scan<A, Gates::kProduct>(cuda, op, gate_bias, check);
}

template <class A>
void gated_scan_first(Cuda& cuda, const GatedScan<Device, A>& op, const float* gate_bias, const GatedRuns& runs) {
  run_scan<A, Gates::kNone>(cuda, op, gate_bias, {.runs = runs});
}

#define MMREC_INSTANTIATE(A)                                                                                  \
  template void gated_scan_raising(Cuda&, const GatedScan<Device, A>&, const float* bias, const GatedCheck&); \
  template void gated_scan_first(Cuda&, const GatedScan<Device, A>&, const float*, const GatedRuns&);
MMREC_FOR_EACH_TYPE(MMREC_INSTANTIATE)

}  // namespace mmrec::kernels
