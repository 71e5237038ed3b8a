// How attention over memory slots is spread over the device: the ways, the one function that decides among them, and
// how to force one.
#pragma once

#include "kernels/cuda/runtime/cuda.h"

namespace mmrec::kernels {

enum class AttentionWay : std::uint8_t {
  kAuto,
  /// From 16 tokens of a sequence on: a block's tokens share tiles of slots in shared memory.
  kTile,
  /// Fewer: groups of lanes share a token's slots, so that a step fills the device. The bits are kTile's.
  kSplit,
  /// Heads of more than 1,024 channels or without 4-channel alignment, which the others do not take.
  kAny,
};

template <class A>
AttentionWay choose_attention(const MemoryAttention<Device, A>& op);

/// memory_attention by one way, which must be able to take the op.
template <class A>
void memory_attention_by(Cuda& cuda, AttentionWay way, const MemoryAttention<Device, A>& op);

}  // namespace mmrec::kernels
