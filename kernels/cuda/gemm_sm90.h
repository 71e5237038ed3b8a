// Ops that exist for devices of compute capability 9.0 alone, on the tensor cores' warpgroup products: each has a
// portable twin, and *_supported() says which to take. Operands are BFloat16 or Float16, all of one type.
#pragma once

#include "kernels/cuda/cuda.h"

namespace mmrec::kernels {

/// y = x Wᵀ: compute capability 9.0, columns a multiple of 8, x and W 16-byte aligned, x's stride a multiple of 8.
template <class A>
bool gemm_sm90_supported(const Cuda& cuda, MatrixView<const A, Device> x, const WeightView<Device>& weight);
/// The product alone, Y the operands' type or float.
template <class A, class Y>
void gemm_sm90(Cuda& cuda, MatrixView<const A, Device> x, const WeightView<Device>& weight, MatrixView<Y, Device> y);

/// hidden_logprobs where gemm_sm90_supported(cuda, op.hidden, op.head) holds. Targets must be below op.head.rows.
template <class A>
void hidden_logprobs_sm90(Cuda& cuda, const HiddenLogprobs<Device, A>& op);

/// One gate-frozen sweep in one kernel (GatedSweep). Compute capability 9.0, D a multiple of 8, 16-byte aligned views with
/// strides that are multiples of 8, and no more tiles than have room for their words in Cuda::flags(): batch x ⌈(T −
/// first) / 128⌉ x D up to about 65,000, gate_weight of type A. Its twin is the product and gated_scan.
template <class A>
bool gated_sweep_sm90_supported(const Cuda& cuda, const GatedSweep<Device, A>& op);
template <class A>
void gated_sweep_sm90(Cuda& cuda, const GatedSweep<Device, A>& op);

}  // namespace mmrec::kernels
