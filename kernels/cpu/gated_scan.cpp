// One gate-frozen sweep of the recurrence: sequential in time, parallel over sequences and tiles of channels.
//
// Each thread keeps its own maxima of change and magnitude per time; they are merged by the maximum, whose result does
// not depend on the order.
#include <algorithm>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"

namespace mmrec::kernels {

void gated_scan(Cpu& cpu, const GatedScan<Host>& op) {
  const GateInputs<Host>& in = op.in;
  const std::int64_t dim = in.z.dim;
  const std::int64_t tiles = (dim + kScanChannels - 1) / kScanChannels;
  const std::int64_t tasks = in.z.batch * tiles;
  constexpr std::int64_t kTimes = static_cast<std::int64_t>(Cpu::kScratchFloats) / 2;

  for (std::int64_t t0 = op.first; t0 < in.z.time; t0 += kTimes) {
    const std::int64_t times = std::min(kTimes, in.z.time - t0);
    std::fill_n(op.change + t0, times, 0.0F);
    std::fill_n(op.magnitude + t0, times, 0.0F);
    bool taken[256] = {};  // threads that hold maxima
    const std::int64_t grain = 1 + kElementsPerThread / 8 / (kScanChannels * times);
    cpu.pool().parallel_for(tasks, grain, [&](std::int64_t begin, std::int64_t end, int thread) {
      float* change = cpu.scratch(thread);  // [times], then magnitude [times]
      if (!taken[thread]) {
        taken[thread] = true;
        std::fill_n(change, 2 * times, 0.0F);
      }
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t b = i / tiles;
        const std::int64_t c = i % tiles * kScanChannels;
        simd().recurrence.scan({.s = op.gate.at(b, 0, t0) + c,
                                .g = op.gate.at(b, 0, t0) + dim + c,
                                .gate_stride = op.gate.time_stride,
                                .z = in.z.at(b, 0, t0) + c,
                                .z_stride = in.z.time_stride,
                                .zm = in.zm.at(b, 0, t0) + c,
                                .zm_stride = in.zm.time_stride,
                                .gamma = in.gamma.at(b, 0, t0) + c,
                                .gamma_stride = in.gamma.time_stride,
                                .h = in.h.at(b, 0, t0) + c,
                                .h_stride = in.h.time_stride,
                                .mdi_mix = in.mdi_mix,
                                .times = times,
                                .channels = std::min(kScanChannels, dim - c),
                                .change = change,
                                .magnitude = change + times});
      }
    });
    for (int thread = 0; thread < cpu.threads(); ++thread) {
      if (!taken[thread]) continue;
      const float* change = cpu.scratch(thread);
      for (std::int64_t t = 0; t < times; ++t) {
        op.change[t0 + t] = std::max(op.change[t0 + t], change[t]);
        op.magnitude[t0 + t] = std::max(op.magnitude[t0 + t], change[times + t]);
      }
    }
  }
}

}  // namespace mmrec::kernels
