// The algorithms of log-probs from hidden states, and the function that chooses.
#pragma once

#include "kernels/cuda/runtime/cuda.h"

namespace mmrec::kernels {

/// Times are of an NVIDIA H200's product of the same operands alone, at D = 2,048 (docs/performance.md).
enum class HiddenLogprobsAlgo : std::uint8_t {
  kAuto,
  /// Where gemm_sm90_supported(cuda, op.hidden, op.head) holds: logits never leave the product's registers, 1.02 to
  /// 1.03 x the product.
  kInRegisters,
  /// Any device and operands: tiles of logits in fp32 that stay in L2, reduced while the next one's product runs.
  kByTiles,
};

template <class A>
HiddenLogprobsAlgo choose_hidden_logprobs(const Cuda& cuda, const HiddenLogprobs<Device, A>& op);

}  // namespace mmrec::kernels
