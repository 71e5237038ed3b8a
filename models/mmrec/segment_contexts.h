// c of sequences that have closed their first memory segment (BlockTerms::set_context), of all layers at once.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/ops.h"
#include "models/mmrec/terms.h"
#include "models/runtime/executor.h"
#include "models/runtime/schedule.h"
#include "models/runtime/tables.h"

namespace mmrec::models {

template <class Backend, class A>
class SegmentContexts {
 public:
  using Work = Workspace<Backend, A>;
  using Space = typename Work::Space;
  template <class T>
  using Matrix = typename Work::template Matrix<T>;

  explicit SegmentContexts(BlockTerms<Backend, A>& terms) : terms_(terms), work_(terms.work), tables_(work_.backend) {}

  void clear() { slots_.clear(); }
  /// A sequence whose segment ends at this position, if it is one that set_context() is for.
  void add(Slot slot, std::int64_t end) {
    if (end % work_.config.memory_segment == 0 && work_.filled_slots(end) == 1) slots_.push_back(slot);
  }
  /// To the bit as set_context(). Overwrites attended() and gamma().
  void set() {
    const auto at_once = static_cast<std::size_t>(work_.rows() / work_.config.num_layers);
    for (std::span<const Slot> left = slots_; !left.empty();) {
      const std::span<const Slot> some = left.first(std::min(left.size(), at_once));
      set(some);
      left = left.subspan(some.size());
    }
  }

 private:
  void set(std::span<const Slot> slots) {
    const auto of_layer = static_cast<std::int64_t>(slots.size()), count = of_layer * work_.config.num_layers;
    const Batch scratch{.slot = slots.front(), .sequences = count, .tokens = 1};
    const Matrix<A> rounded = Work::row_of(work_.attended(scratch), 0);
    const Matrix<float> contexts = work_.gamma(count);
    tables_.clear();
    const auto means = tables_.template place<kernels::RowCopy<A>>(static_cast<std::size_t>(count));
    const auto results = tables_.template place<kernels::RowCopy<A>>(static_cast<std::size_t>(count));
    std::vector<typename Work::template Job<float>> jobs;
    for (std::int64_t row = 0; row < count; ++row) {
      const std::int64_t layer = row / of_layer;
      const Batch one{.slot = slots[static_cast<std::size_t>(row % of_layer)], .sequences = 1, .tokens = 1};
      auto* const mean = reinterpret_cast<std::byte*>(work_.memory(one, layer, 0).data);
      tables_.host(means)[row] = {mean, mean, rounded.row(row)};
      tables_.host(results)[row] = {reinterpret_cast<std::byte*>(contexts.row(row)),
                                    reinterpret_cast<std::byte*>(work_.segment_context(one, layer).data)};
    }
    for (std::int64_t layer = 0; layer < work_.config.num_layers; ++layer) {
      const std::int64_t first = layer * of_layer;
      terms_.add_context_jobs(terms_.layer(layer), rounded.middle_rows(first, of_layer),
                              contexts.middle_rows(first, of_layer), jobs);
    }
    tables_.send();
    copy(means, count);
    kernels::linear(work_.backend, std::span<const typename Work::template Job<float>>(jobs));
    copy(results, count);
  }
  void copy(Placed<kernels::RowCopy<A>> rows, std::int64_t count) {
    copy_listed(work_.backend,
                kernels::CopyListed<Space, A>{.rows = tables_.device(rows), .count = count, .cols = work_.dim()});
  }

  BlockTerms<Backend, A>& terms_;
  Work& work_;
  Tables<Backend> tables_;
  std::vector<Slot> slots_;
};

}  // namespace mmrec::models
