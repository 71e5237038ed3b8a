// Operands of the product kernels: a loader that reads weights and vectors by 16 bytes, the outputs of a job, and
// matrices as the copy engine sees them.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/rows/rows.cuh"
#include "kernels/cuda/runtime/tensor_map.h"

namespace mmrec::kernels {

/// How load_fragment reads: aligned pieces of 16 bytes, and single elements.
struct ReadOnly {  // nothing writes it while the kernel runs
  static __device__ uint4 vector(const void* from) { return __ldg(static_cast<const uint4*>(from)); }
  template <class A>
  static __device__ A element(const A* from) {
    return *from;
  }
};
struct PastL1 {  // a kernel before may have written it
  static __device__ uint4 vector(const void* from) { return __ldcg(static_cast<const uint4*>(from)); }
  template <class A>
  static __device__ A element(const A* from) {
    return std::bit_cast<A>(__ldcg(reinterpret_cast<const Bits<A>*>(from)));
  }
};
struct ReadOnce : PastL1 {
  static __device__ uint4 vector(const void* from) { return ptx::load_streaming(from); }
};

/// A lane's fragment of a row of numbers of type A: 16 bytes from `from`. The first `left` elements exist; the others
/// become zeros. kAligned: `from` is 16-byte aligned, and either all elements exist or none does. A weight format that
/// does not store plain numbers is widened here.
template <class Read, bool kAligned, class A>
__device__ inline uint4 load_fragment(const A* from, int left) {
  if constexpr (kAligned) {
    return left > 0 ? Read::vector(from) : make_uint4(0, 0, 0, 0);
  } else {
    Vector16<A> piece(make_uint4(0, 0, 0, 0));
#pragma unroll
    for (int i = 0; i < Vector16<A>::kSize; ++i) {
      if (i < left) piece.values[i] = Read::element(from + i);
    }
    return piece.bits;
  }
}

/// What becomes of a job's sums: y = act(sum + bias) + residual_scale residual.
template <class Y>
struct LinearOutput {
  Y* y;
  Y* const* y_rows;   // or null
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
          .y_rows = job.y_rows,
          .residual = job.residual.data,
          .bias = job.bias,
          .y_stride = job.y.stride,
          .residual_stride = job.residual.stride,
          .rows = static_cast<int>(job.x.rows),
          .columns = static_cast<int>(job.weight.rows),
          .residual_scale = job.residual_scale,
          .activation = job.activation,
          .vectors = (job.y_rows != nullptr || takes_16_bytes(job.y.data, job.y.stride * kBytes)) &&
                     takes_16_bytes(job.bias) && takes_16_bytes(job.residual.data, job.residual.stride * kBytes)};
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
