// y = weight * x / (|x| / sqrt(D) + 1e-6) per row; the squares are summed in fp64.
#include <cmath>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"

namespace mmrec::kernels {

void rmsnorm(Cpu& cpu, MatrixView<const float, Host> x, const float* weight, MatrixView<float, Host> y) {
  const PointwiseKernels& kernels = simd().pointwise;
  cpu.pool().parallel_for(x.rows, rows_per_thread(x.cols), [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t r = begin; r < end; ++r) {
      const double mean = kernels.sum_squares(x.row(r), x.cols) / static_cast<double>(x.cols);
      kernels.scale_by(x.row(r), weight, static_cast<float>(1.0 / (std::sqrt(mean) + 1e-6)), y.row(r), x.cols);
    }
  });
}

}  // namespace mmrec::kernels
