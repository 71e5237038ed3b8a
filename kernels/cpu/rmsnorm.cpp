// y = weight * x / (|x| / sqrt(D) + 1e-6) per row, or with the 1e-6 inside the root; the squares are summed in fp64.
#include <cmath>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"

namespace mmrec::kernels {

void rmsnorm(Cpu& cpu, MatrixView<const float, Host> x, const float* weight, MatrixView<float, Host> y,
             NormEpsilon epsilon) {
  const PointwiseKernels& kernels = simd().pointwise;
  const double beside = epsilon == NormEpsilon::kBesideRoot ? 1e-6 : 0.0;
  const double inside = epsilon == NormEpsilon::kInsideRoot ? 1e-6 : 0.0;
  cpu.pool().parallel_for(x.rows, rows_per_thread(x.cols), [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t r = begin; r < end; ++r) {
      const double mean = kernels.sum_squares(x.row(r), x.cols) / static_cast<double>(x.cols);
      const double root = std::sqrt(mean + inside) + beside;
      kernels.scale_by(x.row(r), weight, static_cast<float>(1.0 / root), y.row(r), x.cols);
    }
  });
}

}  // namespace mmrec::kernels
