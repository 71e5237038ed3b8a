// The plain product on the tensor cores of sm_90a: y = x Wᵀ stored from the registers.
//
// It exists to test and to time the main loop that the fused ops are built on. Bytes moved: x once, W once per group of
// rows (gemm_sm90.cuh), y once, in runs of 32 (float) or 16 bytes. One block an SM. Deterministic: one order of
// summation.
#include "kernels/cuda/gemm_sm90.cuh"

#include <limits>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/gemm_sm90.h"

namespace mmrec::kernels {

namespace {

/// Rounds the sums to Y and stores those inside of y.
template <class Y>
class StoreEpilogue {
 public:
  struct Parameters {
    Y* y;
    std::int64_t stride;
    int rows;
    int columns;
  };
  static constexpr int kSharedBytes = 0;

  __device__ StoreEpilogue(const Parameters& parameters, std::byte*, std::byte*) : p_(parameters) {}
  __device__ void begin(const GemmPlace&) {}

  template <int kSize>
  __device__ void finish(const GemmPlace& place, const float (&sum)[kSize]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int row = place.row + static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4;
    const int column = place.column + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + 8 * half >= p_.rows) continue;
      Y* y = p_.y + (row + 8 * half) * p_.stride;
#pragma unroll
      for (int j = 0; j < kSize / 4; ++j) {
        const int at = column + 8 * j;
        if (at < p_.columns) y[at] = narrow<Y>(sum[4 * j + 2 * half]);
        if (at + 1 < p_.columns) y[at + 1] = narrow<Y>(sum[4 * j + 2 * half + 1]);
      }
    }
  }

 private:
  const Parameters& p_;
};

template <class A>
MatrixStack stack_of(MatrixView<const A, Device> x) {
  return {.data = x.data, .columns = x.cols, .rows = x.rows, .row_stride = x.stride};
}
MatrixStack stack_of(const WeightView<Device>& w) {
  return {.data = w.data, .columns = w.cols, .rows = w.rows, .row_stride = w.cols};
}

}  // namespace

template <class A>
bool gemm_sm90_supported(const Cuda& cuda, MatrixView<const A, Device> x, const WeightView<Device>& weight) {
  constexpr std::int64_t kMostTiles = std::numeric_limits<std::int32_t>::max();
  return cuda.compute_capability() == 90 && has_tensor_map(stack_of(x)) && has_tensor_map(stack_of(weight)) &&
         (x.rows / 128 + 2) * (weight.rows / 128 + 2) <= kMostTiles;
}

template <class A, class Y>
void gemm_sm90(Cuda& cuda, MatrixView<const A, Device> x, const WeightView<Device>& weight, MatrixView<Y, Device> y) {
  const typename StoreEpilogue<Y>::Parameters parameters = {y.data, y.stride, static_cast<int>(y.rows),
                                                            static_cast<int>(y.cols)};
  if (x.rows <= GemmLayout<WideTile>::kRows) {
    launch_gemm_sm90<WideSingleTile, A, StoreEpilogue<Y>>(cuda, stack_of(x), stack_of(weight), parameters, true);
  } else {
    launch_gemm_sm90<WideTile, A, StoreEpilogue<Y>>(cuda, stack_of(x), stack_of(weight), parameters, true);
  }
}

template bool gemm_sm90_supported(const Cuda&, MatrixView<const BFloat16, Device>, const WeightView<Device>&);
template bool gemm_sm90_supported(const Cuda&, MatrixView<const Float16, Device>, const WeightView<Device>&);
template void gemm_sm90(Cuda&, MatrixView<const BFloat16, Device>, const WeightView<Device>&,
                        MatrixView<float, Device>);
template void gemm_sm90(Cuda&, MatrixView<const Float16, Device>, const WeightView<Device>&, MatrixView<float, Device>);
template void gemm_sm90(Cuda&, MatrixView<const BFloat16, Device>, const WeightView<Device>&,
                        MatrixView<BFloat16, Device>);
template void gemm_sm90(Cuda&, MatrixView<const Float16, Device>, const WeightView<Device>&,
                        MatrixView<Float16, Device>);

}  // namespace mmrec::kernels
