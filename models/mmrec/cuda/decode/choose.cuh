// Which algorithm a decode step takes: one function decides. Figures are of an H200 (docs/performance.md), in bf16.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/runtime/launch.cuh"
#include "models/mmrec/cuda/decode/plan.cuh"
#include "models/mmrec/cuda/ops.h"

namespace mmrec::kernels {

struct DecodeChoice {
  DecodeAlgo algo = DecodeAlgo::kNone;
  int blocks = 0;
  DecodePlan plan;
};

/// For steps that attend to memory slots, or do not: the choice is the same. kNone, too, where shape.algo asks for one
/// that does not serve the shape.
template <class A>
DecodeChoice choose_decode(const Cuda& cuda, const DecodeShape& s, bool attends) {
  const DecodeChoice none;
  constexpr auto kElement = static_cast<int>(sizeof(A));
  constexpr int kLeastCapability = 90;
  const auto may_be = [&](DecodeAlgo algo) { return s.algo == DecodeAlgo::kAuto || s.algo == algo; };
  const auto whole = [](std::int64_t size, int bytes) { return size > 0 && size * kElement % bytes == 0; };
  const auto all_whole = [&](int bytes) {
    return whole(s.dim, bytes) && whole(s.gate_hidden, bytes) && whole(s.ffn, bytes);
  };
  if (cuda.compute_capability() < kLeastCapability || s.stacks > cuda.processors() || s.batch < 1 ||
      s.batch > kTileColumns || !all_whole(kPieceBytes)) {
    return none;
  }
  const auto shared = static_cast<int>(cuda.shared_memory_per_block());

  // A small model's step is a chain of exchanges: 1.15 us a stage within a cluster, 1.6 us through L2. The bundled
  // model makes 18,590 tokens/s.
  if (std::is_same_v<A, BFloat16> && may_be(DecodeAlgo::kCluster) && is_for_cluster(s)) {
    const DecodePlan plan = make_cluster_plan(s, attends, shared);
    if (plan.slots >= kLeastSlots && holds_decode_cluster(cuda)) return {DecodeAlgo::kCluster, kClusterBlocks, plan};
  }
  // As few blocks as own no more channels each than one on every multiprocessor of the step's share would: each waits
  // for all others.
  const std::int64_t channels = ceil_div(s.dim, std::max<std::int64_t>(cuda.processors() / s.stacks, 1));
  const auto blocks = static_cast<int>(ceil_div(s.dim, channels));
  // One sequence is too little work to hide a stage's chain of instructions, so every stage has code of its own, which
  // takes 16 bits and whole steps of the product alone. 93 % of a copy where D = 2048, 64 % where D = 1024.
  if (sizeof(A) == 2 && s.batch == 1 && may_be(DecodeAlgo::kSingle) && all_whole(kStepBytes)) {
    const DecodePlan plan = make_decode_plan(s, attends, kElement, blocks, shared, true);
    if (plan.slots >= kLeastSlots) return {DecodeAlgo::kSingle, blocks, plan};
  }
  // Several share the reading of the weights: where D = 2048 at 78, 67 and 51 % of a copy for 2, 4 and 8.
  if (may_be(DecodeAlgo::kBatch)) {
    const DecodePlan plan = make_decode_plan(s, attends, kElement, blocks, shared, false);
    if (plan.slots >= kLeastSlots) return {DecodeAlgo::kBatch, blocks, plan};
  }
  return none;
}

}  // namespace mmrec::kernels
