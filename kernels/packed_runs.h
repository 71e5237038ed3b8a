// Optional ops of a backend over the runs of several sequences at once, which are packed into the rows of a chunk;
// their states lie anywhere, so lists say where. models/mmrec/paths/packed.h makes these lists. Rules and notation are
// those of kernels/backend.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/backend.h"

namespace mmrec::kernels {

/// Runs of several sequences packed one after another into the rows of a chunk, with a row between two, a gap, which
/// belongs to neither. In memory of Space, but for the spans.
template <class Space>
struct PackedRuns {
  const std::int32_t* of_row = nullptr;                      // [rows]: number of the row's run, -1 in a gap
  const std::int32_t* end = nullptr;                         // [runs]: the row after a run's last
  std::int32_t* settled = nullptr;                           // [runs]: the runs' first rows on entry; scratch
  std::uint32_t* moving = nullptr;                           // [runs]: zeros, on entry and on return
  std::span<const std::int32_t> first_on_host, end_on_host;  // [runs], rising
};

/// gated_sweeps of packed runs, in [1, T]: a window is swept until all runs have settled in it, each by its own bound,
/// and what is settled does not move any more, so what a run gets depends on the others by nothing but the order in
/// which sums over its times are formed. h.at(0, 0, t + 1) of a gap t is the carry of the run that begins at t + 1; the
/// first run's is h.at(0, 0, 0), as in GateInputs. Optional: a backend that has it takes many short runs at the price
/// of one long one.
template <class Space, class A = float>
struct PackedSweeps {
  GatedSweeps<Space, A> sweeps;
  PackedRuns<Space> runs;
};

/// A row to copy: from is null for zeros, rounded for none.
template <class A>
struct RowCopy {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  A* rounded = nullptr;
};
/// to = from, fp32 rows of `cols`, `from_offset` and `to_offset` bytes further than a list in memory of Space says; and
/// rounded to A. No offset is added to null.
template <class Space, class A>
struct CopyListed {
  const RowCopy<A>* rows = nullptr;  // [count]
  std::int64_t count = 0;
  std::int64_t cols = 0;
  std::int64_t from_offset = 0, to_offset = 0;
};

/// x = x + h + 0.1 v + c, u = rmsnorm(x; norm), over the rows of packed runs: x, h, v, u [T, D]. c is `bias` for rows
/// of runs whose context is null and in gaps, else the row `offset` bytes behind it.
template <class Space, class A>
struct PackedResidualNorm {
  MatrixView<float, Space> x;
  MatrixView<const float, Space> h;
  MatrixView<const A, Space> v;
  const std::int32_t* of_row = nullptr;       // [T], see PackedRuns
  const std::byte* const* context = nullptr;  // [runs]
  std::int64_t offset = 0;
  const float* bias = nullptr;
  const float* norm = nullptr;
  MatrixView<A, Space> u;
};

/// A run that attends: rows [first, first + rows) to the first `count` of the slots at `slots`, [count, D].
struct AttendingRun {
  const float* slots = nullptr;
  std::int32_t count = 0;
  std::int32_t first = 0;
  std::int32_t rows = 0;
};
/// memory_attention of packed runs: q, out [T, D], out may alias q; rows of no run are left alone. Slots lie `offset`
/// floats behind what the list says. most_rows and most_slots are the largest of the list.
template <class Space, class A>
struct PackedAttention {
  MatrixView<const A, Space> q;
  MatrixView<A, Space> out;
  std::int64_t heads = 1;
  const AttendingRun* runs = nullptr;  // [count], in memory of Space
  std::int64_t count = 0;
  std::int64_t offset = 0;
  std::int64_t most_rows = 0, most_slots = 0;
};

/// A run whose outputs are summed: rows [first, first + rows), and where the sum and the memory's ring of its sequence
/// lie. closes: the slot of the ring that the segment ending with the run fills, or -1.
struct SummedRun {
  double* sum = nullptr;
  float* memory = nullptr;
  std::int32_t first = 0;
  std::int32_t rows = 0;
  std::int32_t closes = -1;
};
/// sum += x over a run's rows, in fp64, in an order that follows from their number alone; where the run closes a
/// segment slot = sum / segment, then sum = 0. Sums lie layer * D doubles behind what the list says, slots layer *
/// memory_slots
/// * D floats. x [T, D]. most_rows is the largest of the list.
template <class Space>
struct PackedSegmentSum {
  MatrixView<const float, Space> x;
  const SummedRun* runs = nullptr;  // [count], in memory of Space
  std::int64_t count = 0;
  std::int64_t most_rows = 0;
  std::int64_t layer = 0;
  std::int64_t memory_slots = 1;
  std::int64_t segment = 1;
};

}  // namespace mmrec::kernels
