// One token of each of many sequences, which go through a block by rows: where each row's state lies, whether the
// sequences stand side by side at one position or anywhere. Those that attend to two slots or more come last.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/packed_runs.h"
#include "models/mmrec/mmrec.h"
#include "models/mmrec/segment_memory.h"
#include "models/mmrec/workspace.h"
#include "models/runtime/schedule.h"
#include "models/runtime/tables.h"

namespace mmrec::models {

template <class Backend, class A>
class TokenRows {
 public:
  using Work = Workspace<Backend, A>;
  using Space = typename Work::Space;
  using Layer = LayerView<Space>;
  template <class T>
  using Rows = kernels::RowsView<T, Space>;

  static constexpr bool kBackendHasIt =
      Work::kRounds && requires(Backend & backend, const kernels::AdvanceNorm<Space, A>& op) {
    advance_norm(backend, op);
  };

  explicit TokenRows(Work& work) : work_(work), tables_(work.backend) {}

  /// Batches of one token each, in order of rows; those that attend come last.
  void begin(std::span<const Batch> batches) {
    batches_ = batches;
    const Batch& last = batches.back();
    all_ = {.slot = batches.front().slot, .sequences = last.first_row + last.sequences, .tokens = 1};
    const auto attending = std::find_if(batches.begin(), batches.end(), [&](const Batch& b) { return attends(b); });
    const std::int64_t calm = attending == batches.end() ? all_.sequences : attending->first_row;
    attending_ = {
        .slot = all_.slot, .first_row = calm, .first_run = calm, .sequences = all_.sequences - calm, .tokens = 1};
    if (batches.size() > 1) list();
  }

  std::int64_t rows() const { return all_.sequences; }
  /// For activations alone.
  const Batch& all() const { return all_; }
  const Batch& attending() const { return attending_; }
  std::span<const Batch> batches() const { return batches_; }

  Rows<float> state(std::int64_t layer) {
    return is_listed() ? listed<float>(states_, layer) : Rows<float>(work_.state(batches_.front(), layer));
  }
  Rows<double> segment_sum(std::int64_t layer) {
    return is_listed() ? listed<double>(sums_, layer) : Rows<double>(work_.segment_sum(batches_.front(), layer));
  }
  /// c of the rows that do not attend; null rows have the bias alone.
  Rows<const float> context(std::int64_t layer) {
    if (is_listed()) return listed<const float>(contexts_, layer);
    const Batch& b = batches_.front();
    return work_.filled_slots(b.position) == 1 ? Rows<const float>(work_.segment_context(b, layer))
                                               : Rows<const float>();
  }
  /// What takes c's place where it is null: rows that attend get theirs later.
  const float* context_bias(const Layer& w) const {
    return !is_listed() && attends(batches_.front()) ? nullptr : w.memory_out_bias;
  }

  /// x += c, u = rmsnorm(x; norm2) for rows that attend. Requires: there are some.
  void attend(const Layer& w, std::int64_t layer, SegmentMemory<Backend, A>& memory) {
    memory.project_queries(w, attending_, {0, 1});
    if (!is_listed()) {
      memory.attend(w, layer, batches_.front(), {0, 1});
    } else if constexpr (kBackendHasIt) {
      const auto rows = Work::matrix(work_.attended(attending_));
      packed_attention(work_.backend,
                       kernels::PackedAttention<Space, A>{.q = rows,
                                                          .out = rows,
                                                          .heads = work_.config.num_heads,
                                                          .runs = tables_.template device<kernels::AttendingRun>(runs_),
                                                          .count = attending_.sequences,
                                                          .offset = layer * work_.config.memory_slots * work_.dim(),
                                                          .most_rows = 1,
                                                          .most_slots = most_slots_});
      memory.add_attended(w, attending_, {0, 1});
    }
    work_.normalise(work_.x(attending_), w.norm2, work_.u(attending_));
  }

 private:
  bool is_listed() const { return batches_.size() > 1; }
  bool attends(const Batch& b) const { return work_.filled_slots(b.position) > 1; }
  template <class T>
  Rows<T> listed(std::size_t at, std::int64_t layer) {
    return {tables_.template device<T*>(at), rows(), work_.dim(), layer * work_.dim()};
  }

  void list() {
    if (zeros_.size() == 0) {
      zeros_ = work_.backend.template allocate<float>(
          static_cast<std::size_t>(work_.config.num_layers * work_.config.model_dim));
    }
    const auto count = static_cast<std::size_t>(rows());
    tables_.clear();
    states_ = tables_.template place<float*>(count);
    sums_ = tables_.template place<double*>(count);
    contexts_ = tables_.template place<const float*>(count);
    runs_ = tables_.template place<kernels::AttendingRun>(static_cast<std::size_t>(attending_.sequences));
    most_slots_ = 0;
    std::size_t row = 0;
    for (const Batch& b : batches_) {
      const std::int64_t slots = work_.filled_slots(b.position);
      most_slots_ = std::max(most_slots_, slots);
      for (std::int64_t s = 0; s < b.sequences; ++s, ++row) {
        const Slot slot = b.slot + static_cast<std::size_t>(s) * work_.slot.bytes;
        tables_.template host<float*>(states_)[row] = work_.template in_slot<float>(slot, work_.slot.h);
        tables_.template host<double*>(sums_)[row] = work_.template in_slot<double>(slot, work_.slot.segment_sum);
        tables_.template host<const float*>(contexts_)[row] =
            slots == 0   ? nullptr
            : slots == 1 ? work_.template in_slot<float>(slot, work_.slot.segment_context)
                         : zeros_.data();
        if (slots < 2) continue;
        const auto first = static_cast<std::int32_t>(static_cast<std::int64_t>(row) - attending_.first_row);
        tables_.template host<kernels::AttendingRun>(runs_)[first] = {
            .slots = work_.template in_slot<float>(slot, work_.slot.memory),
            .count = static_cast<std::int32_t>(slots),
            .first = first,
            .rows = 1};
      }
    }
    tables_.send();
  }

  Work& work_;
  Tables<Backend> tables_;
  std::span<const Batch> batches_;
  Batch all_, attending_;
  std::size_t states_ = 0, sums_ = 0, contexts_ = 0, runs_ = 0;  // places of lists
  std::int64_t most_slots_ = 0;
  typename Backend::template Buffer<float> zeros_;  // [L, D]: c of rows that attend
};

}  // namespace mmrec::models
