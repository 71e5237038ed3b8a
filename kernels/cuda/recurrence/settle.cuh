// What has settled at the end of a sweep by tiles (GatedCheck), found in two steps, so that little is left to do at the
// sweep's end: the last tile of the same times to finish looks at their maxima and raises how many times are left from
// the first that moves; the last tile of all to have done so reports.
#pragma once

#include <cstdint>
#include <limits>

#include "kernels/cuda/recurrence/operands.cuh"

namespace mmrec::kernels {

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
