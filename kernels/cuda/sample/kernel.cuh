// One row of logits, one token: by a block, or by the blocks of a cluster.
#pragma once

#include "kernels/cuda/rows/rows.cuh"
#include "kernels/cuda/sample/chain.cuh"
#include "kernels/cuda/sample/few.cuh"

namespace mmrec::kernels::sampling {

/// The token, or -1.
template <bool kCluster>
__device__ int draw(Shared& shared, Slice<kCluster>& slice) {
  const bool may_be_few = Few<kCluster>::takes(slice.rule());
  Few<kCluster> few(shared, slice);
  const std::uint32_t of_thread = slice.find_first();
  if (may_be_few) few.list(of_thread);
  const auto whole = slice.meet(few.most_listed());
  if (whole.falling == kFault || whole.falling == kNone) return -1;
  if (slice.rule().options.temperature == 0.0F) return static_cast<int>(whole.id);
  if (may_be_few && whole.is_short) {
    const int token = few.draw(whole.falling, whole.listed);
    if (token != kTooMany) return token;
    slice.group.stay();
  }
  return Chain<kCluster>(shared, slice, from_falling_bits(whole.falling)).draw();
}

template <bool kCluster>
__global__ void __launch_bounds__(kThreads, 1) sample_kernel(MatrixView<const float, Device> logits, SampleRule* rules,
                                                             int* tokens, int* copy, bool takes_vectors, int blocks) {
  ptx::wait_for_predecessor();
  Shared& shared = *ptx::shared_memory<Shared>();
  const unsigned row = kCluster ? blockIdx.x / static_cast<unsigned>(blocks) : blockIdx.x;
  Slice<kCluster> slice(shared, rules + row, logits.row(row), static_cast<int>(logits.cols), takes_vectors, blocks);
  const int token = draw(shared, slice);
  slice.group.stay();  // all have read the rule, and nobody's memory
  if (slice.group.rank() != 0 || threadIdx.x != 0) return;
  const SampleRule& before = slice.rule();
  if (before.recent != nullptr && before.options.repetition_window > 0) {
    const auto window = static_cast<std::uint64_t>(before.options.repetition_window);
    before.recent[before.recent_count % window] = max(token, 0);
    rules[row].recent_count = before.recent_count + 1;
  }
  rules[row].step = before.step + 1;
  if (copy != nullptr) copy[row] = max(token, 0);
  tokens[row] = token;
}

template <bool kCluster>
void launch_sample(Cuda& cuda, int blocks, const SampleTokens<Device>& op) {
  const bool takes_vectors = takes_16_bytes(op.logits.data, op.logits.rows == 1 ? 0 : 4 * op.logits.stride);
  launch(cuda.stream(),
         {.grid = dim3(static_cast<unsigned>(op.logits.rows * blocks)),
          .block = dim3(kThreads),
          .shared_bytes = shared_bytes(part_of(static_cast<int>(op.logits.cols), blocks)),
          .cluster = static_cast<unsigned>(blocks),
          .overlap_predecessor = true},
         sample_kernel<kCluster>, op.logits, op.rules, op.tokens, op.copy, takes_vectors, blocks);
}

}  // namespace mmrec::kernels::sampling
