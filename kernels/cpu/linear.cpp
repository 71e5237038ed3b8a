// y = act(x W^T + bias) + residual_scale * residual, for several independent jobs in one parallel region.
//
// A job's rows fall into whole row tiles and the rest. Products of whole row tiles go through oneDNN in fixed shapes
// (row_tile.h), the others through the matrix-vector kernel (matvec.inl). In both cases bias, activation and residual
// follow while the products are still in cache.
//
// The work of all jobs is laid out on one line: part after part, in each part one chunk of rows after another, in each
// chunk its outputs in units. The line is cut into pieces of about equal cost; threads take the next piece until none
// is left. So a decode step streams each weight matrix in long contiguous runs, and a prefill keeps a chunk of rows and
// a panel of weights in L2. Units follow from shapes alone, so how the line is cut changes no bit.
#include <algorithm>
#include <array>
#include <vector>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/row_tile.h"
#include "kernels/cpu/simd.h"

namespace mmrec::kernels {
namespace {

constexpr std::int64_t kUnit = 24;                               // outputs; a multiple of every register block's height
constexpr std::int64_t kMostChunk = 10 * kUnit;                  // rows that the matrix-vector kernel takes at once
constexpr std::int64_t kTokensBytes = std::int64_t{384} * 1024;  // of activations that stay in L2
constexpr std::int64_t kPanelBytes = std::int64_t{192} * 1024;   // of weights that stay in L2 beside them
constexpr std::int64_t kProductFloats = std::int64_t{32} * 1024;  // of products before bias and activation
static_assert(kRowTile <= kMostChunk && kRowTile * kMostPanelRows <= kProductFloats);
static_assert(kProductFloats + kPanelFloats <= static_cast<std::int64_t>(Cpu::kScratchFloats));

/// The whole row tiles of a job, or its remaining rows, and how they are cut.
struct Part {
  const Linear<Host>* job;
  bool tiled;
  std::int64_t first;  // row
  std::int64_t rows;
  std::int64_t chunk;   // rows
  std::int64_t chunks;  // number of them
  std::int64_t unit;    // outputs
  std::int64_t units;   // number of them per chunk
  std::int64_t panel;   // outputs between two epilogues
  std::int64_t cost;    // of one unit of one chunk

  static Part tiles(const Linear<Host>& job, std::int64_t rows) {
    const std::int64_t unit = panel_rows(job.weight.cols);
    return {&job,     true,
            0,        rows,
            kRowTile, rows / kRowTile,
            unit,     (job.weight.rows + unit - 1) / unit,
            unit,     unit * job.weight.cols * kRowTile};
  }

  static Part row_kernel(const Linear<Host>& job, std::int64_t first) {
    const std::int64_t rows = job.x.rows - first;
    const std::int64_t in = std::max<std::int64_t>(job.weight.cols, 1);
    const std::int64_t most = std::clamp<std::int64_t>(kTokensBytes / (in * 4) / kUnit * kUnit, kUnit, kMostChunk);
    const std::int64_t chunk = std::min(most, rows);
    const std::int64_t unit = rows == 1 ? 8 : kUnit;
    std::int64_t panel = 480;  // few rows use the weights once, together: long runs
    if (rows > 6) {
      const std::int64_t cached = kPanelBytes / static_cast<std::int64_t>(bytes_of(job.weight.format, 1, in));
      panel = std::clamp<std::int64_t>(std::min(cached, kProductFloats / chunk) / kUnit * kUnit, kUnit, 480);
    }
    return {&job,  false,
            first, rows,
            chunk, (rows + chunk - 1) / chunk,
            unit,  (job.weight.rows + unit - 1) / unit,
            panel, unit * in * chunk};
  }

  std::int64_t total() const { return chunks * units; }
};

/// Calls visit(part) for the parts of every job, in order.
template <class Visit>
void for_each_part(std::span<const Linear<Host>> jobs, Visit&& visit) {
  for (const Linear<Host>& job : jobs) {
    if (job.weight.rows == 0) continue;
    const bool tiles = !job.force_row_kernel && job.weight.cols != 0 && panel_rows(job.weight.cols) != 0;
    const std::int64_t whole = tiles ? job.x.rows / kRowTile * kRowTile : 0;
    if (whole != 0) visit(Part::tiles(job, whole));
    if (whole != job.x.rows) visit(Part::row_kernel(job, whole));
  }
}

/// Outputs first..last of one chunk of rows.
void compute(Cpu& cpu, const Part& part, std::int64_t chunk, std::int64_t first, std::int64_t last, int thread) {
  const Linear<Host>& job = *part.job;
  const MatvecKernels& kernels = simd().matvec;
  const auto matvec = kernels.matvec[job.weight.format.code];
  const auto epilogue = kernels.epilogue[static_cast<std::size_t>(job.activation)];
  const std::int64_t t0 = part.first + chunk * part.chunk;
  const std::int64_t rows = std::min(part.chunk, part.first + part.rows - t0);
  std::array<const float*, kMostChunk> x{};
  for (std::int64_t t = 0; t < rows; ++t) x[static_cast<std::size_t>(t)] = job.x.row(t0 + t);
  float* products = cpu.scratch(thread);
  for (std::int64_t o = first; o < last; o += part.panel) {
    const std::int64_t outputs = std::min(part.panel, last - o);
    const WeightView<Host> panel = job.weight.middle_rows(o, outputs);
    if (part.tiled) {
      cpu.row_tiles().multiply(thread, job.x.row(t0), job.x.stride, panel, products + kProductFloats, products);
    } else {
      matvec(x.data(), rows, panel, products, outputs);
    }
    for (std::int64_t t = 0; t < rows; ++t) {
      epilogue(products + t * outputs, job.bias == nullptr ? nullptr : job.bias + o,
               job.residual.data == nullptr ? nullptr : job.residual.row(t0 + t) + o, job.residual_scale,
               job.y.row(t0 + t) + o, outputs);
    }
  }
}

/// Units begin..end (counted over chunks) of one part.
void compute_units(Cpu& cpu, const Part& part, std::int64_t begin, std::int64_t end, int thread) {
  while (begin < end) {
    const std::int64_t chunk = begin / part.units;
    const std::int64_t unit = begin % part.units;
    const std::int64_t count = std::min(part.units - unit, end - begin);
    compute(cpu, part, chunk, unit * part.unit, std::min((unit + count) * part.unit, part.job->weight.rows), thread);
    begin += count;
  }
}

/// The jobs, those of stacks by their parts.
std::vector<Linear<Host>> by_parts(std::span<const Linear<Host>> jobs) {
  std::vector<Linear<Host>> all;
  for (const Linear<Host>& job : jobs) {
    const StackedRows whole{job.weight.format, job.weight.rows};
    std::int64_t first = 0;
    for (const StackedRows& rows : job.weight.stack.empty() ? std::span(&whole, 1) : job.weight.stack) {
      if (first == job.weight.rows) break;
      Linear<Host> part = job;
      part.weight = job.weight.middle_rows(first, rows.rows);
      if (job.bias != nullptr) part.bias += first;
      part.y = job.y.middle_cols(first, rows.rows);
      if (job.residual.data != nullptr) part.residual = job.residual.middle_cols(first, rows.rows);
      all.push_back(part);
      first += rows.rows;
    }
  }
  return all;
}

void multiply(Cpu& cpu, std::span<const Linear<Host>> jobs) {
  // A piece is worth taking if it lasts some ten microseconds; more pieces than threads even out uneven threads.
  constexpr std::int64_t kLeastCost = std::int64_t{16} * 1024;  // multiply-adds worth a second thread
  constexpr std::int64_t kPiecesPerThread = 16;
  constexpr std::int64_t kCutOutputs = 10 * kUnit;  // some twenty times as much work as to cut x for them
  std::int64_t piece_cost = std::int64_t{512} * 1024;
  std::int64_t cost = 0;
  for_each_part(jobs, [&](const Part& part) {
    cost += part.total() * part.cost;
    const Linear<Host>& job = *part.job;
    if (part.tiled) {
      cpu.row_tiles().prepare(job.x.stride, job.weight, part.panel);
    } else if (simd().matvec.by_digits && is_quantized(job.weight.format.code)) {
      piece_cost = std::max(piece_cost, part.cost / part.unit * kCutOutputs);
    }
  });
  if (cost == 0) return;
  const std::int64_t team = std::clamp<std::int64_t>(cost / kLeastCost, 1, cpu.threads());
  const std::int64_t pieces = std::clamp(cost / piece_cost, team, team * kPiecesPerThread);

  const auto compute_piece = [&](std::int64_t piece, int thread) {
    // A unit belongs to the piece in which its first multiply-add lies.
    std::int64_t begin = piece * (cost / pieces) + std::min(piece, cost % pieces);
    std::int64_t end = (piece + 1) * (cost / pieces) + std::min(piece + 1, cost % pieces);
    for_each_part(jobs, [&](const Part& part) {
      const std::int64_t part_cost = part.total() * part.cost;
      const auto unit_at = [&](std::int64_t at) {
        return std::clamp<std::int64_t>((at + part.cost - 1) / part.cost, 0, part.total());
      };
      if (end > 0 && begin < part_cost) {
        compute_units(cpu, part, unit_at(std::max<std::int64_t>(begin, 0)), unit_at(end), thread);
      }
      begin -= part_cost;
      end -= part_cost;
    });
  };

  if (team == 1) {
    for (std::int64_t piece = 0; piece < pieces; ++piece) compute_piece(piece, 0);
  } else {
    cpu.pool().share_items(pieces, compute_piece);
  }
  cpu.row_tiles().check();
}

}  // namespace

void linear(Cpu& cpu, std::span<const Linear<Host>> jobs) {
  if (cpu.observer != nullptr) cpu.observer->observe(jobs);
  const auto is_stack = [](const Linear<Host>& job) { return !job.weight.stack.empty(); };
  std::any_of(jobs.begin(), jobs.end(), is_stack) ? multiply(cpu, by_parts(jobs)) : multiply(cpu, jobs);
}

}  // namespace mmrec::kernels
