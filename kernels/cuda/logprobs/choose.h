// How log-probs come from hidden states: the ways, the one function that decides between them, and how to force one.
#pragma once

#include "kernels/cuda/runtime/cuda.h"

namespace mmrec::kernels {

/// Times are of an NVIDIA H200's product of the same operands alone, at D = 2,048 (docs/performance.md).
enum class HiddenLogprobsWay : std::uint8_t {
  kAuto,
  /// Where gemm_sm90_supported(cuda, op.hidden, op.head) holds: logits never leave the product's registers, 1.02 to
  /// 1.03 x the product.
  kInRegisters,
  /// Any device and operands: tiles of logits in fp32 that stay in L2, reduced while the next one's product runs.
  kByTiles,
};

template <class A>
HiddenLogprobsWay choose_hidden_logprobs(const Cuda& cuda, const HiddenLogprobs<Device, A>& op);

/// hidden_logprobs by one way, which must be able to take the op. A target beyond the vocabulary gives NaN.
template <class A>
void hidden_logprobs_by(Cuda& cuda, HiddenLogprobsWay way, const HiddenLogprobs<Device, A>& op);

}  // namespace mmrec::kernels
