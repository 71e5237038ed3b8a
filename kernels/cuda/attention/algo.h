// The algorithms of attention over memory slots and to banks, and the function that chooses. Ops take one as their last
// argument to force it; it must be able to take the op.
#pragma once

#include "kernels/cuda/runtime/cuda.h"

namespace mmrec::kernels {

/// How attention over memory slots is spread over the device.
enum class AttentionAlgo : std::uint8_t {
  kAuto,
  /// From 16 tokens of a sequence on: a block's tokens share tiles of slots in shared memory.
  kTile,
  /// Fewer: groups of lanes share a token's slots, so that a step fills the device. The bits are kTile's.
  kSplit,
  /// Heads of more than 1,024 channels or without 4-channel alignment, which the others do not take.
  kAny,
};

template <class A>
AttentionAlgo choose_attention(const MemoryAttention<Device, A>& op);

/// How a run attends to its bank. kAuto chooses for each run by its rows.
enum class BankAlgo : std::uint8_t {
  kAuto,
  /// Few rows of a run: blocks take parts of the bank for a row, and a second kernel merges their results. The bank is
  /// read once for every row, in fp32.
  kSplit,
  /// From 16 rows of a run on: `linear` computes both products, with the bank rounded to A.
  kProducts,
};

}  // namespace mmrec::kernels
