// One row of logits, one token: by a block, or by the blocks of a cluster.
#pragma once

#include <algorithm>

#include "kernels/cuda/rows/rows.cuh"
#include "kernels/cuda/sample/chain.cuh"
#include "kernels/cuda/sample/few.cuh"

namespace mmrec::kernels::sampling {

/// The token, or -1.
template <bool kCluster>
__device__ int draw(Shared& shared, Slice<kCluster>& slice) {
  const bool may_be_few = Few<kCluster>::takes(slice.rule());
  Few<kCluster> few(shared, slice);
  std::uint32_t of_thread = kNone;
  const bool is_greedy = slice.rule().options.temperature == 0.0F;
  std::uint32_t first =
      is_greedy ? slice.template find_first<true>(of_thread) : slice.template find_first<false>(of_thread);
  if (may_be_few) few.list(first, of_thread);

  // All parts meet.
  std::uint32_t id = 0;
  std::uint32_t listed = 0;
  bool is_short = true;
  if constexpr (!kCluster) {
    __syncthreads();
    id = shared.first_id;
    listed = shared.list_size;
    is_short = listed <= few.most_listed();
  } else {
    if (threadIdx.x == 0) shared.first_falling = first;
    slice.group.sync();
    const auto lane = static_cast<int>(threadIdx.x % 32);
    std::uint32_t falling = kNone;
    id = ~std::uint32_t{0};
    if (lane < slice.group.blocks()) {
      falling = slice.group.load(&shared.first_falling, lane);
      id = slice.group.load(&shared.first_id, lane);
      listed = slice.group.load(&shared.list_size, lane);
    }
    first = ptx::warp_min(falling);
    id = ptx::warp_min(falling == first ? id : ~std::uint32_t{0});
    is_short = __all_sync(0xffffffffU, static_cast<int>(listed <= few.most_listed())) != 0;
    listed = ptx::warp_sum(listed);
  }
  if (first == kFault || first == kNone) return -1;
  if (is_greedy) return static_cast<int>(id);
  if (may_be_few && is_short) {
    const int token = few.draw(first, listed);
    if (token != kTooMany) return token;
    slice.group.stay();
  }
  return Chain<kCluster>(shared, slice, from_falling_bits(first)).draw();
}

template <bool kCluster>
__global__ void __launch_bounds__(kThreads, 1)
    sample_kernel(MatrixView<const float, Device> logits, SampleRule* rules, int* tokens, int* copy, bool takes_vectors,
                  int blocks, int piece) {
  ptx::wait_for_predecessor();
  Shared& shared = *ptx::shared_memory<Shared>();
  const unsigned row = kCluster ? blockIdx.x / static_cast<unsigned>(blocks) : blockIdx.x;
  Slice<kCluster> slice(shared, rules + row, logits.row(row), static_cast<int>(logits.cols), takes_vectors, blocks,
                        piece);
  const int token = draw(shared, slice);
  slice.group.stay();  // all have read the rule, and nobody's memory
  if (slice.group.rank() != 0 || threadIdx.x != 0) return;
  const SampleRule& rule = slice.rule();
  if (rule.recent != nullptr && rule.options.repetition_window > 0) {
    rule.recent[shared.ring_place] = max(token, 0);
    rules[row].recent_count = rule.recent_count + 1;
  }
  rules[row].step = rule.step + 1;
  if (copy != nullptr) copy[row] = max(token, 0);
  tokens[row] = token;
}

template <bool kCluster>
void launch_sample(Cuda& cuda, int blocks, const SampleTokens<Device>& op) {
  const bool takes_vectors = takes_16_bytes(op.logits.data, op.logits.rows == 1 ? 0 : 4 * op.logits.stride);
  const auto words = static_cast<int>(op.logits.cols);
  const std::size_t most = (cuda.shared_memory_per_block() - shared_bytes(0)) / sizeof(std::uint32_t);
  const int piece =
      std::min(part_of(words, blocks), std::min(static_cast<int>(most) / kWarpIds * kWarpIds, kMostPiece));
  launch(cuda.stream(),
         {.grid = dim3(static_cast<unsigned>(op.logits.rows * blocks)),
          .block = dim3(kThreads),
          .shared_bytes = shared_bytes(piece),
          .cluster = static_cast<unsigned>(blocks),
          .overlap_predecessor = true},
         sample_kernel<kCluster>, op.logits, op.rules, op.tokens, op.copy, takes_vectors, blocks, piece);
}

}  // namespace mmrec::kernels::sampling
