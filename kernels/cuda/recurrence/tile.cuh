// A tile of a gate-frozen sweep: what a block does once it has the gates' sums of its times and channels. Long,
// because the steps 1 to 4 below share the tile's registers.
//   s = σ(sum_s + b_g),  g = σ(zm + sum_g),  a = γ + μ (1 − g + γ),  b = z ⊙ (s + μ g),  h = a ⊙ h₋₁ + b
//
// A warp owns kWarpTimes times in a row and 64 kBands channels: a lane has two neighbouring channels of each band at
// all of the warp's times. Then
//   1. each lane composes its times' steps h ↦ a h + b into one;
//   2. the warps' steps meet in shared memory; the tile's own, their composition, is published for the later tiles;
//   3. the tile fetches the steps of all earlier tiles of its channels, each warp every kWarps-th, and applies them in
//      their order to the carry;
//   4. each lane runs its times: h, h rounded, |h_new − h_old| and |h_new|, whose maxima over channels are atomic
//      maxima of the bits of floats that are not negative, so their order does not matter.
// Products of decays, which may exceed 1, span one tile: a composed step is only ever applied to a state.
//
// A published element is two words of 64 bits, each a float and a mark, so no fence stands between data and flag. Tiles
// are numbered time after time, and a tile waits for lower numbers only. The last of the tiles of the same channels to
// have read clears their words: Cuda::flags() is left zero. What has settled is found at the end, if that is asked for
// (operands.cuh).
//
// Packed runs (kRuns): a time that stays as it is, a gap or what has settled, has the step h ↦ 0 h + its state, so a
// run begins anew after it whatever stands before, NaN included: a decay of 0 is never multiplied. So begins a run
// without a gap before it: h ↦ 0 h + b, with gates that see the state 0. A tile looks at the earlier tiles from the
// first on in which its first time's run moves.
//
// All that tiles read may have been written by the kernel before, so it is read past L1 (rows.cuh).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/recurrence/equations.cuh"
#include "kernels/cuda/recurrence/operands.cuh"

namespace mmrec::kernels {

/// Where a tile begins.
struct GatedPlace {
  int batch;
  int time;
  int channel;
};

/// The sums of both gates of two neighbouring channels.
struct GateSums {
  float2 s, g;
};

// A shape is a struct of constants:
//   kWarps, kWarpTimes, kBands   see above
//   kMeasures                    change and magnitude are raised; otherwise no old state is looked at
//   kRuns                        times are those of packed runs
template <class A, class Shape>
class GatedTile {
 public:
  static constexpr int kThreads = 32 * Shape::kWarps;
  static constexpr int kTimes = Shape::kWarps * Shape::kWarpTimes;
  static constexpr int kBand = 64;  // channels of a warp's row: two neighbours each lane
  static constexpr int kChannels = kBand * Shape::kBands;
  static constexpr int kTogether = 4 / Shape::kBands;           // earlier tiles that a warp fetches at once, ...
  static constexpr int kRound = 2 * kTogether * Shape::kWarps;  // ... and the block before it applies them
  static constexpr int kSharedBytes = (Shape::kWarps + kRound) * kChannels * 8 + 16;

  /// Threads [0, kThreads) of a block, `shared` 16-byte aligned; `meeting` is a named barrier of theirs.
  __device__ GatedTile(const GatedTileOperands<A>& operands, const GatedPlace& place, std::byte* shared, int meeting)
      : p_(operands),
        place_(place),
        meeting_(meeting),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32),
        warp_steps_(reinterpret_cast<Step*>(shared)),
        tile_steps_(warp_steps_ + Shape::kWarps * kChannels),
        jobs_(reinterpret_cast<std::uint32_t*>(tile_steps_ + kRound * kChannels)) {}

  __device__ void move_to(const GatedPlace& place) { place_ = place; }
  /// Tiles of time before this one do nothing; what they would leave is there.
  __device__ void begin_at_tile(int tile) { first_tile_ = tile; }
  __device__ void meet() const { ptx::named_barrier_sync(meeting_, kThreads); }
  /// Packed runs: which of the warp's times stay or begin a run without a gap, and with which earlier tile the tile's
  /// first run begins to move. `steps` has a bit for each kGatedSweepStep times that the sweep does not leave out.
  __device__ void begin_runs(std::uint32_t steps) {
    static_assert(Shape::kRuns && kGatedSweepStep % kTimes == 0);
    constexpr int kStepTiles = kGatedSweepStep / kTimes;
    const int all = (p_.time_tiles + kStepTiles - 1) / kStepTiles;
    steps &= (1U << all) - 1U;
    tiles_ = __popc(steps) * kStepTiles;
    if ((steps >> (all - 1)) != 0) tiles_ -= all * kStepTiles - p_.time_tiles;

    const GatedRuns& runs = p_.check.runs;
    const int own = clamped_time(lane_ % Shape::kWarpTimes);
    const int run = __ldg(runs.of_row + own);
    const bool stays = run < 0 || runs.base + own < __ldcg(runs.settled + run);
    const int before = runs.base + own == 0 ? run : __ldg(runs.of_row + own - 1);
    const bool begins = before >= 0 && before != run;
    static_assert(Shape::kWarpTimes <= 16);
    special_ = __ballot_sync(0xffffffffU, lane_ < 16 ? stays : begins);
    first_tile_ = place_.time / kTimes;
    const int first_run = __ldg(runs.of_row + min(place_.time, p_.times - 1));
    if (first_run < 0) return;
    const int moves = __ldcg(runs.settled + first_run) - runs.base;
    if (moves < place_.time) first_tile_ = max(moves, 0) / kTimes;
  }

  /// What the lane needs of z, zm, gamma and the bias.
  __device__ void load_inputs(int band) {
    const A* z = column(p_.z, band);
    const A* zm = column(p_.zm, band);
    const float* gamma = column(p_.gamma, band);
#pragma unroll
    for (int i = 0; i < Shape::kWarpTimes; ++i) {
      const int time = clamped_time(i);
      inputs_[band][i] = {load_pair(p_.z.below(z, time)), load_pair(p_.zm.below(zm, time)),
                          load_pair(p_.gamma.below(gamma, time))};
    }
  }
  /// The previous states.
  __device__ void load_states(int band) {
    if constexpr (!Shape::kMeasures && !Shape::kRuns) return;
    const float* h = column(p_.h, band);
#pragma unroll
    for (int i = 0; i < Shape::kWarpTimes; ++i) {
      if (!Shape::kMeasures && !stays(i)) continue;
      old_[band][i] = load_pair(static_cast<const float*>(p_.h.below(const_cast<float*>(h), clamped_time(i) + 1)));
    }
  }
  /// Brings what these two read into L2.
  __device__ void prefetch_inputs(int band) const {
    if (lane_ < 16) {
      prefetch_line(p_.z, band, 0, 0);
    } else {
      prefetch_line(p_.zm, band, 0, 0);
    }
    prefetch_line(p_.gamma, band, lane_ / 16 * 32, 0);
  }
  __device__ void prefetch_states(int band) const { prefetch_line(p_.h, band, lane_ / 16 * 32, 1); }

  /// No address is kept in registers from here on; where it is needed again it is computed again.
  __device__ void forget_addresses() { place_.time = ptx::opaque(place_.time); }

  /// a and b of the lane's elements, and their composition over time for the other warps. `sums(i)` are those of the
  /// warp's time i; `keep(i, steps)` keeps both channels' steps. Times beyond the sweep have some step too; they come
  /// last, so it reaches nothing.
  template <class Sums, class Keep>
  __device__ void compute_steps(int band, const Sums& sums, const Keep& keep) {
    const float2 bias =
        p_.bias == nullptr ? make_float2(0.0F, 0.0F) : widen_pair(load_pair(p_.bias + clamped_channel(band)));
    Step all[2];
#pragma unroll
    for (int i = 0; i < Shape::kWarpTimes; ++i) {
      GateSums sum = sums(i);
      if (restarts(i)) sum = {};  // h is 0
      const float2 z = widen_pair(inputs_[band][i].z);
      const float2 zm = widen_pair(inputs_[band][i].zm);
      const float2 gamma = widen_pair(inputs_[band][i].gamma);
      Step steps[2] = {step_of(sum.s.x + bias.x, zm.x + sum.g.x, z.x, gamma.x),
                       step_of(sum.s.y + bias.y, zm.y + sum.g.y, z.y, gamma.y)};
      if constexpr (Shape::kRuns) {
        if (restarts(i)) steps[0].a = steps[1].a = 0.0F;
        if (stays(i)) {
          steps[0] = {0.0F, old_[band][i].x};
          steps[1] = {0.0F, old_[band][i].y};
        }
      }
      keep(i, steps);
      all[0] = composed(all[0], steps[0]);
      all[1] = composed(all[1], steps[1]);
    }
    *reinterpret_cast<float4*>(two(warp_steps_, warp_, band)) = make_float4(all[0].a, all[0].b, all[1].a, all[1].b);
  }

  /// The rest: `kept(band, i, steps)` gives back what was kept.
  template <class Kept>
  __device__ void scan(const Kept& kept) {
    const int tile = place_.time / kTimes;
    float2 h[Shape::kBands];
#pragma unroll
    for (int band = 0; band < Shape::kBands; ++band) {
      const float* carry = p_.h.below(column(p_.h, band), first_tile_ * kTimes);
      h[band] = widen_pair(load_pair(carry));
    }
    meet();
    Step before[Shape::kBands][2];
#pragma unroll
    for (int band = 0; band < Shape::kBands; ++band) compose_warps(tile, band, before[band]);
    apply_tiles(tile, h);
    // The fetches before this have returned: their values have passed a barrier. So it need not order them.
    const auto readers = static_cast<std::uint32_t>(taking_part());
    bool last_reader = false;
    if (threadIdx.x == 0 && readers != 1) last_reader = atomicAdd(this->readers(), 1U) + 1 == readers;
#pragma unroll
    for (int band = 0; band < Shape::kBands; ++band) {
      h[band] = make_float2(applied(before[band][0], h[band].x), applied(before[band][1], h[band].y));
    }
    run(kept, h);
    finish(last_reader);
  }

  /// The first channel of the lane's pair; clamped, one that exists.
  __device__ int channel(int band) const { return place_.channel + kBand * band + 2 * lane_; }
  __device__ int clamped_channel(int band) const { return min(channel(band), p_.channels - 2); }
  __device__ int time_of(int i) const { return place_.time + warp_ * Shape::kWarpTimes + i; }
  /// What lies beyond the sweep is read at its border and never used.
  __device__ int clamped_time(int i) const { return min(time_of(i), p_.times - 1); }
  __device__ int warp() const { return warp_; }
  __device__ int lane() const { return lane_; }

 private:
  struct Input {
    Pair<A> z, zm;
    Pair<float> gamma;
  };

  template <class T>
  __device__ T* column(const GatedRows<T>& rows, int band) const {
    return rows.column(place_.batch, clamped_channel(band));
  }

  /// The line of the time lane % 16, `below` rows on, that holds the band's channel `offset`.
  template <class T>
  __device__ void prefetch_line(const GatedRows<T>& rows, int band, int offset, int below) const {
    const int channel = min(place_.channel + kBand * band + offset, p_.channels - 1);
    ptx::prefetch_l2(rows.below(rows.column(place_.batch, channel), clamped_time(lane_ % 16) + below));
  }

  /// Tiles of time that the sweep does not leave out.
  __device__ int taking_part() const { return Shape::kRuns ? tiles_ : p_.time_tiles - first_tile_; }
  __device__ bool stays(int i) const { return (special_ >> i & 1U) != 0; }
  __device__ bool restarts(int i) const { return Shape::kRuns && (special_ >> (16 + i) & 1U) != 0; }
  __device__ static Step composed(Step first, Step second) {
    return Shape::kRuns && second.a == 0.0F ? second : compose(first, second);
  }
  __device__ static float applied(Step step, float h) { return Shape::kRuns && step.a == 0.0F ? step.b : step(h); }

  __device__ Step step_of(float s, float g, float z, float gamma) const { return gated_step(s, g, z, gamma, p_.mix); }

  /// The lane's two steps of row `row` of an array [row][channel].
  __device__ Step* two(Step* rows, int row, int band) const {
    return rows + row * kChannels + kBand * band + 2 * lane_;
  }
  __device__ static void read(const Step* from, Step (&steps)[2]) {
    const float4 v = *reinterpret_cast<const float4*>(from);
    steps[0] = {v.x, v.y};
    steps[1] = {v.z, v.w};
  }

  /// The steps of the warps before this one. The last warp also composes the tile's and publishes them.
  __device__ void compose_warps(int tile, int band, Step (&before)[2]) const {
    // Not left to the array's own initialisation: nvcc 13.0 begins the second row of a Step [2][2] with zeros.
    before[0] = before[1] = Step{1.0F, 0.0F};
    Step next[2];
#pragma unroll
    for (int w = 0; w < Shape::kWarps - 1; ++w) {
      if (w >= warp_) break;
      read(two(warp_steps_, w, band), next);
      before[0] = composed(before[0], next[0]);
      before[1] = composed(before[1], next[1]);
    }
    if (warp_ != Shape::kWarps - 1 || tile + 1 == p_.time_tiles) return;
    read(two(warp_steps_, warp_, band), next);
    if (channel(band) >= p_.channels) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Step all = composed(before[i], next[i]);
      ptx::store_relaxed_pair(
          published(tile) + channel(band) + i,
          make_ulonglong2(kPublished | __float_as_uint(all.a), kPublished | __float_as_uint(all.b)));
    }
  }

  __device__ ulonglong2* published(int tile) const {
    return p_.published + (std::int64_t{place_.batch} * (p_.time_tiles - 1) + tile) * p_.channels;
  }

  /// h, the sweep's carry, becomes the state before the tile by every earlier tile's steps.
  __device__ void apply_tiles(int tile, float2 (&h)[Shape::kBands]) const {
    for (int first = first_tile_; first < tile; first += kRound) {
      const int count = min(kRound, tile - first);
      if (first != first_tile_) meet();  // the last ones are read
      for (int t = warp_; t < count; t += kTogether * Shape::kWarps) fetch(first, t, count);
      meet();
#pragma unroll 4
      for (int t = 0; t < count; ++t) {
#pragma unroll
        for (int band = 0; band < Shape::kBands; ++band) {
          Step next[2];
          read(two(tile_steps_, t, band), next);
          h[band] = make_float2(applied(next[0], h[band].x), applied(next[1], h[band].y));
        }
      }
    }
  }

  /// Tiles first + t, first + t + kWarps, ... of `count`, all under way at once.
  __device__ void fetch(int first, int t, int count) const {
    ulonglong2 words[kTogether][Shape::kBands][2];
    const auto tile = [&](int j) { return min(t + j * Shape::kWarps, count - 1); };
    for (;;) {
      std::uint64_t all = kPublished;
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
#pragma unroll
        for (int band = 0; band < Shape::kBands; ++band) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            words[j][band][i] = ptx::load_relaxed_pair(published(first + tile(j)) + clamped_channel(band) + i);
          }
        }
      }
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
#pragma unroll
        for (int band = 0; band < Shape::kBands; ++band) {
#pragma unroll
          for (int i = 0; i < 2; ++i) all &= words[j][band][i].x & words[j][band][i].y;
        }
      }
      if ((all & kPublished) != 0) break;
      ptx::spin_pause();
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
#pragma unroll
      for (int band = 0; band < Shape::kBands; ++band) put(two(tile_steps_, tile(j), band), words[j][band]);
    }
  }
  __device__ static void put(Step* to, const ulonglong2 (&words)[2]) {
    const auto number = [](std::uint64_t word) { return __uint_as_float(static_cast<std::uint32_t>(word)); };
    *reinterpret_cast<float4*>(to) =
        make_float4(number(words[0].x), number(words[0].y), number(words[1].x), number(words[1].y));
  }

  __device__ std::uint32_t* readers() const {
    return p_.readers + place_.batch * p_.channel_tiles + place_.channel / kChannels;
  }
  /// What is left to do for the last tile to have read, if this is it, and for the last of its times to come here.
  __device__ void finish(bool last_reader) const {
    constexpr std::uint32_t kCleans = 1;
    constexpr std::uint32_t kChecks = 2;
    static_assert(kTimes <= kThreads);
    const bool checks = Shape::kMeasures && p_.check.report != nullptr;
    if (taking_part() == 1 && !checks) return;
    meet();  // the tile's maxima are raised
    if (threadIdx.x == 0) {
      *jobs_ = last_reader ? kCleans : 0U;
      std::uint32_t* finished = p_.finished + place_.time / kTimes;
      if (checks && ptx::add_acq_rel(finished, 1) + 1 == static_cast<std::uint32_t>(p_.tiles_of_a_time)) {
        *finished = 0;
        *jobs_ |= kChecks;
      }
    }
    meet();
    const std::uint32_t jobs = *jobs_;
    if ((jobs & kChecks) != 0) {
      check_times<kTimes, kThreads, Shape::kRuns>(p_, place_.time, taking_part(), jobs_, [&] { meet(); });
    }
    if ((jobs & kCleans) != 0) clean();
  }

  /// In the last tile of those that share channels to have read.
  __device__ void clean() const {
    if (threadIdx.x == 0) *readers() = 0;
    const int count = min(kChannels, p_.channels - place_.channel);
    for (int tile = (Shape::kRuns ? 0 : first_tile_) + warp_; tile + 1 < p_.time_tiles; tile += Shape::kWarps) {
      for (int c = lane_; c < count; c += 32) published(tile)[place_.channel + c] = make_ulonglong2(0, 0);
    }
  }

  /// The lane's states in order of time from h.
  template <class Kept>
  __device__ void run(const Kept& kept, float2 (&h)[Shape::kBands]) {
    std::uint32_t maximum = 0;  // lane i: change of the warp's time i; lane 16 + i: magnitude
    float* to[Shape::kBands];
    A* rounded[Shape::kBands];
#pragma unroll
    for (int band = 0; band < Shape::kBands; ++band) {
      to[band] = p_.h.below(column(p_.h, band), time_of(1));
      rounded[band] = p_.rounded.below(column(p_.rounded, band), time_of(1));
    }
#pragma unroll
    for (int i = 0; i < Shape::kWarpTimes; ++i) {
      const int time = time_of(i);
      std::uint32_t change = 0;
      std::uint32_t magnitude = 0;
#pragma unroll
      for (int band = 0; band < Shape::kBands; ++band) {
        Step steps[2];
        kept(band, i, steps);
        h[band] = make_float2(applied(steps[0], h[band].x), applied(steps[1], h[band].y));
        const bool exists = channel(band) < p_.channels;
        if (exists && time < p_.times) store_pair(to[band], rounded[band], h[band]);
        to[band] = p_.h.below(to[band], 1);
        rounded[band] = p_.rounded.below(rounded[band], 1);
        if constexpr (Shape::kMeasures) {
          const Pair<float> old = old_[band][i];
          change = max(change, magnitude_bits(h[band].x - old.x, h[band].y - old.y, exists));
          magnitude = max(magnitude, magnitude_bits(h[band].x, h[band].y, exists));
        }
      }
      if constexpr (Shape::kMeasures) {
        change = ptx::warp_max(change);
        magnitude = ptx::warp_max(magnitude);
        if (lane_ == i) maximum = change;
        if (lane_ == i + 16) maximum = magnitude;
      }
    }
    if constexpr (Shape::kMeasures) {
      static_assert(Shape::kWarpTimes <= 16);
      const int time = time_of(lane_ % 16);
      if (lane_ % 16 >= Shape::kWarpTimes || time >= p_.times) return;
      float* to = (lane_ < 16 ? p_.change : p_.magnitude) + time;
      atomicMax(reinterpret_cast<std::uint32_t*>(to), min(maximum, 0x7f800000U));  // NaN counts as infinity
    }
  }
  static constexpr std::uint64_t kPublished = std::uint64_t{1} << 32;

  const GatedTileOperands<A>& p_;
  GatedPlace place_;
  int first_tile_ = 0;
  int tiles_ = 0;              // of packed runs: that take part
  std::uint32_t special_ = 0;  // bit i: the warp's time i stays; bit 16 + i: a run restarts there
  int meeting_;
  int warp_;
  int lane_;
  Step* warp_steps_;     // [warp][channel]
  Step* tile_steps_;     // [kRound][channel], of earlier tiles
  std::uint32_t* jobs_;  // of the whole tile at its end
  Input inputs_[Shape::kBands][Shape::kWarpTimes];
  Pair<float> old_[Shape::kBands][Shape::kWarpTimes];
};

}  // namespace mmrec::kernels
