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

/// Which of the times [first, first + kTimes) are at rest, by all threads of the last of their tiles; `tiles` of time
/// do so, and meet() is a barrier of the threads, of which there are kTimes or more.
template <int kTimes, class A, class Meet>
__device__ inline void check_times(const GatedTileOperands<A>& p, int first, int tiles, const Meet& meet) {
  const int time = first + static_cast<int>(threadIdx.x);
  std::uint32_t left = 0;  // times from the first that is not at rest on
  if (static_cast<int>(threadIdx.x) < kTimes && time < p.times) {
    const float change = __ldcg(p.change + time);
    const float magnitude = __ldcg(p.magnitude + time);
    p.change[time] = p.magnitude[time] = 0.0F;
    const bool rests = magnitude <= std::numeric_limits<float>::max() && change <= p.check.tolerance * magnitude;
    if (!rests) left = static_cast<std::uint32_t>(p.times - time + p.after);
  }
  left = ptx::warp_max(left);
  if (threadIdx.x % 32 == 0 && left != 0) atomicMax(p.moving, left);
  meet();  // raised
  if (threadIdx.x != 0) return;
  if (ptx::add_acq_rel(p.checked, 1) + 1 != static_cast<std::uint32_t>(tiles)) return;
  *p.checked = 0;
  if (p.reports) report_settled(p);
}

}  // namespace mmrec::kernels
