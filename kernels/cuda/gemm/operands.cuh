// Operands of the product kernels: a loader that reads weights and vectors by 16 bytes, the outputs of a job, and
// matrices as the copy engine sees them.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <span>
#include <type_traits>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/gemm/algo.h"
#include "kernels/cuda/gemm/compact.h"
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
struct FromShared {  // shared memory of the block
  static __device__ uint4 vector(const void* from) { return *static_cast<const uint4*>(from); }
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

/// Where k-block k of W begins, in 16-bit elements. Of Float8 it is two groups of compact rows.
template <class A>
__device__ inline int block_of_w(int k) {
  if constexpr (std::is_same_v<A, Float8>) return compact_group_at(DType::kF8, 2 * k) / 2;
  return k * kBoxColumns;
}

/// The scales of a product of fp8: of x's rows, and of W's.
struct ProductScales {
  const float* x;
  const std::byte* w;
  std::int64_t w_stride;  // bytes

  __device__ float of_output(int output) const { return __ldg(reinterpret_cast<const float*>(w + output * w_stride)); }
};
inline ProductScales product_scales(const float* x, const WeightView<Device>& w) {
  return {x, w.compact.data + compact_scale_at(w.cols), w.compact.row_bytes};
}

/// Of 16-bit elements: two numbers each of Float8, whose weights are compact rows.
template <class A>
MatrixStack matrix_stack(MatrixView<const A, Device> x) {
  constexpr std::int64_t kNumbers = 2 / sizeof(A);
  return {.data = x.data, .columns = x.cols / kNumbers, .rows = x.rows, .row_stride = x.stride / kNumbers};
}
inline MatrixStack matrix_stack(const CompactView& compact, std::int64_t rows) {
  return {.data = compact.data, .columns = compact.row_bytes / 2, .rows = rows, .row_stride = compact.row_bytes / 2};
}
template <class A>
MatrixStack matrix_stack(const WeightView<Device>& w) {
  if constexpr (std::is_same_v<A, Float8>) return matrix_stack(w.compact, w.rows);
  return {.data = w.as<A>(), .columns = w.cols, .rows = w.rows, .row_stride = w.cols};
}

// Products of x in another form, which is made of some rows at a time, in Cuda::parts().

/// As many rows of so many bytes as fit `bytes`, in whole tiles; 0: not even one tile.
inline std::int64_t rows_at_once(std::int64_t rows, std::int64_t row_bytes, std::size_t bytes) {
  constexpr std::int64_t kTile = 256;
  const auto fit = static_cast<std::int64_t>(bytes) / row_bytes / kTile * kTile;
  if (rows <= fit || fit == 0) return std::min(rows, fit);
  return ceil_div(ceil_div(rows, ceil_div(rows, fit)), kTile) * kTile;
}

/// For the jobs, by those that share an x, and by rows that fit `bytes`: make(rows of x), which writes them to `other`,
/// row_bytes(columns) a row, and multiply(products of them).
template <class To, class A, class Y, class RowBytes, class Make, class Multiply>
void by_rows_of_x(std::span<const Linear<Device, A, Y>> jobs, const To* other, const RowBytes& row_bytes,
                  std::size_t bytes, const Make& make, const Multiply& multiply) {
  const auto is_same = [](const MatrixView<const A, Device>& a, const MatrixView<const A, Device>& b) {
    return a.data == b.data && a.rows == b.rows && a.cols == b.cols && a.stride == b.stride;
  };
  for (std::size_t begin = 0, end = 0; begin < jobs.size(); begin = end) {
    const MatrixView<const A, Device> x = jobs[begin].x;
    while (end < jobs.size() && is_same(jobs[end].x, x)) ++end;
    const std::int64_t most = rows_at_once(x.rows, row_bytes(x.cols), bytes);
    for (std::int64_t first = 0; first < x.rows; first += most) {
      const std::int64_t count = std::min(most, x.rows - first);
      make(x.middle_rows(first, count));
      std::array<Linear<Device, To, Y>, kMostGemmJobs> products;
      for (std::size_t i = begin; i < end; ++i) {
        const Linear<Device, A, Y>& job = jobs[i];
        Linear<Device, To, Y>& product = products[i - begin];
        product.x = {other, count, x.cols};
        product.weight = job.weight;
        product.bias = job.bias;
        product.activation = job.activation;
        product.residual_scale = job.residual_scale;
        if (job.residual.data != nullptr) product.residual = job.residual.middle_rows(first, count);
        if (job.y_rows != nullptr) {
          product.y_rows = job.y_rows + first;
        } else {
          product.y = job.y.middle_rows(first, count);
        }
      }
      multiply(std::span<Linear<Device, To, Y>>(products).first(end - begin));
    }
  }
}

}  // namespace mmrec::kernels
