#include "kernels/cpu/row_tile.h"

#include <cblas.h>

#include "kernels/cpu/simd.h"

namespace mmrec::kernels {

void row_tile_product(const float* x, std::int64_t x_stride, const WeightView<Host>& panel, float* widened, float* y,
                      std::int64_t y_stride) {
  const auto* weights = static_cast<const float*>(panel.data);
  if (panel.format != DType::kF32) {
    simd().matvec.widen[static_cast<std::size_t>(panel.format.code)](panel.data, widened, panel.rows * panel.cols);
    weights = widened;
  }
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, static_cast<blasint>(kRowTile), static_cast<blasint>(panel.rows),
              static_cast<blasint>(panel.cols), 1.0F, x, static_cast<blasint>(x_stride), weights,
              static_cast<blasint>(panel.cols), 0.0F, y, static_cast<blasint>(y_stride));
}

}  // namespace mmrec::kernels
