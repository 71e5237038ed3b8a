// Token log-probs from logits and their gradient on the CPU: log p = logit[target] − logsumexp(row).
//
// A row is cut into fixed tiles of kTile logits; a tile's (max, sum) comes from the vector kernel, tiles are merged
// from left to right by the monoid in fp64. Threads share rows, or the tiles of one row where rows are few: the
// arithmetic is the same, so bits do not depend on threads. Bytes moved: the logits once (forward), twice and the
// gradient once (backward; the second reading of a row of ordinary length comes from the cache).
#include <algorithm>
#include <cmath>
#include <new>
#include <stdexcept>
#include <string>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/scan_blocks.h"
#include "kernels/cpu/simd.h"
#include "kernels/logsumexp.h"

namespace mmrec::kernels {

namespace {

constexpr std::int64_t kTile = 4096;
/// Tiles whose results fit into one thread's scratch.
constexpr std::int64_t kMostTiles = static_cast<std::int64_t>(Cpu::kScratchFloats * sizeof(float) / sizeof(MaxSum64));

/// Throws std::invalid_argument unless all targets are in the vocabulary.
template <class T, class Index>
void check_targets(const char* op, const MatrixView<const T, Host>& logits, const Index* targets) {
  for (std::int64_t r = 0; r < logits.rows; ++r) {
    if (targets[r] < 0 || static_cast<std::int64_t>(targets[r]) >= logits.cols) {
      throw std::invalid_argument(std::string(op) + ": target " + std::to_string(targets[r]) + " of row " +
                                  std::to_string(r) + " lies outside [0, " + std::to_string(logits.cols) + ")");
    }
  }
}

template <class T>
MaxSum64 tile_sum(const T* row, std::int64_t cols, std::int64_t tile) {
  const std::int64_t begin = tile * kTile;
  float max = 0.0F;
  double sum = 0.0;
  simd().logprobs.max_sum[kDTypeIndex<T>](row + begin, std::min(kTile, cols - begin), &max, &sum);
  return {static_cast<double>(max), sum};
}

/// The whole row on the calling thread.
template <class T>
MaxSum64 row_sum(const T* row, std::int64_t cols) {
  MaxSum64 total;
  for (std::int64_t t = 0; t * kTile < cols; ++t) total = combine(total, tile_sum(row, cols, t));
  return total;
}

/// The whole row on all threads.
template <class T>
MaxSum64 shared_row_sum(Cpu& cpu, const T* row, std::int64_t cols) {
  const std::int64_t tiles = (cols + kTile - 1) / kTile;
  auto* partial = reinterpret_cast<MaxSum64*>(cpu.scratch(0));
  MaxSum64 total;
  for (std::int64_t first = 0; first < tiles; first += kMostTiles) {
    const std::int64_t count = std::min(kMostTiles, tiles - first);
    cpu.pool().parallel_for(count, 1, [&](std::int64_t begin, std::int64_t end, int) {
      for (std::int64_t t = begin; t < end; ++t) new (partial + t) MaxSum64(tile_sum(row, cols, first + t));
    });
    for (std::int64_t t = 0; t < count; ++t) total = combine(total, partial[t]);
  }
  return total;
}

/// True where each row keeps the threads busy by itself and there are too few rows to share them out.
bool split_rows(Cpu& cpu, std::int64_t rows, std::int64_t cols) {
  return cpu.threads() > 1 && rows < std::int64_t{4} * cpu.threads() && cols >= 4 * kTile;
}

}  // namespace

template <class T, class Index>
void token_logprobs(Cpu& cpu, const TokenLogprobs<T, Index, Host>& op) {
  check_targets("token_logprobs", op.logits, op.targets);
  const std::int64_t cols = op.logits.cols;
  if (split_rows(cpu, op.logits.rows, cols)) {
    for (std::int64_t r = 0; r < op.logits.rows; ++r) {
      const T* row = op.logits.row(r);
      op.logprobs[r] = log_probability(to_float(row[op.targets[r]]), shared_row_sum(cpu, row, cols));
    }
    return;
  }
  cpu.pool().parallel_for(op.logits.rows, 1, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t r = begin; r < end; ++r) {
      const T* row = op.logits.row(r);
      op.logprobs[r] = log_probability(to_float(row[op.targets[r]]), row_sum(row, cols));
    }
  });
}

template <class T, class Index>
void token_logprobs_backward(Cpu& cpu, const TokenLogprobsBackward<T, Index, Host>& op) {
  check_targets("token_logprobs_backward", op.logits, op.targets);
  const std::int64_t cols = op.logits.cols;

  // d = −g softmax everywhere, tile by tile; the target, read before it may be overwritten, is then set to g (1 − p).
  struct RowGradient {
    float max, scale, at_target;
  };
  const auto prepare = [&](std::int64_t r, MaxSum64 total) {
    const float g = op.grad[r];
    const double scale = -static_cast<double>(g) / total.sum;
    const auto x = static_cast<double>(to_float(op.logits.row(r)[op.targets[r]]));
    const double p = std::exp(x - total.max) / total.sum;
    return RowGradient{static_cast<float>(total.max), static_cast<float>(scale),
                       static_cast<float>(static_cast<double>(g) * (1.0 - p))};
  };
  const auto write = [&](std::int64_t r, std::int64_t begin, std::int64_t end, const RowGradient& row) {
    simd().logprobs.scaled_exp[kDTypeIndex<T>](op.logits.row(r) + begin, end - begin, row.max, row.scale,
                                               op.d_logits.row(r) + begin);
  };
  if (split_rows(cpu, op.logits.rows, cols)) {
    for (std::int64_t r = 0; r < op.logits.rows; ++r) {
      const RowGradient row = prepare(r, shared_row_sum(cpu, op.logits.row(r), cols));
      cpu.pool().parallel_for(cols, kTile,
                              [&](std::int64_t begin, std::int64_t end, int) { write(r, begin, end, row); });
      op.d_logits.row(r)[op.targets[r]] = from_float<T>(row.at_target);
    }
    return;
  }
  cpu.pool().parallel_for(op.logits.rows, 1, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t r = begin; r < end; ++r) {
      const RowGradient row = prepare(r, row_sum(op.logits.row(r), cols));
      write(r, 0, cols, row);
      op.d_logits.row(r)[op.targets[r]] = from_float<T>(row.at_target);
    }
  });
}

#define MMREC_INSTANTIATE(T, Index)                                         \
  template void token_logprobs(Cpu&, const TokenLogprobs<T, Index, Host>&); \
  template void token_logprobs_backward(Cpu&, const TokenLogprobsBackward<T, Index, Host>&);
MMREC_INSTANTIATE(float, std::int32_t)
MMREC_INSTANTIATE(float, std::int64_t)
MMREC_INSTANTIATE(Float16, std::int32_t)
MMREC_INSTANTIATE(Float16, std::int64_t)
MMREC_INSTANTIATE(BFloat16, std::int32_t)
MMREC_INSTANTIATE(BFloat16, std::int64_t)
#undef MMREC_INSTANTIATE

}  // namespace mmrec::kernels
