// How attention to a bank of past states goes: the ways, and how to force one.
#pragma once

#include "kernels/cuda/runtime/cuda.h"

namespace mmrec::kernels {

enum class BankWay : std::uint8_t {
  kAuto,
  /// Few rows of a run: blocks take parts of the bank for a row, whose results a second kernel merges. The bank is read
  /// once for every row, in fp32.
  kSplit,
  /// From 16 rows of a run on: both products by `linear`, with the bank rounded to A.
  kProducts,
};

/// Each run by the way that its rows say, or all by one.
template <class A>
void bank_attention_by(Cuda& cuda, BankWay way, const BankAttention<Device, A>& op);

}  // namespace mmrec::kernels
