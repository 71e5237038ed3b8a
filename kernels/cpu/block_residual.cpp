// y = x + h + 0.1 v + bias.
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"

namespace mmrec::kernels {

void block_residual(Cpu& cpu, const BlockResidual<Host>& op) {
  const auto run = simd().pointwise.block_residual;
  const std::int64_t rows = op.y.batch * op.y.time;
  cpu.pool().parallel_for(rows, rows_per_thread(op.y.dim), [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t r = begin; r < end; ++r) {
      const std::int64_t b = r / op.y.time;
      const std::int64_t t = r % op.y.time;
      run(op.x.at(b, 0, t), op.h.at(b, 0, t), op.v.at(b, 0, t),
          op.bias == nullptr ? nullptr : op.bias + b * op.bias_stride, op.y.at(b, 0, t), op.y.dim);
    }
  });
}

}  // namespace mmrec::kernels
