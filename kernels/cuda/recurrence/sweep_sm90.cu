// One gate-frozen sweep of the recurrence on the tensor cores of sm_90a: the gates' product, the gates, the scan over
// time and the measures of convergence in one kernel. The [T, 2D] matrix of gates never exists.
//
//   s_t = σ(W_g h_{t-1} + b_g),  g_t = σ(zm_t + W_mh h_{t-1})      h of the previous sweep, rounded to A
//   a_t = γ_t + μ (1 − g_t + γ_t),  b_t = z_t ⊙ (s_t + μ g_t),  h_t = a_t ⊙ h_{t-1} + b_t      h of this one, fp32
//
// A block owns 128 times and 64 or 128 channels; its tile of the weights has those rows of both gates, so that s and g
// of an element are sums of one thread (sm90.cuh). The sums of a warp are 16 whole times; it passes them
// through shared memory, where the ring was, into the layout of the scan (tile.cuh), in which each lane replaces
// them by its steps. What the scan needs from memory is under way before the first sum is looked at: with 64 channels
// while the block multiplies, with 128 the inputs of one half, while the rest is brought into L2; it is read when the
// sums have left their registers.
//
// Bytes per element of [T, D]: 8 for z, zm, γ in, 4 for h in and 4 out, 2 for the product's operand and 2 for the next
// one's, and D/128 + T/… of operand tiles from L2. One block an SM: all 227 KB are ring.
//
// Deterministic: sums, compositions and the walk over earlier tiles have one order, in whatever order tiles arrive.
#include <cstdint>

#include "kernels/cuda/gemm/sm90.cuh"
#include "kernels/cuda/recurrence/algo.h"
#include "kernels/cuda/recurrence/tile.cuh"
#include "kernels/cuda/rows/rows.cuh"

namespace mmrec::kernels {
namespace {

/// 64 channels; two blocks share a tile of weights. (Of clusters of four fewer than 132 blocks fit the device at once.)
/// For up to one wave of blocks.
struct NarrowSweepTile {
  static constexpr int kColumns = 128;
  static constexpr int kParts = 2;
  static constexpr int kStages = 7;
  static constexpr int kClusterRows = 2;
  static constexpr int kLead = 0;   // both consumers scan together
  static constexpr int kGroup = 1;  // times slowest: earlier tiles have lower numbers
  static constexpr bool kFolds = false;
};
/// 128 channels, with less traffic a multiply-add.
struct WideSweepTile : NarrowSweepTile {
  static constexpr int kColumns = 256;
  static constexpr int kStages = 4;
};

template <class Tile, bool kPacked>
struct SweepShape {
  static constexpr int kWarps = 4 * GemmLayout<Tile>::kConsumers;
  static constexpr int kWarpTimes = 16;
  static constexpr int kBands = Tile::kColumns / 128;
  static constexpr bool kMeasures = true;
  static constexpr bool kRuns = kPacked;
};

template <class A, class Tile, bool kRuns>
class SweepEpilogue {
 public:
  struct Parameters {
    GatedTileOperands<A> tile;
    GatedRows<const A> h_rounded;  // its carry's row is copied
    GatedRows<A> settled;          // receives h rounded where nothing else is left to do; or null
  };
  static constexpr int kSharedBytes = 0;

  __device__ SweepEpilogue(const Parameters& parameters, std::byte*, std::byte* ring)
      : p_(parameters),
        scan_(p_.tile, {}, ring + kSumsBytes, kMeeting),
        sums_(reinterpret_cast<float*>(ring) + scan_.warp() * kWarpTimes * kPitch) {}

  /// Rounds the tile's states: for the ops after the sweeps where nothing is left to do, else for the next sweep.
  static __device__ void skipped(const Parameters& p, const GemmPlace& place) {
    constexpr int kVector = 4;
    constexpr int kChannels = Tile::kColumns / 2;
    constexpr int kTogether = 4;  // rows that a thread reads at once
    constexpr int kRowsAtOnce = GemmLayout<Tile>::kThreads * kVector / kChannels;
    const auto thread = static_cast<int>(threadIdx.x);
    const int channel = place.column + thread * kVector % kChannels;
    const bool moves = kRuns && ptx::load_relaxed(p.tile.check.settled) != 0;
    const GatedRows<A>& rounded = moves ? p.tile.rounded : p.settled;
    if (rounded.data == nullptr || channel >= p.tile.channels) return;
    float* from = p.tile.h.column(place.batch, channel);
    A* to = rounded.column(place.batch, channel);
    const int end = min(place.row + GemmLayout<Tile>::kRows, p.tile.times) + 1;
    const int begin = moves && place.row == 0 ? 0 : place.row + 1;  // the first state is the carry
    for (int row = begin + thread * kVector / kChannels; row < end; row += kTogether * kRowsAtOnce) {
      float values[kTogether][kVector];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int at = row + i * kRowsAtOnce;
        if (at < end) load(p.tile.h.below(from, at), values[i]);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int at = row + i * kRowsAtOnce;
        if (at < end) store(rounded.below(to, at), values[i]);
      }
    }
  }

  __device__ void begin(const GemmPlace& place) {
    scan_.move_to({place.batch, place.row, place.column});
    const GatedCheck& check = p_.tile.check;
    if constexpr (kRuns) {
      scan_.begin_runs(check.begins ? ~0U : ptx::load_relaxed(check.settled));
    } else if (check.report != nullptr && !check.begins) {
      const int settled = static_cast<int>(ptx::load_relaxed(check.settled)) - check.first;
      first_tile_ = max(settled, 0) / kGatedSweepStep * (kGatedSweepStep / Scan::kTimes);
      scan_.begin_at_tile(first_tile_);
    }
    scan_.load_inputs(0);
    if constexpr (kBands == 1) {
      scan_.load_states(0);
    } else {
      scan_.prefetch_inputs(1);
      scan_.prefetch_states(0);
      scan_.prefetch_states(1);
    }
  }

  template <int kSize>
  __device__ void finish(const GemmPlace& place, const float (&sum)[kSize]) {
    static_assert(kSize == Scan::kChannels && GemmLayout<Tile>::kRows == Scan::kTimes);
    if (place.row >= p_.tile.times || place.column >= p_.tile.channels) return;  // the whole block
    scan_.meet();                                                                // nobody reads the ring any more
    store_sums(sum);
    scan_.forget_addresses();
    if constexpr (kBands == 2) {
      scan_.load_inputs(1);
      scan_.load_states(0);
      scan_.load_states(1);
    }
    __syncwarp();
#pragma unroll
    for (int band = 0; band < kBands; ++band) {
      scan_.compute_steps(
          band,
          [&](int i) -> GateSums {
            return {pair(band, i, 0), pair(band, i, 1)};
          },
          [&](int i, const Step(&steps)[2]) {
            pair(band, i, 0) = make_float2(steps[0].a, steps[1].a);
            pair(band, i, 1) = make_float2(steps[0].b, steps[1].b);
          });
    }
    if (place.row == first_tile_ * Scan::kTimes && scan_.warp() == 0) copy_carry(place);
    scan_.scan([&](int band, int i, Step(&steps)[2]) {
      const float2 a = pair(band, i, 0);
      const float2 b = pair(band, i, 1);
      steps[0] = {a.x, b.x};
      steps[1] = {a.y, b.y};
    });
  }

 private:
  static_assert(kGatedSweepStep == GemmLayout<Tile>::kRows * Tile::kClusterRows);
  using Shape = SweepShape<Tile, kRuns>;
  using Scan = GatedTile<A, Shape>;
  static constexpr int kBands = Shape::kBands;
  static constexpr int kWarpTimes = Shape::kWarpTimes;
  static constexpr int kPitch = 2 * Scan::kChannels + 8;  // floats: rows begin 8 banks apart, so stores of 8 rows fill
                                                          // all 32
  static constexpr int kSumsBytes = Shape::kWarps * kWarpTimes * kPitch * 4;
  static constexpr int kMeeting = GemmLayout<Tile>::kConsumers;  // named barrier
  static_assert(kSumsBytes + Scan::kSharedBytes <= GemmLayout<Tile>::kRingBytes);

  template <int kSize>
  __device__ void store_sums(const float (&sum)[kSize]) const {
    const int lane = scan_.lane();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* row = sums_ + (lane / 4 + 8 * half) * kPitch + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < kSize / 4; ++j) {
        *reinterpret_cast<float2*>(row + 8 * j) = make_float2(sum[4 * j + 2 * half], sum[4 * j + 2 * half + 1]);
      }
    }
  }
  /// The lane's pair of time i: sums of W_g's and of W_mh's channels, later a and b.
  __device__ float2& pair(int band, int i, int half) const {
    return *reinterpret_cast<float2*>(sums_ + i * kPitch + half * Scan::kChannels + Scan::kBand * band +
                                      2 * scan_.lane());
  }

  /// The carry's row of the next h_rounded.
  __device__ void copy_carry(const GemmPlace& place) const {
#pragma unroll
    for (int band = 0; band < kBands; ++band) {
      const int channel = scan_.channel(band);
      if (channel >= p_.tile.channels) continue;
      const A* from = p_.h_rounded.below(p_.h_rounded.column(place.batch, channel), place.row);
      A* to = p_.tile.rounded.below(p_.tile.rounded.column(place.batch, channel), place.row);
      *reinterpret_cast<std::uint32_t*>(to) = __ldcg(reinterpret_cast<const std::uint32_t*>(from));
    }
  }

  const Parameters& p_;
  Scan scan_;
  int first_tile_ = 0;
  float* sums_;  // of this warp: [time][W_g's, then W_mh's kChannels], kPitch apart
};

template <class Tile>
GatedFlags sweep_flags(std::int64_t batch, std::int64_t times, std::int64_t channels) {
  return {batch, ceil_div(times, GemmLayout<Tile>::kRows), ceil_div(channels, Tile::kColumns / 2), channels};
}

template <class A>
MatrixStack state_stack(const GatedSweep<Device, A>& op) {
  const SequenceView<A, Device>& h = op.in.h_rounded;
  return {.data = h.at(0, 0, op.first),
          .columns = h.dim,
          .rows = op.in.z.time - op.first,
          .depth = h.batch,
          .row_stride = h.time_stride,
          .depth_stride = h.batch_stride};
}
template <class A>
MatrixStack gate_stack(const WeightView<Device>& w) {
  const std::int64_t dim = w.cols;
  return {.data = w.as<A>(), .columns = dim, .rows = dim, .depth = 2, .row_stride = dim, .depth_stride = dim * dim};
}

template <class Tile, bool kRuns, class A>
void launch_sweep(Cuda& cuda, const GatedSweep<Device, A>& op, const GatedCheck& check,
                  const SequenceView<A, Device>& settled) {
  using Epilogue = SweepEpilogue<A, Tile, kRuns>;
  const std::int64_t times = op.in.z.time - op.first;
  const GatedFlags flags = sweep_flags<Tile>(op.in.z.batch, times, op.in.z.dim);
  typename Epilogue::Parameters parameters = {
      .tile = gated_tile_operands(cuda, op, op.h_rounded_next, op.gate_bias, check, op.first, times, flags),
      .h_rounded = gated_rows<const A>(op.in.h_rounded, op.first),
      .settled = settled.data == nullptr ? GatedRows<A>() : gated_rows(settled, op.first)};
  GemmSkip skip;
  if (check.report != nullptr && !check.begins)
    skip = {check.settled, static_cast<std::uint32_t>(check.times), check.first, kRuns};
  launch_gemm_sm90<Tile, A, Epilogue>(cuda, state_stack(op), gate_stack<A>(op.gate_weight), parameters, false, skip);
}

}  // namespace

template <class A>
SweepAlgo choose_sweep(const Cuda& cuda, const GatedSweep<Device, A>& op) {
  if constexpr (sizeof(A) == 4) {
    return SweepAlgo::kProductAndScan;
  } else {
    const std::int64_t batch = op.in.z.batch;
    const std::int64_t dim = op.in.z.dim;
    const std::int64_t times = op.in.z.time - op.first;
    const bool one_kernel = cuda.compute_capability() == 90 && dim % 8 == 0 && times > 0 && batch > 0 &&
                            sweep_flags<NarrowSweepTile>(batch, times, dim).fit() && has_tensor_map(state_stack(op)) &&
                            has_tensor_map(gate_stack<A>(op.gate_weight)) && takes_16_bytes(op.in.z) &&
                            takes_16_bytes(op.in.zm) && takes_16_bytes(op.in.gamma) && takes_16_bytes(op.in.h) &&
                            takes_16_bytes(op.h_rounded_next) &&
                            reinterpret_cast<std::uintptr_t>(op.gate_bias) % 8 == 0;
    if (!one_kernel) return SweepAlgo::kProductAndScan;
    const GatedFlags wide = sweep_flags<WideSweepTile>(batch, times, dim);
    const bool one_wave = 2 * batch * wide.time_tiles * wide.channel_tiles <= cuda.processors();
    return one_wave ? SweepAlgo::kNarrowTiles : SweepAlgo::kWideTiles;
  }
}

template <class A>
void gated_sweep_sm90(Cuda& cuda, const GatedSweep<Device, A>& op, SweepAlgo algo, const GatedCheck& check,
                      const SequenceView<A, Device>& settled) {
  const auto by_tiles = [&]<class Tile>(Tile) {
    check.runs.of_row != nullptr ? launch_sweep<Tile, true>(cuda, op, check, settled)
                                 : launch_sweep<Tile, false>(cuda, op, check, settled);
  };
  algo == SweepAlgo::kNarrowTiles ? by_tiles(NarrowSweepTile()) : by_tiles(WideSweepTile());
}

template SweepAlgo choose_sweep(const Cuda&, const GatedSweep<Device, float>&);
#define MMREC_INSTANTIATE(A)                                                                        \
  template SweepAlgo choose_sweep(const Cuda&, const GatedSweep<Device, A>&);                       \
  template void gated_sweep_sm90(Cuda&, const GatedSweep<Device, A>&, SweepAlgo, const GatedCheck&, \
                                 const SequenceView<A, Device>&);
MMREC_FOR_EACH_HALF(MMREC_INSTANTIATE)

}  // namespace mmrec::kernels
