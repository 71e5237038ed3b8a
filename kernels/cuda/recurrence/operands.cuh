// What a gate-frozen sweep by tiles (tile.cuh) reads and writes: its operands, the words of Cuda::flags() by which its
// tiles know of each other, pairs of channels; and what has settled at its end.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/recurrence/algo.h"
#include "kernels/cuda/runtime/launch.cuh"

namespace mmrec::kernels {

// --- Two neighbouring channels of a row, as a lane reads and writes them: in one access, for pairs are aligned in all
// operands.

template <class T>
struct Pair {
  T x, y;
};
template <class T>
__device__ inline float2 widen_pair(Pair<T> pair) {
  return make_float2(widen(pair.x), widen(pair.y));
}

/// Past L1.
template <class T>
__device__ inline Pair<T> load_pair(const T* from) {
  if constexpr (sizeof(T) == 4) {
    const float2 v = __ldcg(reinterpret_cast<const float2*>(from));
    return {v.x, v.y};
  } else {
    const std::uint32_t v = __ldcg(reinterpret_cast<const std::uint32_t*>(from));
    return {T{static_cast<std::uint16_t>(v)}, T{static_cast<std::uint16_t>(v >> 16)}};
  }
}

/// fp32, and rounded where A has 16 bits.
template <class A>
__device__ inline void store_pair(float* to, A* rounded, float2 h) {
  *reinterpret_cast<float2*>(to) = h;
  if constexpr (sizeof(A) == 2) {
    *reinterpret_cast<std::uint32_t*>(rounded) = ptx::to_pair<A>(h.x, h.y);
  }
}

/// Bits of the larger of |x| and |y|, 0 where there are no such channels. As integers they are in the order of the
/// floats, NaN above infinity.
__device__ inline std::uint32_t magnitude_bits(float x, float y, bool exist) {
  const std::uint32_t mask = exist ? 0x7fffffffU : 0U;
  return max(__float_as_uint(x) & mask, __float_as_uint(y) & mask);
}

// --- Operands.

/// A tensor's [batch, time, channel], time 0 being the sweep's first.
template <class T>
struct GatedRows {
  T* data = nullptr;
  std::int64_t batch_stride = 0;
  std::int32_t time_bytes = 0;  // from one time to the next

  __device__ T* column(int batch, int channel) const { return data + batch * batch_stride + channel; }
  /// `time` rows below `top`: one multiply-add.
  __device__ T* below(T* top, int time) const {
    using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
    return reinterpret_cast<T*>(reinterpret_cast<Byte*>(top) + std::int64_t{time_bytes} * time);
  }
};
template <class T>
GatedRows<T> gated_rows(const SequenceView<T, Device>& view, std::int64_t first) {
  return {view.at(0, 0, first), view.batch_stride,
          static_cast<std::int32_t>(view.time_stride * static_cast<std::int64_t>(sizeof(T)))};
}

/// Operands of a sweep of `times` times.
template <class A>
struct GatedTileOperands {
  GatedRows<const A> z, zm;
  GatedRows<const float> gamma;
  GatedRows<float> h;    // row t is the state before time t
  GatedRows<A> rounded;  // receives h rounded; the same memory as h where A is float
  const float* bias;     // or null
  float* change;         // [times], raised
  float* magnitude;
  float mix;
  int times;
  int channels;
  int time_tiles;
  int channel_tiles;
  int tiles_of_a_time;      // channel tiles of all sequences
  std::uint32_t* checked;   // times' tiles that have been looked at
  std::uint32_t* moving;    // times left from the first that moves
  std::uint32_t* finished;  // [time tile] tiles
  std::uint32_t* readers;   // [batch][channel tile]
  ulonglong2* published;    // [batch][time tile but the last][channel]
  GatedCheck check;         // its runs.of_row and runs.base are those of these times
  int after;                // times of the check after these
  bool reports;             // else a later launch does
};

/// Words of Cuda::flags() that a sweep by such tiles takes: the two of the check, a count of finished tiles per tile of
/// time, one of readers per batch and tile of channels, then what tiles publish.
struct GatedFlags {
  std::int64_t batch, time_tiles, channel_tiles, channels;

  std::int64_t counters() const { return ceil_div(2 + time_tiles + batch * channel_tiles, 4) * 4; }
  std::int64_t words() const { return counters() + 4 * batch * (time_tiles - 1) * channels; }
  bool fit() const { return words() <= static_cast<std::int64_t>(Cuda::kFlagWords); }
};

/// Operands of times [first, first + count) of a GatedScan or GatedSweep, which rounds states into `rounded`.
template <class Op, class A>
GatedTileOperands<A> gated_tile_operands(Cuda& cuda, const Op& op, const SequenceView<A, Device>& rounded,
                                         const float* bias, const GatedCheck& check, std::int64_t first,
                                         std::int64_t count, const GatedFlags& flags) {
  const GateInputs<Device, A>& in = op.in;
  const auto after = static_cast<int>(in.z.time - first - count);
  GatedCheck here = check;
  if (here.runs.of_row != nullptr) here.runs.of_row += first, here.runs.base += static_cast<int>(first);
  return {.z = gated_rows(in.z, first),
          .zm = gated_rows(in.zm, first),
          .gamma = gated_rows(in.gamma, first),
          .h = gated_rows(in.h, first),
          .rounded = gated_rows(rounded, first),
          .bias = bias,
          .change = op.change + first,
          .magnitude = op.magnitude + first,
          .mix = in.mdi_mix,
          .times = static_cast<int>(count),
          .channels = static_cast<int>(in.z.dim),
          .time_tiles = static_cast<int>(flags.time_tiles),
          .channel_tiles = static_cast<int>(flags.channel_tiles),
          .tiles_of_a_time = static_cast<int>(flags.batch * flags.channel_tiles),
          .checked = cuda.flags(),
          .moving = cuda.flags() + 1,
          .finished = cuda.flags() + 2,
          .readers = cuda.flags() + 2 + flags.time_tiles,
          .published = reinterpret_cast<ulonglong2*>(cuda.flags() + flags.counters()),
          .check = here,
          .after = after,
          .reports = after == 0};
}

// --- What has settled at the end of a sweep by tiles (GatedCheck), in two steps, so that little is left to do at the
// sweep's end: the last tile of the same times to finish looks at their maxima and raises how many times are left from
// the first that moves. The last tile of all to have done so reports.

/// By one thread.
template <class A>
__device__ inline void report_settled(const GatedTileOperands<A>& p) {
  const GatedCheck& c = p.check;
  const int before = c.begins ? c.first : static_cast<int>(ptx::load_relaxed(c.settled));
  const auto left = static_cast<int>(ptx::load_relaxed(p.moving));
  *p.moving = 0;
  const auto settled = static_cast<std::uint32_t>(max(c.times - left, before + 1));
  if (c.settled != nullptr) *c.settled = settled;
  ptx::store_for_host(c.report, settled);
}

/// The same of packed runs, by all threads; `shared` is a word of theirs.
template <int kThreads, class A, class Meet>
__device__ inline void report_settled_runs(const GatedTileOperands<A>& p, std::uint32_t* shared, const Meet& meet) {
  const GatedRuns& runs = p.check.runs;
  if (threadIdx.x == 0) *shared = 0;
  meet();
  std::uint32_t moving = 0;  // steps of the window
  for (int run = runs.first + static_cast<int>(threadIdx.x); run < runs.first + runs.count; run += kThreads) {
    const int end = min(__ldg(runs.end + run), runs.window_end);
    const int before = __ldcg(runs.settled + run);
    if (before >= end) continue;
    const auto left = static_cast<int>(ptx::load_relaxed(runs.moving + run));
    runs.moving[run] = 0;
    const int settled = max(end - left, before + 1);
    runs.settled[run] = settled;
    if (settled == end) continue;
    const int last = (end - 1 - runs.window_begin) / kGatedSweepStep;
    for (int step = (settled - runs.window_begin) / kGatedSweepStep; step <= last; ++step) moving |= 1U << step;
  }
  if (moving != 0) atomicOr(shared, moving);
  meet();
  if (threadIdx.x != 0) return;
  if (p.check.settled != nullptr) *p.check.settled = *shared;
  ptx::store_for_host(p.check.report, *shared);
}

/// Which of the times [first, first + kTimes) are at rest, by all threads of the last of their tiles; `tiles` of time
/// do so, and meet() is a barrier of the kThreads >= kTimes threads; `shared` is a word of theirs.
template <int kTimes, int kThreads, bool kRuns, class A, class Meet>
__device__ inline void check_times(const GatedTileOperands<A>& p, int first, int tiles, std::uint32_t* shared,
                                   const Meet& meet) {
  const int time = first + static_cast<int>(threadIdx.x);
  std::uint32_t left = 0;  // times from the first that is not at rest on
  if (static_cast<int>(threadIdx.x) < kTimes && time < p.times) {
    const float change = __ldcg(p.change + time);
    const float magnitude = __ldcg(p.magnitude + time);
    p.change[time] = p.magnitude[time] = 0.0F;
    const bool rests = magnitude <= std::numeric_limits<float>::max() && change <= p.check.tolerance * magnitude;
    if constexpr (kRuns) {
      const GatedRuns& runs = p.check.runs;
      const int run = __ldg(runs.of_row + time);
      const int row = runs.base + time;
      if (!rests && run >= 0 && row >= __ldcg(runs.settled + run)) {
        atomicMax(runs.moving + run, static_cast<std::uint32_t>(min(__ldg(runs.end + run), runs.window_end) - row));
      }
    } else {
      if (!rests) left = static_cast<std::uint32_t>(p.times - time + p.after);
    }
  }
  if constexpr (!kRuns) {
    left = ptx::warp_max(left);
    if (threadIdx.x % 32 == 0 && left != 0) atomicMax(p.moving, left);
  }
  meet();  // raised
  bool reports = false;
  if (threadIdx.x == 0 && ptx::add_acq_rel(p.checked, 1) + 1 == static_cast<std::uint32_t>(tiles)) {
    *p.checked = 0;
    reports = p.reports;
  }
  if constexpr (kRuns) {
    if (threadIdx.x == 0) *shared = reports ? 1U : 0U;
    meet();
    reports = *shared != 0;
    meet();
    if (reports) report_settled_runs<kThreads>(p, shared, meet);
  } else {
    if (reports) report_settled(p);
  }
}

}  // namespace mmrec::kernels
