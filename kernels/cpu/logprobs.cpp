// Token log-probs on the CPU, from logits with their gradient, and straight from hidden states and the head without the
// logits of the whole vocabulary: log p = logit[target] − logsumexp(row).
//
// From logits. A row is cut into fixed tiles of kTile logits. The vector kernel computes a tile's (max, sum), and the
// monoid merges tiles from left to right in fp64. Threads share rows, or the tiles of one row where rows are few. The
// arithmetic is the same, so bits do not depend on threads. Bytes moved: the logits once (forward), twice and the
// gradient once (backward; the second reading of a row of ordinary length comes from the cache).
//
// From hidden states. Rows are taken in chunks, whole row tiles first, the vocabulary in stripes of whole panels. A
// task is one chunk and one stripe: panel after panel, the product leaves [chunk, panel] logits in the thread's
// scratch, each row's (max, sum) is merged into the stripe's, and the target's logit is picked out. The stripes of a
// row are merged from left to right at the end. As in `linear`, whole row tiles go through oneDNN, other rows through
// the matrix-vector kernel. What must stay true: chunks, panels and stripes follow from the shapes alone, so bits do
// not depend on threads. At most one tile of logits per thread is in memory. Bytes moved: the head once per chunk.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/row_tile.h"
#include "kernels/cpu/simd.h"
#include "kernels/logsumexp.h"

namespace mmrec::kernels {
namespace {

constexpr std::int64_t kTile = 4096;
/// Tiles whose results fit into one thread's scratch.
constexpr std::int64_t kMostTiles = static_cast<std::int64_t>(Cpu::kScratchFloats * sizeof(float) / sizeof(MaxSum64));

/// Throws std::invalid_argument if a target is less than `least`, or not less than `vocab`: it lies `where`.
template <class Index>
void check_targets(const std::string& op, const Index* targets, std::int64_t rows, std::int64_t least,
                   std::int64_t vocab, const std::string& where) {
  const Index* const bad = std::find_if(targets, targets + rows, [&](Index t) { return t < least || t >= vocab; });
  if (bad == targets + rows) return;
  throw std::invalid_argument(op + ": target " + std::to_string(*bad) + " of row " + std::to_string(bad - targets) +
                              " lies " + where);
}
template <class T, class Index>
void check_targets(const char* op, const MatrixView<const T, Host>& logits, const Index* targets) {
  check_targets(op, targets, logits.rows, 0, logits.cols, "outside [0, " + std::to_string(logits.cols) + ")");
}

template <class T>
MaxSum64 max_sum(const T* logits, std::int64_t count) {
  float max = 0.0F;
  double sum = 0.0;
  simd().logprobs.max_sum[kDTypeOf<T>](logits, count, &max, &sum);
  return {static_cast<double>(max), sum};
}

template <class T>
MaxSum64 tile_sum(const T* row, std::int64_t cols, std::int64_t tile) {
  return max_sum(row + tile * kTile, std::min(kTile, cols - tile * kTile));
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

/// f(row number, its sum, whether it is alone) for every row. Alone: the row has all threads, of which the calling one
/// does f. So it is where rows are long, and too few for the threads.
template <class T, class F>
void for_each_sum(Cpu& cpu, const MatrixView<const T, Host>& logits, const F& f) {
  const std::int64_t rows = logits.rows, cols = logits.cols;
  if (cpu.threads() > 1 && rows < std::int64_t{4} * cpu.threads() && cols >= 4 * kTile) {
    for (std::int64_t r = 0; r < rows; ++r) f(r, shared_row_sum(cpu, logits.row(r), cols), true);
    return;
  }
  cpu.pool().parallel_for(rows, 1, [&](std::int64_t begin, std::int64_t end, int) {
    for (std::int64_t r = begin; r < end; ++r) f(r, row_sum(logits.row(r), cols), false);
  });
}

constexpr std::int64_t kMostPanel = 96;     // vocabulary rows of one tile of logits
constexpr std::int64_t kStripePanels = 16;  // at least this many panels to a stripe
constexpr std::int64_t kMostStripes = 64;
static_assert(kMostPanel <= kMostPanelRows);

// A thread's scratch: a tile of logits, the widened panel, then the stripes' results for one chunk.
constexpr std::size_t kTileFloats = static_cast<std::size_t>(kRowTile * kMostPanel);
constexpr std::size_t kPartialFloats = static_cast<std::size_t>(kRowTile * kMostStripes) * sizeof(MaxSum64) / 4;
static_assert(kTileFloats + static_cast<std::size_t>(kPanelFloats) + kPartialFloats <= Cpu::kScratchFloats);

}  // namespace

template <class T, class Index>
void token_logprobs(Cpu& cpu, const TokenLogprobs<T, Index, Host>& op) {
  check_targets("token_logprobs", op.logits, op.targets);
  for_each_sum(cpu, op.logits, [&](std::int64_t r, const MaxSum64& total, bool /*alone*/) {
    op.logprobs[r] = log_probability(to_float(op.logits.row(r)[op.targets[r]]), total);
  });
}

template <class T, class Index>
void token_logprobs_backward(Cpu& cpu, const TokenLogprobsBackward<T, Index, Host>& op) {
  check_targets("token_logprobs_backward", op.logits, op.targets);
  // d = −g softmax everywhere, tile by tile; the target, read before it may be overwritten, is then set to g (1 − p).
  for_each_sum(cpu, op.logits, [&](std::int64_t r, const MaxSum64& total, bool alone) {
    const auto g = static_cast<double>(op.grad[r]);
    const auto max = static_cast<float>(total.max), scale = static_cast<float>(-g / total.sum);
    const T* const logits = op.logits.row(r);
    T* const d = op.d_logits.row(r);
    const double p = std::exp(static_cast<double>(to_float(logits[op.targets[r]])) - total.max) / total.sum;
    const auto write = [&](std::int64_t begin, std::int64_t end, int /*thread*/) {
      simd().logprobs.scaled_exp[kDTypeOf<T>](logits + begin, end - begin, max, scale, d + begin);
    };
    if (alone) {
      cpu.pool().parallel_for(op.logits.cols, kTile, write);
    } else {
      write(0, op.logits.cols, 0);
    }
    d[op.targets[r]] = from_float<T>(static_cast<float>(g * (1.0 - p)));
  });
}

void hidden_logprobs(Cpu& cpu, const HiddenLogprobs<Host>& op) {
  check_targets("hidden_logprobs", op.targets, op.hidden.rows, std::numeric_limits<int>::min(), op.head.rows,
                "beyond the vocabulary of " + std::to_string(op.head.rows));
  const std::int64_t n = op.hidden.rows, dim = op.hidden.cols, vocab = op.head.rows;
  if (n == 0 || vocab == 0) return;
  // A head too wide for any panel leaves all rows to the matrix-vector kernel. The stripes do not depend on
  // force_row_kernel.
  const bool tiles = !op.force_row_kernel && panel_rows(dim) != 0;
  const std::int64_t panel_height = panel_rows(dim) != 0 ? std::min(kMostPanel, panel_rows(dim)) : kMostPanel;
  const std::int64_t panels = (vocab + panel_height - 1) / panel_height;
  const std::int64_t stripe_panels = std::max(kStripePanels, (panels + kMostStripes - 1) / kMostStripes);
  const std::int64_t stripes = (panels + stripe_panels - 1) / stripe_panels;
  const std::int64_t chunks = (n + kRowTile - 1) / kRowTile;
  if (tiles && n >= kRowTile) cpu.row_tiles().prepare(op.hidden.stride, op.head, panel_height);
  const auto matvec = simd().matvec.matvec[op.head.format.code];
  const auto partials_of = [&](std::int64_t slot) {
    return reinterpret_cast<MaxSum64*>(cpu.scratch(static_cast<int>(slot)) + kTileFloats + kPanelFloats);
  };

  // One stripe for the rows first..first + rows; partials[r * stripes + stripe] receives row r's part.
  const auto compute = [&](std::int64_t first, std::int64_t rows, std::int64_t stripe, MaxSum64* partials, int thread) {
    float* logits = cpu.scratch(thread);
    std::array<const float*, kRowTile> x{};
    for (std::int64_t r = 0; r < rows; ++r) {
      x[static_cast<std::size_t>(r)] = op.hidden.row(first + r);
      new (partials + r * stripes + stripe) MaxSum64();
    }
    const std::int64_t end = std::min((stripe + 1) * stripe_panels * panel_height, vocab);
    for (std::int64_t v = stripe * stripe_panels * panel_height; v < end; v += panel_height) {
      const std::int64_t width = std::min(panel_height, end - v);
      const WeightView<Host> panel = op.head.middle_rows(v, width);
      if (tiles && rows == kRowTile) {
        cpu.row_tiles().multiply(thread, op.hidden.row(first), op.hidden.stride, panel, logits + kTileFloats, logits);
      } else {
        matvec(x.data(), rows, panel, logits, width);
      }
      for (std::int64_t r = 0; r < rows; ++r) {
        const std::int64_t target = op.targets[first + r];
        if (target < 0) continue;
        const float* row = logits + r * width;
        if (target >= v && target < v + width) op.logprobs[first + r] = row[target - v];
        MaxSum64& total = partials[r * stripes + stripe];
        total = combine(total, max_sum(row, width));
      }
    }
  };

  // Rounds of as many chunks as there are threads, whose scratch holds a chunk's partial results each.
  const std::int64_t round = cpu.threads();
  for (std::int64_t first = 0; first < chunks; first += round) {
    const std::int64_t count = std::min(round, chunks - first);
    cpu.pool().share_items(count * stripes, [&](std::int64_t task, int thread) {
      const std::int64_t slot = task / stripes;
      const std::int64_t row = (first + slot) * kRowTile;
      compute(row, std::min(kRowTile, n - row), task % stripes, partials_of(slot), thread);
    });
    cpu.row_tiles().check();
    for (std::int64_t slot = 0; slot < count; ++slot) {
      const std::int64_t row = (first + slot) * kRowTile;
      for (std::int64_t r = row; r < std::min(row + kRowTile, n); ++r) {
        if (op.targets[r] < 0) continue;
        MaxSum64 all;
        for (std::int64_t s = 0; s < stripes; ++s) all = combine(all, partials_of(slot)[(r - row) * stripes + s]);
        op.logprobs[r] = log_probability(op.logprobs[r], all);
      }
    }
  }
}

#define MMREC_INSTANTIATE(T, Index)                                         \
  template void token_logprobs(Cpu&, const TokenLogprobs<T, Index, Host>&); \
  template void token_logprobs_backward(Cpu&, const TokenLogprobsBackward<T, Index, Host>&);
#define MMREC_INSTANTIATE_BOTH(T) MMREC_INSTANTIATE(T, std::int32_t) MMREC_INSTANTIATE(T, std::int64_t)
MMREC_FOR_EACH_TYPE(MMREC_INSTANTIATE_BOTH)

}  // namespace mmrec::kernels
