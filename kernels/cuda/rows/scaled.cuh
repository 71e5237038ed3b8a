// Scaled rows (ScaledRows in kernels/ops.h): a product leaves them, the next products take them.
#pragma once

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/recurrence/equations.cuh"
#include "kernels/cuda/rows/rows.cuh"

namespace mmrec::kernels {

/// By all lanes of a warp, neighbours for a part: leaves kWidth channels of a row, if it exists.
template <int kPart, class A, int kWidth>
__device__ inline void leave_scaled(const ScaledRows<Device, A>& scaled, bool exists, std::int64_t row, int column,
                                    const float (&y)[kWidth], const float (&weight)[kWidth]) {
  float squares = 0.0F;
  float product[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) squares = __fmaf_rn(y[i], y[i], squares), product[i] = y[i] * weight[i];
#pragma unroll
  for (int offset = 1; offset < kPart / kWidth; offset *= 2) squares += __shfl_xor_sync(0xffffffffU, squares, offset);
  if (!exists) return;
  store(scaled.y.row(row) + column, product);
  if (column % kPart == 0) scaled.squares[row * scaled_parts(scaled.y.cols, kPart) + column / kPart] = squares;
}

/// By a warp, where parts are small: what products of a scaled row are multiplied by. The squares of 1,024 channels are
/// loaded early, and added when products have left registers. squares: of all rows.
class ScaledFactor {
 public:
  __device__ void load_first(const float* squares, int cols, int row) {
    if (at() < cols) first_ = load(squares, cols, row, at());
  }
  __device__ float find(const float* squares, int cols, int row) const {
    float sum = add(first_);
    for (int c = at() + kAtOnce; c < cols; c += kAtOnce) sum += add(load(squares, cols, row, c));
    return norm_factor_fast(warp_sum(sum) / static_cast<float>(cols));
  }

 private:
  static constexpr int kAtOnce = 32 * 4 * kFewScaledPart;  // channels
  __device__ static int at() { return static_cast<int>(threadIdx.x) % 32 * 4 * kFewScaledPart; }
  __device__ static float4 load(const float* squares, int cols, int row, int channel) {
    return __ldcg(reinterpret_cast<const float4*>(squares + (row * cols + channel) / kFewScaledPart));
  }
  __device__ static float add(const float4& part) { return (part.x + part.y) + (part.z + part.w); }

  float4 first_ = {};
};

/// By a warp: the same of rows [first, end), where parts are large. Four lanes share a row, and all loads of 64 rows of
/// 1,024 channels are under way at once.
template <class Leave>
__device__ inline void scaled_factors(const float* squares, int cols, int first, int end, const Leave& leave) {
  constexpr int kLanes = 4, kAtOnce = 32 / kLanes, kMost = 64 / kAtOnce;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int parts = cols / kScaledPart, stride = static_cast<int>(scaled_parts(cols, kScaledPart));
  const float inverse_cols = 1.0F / static_cast<float>(cols);
#pragma unroll 1
  for (; first < end; first += kMost * kAtOnce) {
    const int groups = (end - first + kAtOnce - 1) / kAtOnce;
    const auto row_of = [&](int i) { return first + i * kAtOnce + lane / kLanes; };
    float sum[kMost] = {};
#pragma unroll 1
    for (int p = lane % kLanes * 4; p < parts; p += kLanes * 4) {
      float4 part[kMost] = {};
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        if (i >= groups) break;
        part[i] = __ldcg(reinterpret_cast<const float4*>(squares + min(row_of(i), end - 1) * stride + p));
      }
#pragma unroll
      for (int i = 0; i < kMost; ++i) {
        sum[i] += part[i].x + (p + 1 < parts ? part[i].y : 0.0F) + (p + 2 < parts ? part[i].z : 0.0F) +
                  (p + 3 < parts ? part[i].w : 0.0F);
      }
    }
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
#pragma unroll
      for (int offset = 1; offset < kLanes; offset *= 2) sum[i] += __shfl_xor_sync(0xffffffffU, sum[i], offset);
      if (lane % kLanes == 0 && row_of(i) < end) leave(row_of(i), norm_factor_fast(sum[i] * inverse_cols));
    }
  }
}

}  // namespace mmrec::kernels
