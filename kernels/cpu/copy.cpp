// Row copies between state and activations: small, so they run on the calling thread.
#include <algorithm>

#include "kernels/cpu/cpu.h"

namespace mmrec::kernels {

void copy_rows(Cpu& /*cpu*/, MatrixView<const float, Host> from, MatrixView<float, Host> to) {
  for (std::int64_t r = 0; r < from.rows; ++r) std::copy_n(from.row(r), from.cols, to.row(r));
}

void fill_zero(Cpu& /*cpu*/, MatrixView<float, Host> to) {
  for (std::int64_t r = 0; r < to.rows; ++r) std::fill_n(to.row(r), to.cols, 0.0F);
}

}  // namespace mmrec::kernels
