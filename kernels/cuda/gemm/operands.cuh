// What the kernels of linear share: the outputs of a job, and operands as the copy engine sees them.
#pragma once

#include <cstdint>

#include "kernels/cuda/rows/rows.cuh"
#include "kernels/cuda/runtime/tensor_map.h"

namespace mmrec::kernels {

/// What becomes of a job's sums: y = act(sum + bias) + residual_scale residual.
template <class Y>
struct LinearOutput {
  Y* y;
  const Y* residual;  // or null
  const float* bias;  // or null
  std::int64_t y_stride;
  std::int64_t residual_stride;
  int rows;
  int columns;
  float residual_scale;
  Activation activation;
  bool vectors;  // all three can be accessed 16 bytes at a time
};

template <class A, class Y>
LinearOutput<Y> linear_output(const Linear<Device, A, Y>& job) {
  constexpr auto kBytes = static_cast<std::int64_t>(sizeof(Y));
  return {.y = job.y.data,
          .residual = job.residual.data,
          .bias = job.bias,
          .y_stride = job.y.stride,
          .residual_stride = job.residual.stride,
          .rows = static_cast<int>(job.x.rows),
          .columns = static_cast<int>(job.weight.rows),
          .residual_scale = job.residual_scale,
          .activation = job.activation,
          .vectors = takes_16_bytes(job.y.data, job.y.stride * kBytes) && takes_16_bytes(job.bias) &&
                     takes_16_bytes(job.residual.data, job.residual.stride * kBytes)};
}

template <class A>
MatrixStack matrix_stack(MatrixView<const A, Device> x) {
  return {.data = x.data, .columns = x.cols, .rows = x.rows, .row_stride = x.stride};
}
template <class A>
MatrixStack matrix_stack(const WeightView<Device>& w) {
  return {.data = w.as<A>(), .columns = w.cols, .rows = w.rows, .row_stride = w.cols};
}

}  // namespace mmrec::kernels
