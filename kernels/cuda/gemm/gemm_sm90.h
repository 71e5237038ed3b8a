// Ops that exist for devices of compute capability 9.0 alone, on the tensor cores' warpgroup products: each has a
// portable twin, and *_supported() says which to take. Operands are BFloat16 or Float16, all of one type.
#pragma once

#include <span>

#include "kernels/cuda/runtime/cuda.h"

namespace mmrec::kernels {

/// A product x Wᵀ: compute capability 9.0, columns a multiple of 8, x and W 16-byte aligned, x's stride a multiple
/// of 8.
template <class A>
bool gemm_sm90_supported(const Cuda& cuda, MatrixView<const A, Device> x, const WeightView<Device>& weight);

/// linear for jobs of any number of rows of which gemm_sm90_supported(cuda, job.x, job.weight) holds. A row's bits
/// depend on the row, the weights and the epilogue's operands alone.
template <class A, class Y>
void linear_sm90(Cuda& cuda, std::span<const Linear<Device, A, Y>> jobs);
/// The same by a kernel for few rows, up to kFewRows, that streams the weights.
template <class A, class Y>
void linear_few_rows_sm90(Cuda& cuda, std::span<const Linear<Device, A, Y>> jobs);
inline constexpr std::int64_t kFewRows = 128;

/// The product alone, Y the operands' type or float.
template <class A, class Y>
void gemm_sm90(Cuda& cuda, MatrixView<const A, Device> x, const WeightView<Device>& weight, MatrixView<Y, Device> y) {
  const Linear<Device, A, Y> job{.x = x, .weight = weight, .y = y};
  linear_sm90(cuda, std::span(&job, 1));
}

/// hidden_logprobs where gemm_sm90_supported(cuda, op.hidden, op.head) holds. A target beyond the vocabulary gives
/// NaN.
template <class A>
void hidden_logprobs_sm90(Cuda& cuda, const HiddenLogprobs<Device, A>& op);

}  // namespace mmrec::kernels
