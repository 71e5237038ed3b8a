// gamma = clamp(sigmoid(a) * sigmoid(c)), or clamp(sigmoid(a)).
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"

namespace mmrec::kernels {

void decay_gate(Cpu& cpu, const DecayGate<Host>& op) {
  const auto run = simd().pointwise.decay_gate;
  cpu.pool().parallel_for(
      op.gamma.rows, rows_per_thread(op.gamma.cols), [&](std::int64_t begin, std::int64_t end, int) {
        for (std::int64_t r = begin; r < end; ++r) {
          run(op.a.row(r), op.c.data == nullptr ? nullptr : op.c.row(r), op.gamma.row(r), op.gamma.cols);
        }
      });
}

}  // namespace mmrec::kernels
