// Lists of the runs that sweeps take at once (kernels::PackedRuns).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/ops.h"
#include "models/mmrec/workspace.h"
#include "models/runtime/schedule.h"
#include "models/runtime/tables.h"

namespace mmrec::models {

/// Runs of a chunk, cut where their state restarts: no gap stands between two parts of a run.
template <class Backend, class A>
class SweptRuns {
 public:
  using Work = Workspace<Backend, A>;
  using Space = typename Backend::Space;

  explicit SweptRuns(Work& work) : work_(work), tables_(work.backend) {}

  /// Of the first sequences of these batches, whose rows rise and are less than `rows`. Sends the lists.
  void lay_out(std::span<const Batch> batches, std::int64_t rows) {
    first_.clear(), end_.clear();
    for (const Batch& b : batches) {
      for (std::int64_t first = 0; first < b.tokens; first += work_.until_restart(b, first)) {
        first_.push_back(static_cast<std::int32_t>(b.first_row + first));
        end_.push_back(static_cast<std::int32_t>(b.first_row + first + work_.until_restart(b, first)));
      }
    }
    tables_.clear();
    of_row_ = tables_.template place<std::int32_t>(static_cast<std::size_t>(rows));
    firsts_ = tables_.template place<std::int32_t>(first_.size());
    ends_ = tables_.template place<std::int32_t>(first_.size());
    settled_ = tables_.template place<std::int32_t>(first_.size());
    moving_ = tables_.template place<std::uint32_t>(first_.size());
    std::int32_t* const of_row = tables_.host(of_row_);
    std::fill_n(of_row, rows, -1);
    for (std::size_t i = 0; i < first_.size(); ++i) {
      std::fill(of_row + first_[i], of_row + end_[i], static_cast<std::int32_t>(i));
    }
    std::copy(first_.begin(), first_.end(), tables_.host(firsts_));
    std::copy(end_.begin(), end_.end(), tables_.host(ends_));
    tables_.send();
  }
  const std::int32_t* of_row() { return tables_.device(of_row_); }
  /// For one op.
  kernels::PackedRuns<Space> begin() {
    work_.backend.copy(tables_.device(firsts_), tables_.device(settled_), first_.size() * sizeof(std::int32_t));
    return {.of_row = of_row(),
            .end = tables_.device(ends_),
            .settled = tables_.device(settled_),
            .moving = tables_.device(moving_),
            .first_on_host = first_,
            .end_on_host = end_};
  }

 private:
  Work& work_;
  std::vector<std::int32_t> first_, end_;  // rows of each part
  Tables<Backend> tables_;
  Placed<std::int32_t> of_row_, firsts_, ends_, settled_;
  Placed<std::uint32_t> moving_;
};

}  // namespace mmrec::models
