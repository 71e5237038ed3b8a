// The recurrence by gate-frozen sweeps, sequence after sequence and window after window. A sweep is one product and one
// scan over what is not frozen yet.
#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/cpu/cpu.h"

namespace mmrec::kernels {
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
    // orders of magnitude within a window. What is not finite never is: it falls through to the exact steps and shows
    // in the result. The first active row had exact gates, so it is final whatever it changed by.
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
