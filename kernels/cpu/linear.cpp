// y = act(x W^T + bias) + residual_scale * residual, for several independent jobs in one parallel region.
//
// The work of all jobs is laid out on one line: job after job, in each job one chunk of tokens after another, in each
// chunk its outputs in units of a few weight rows. The line is cut into pieces of equal cost; threads take the next
// piece until none is left. So a decode step streams each weight matrix in long contiguous runs, and a prefill keeps a
// chunk of tokens and a panel of weights in L2. Cuts change no bit: matvec.inl fixes the order of every sum, and the
// bias, activation and residual follow while the products are still in cache.
//
// Every row goes through this one kernel, whole row tiles too: it equals or beats OpenBLAS on tiles of kRowTile rows,
// reads weights in their stored type, and makes a row's bits independent of all its neighbours.
#include <algorithm>
#include <atomic>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"

namespace mmrec::kernels {

namespace {

constexpr std::int64_t kUnit = 24;                  // outputs; a multiple of every register block's height
constexpr std::int64_t kTokensBytes = 384 * 1024;   // of activations that stay in L2
constexpr std::int64_t kPanelBytes = 192 * 1024;    // of weights that stay in L2 beside them
constexpr std::int64_t kProductFloats = 32 * 1024;  // of products before bias and activation
static_assert(kProductFloats <= static_cast<std::int64_t>(Cpu::kScratchFloats));

/// How one job is cut. Depends on its shape alone.
struct Plan {
  std::int64_t chunk;   // tokens
  std::int64_t panel;   // outputs
  std::int64_t chunks;  // number of token chunks
  std::int64_t units;   // output units per chunk
  std::int64_t unit;    // outputs per unit
  std::int64_t cost;    // of one unit of one chunk

  explicit Plan(const Linear<Host>& job) {
    const std::int64_t n = job.x.rows;
    const std::int64_t in = std::max<std::int64_t>(job.weight.cols, 1);
    chunk = std::clamp<std::int64_t>(kTokensBytes / (in * 4) / kUnit * kUnit, kUnit, 10 * kUnit);
    chunk = std::min(chunk, std::max<std::int64_t>(n, 1));
    chunks = (n + chunk - 1) / chunk;
    unit = n == 1 ? 8 : kUnit;
    units = (job.weight.rows + unit - 1) / unit;
    panel = kPanelBytes / (in * static_cast<std::int64_t>(size_of(job.weight.dtype)));
    panel = std::clamp<std::int64_t>(std::min(panel, kProductFloats / chunk) / kUnit * kUnit, kUnit, 480);
    if (n == 1) panel = 480;  // weights are used once: long runs
    cost = unit * in * chunk;
  }
  std::int64_t total() const { return chunks * units; }
};

/// Outputs first..last of one chunk of tokens.
void compute(const Linear<Host>& job, const Plan& plan, std::int64_t chunk, std::int64_t first, std::int64_t last,
             float* products) {
  const MatvecKernels& kernels = simd().matvec;
  const auto dtype = static_cast<std::size_t>(job.weight.dtype);
  const auto epilogue = kernels.epilogue[static_cast<std::size_t>(job.activation)];
  const std::int64_t t0 = chunk * plan.chunk;
  const std::int64_t tokens = std::min(plan.chunk, job.x.rows - t0);
  for (std::int64_t o = first; o < last; o += plan.panel) {
    const std::int64_t outputs = std::min(plan.panel, last - o);
    kernels.matvec[dtype](job.x.row(t0), job.x.stride, tokens, job.weight.middle_rows(o, outputs).data, job.weight.cols,
                          outputs, products, outputs);
    for (std::int64_t t = 0; t < tokens; ++t) {
      epilogue(products + t * outputs, job.bias == nullptr ? nullptr : job.bias + o,
               job.residual.data == nullptr ? nullptr : job.residual.row(t0 + t) + o, job.residual_scale,
               job.y.row(t0 + t) + o, outputs);
    }
  }
}

/// Units begin..end (counted over chunks) of one job.
void compute_units(const Linear<Host>& job, const Plan& plan, std::int64_t begin, std::int64_t end, float* products) {
  while (begin < end) {
    const std::int64_t chunk = begin / plan.units;
    const std::int64_t unit = begin % plan.units;
    const std::int64_t count = std::min(plan.units - unit, end - begin);
    compute(job, plan, chunk, unit * plan.unit, std::min((unit + count) * plan.unit, job.weight.rows), products);
    begin += count;
  }
}

}  // namespace

void linear(Cpu& cpu, std::span<const Linear<Host>> jobs) {
  // A piece is worth taking if it lasts some ten microseconds; more pieces than threads even out uneven threads.
  constexpr std::int64_t kLeastCost = 16 * 1024;  // multiply-adds worth a second thread
  constexpr std::int64_t kPieceCost = 512 * 1024;
  constexpr std::int64_t kPiecesPerThread = 16;
  std::int64_t cost = 0;
  for (const Linear<Host>& job : jobs) {
    const Plan plan(job);
    cost += plan.total() * plan.cost;
  }
  if (cost == 0) return;
  const std::int64_t team = std::clamp<std::int64_t>(cost / kLeastCost, 1, cpu.threads());
  const std::int64_t pieces = std::clamp(cost / kPieceCost, team, team * kPiecesPerThread);

  const auto compute_piece = [&](std::int64_t piece, float* products) {
    // A unit belongs to the piece in which its first multiply-add lies.
    std::int64_t begin = piece * (cost / pieces) + std::min(piece, cost % pieces);
    std::int64_t end = (piece + 1) * (cost / pieces) + std::min(piece + 1, cost % pieces);
    for (const Linear<Host>& job : jobs) {
      const Plan plan(job);
      const std::int64_t job_cost = plan.total() * plan.cost;
      const auto unit_at = [&](std::int64_t at) {
        return std::clamp<std::int64_t>((at + plan.cost - 1) / plan.cost, 0, plan.total());
      };
      if (end <= 0) break;
      if (begin < job_cost) compute_units(job, plan, unit_at(std::max<std::int64_t>(begin, 0)), unit_at(end), products);
      begin -= job_cost;
      end -= job_cost;
    }
  };

  if (team == 1) {
    for (std::int64_t piece = 0; piece < pieces; ++piece) compute_piece(piece, cpu.scratch(0));
    return;
  }
  std::atomic<std::int64_t> next{0};
  cpu.pool().run_sharing([&](int thread) {
    for (;;) {
      const std::int64_t piece = next.fetch_add(1, std::memory_order_relaxed);
      if (piece >= pieces) return;
      compute_piece(piece, cpu.scratch(thread));
    }
  });
}

}  // namespace mmrec::kernels
