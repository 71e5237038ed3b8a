// Embedding rows, widened to fp32.
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"

namespace mmrec::kernels {

void embed(Cpu& cpu, const WeightView<Host>& table, const int* tokens, MatrixView<float, Host> x) {
  const auto widen = simd().matvec.widen[static_cast<std::size_t>(table.format.code)];
  cpu.pool().parallel_for(x.rows, rows_per_thread(x.cols), [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t r = begin; r < end; ++r) widen(table.middle_rows(tokens[r], 1).data, x.row(r), table.cols);
  });
}

}  // namespace mmrec::kernels
