// What follows the recurrence in a block, over whole memory segments, as one op: for backends that have a kernel for
// it. The equations are those of models/mmrec/block.h; operands of products are rounded to A in the same places.
#pragma once

#include <cstdint>

#include "kernels/tensor.h"

namespace mmrec::kernels {

/// What follows a block's recurrence, for T tokens from `position` on: piece by piece, a piece ending where a memory
/// segment does,
///   y = x + h + 0.1 v + W_o attend(q; the slots filled so far) + b_o
///   x = y + W_2 gelu(W_1 rmsnorm(y; norm) + b_1) + b_2
/// and then sum += x over the piece's time, in fp64; at a segment's end slot = sum / segment, into the ring, and sum =
/// 0. x, h, v, q [B, T, D]; q is looked at where two slots or more are filled. memory [M, D] and sum [D] are the first
/// sequence's, the next ones' lie slot_bytes further each: the segment that ends before position e fills slot
/// (e / segment - 1) mod M. attend(), rmsnorm() and gelu() are rounded to A.
template <class Space, class A = float>
struct FinishSegments {
  SequenceView<float, Space> x;
  SequenceView<const float, Space> h;
  SequenceView<const A, Space> v;
  SequenceView<const A, Space> q;
  std::int64_t position = 0;
  std::int64_t segment = 1;
  std::int64_t heads = 1;
  float* memory = nullptr;
  std::int64_t memory_slots = 1;  // M
  double* sum = nullptr;
  std::int64_t slot_bytes = 0;
  WeightView<Space> memory_out;  // W_o
  const float* memory_out_bias = nullptr;
  const float* norm = nullptr;
  WeightView<Space> ffn_in;  // W_1
  const float* ffn_in_bias = nullptr;
  WeightView<Space> ffn_out;  // W_2
  const float* ffn_out_bias = nullptr;
};

}  // namespace mmrec::kernels
