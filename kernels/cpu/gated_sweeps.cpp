// The recurrence by gate-frozen sweeps, sequence after sequence and window after window. A sweep is one product and one
// scan over the times that are not frozen yet.
//
// The scan is sequential in time, parallel over sequences and tiles of channels. Each thread keeps its own maxima of
// change and magnitude per time. They are merged by maximum, so their order does not matter.
#include <algorithm>
#include <array>
#include <cmath>

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

namespace {

void sweep_window(Cpu& cpu, const GatedSweeps<Host>& op, const GateInputs<Host>& window, SweepCounts& counts) {
  const std::int64_t n = window.z.time;
  const std::int64_t dim = window.z.dim;
  fill_zero(cpu, {window.h.at(0, 0, 1), n, dim, window.h.time_stride});
  counts.windows += 1;
  std::int64_t first = 0;
  for (int i = 0; i < op.max_sweeps && first < n; ++i) {
    const std::int64_t active = n - first;
    const GateInputs<Host> in = window.slice(0, first, active);
    const MatrixView<const float, Host> previous(in.h.data, active, dim, in.h.time_stride);
    const MatrixView<float, Host> gate = op.gate.middle_rows(0, active);
    const std::array<Linear<Host>, 2> products = {
        {{.x = previous,
          .weight = op.gate_weight.middle_rows(0, dim),
          .bias = op.gate_bias,
          .y = gate.middle_cols(0, dim)},
         {.x = previous, .weight = op.gate_weight.middle_rows(dim, dim), .y = gate.middle_cols(dim, dim)}}};
    linear(cpu, products);
    float* const change = op.change;
    float* const magnitude = op.change + op.gate.rows;
    gated_scan(cpu, {.in = in, .gate = {gate.data, 1, active, 2 * dim}, .change = change, .magnitude = magnitude});
    counts.token_sweeps += active;
    // A time is settled by its own measure, whatever comes later or was larger before: |h| can grow and shrink by
    // orders of magnitude within a window. A value that is not finite never settles: it falls through to the exact
    // steps and shows in the result. The first active row had exact gates, so it is final whatever it changed by.
    std::int64_t settled = 0;
    while (settled < active && std::isfinite(magnitude[settled]) &&
           change[settled] <= op.tolerance * magnitude[settled]) {
      ++settled;
    }
    first += std::max<std::int64_t>(settled, 1);
  }
  if (first < n) {
    counts.fallbacks += 1;
    gated_recurrence(
        cpu, {.in = window.slice(0, first, n - first), .gate_weight = op.gate_weight, .gate_bias = op.gate_bias});
  }
}

}  // namespace

SweepCounts gated_sweeps(Cpu& cpu, const GatedSweeps<Host>& op) {
  SweepCounts counts;
  for (std::int64_t b = 0; b < op.in.z.batch; ++b) {
    for (std::int64_t first = 0; first < op.in.z.time; first += op.gate.rows) {
      const std::int64_t count = std::min(op.gate.rows, op.in.z.time - first);
      sweep_window(cpu, op, op.in.slice(b, first, count), counts);
    }
  }
  return counts;
}

}  // namespace mmrec::kernels
