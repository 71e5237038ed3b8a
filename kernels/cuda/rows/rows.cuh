// Element-wise kernels over rows of views: access by vectors of 4 elements, and the launch that hands every thread one
// vector of one row.
//
// Everything that a kernel before may have written is read past L1: kernels here start while that one drains
// (LaunchConfig::overlap_predecessor), and L1 may hold lines from before it wrote.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/cuda/runtime/launch.cuh"

namespace mmrec::kernels {

/// 1 element, or 4 elements in one access of 4 * sizeof(T) bytes, widened.
template <int kWidth, class T>
__device__ inline void load(const T* from, float (&to)[kWidth]) {
  static_assert(kWidth == 1 || kWidth == 4);
  if constexpr (kWidth == 1) {
    if constexpr (sizeof(T) == 4) {
      to[0] = __ldcg(from);
    } else {
      to[0] = widen(T{__ldcg(&from->bits)});
    }
  } else if constexpr (sizeof(T) == 4) {
    const float4 v = __ldcg(reinterpret_cast<const float4*>(from));
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  } else {
    const uint2 v = __ldcg(reinterpret_cast<const uint2*>(from));
    to[0] = widen_part<T>(v.x, 0), to[1] = widen_part<T>(v.x, 1);
    to[2] = widen_part<T>(v.y, 0), to[3] = widen_part<T>(v.y, 1);
  }
}

/// One element, widened.
template <class T>
__device__ inline float read(const T* from) {
  float value[1];
  load(from, value);
  return value[0];
}

/// The reverse of load, rounded to nearest even. `to` is in global memory. (An assignment of float4 may become four
/// stores.)
template <int kWidth, class T>
__device__ inline void store(T* to, const float (&from)[kWidth]) {
  static_assert(kWidth == 1 || kWidth == 4);
  if constexpr (kWidth == 1) {
    *to = narrow<T>(from[0]);
  } else if constexpr (sizeof(T) == 4) {
    __stcg(reinterpret_cast<float4*>(to), make_float4(from[0], from[1], from[2], from[3]));
  } else {
    __stcg(reinterpret_cast<uint2*>(to),
           make_uint2(ptx::to_pair<T>(from[0], from[1]), ptx::to_pair<T>(from[2], from[3])));
  }
}

/// Columns 4 group..4 group + 3 of a row of `cols`, zeros past its end: a thread's share of work whose result must not
/// depend on how rows are aligned. kVectors: cols is a multiple of 4 and the row aligned to 4.
inline constexpr int kGroup = 4;
template <bool kVectors, class T>
__device__ inline void load_group(const T* row, std::int64_t group, std::int64_t cols, float (&to)[kGroup]) {
  const std::int64_t col = group * kGroup;
#pragma unroll
  for (float& value : to) value = 0.0F;
  if constexpr (kVectors) {
    if (col < cols) load(row + col, to);
  } else {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (col + i < cols) to[i] = read(row + col + i);
    }
  }
}
template <bool kVectors, class T>
__device__ inline void store_group(T* row, std::int64_t group, std::int64_t cols, const float (&from)[kGroup]) {
  const std::int64_t col = group * kGroup;
  if constexpr (kVectors) {
    if (col < cols) store(row + col, from);
  } else {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (col + i < cols) row[col + i] = narrow<T>(from[i]);
    }
  }
}

/// a / b for a >= 0, b > 0; 64-bit division only where it is needed.
__device__ inline std::int64_t quotient(std::int64_t a, std::int64_t b) {
  if (((a | b) >> 32) == 0) return static_cast<std::uint32_t>(a) / static_cast<std::uint32_t>(b);
  return a / b;
}

/// Adds x to a segment's sums, which were `before`. If `closed` is not null, the segment ends: it gets the mean, and
/// the sums become 0.
template <int kWidth>
__device__ inline void add_to_segment(const double (&before)[kWidth], const float (&x)[kWidth], double segment,
                                      double* sums, float* closed) {
  double sum[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sum[i] = before[i] + static_cast<double>(x[i]);
  if (closed != nullptr) {
    float mean[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) mean[i] = static_cast<float>(sum[i] / segment), sum[i] = 0.0;
    store(closed, mean);
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sums[i] = sum[i];
}

__device__ inline float activate(float x, Activation activation) {
  switch (activation) {
    case Activation::kGelu:
      return gelu(x);
    case Activation::kRelu:
      return relu(x);
    case Activation::kGeluTanh:
      return gelu_tanh(x);
    case Activation::kNone:
      break;
  }
  return x;
}

/// True if vectors of 4 elements at all multiples of 4 columns of all rows are aligned.
template <class T>
bool takes_vectors(const T* data, std::int64_t stride) {
  return (reinterpret_cast<std::uintptr_t>(data) | static_cast<std::uintptr_t>(stride) * sizeof(T)) % (4 * sizeof(T)) ==
         0;
}
template <class T>
bool takes_vectors(const MatrixView<T, Device>& v) {
  return takes_vectors(v.data, v.stride) && v.cols % 4 == 0;
}
template <class T>
bool takes_vectors(const SequenceView<T, Device>& v) {
  return takes_vectors(v.data, v.time_stride) && takes_vectors(v.data, v.batch_stride) && v.dim % 4 == 0;
}

/// True if rows so many bytes apart begin at multiples of 16 bytes.
inline bool takes_16_bytes(const void* data, std::int64_t stride_bytes = 0) {
  return (reinterpret_cast<std::uintptr_t>(data) | static_cast<std::uintptr_t>(stride_bytes)) % 16 == 0;
}
template <class T>
bool takes_16_bytes(const SequenceView<T, Device>& v) {
  constexpr auto kSize = static_cast<std::int64_t>(sizeof(T));
  return takes_16_bytes(v.data, v.time_stride * kSize) && takes_16_bytes(v.data, v.batch_stride * kSize);
}

/// A launch that may start while the one before drains, on devices that can.
inline LaunchConfig overlapping(const Cuda& cuda, dim3 grid, dim3 block) {
  return {.grid = grid, .block = block, .overlap_predecessor = cuda.compute_capability() >= 90};
}

inline constexpr unsigned kMapThreads = 256;

/// op.apply<kWidth>(row, column) for kWidth columns of every row. A block is a rectangle of as many columns as there
/// are, up to 256 vectors, and of rows for the rest of its threads, so that narrow rows fill it too.
template <int kWidth, class Op>
__global__ void __launch_bounds__(kMapThreads)
    map_rows_kernel(const __grid_constant__ Op op, std::int64_t rows, std::int64_t cols) {
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const std::int64_t row = std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const std::int64_t col = (std::int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * kWidth;
  if (row < rows && col < cols) op.template apply<kWidth>(row, col);
}

template <int kWidth, class Op>
void map_rows_by(const Cuda& cuda, CUstream_st* stream, const Op& op, std::int64_t rows, std::int64_t cols) {
  if (rows == 0 || cols == 0) return;
  const std::int64_t vectors = ceil_div(cols, kWidth);
  const unsigned across = std::bit_ceil(static_cast<unsigned>(std::min<std::int64_t>(vectors, kMapThreads)));
  const unsigned down = kMapThreads / across;
  launch(stream, overlapping(cuda, dims(ceil_div(rows, down), ceil_div(vectors, across)), dim3(across, down)),
         map_rows_kernel<kWidth, Op>, op, rows, cols);
}

/// By 4 columns if `vectors`, else one by one.
template <class Op>
void map_rows(const Cuda& cuda, CUstream_st* stream, const Op& op, std::int64_t rows, std::int64_t cols, bool vectors) {
  if (vectors) {
    map_rows_by<4>(cuda, stream, op, rows, cols);
  } else {
    map_rows_by<1>(cuda, stream, op, rows, cols);
  }
}

}  // namespace mmrec::kernels
