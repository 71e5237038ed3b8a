// Runs within one memory segment each, by ops that read from lists in the backend's memory where a run's memory and sum
// lie. So the ops depend on rows alone, and a recording of them serves any sequence at any position.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "kernels/ops.h"
#include "models/mmrec/terms.h"
#include "models/runtime/schedule.h"
#include "models/runtime/tables.h"

namespace mmrec::models {

template <class Backend, class A>
class ListedRuns {
 public:
  using Work = Workspace<Backend, A>;
  using Space = typename Work::Space;
  using Layer = LayerView<Space>;

  ListedRuns(BlockTerms<Backend, A>& terms, Tables<Backend>& tables) : terms_(terms), tables_(tables) {}

  /// Lists the runs in the tables. first_row counts the rows that attend() and remember() name.
  void lay_out(std::span<const Batch> runs) {
    const Work& work = terms_.work;
    attending_ = tables_.template place<kernels::AttendingRun>(runs.size());
    summed_ = tables_.template place<kernels::SummedRun>(runs.size());
    most_rows_ = 0;
    for (std::size_t i = 0; i < runs.size(); ++i) {
      const Batch& b = runs[i];
      const auto first = static_cast<std::int32_t>(b.first_row), rows = static_cast<std::int32_t>(b.tokens);
      const std::int64_t after = b.position + b.tokens;
      const bool closes = after % work.config.memory_segment == 0;
      float* const memory = work.memory(b, 0, 0).data;
      tables_.host(attending_)[i] = {memory, static_cast<std::int32_t>(work.filled_slots(b.position)), first, rows};
      tables_.host(summed_)[i] = {work.segment_sum(b, 0).data, memory, first, rows,
                                  closes ? static_cast<std::int32_t>(work.ring_slot(after)) : -1};
      most_rows_ = std::max(most_rows_, b.tokens);
    }
  }

  // Of runs [first, first + count) of the list, after the tables are sent.

  /// x += c and u = rmsnorm(x; norm2) of a piece of `all`, the rows of these runs, which attend to two slots or more.
  void attend(const Layer& w, std::int64_t layer, const Batch& all, const Piece& piece, std::int64_t first,
              std::int64_t count) {
    terms_.attend_listed(w, layer, all, piece, tables_.device(attending_) + first, count, most_rows_);
    Work& work = terms_.work;
    work.normalise(Work::times(work.x(all), piece), w.norm2, Work::times(work.u(all), piece));
  }
  /// Adds their x to their segments' sums, and makes slots of the segments that end. Their contexts are the caller's.
  void remember(std::int64_t layer, std::int64_t rows, std::int64_t first, std::int64_t count) {
    const Config& config = terms_.work.config;
    packed_segment_sum(terms_.work.backend, kernels::PackedSegmentSum<Space>{.x = terms_.work.x(rows),
                                                                             .runs = tables_.device(summed_) + first,
                                                                             .count = count,
                                                                             .most_rows = most_rows_,
                                                                             .layer = layer,
                                                                             .memory_slots = config.memory_slots,
                                                                             .segment = config.memory_segment});
  }

 private:
  BlockTerms<Backend, A>& terms_;
  Tables<Backend>& tables_;
  Placed<kernels::AttendingRun> attending_;
  Placed<kernels::SummedRun> summed_;
  std::int64_t most_rows_ = 0;  // of a run
};

}  // namespace mmrec::models
