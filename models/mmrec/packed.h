// A chunk of many runs whose recurrence and memory go for all of them at once, on backends that have the ops for it
// (kernels::PackedRuns): what the ops need to know of the runs, in the backend's memory.
//
// Runs within one memory segment are simple: after the recurrence their rows go on together. They stand first in the
// chunk, and those last among them that attend to two slots or more. What is left, a few long runs, goes on run by run.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/packed_runs.h"
#include "models/mmrec/mmrec.h"
#include "models/mmrec/segment_memory.h"
#include "models/mmrec/workspace.h"
#include "models/runtime/schedule.h"
#include "models/runtime/tables.h"

namespace mmrec::models {

template <class Backend, class A>
class PackedChunk {
 public:
  using Work = Workspace<Backend, A>;
  using Space = typename Work::Space;
  using Layer = LayerView<Space>;
  template <class T>
  using Matrix = typename Work::template Matrix<T>;

  static constexpr bool kBackendHasIt = requires(Backend & backend, const kernels::PackedSweeps<Space, A>& op) {
    packed_sweeps(backend, op);
  };

  explicit PackedChunk(Work& work) : work_(work), tables_(work.backend) {}

  /// Lays out the runs of a chunk of `rows` rows, a batch each, for all that follows. Requires: kBackendHasIt.
  void begin(std::span<const Batch> batches, std::int64_t rows) {
    batches_ = batches;
    first_.clear(), end_.clear();
    for (const Batch& b : batches) {
      first_.push_back(static_cast<std::int32_t>(b.first_row));
      end_.push_back(static_cast<std::int32_t>(b.first_row + b.tokens));
    }
    const auto simple = std::find_if_not(batches.begin(), batches.end(), [&](const Batch& b) {
      return b.position % work_.config.memory_segment + b.tokens <= work_.config.memory_segment;
    });
    simple_ = batches.first(static_cast<std::size_t>(simple - batches.begin()));
    simple_rows_ = simple_.empty() ? 0 : simple_.back().first_row + simple_.back().tokens;
    const auto attending = std::find_if(simple_.begin(), simple_.end(),
                                        [&](const Batch& b) { return work_.filled_slots(b.position) > 1; });
    attending_ = simple_.subspan(static_cast<std::size_t>(attending - simple_.begin()));
    calm_rows_ = attending_.empty() ? simple_rows_ : attending_.front().first_row;

    tables_.clear();
    const std::size_t of_row = tables_.template place<std::int32_t>(static_cast<std::size_t>(rows));
    const std::size_t end = tables_.template place<std::int32_t>(batches.size());
    settled_at_ = tables_.template place<std::int32_t>(batches.size());
    first_at_ = tables_.template place<std::int32_t>(batches.size());
    const std::size_t moving = tables_.template place<std::uint32_t>(batches.size());
    const std::size_t context = tables_.template place<const std::byte*>(batches.size());
    loads_at_ = tables_.template place<kernels::RowCopy<A>>(batches.size());
    stores_at_ = tables_.template place<kernels::RowCopy<A>>(batches.size());
    ends_at_ = tables_.template place<kernels::RowCopy<A>>(batches.size());
    sums_at_ = tables_.template place<kernels::SummedRun>(batches.size());
    attending_at_ = tables_.template place<kernels::AttendingRun>(attending_.size());

    std::fill_n(host<std::int32_t>(of_row), rows, -1);
    std::copy(end_.begin(), end_.end(), host<std::int32_t>(end));
    std::copy(first_.begin(), first_.end(), host<std::int32_t>(first_at_));
    ends_ = 0;
    for (std::size_t i = 0; i < batches.size(); ++i) {
      const Batch& b = batches[i];
      std::fill_n(host<std::int32_t>(of_row) + b.first_row, b.tokens, static_cast<std::int32_t>(i));
      host<const std::byte*>(context)[i] =
          work_.filled_slots(b.position) == 0 ? nullptr : b.slot + work_.slot.segment_context;
      const auto h = work_.h(b);
      host<kernels::RowCopy<A>>(loads_at_)[i] = {work_.restarts(b.position) ? nullptr : b.slot + work_.slot.h,
                                                 reinterpret_cast<std::byte*>(h.data),
                                                 Work::kRounds ? work_.h_rounded(b).data : nullptr};
      host<kernels::RowCopy<A>>(stores_at_)[i] = {reinterpret_cast<const std::byte*>(h.at(0, 0, b.tokens)),
                                                  b.slot + work_.slot.h};
      if (b.ends) {
        host<kernels::RowCopy<A>>(ends_at_)[ends_] = {
            reinterpret_cast<const std::byte*>(work_.x(b).at(0, 0, b.tokens - 1)),
            reinterpret_cast<std::byte*>(work_.context(1).row(0) + static_cast<std::int64_t>(ends_) * work_.dim())};
        ++ends_;
      }
      const std::int64_t after = b.position + b.tokens;
      const bool closes = after % work_.config.memory_segment == 0;
      host<kernels::SummedRun>(sums_at_)[i] = {
          .sum = work_.template in_slot<double>(b.slot, work_.slot.segment_sum),
          .memory = work_.template in_slot<float>(b.slot, work_.slot.memory),
          .first = static_cast<std::int32_t>(b.first_row),
          .rows = static_cast<std::int32_t>(b.tokens),
          .closes = closes ? static_cast<std::int32_t>(work_.ring_slot(after)) : -1};
    }
    most_rows_ = most_slots_ = most_summed_ = 0;
    for (const Batch& b : simple_) most_summed_ = std::max(most_summed_, b.tokens);
    for (std::size_t i = 0; i < attending_.size(); ++i) {
      const Batch& b = attending_[i];
      const std::int64_t slots = work_.filled_slots(b.position);
      host<kernels::AttendingRun>(attending_at_)[i] = {.slots = work_.memory(b, 0, 0).data,
                                                       .count = static_cast<std::int32_t>(slots),
                                                       .first = static_cast<std::int32_t>(b.first_row),
                                                       .rows = static_cast<std::int32_t>(b.tokens)};
      most_rows_ = std::max(most_rows_, b.tokens);
      most_slots_ = std::max(most_slots_, slots);
    }
    tables_.send();
    runs_ = {.of_row = device<std::int32_t>(of_row),
             .end = device<std::int32_t>(end),
             .settled = device<std::int32_t>(settled_at_),
             .moving = device<std::uint32_t>(moving),
             .first_on_host = first_,
             .end_on_host = end_};
    context_ = device<const std::byte*>(context);
  }

  /// Rows 1.. of every run's h, from the layer's state.
  kernels::SweepCounts recur(const kernels::GatedSweeps<Space, A>& sweeps, std::int64_t layer) {
    const std::int64_t offset = layer * work_.dim() * static_cast<std::int64_t>(sizeof(float));
    copy(loads_at_, batches_.size(), offset, 0);
    work_.backend.copy(device<std::int32_t>(first_at_), runs_.settled, first_.size() * sizeof(std::int32_t));
    const kernels::SweepCounts counts = packed_sweeps(work_.backend, kernels::PackedSweeps<Space, A>{sweeps, runs_});
    copy(stores_at_, batches_.size(), 0, offset);
    return counts;
  }

  /// From h to the blocks' output in x.
  void finish(const Layer& w, std::int64_t layer, SegmentMemory<Backend, A>& memory) {
    if (!simple_.empty()) {
      const std::int64_t rows = calm_rows_;
      if (rows != 0) {
        packed_residual_norm(work_.backend,
                             kernels::PackedResidualNorm<Space, A>{
                                 .x = work_.x(rows),
                                 .h = Matrix<const float>(work_.h(simple_.front()).at(0, 0, 1), rows, work_.dim()),
                                 .v = work_.qvzk(rows).middle_cols(work_.dim(), work_.dim()),
                                 .of_row = runs_.of_row,
                                 .context = context_,
                                 .offset = layer * work_.dim() * static_cast<std::int64_t>(sizeof(float)),
                                 .bias = w.memory_out_bias,
                                 .norm = w.norm2,
                                 .u = work_.u(rows)});
      }
      const Batch all{.slot = simple_.front().slot, .sequences = 1, .tokens = simple_rows_};
      attend(w, layer, all, memory);
      memory.feed_forward(w, all, {0, simple_rows_});
      packed_segment_sum(work_.backend,
                         kernels::PackedSegmentSum<Space>{.x = work_.x(simple_rows_),
                                                          .runs = device<kernels::SummedRun>(sums_at_),
                                                          .count = static_cast<std::int64_t>(simple_.size()),
                                                          .most_rows = most_summed_,
                                                          .layer = layer,
                                                          .memory_slots = work_.config.memory_slots,
                                                          .segment = work_.config.memory_segment});
      for (const Batch& b : simple_) {
        const std::int64_t after = b.position + b.tokens;
        if (after % work_.config.memory_segment == 0) memory.set_context(w, layer, b, after);
      }
    }
    for (const Batch& b : batches_.subspan(simple_.size())) memory.finish(w, layer, b);
  }

  /// x of the last rows of the runs that end in this chunk, in order of the runs, by a backend that comes after this
  /// one's work; overwrites context().
  Matrix<float> last_rows(Backend& backend) {
    copy(backend, ends_at_, ends_, 0, 0);
    return work_.context(static_cast<std::int64_t>(ends_));
  }

 private:
  // The simple runs that attend to two slots or more.
  void attend(const Layer& w, std::int64_t layer, const Batch& all, SegmentMemory<Backend, A>& memory) {
    if (attending_.empty()) return;
    const Piece piece{calm_rows_, simple_rows_ - calm_rows_};
    memory.prepare_attention(w, all, piece);
    const Matrix<A> rows = Work::matrix(work_.attended(all));
    packed_attention(work_.backend,
                     kernels::PackedAttention<Space, A>{.q = rows,
                                                        .out = rows,
                                                        .heads = work_.config.num_heads,
                                                        .runs = device<kernels::AttendingRun>(attending_at_),
                                                        .count = static_cast<std::int64_t>(attending_.size()),
                                                        .offset = layer * work_.config.memory_slots * work_.dim(),
                                                        .most_rows = most_rows_,
                                                        .most_slots = most_slots_});
    memory.add_attended(w, all, piece);
    work_.normalise(Work::times(work_.x(all), piece), w.norm2, Work::times(work_.u(all), piece));
  }

  template <class T>
  T* host(std::size_t at) {
    return tables_.template host<T>(at);
  }
  template <class T>
  T* device(std::size_t at) {
    return tables_.template device<T>(at);
  }
  void copy(std::size_t list, std::size_t count, std::int64_t from_offset, std::int64_t to_offset) {
    copy(work_.backend, list, count, from_offset, to_offset);
  }
  void copy(Backend& backend, std::size_t list, std::size_t count, std::int64_t from_offset, std::int64_t to_offset) {
    copy_listed(backend, kernels::CopyListed<Space, A>{.rows = device<kernels::RowCopy<A>>(list),
                                                       .count = static_cast<std::int64_t>(count),
                                                       .cols = work_.dim(),
                                                       .from_offset = from_offset,
                                                       .to_offset = to_offset});
  }

  Work& work_;
  std::span<const Batch> batches_, simple_, attending_;
  std::int64_t simple_rows_ = 0, calm_rows_ = 0;  // calm: of simple runs that do not attend
  std::int64_t most_summed_ = 0;                  // rows of a simple run
  std::int64_t most_rows_ = 0, most_slots_ = 0;   // of those that attend
  std::vector<std::int32_t> first_, end_;         // rows of each run
  std::size_t ends_ = 0;                          // runs that end here
  Tables<Backend> tables_;
  std::size_t settled_at_ = 0, first_at_ = 0, loads_at_ = 0, stores_at_ = 0, ends_at_ = 0, sums_at_ = 0,
              attending_at_ = 0;
  kernels::PackedRuns<Space> runs_;
  const std::byte* const* context_ = nullptr;
};

}  // namespace mmrec::models
