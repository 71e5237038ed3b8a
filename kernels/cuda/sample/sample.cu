// Drawing tokens on the device, so that an id crosses the bus instead of a row of logits.
//
// A decode step has few rows, so it is the latency of one that counts: a block of 512 threads holds it in shared
// memory, and a wide one is shared by the blocks of a cluster (slice.cuh), which read it at several times the rate of
// one multiprocessor. First comes the largest logit, and whether there are faults; greedy choice ends there. A top-k of
// up to 128 is drawn among the few candidates that it leaves (few.cuh); everything else, and what has too many equal
// logits for that, by histograms of the whole row (chain.cuh). All of them draw the same token. Bytes: 4 V, read once
// if a block holds its part, some 45,000 ids on an H200, else once for every look at it.
//
// Deterministic, with atomics: weights are integers (order.cuh), so sums do not depend on their order.
//
// One row on an NVIDIA H200, back to back, with top-k 40, top-p 0.92 and a penalty: 5.2 us for V = 8,192, 7.6 for
// 32,000 by 4 blocks, 9.4 for 128,256 by 8; greedily 2.7, 3.9 and 5.9; with top-p 0.95 of the whole vocabulary 13, 25
// and 41. An empty kernel takes 0.5 us so.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "kernels/cuda/sample/algo.h"
#include "kernels/cuda/sample/few.cuh"

namespace mmrec::kernels {

int choose_sample_blocks(const Cuda& cuda, const SampleTokens<Device>& op) {
  constexpr std::int64_t kIds = 8192;
  if (cuda.compute_capability() != 90 || op.logits.rows < 1) return 1;
  const auto wanted = std::bit_ceil(static_cast<std::uint64_t>(ceil_div(op.logits.cols, kIds)));
  const auto at_once =
      std::bit_floor(static_cast<std::uint64_t>(std::max<std::int64_t>(cuda.processors() / op.logits.rows, 1)));
  return static_cast<int>(std::min({wanted, at_once, std::uint64_t{kMostSampleBlocks}}));
}

void sample_tokens(Cuda& cuda, const SampleTokens<Device>& op, int blocks) {
  if (op.logits.cols < 1 || op.logits.cols > kMostSampleWords) {
    throw std::invalid_argument("sample_tokens: found rows of " + std::to_string(op.logits.cols) +
                                " logits, expected 1 to " + std::to_string(kMostSampleWords));
  }
  if (blocks == 0) blocks = choose_sample_blocks(cuda, op);
  if (blocks > 1) return sample_tokens_by_clusters(cuda, blocks, op);
  sampling::launch_sample<false>(cuda, 1, op);
}

}  // namespace mmrec::kernels
