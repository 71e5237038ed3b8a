// Log-probs straight from hidden states and the head on the CPU, without the logits of the whole vocabulary.
//
// Rows are taken in chunks, whole row tiles first, the vocabulary in stripes of whole panels. A task is one chunk and
// one stripe: panel after panel, the product leaves [chunk, panel] logits in the thread's scratch, each row's (max,
// sum) is merged into the stripe's and the target's logit is picked out. The stripes of a row are merged from left to
// right at the end. As in `linear`, a whole row tile's product goes through oneDNN, the other rows' through the
// matrix-vector kernel.
//
// What must stay true: chunks, panels and stripes follow from the shapes alone, so a log-prob's bits do not depend on
// threads. At most one tile of logits per thread is in memory. Bytes moved: the head once per chunk.
#include <algorithm>
#include <atomic>
#include <new>
#include <stdexcept>
#include <string>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/row_tile.h"
#include "kernels/cpu/simd.h"
#include "kernels/logsumexp.h"

namespace mmrec::kernels {

namespace {

constexpr std::int64_t kMostPanel = 96;     // vocabulary rows of one tile of logits
constexpr std::int64_t kStripePanels = 16;  // at least this many panels to a stripe
constexpr std::int64_t kMostStripes = 64;
static_assert(kMostPanel <= kMostPanelRows);

// A thread's scratch: a tile of logits, the widened panel, then the stripes' results for one chunk.
constexpr std::size_t kTileFloats = static_cast<std::size_t>(kRowTile * kMostPanel);
constexpr std::size_t kPartialFloats = static_cast<std::size_t>(kRowTile * kMostStripes) * sizeof(MaxSum64) / 4;
static_assert(kTileFloats + static_cast<std::size_t>(kPanelFloats) + kPartialFloats <= Cpu::kScratchFloats);

/// Throws std::invalid_argument unless all targets are in the vocabulary or negative.
void check_targets(const HiddenLogprobs<Host>& op) {
  for (std::int64_t r = 0; r < op.hidden.rows; ++r) {
    if (op.targets[r] >= op.head.rows) {
      throw std::invalid_argument("hidden_logprobs: target " + std::to_string(op.targets[r]) + " of row " +
                                  std::to_string(r) + " lies beyond the vocabulary of " + std::to_string(op.head.rows));
    }
  }
}

}  // namespace

void hidden_logprobs(Cpu& cpu, const HiddenLogprobs<Host>& op) {
  check_targets(op);
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
  const auto dtype = static_cast<std::size_t>(op.head.format.code);
  const SimdKernels& kernels = simd();
  const auto partials_of = [&](std::int64_t slot) {
    return reinterpret_cast<MaxSum64*>(cpu.scratch(static_cast<int>(slot)) + kTileFloats + kPanelFloats);
  };

  // One stripe for the rows first..first + rows; partials[r * stripes + stripe] receives row r's part.
  const auto compute = [&](std::int64_t first, std::int64_t rows, std::int64_t stripe, MaxSum64* partials, int thread) {
    float* logits = cpu.scratch(thread);
    for (std::int64_t r = 0; r < rows; ++r) new (partials + r * stripes + stripe) MaxSum64();
    const std::int64_t end = std::min((stripe + 1) * stripe_panels * panel_height, vocab);
    for (std::int64_t v = stripe * stripe_panels * panel_height; v < end; v += panel_height) {
      const std::int64_t width = std::min(panel_height, end - v);
      const WeightView<Host> panel = op.head.middle_rows(v, width);
      if (tiles && rows == kRowTile) {
        cpu.row_tiles().multiply(thread, op.hidden.row(first), op.hidden.stride, panel, logits + kTileFloats, logits);
      } else {
        kernels.matvec.matvec[dtype](op.hidden.row(first), op.hidden.stride, rows, panel.data, dim, width, logits,
                                     width);
      }
      for (std::int64_t r = 0; r < rows; ++r) {
        const std::int64_t target = op.targets[first + r];
        if (target < 0) continue;
        const float* row = logits + r * width;
        if (target >= v && target < v + width) op.logprobs[first + r] = row[target - v];
        float max = 0.0F;
        double sum = 0.0;
        kernels.logprobs.max_sum[static_cast<std::size_t>(DType::kF32)](row, width, &max, &sum);
        MaxSum64& total = partials[r * stripes + stripe];
        total = combine(total, MaxSum64{static_cast<double>(max), sum});
      }
    }
  };

  // Rounds of as many chunks as there are threads, whose scratch holds a chunk's partial results each.
  const std::int64_t round = cpu.threads();
  for (std::int64_t first = 0; first < chunks; first += round) {
    const std::int64_t count = std::min(round, chunks - first);
    std::atomic<std::int64_t> next{0};
    cpu.pool().run([&](int thread) {
      for (;;) {
        const std::int64_t task = next.fetch_add(1, std::memory_order_relaxed);
        if (task >= count * stripes) return;
        const std::int64_t slot = task / stripes;
        const std::int64_t row = (first + slot) * kRowTile;
        compute(row, std::min(kRowTile, n - row), task % stripes, partials_of(slot), thread);
      }
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

}  // namespace mmrec::kernels
