// All runs of a chunk at once, packed with a row between two and swept, on backends that have the ops
// (kernels::PackedRuns).
//
// Runs within one memory segment are simple: after the recurrence their rows go on together. They stand first in the
// chunk. Among them, those that attend to two slots or more stand last. The few long runs that remain go on run by run.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/ops.h"
#include "models/mmrec/block.h"
#include "models/mmrec/listed_runs.h"
#include "models/mmrec/segment_contexts.h"
#include "models/mmrec/swept_runs.h"
#include "models/runtime/tables.h"

namespace mmrec::models {

template <class Backend, class A>
class Packed {
 public:
  using Work = Workspace<Backend, A>;
  using Space = typename Work::Space;
  using Layer = LayerView<Space>;
  template <class T>
  using Matrix = typename Work::template Matrix<T>;

  explicit Packed(Block<Backend, A>& block)
      : block_(block),
        terms_(block.terms),
        work_(terms_.work),
        runs_(work_),
        tables_(work_.backend),
        listed_(terms_, tables_),
        firsts_(terms_) {}

  void begin(const Chunk& chunk) {
    runs_.lay_out(chunk.batches, chunk.rows);
    lay_out(chunk.batches);
    block_.begin(chunk);
  }

  void layer(std::int64_t layer, const Chunk& chunk, Done& done) {
    block_.inputs(layer, chunk);
    recur(layer, chunk, done);
    finish_simple(layer);
    for (const Batch& b : batches_.subspan(simple_.size())) block_.finish(layer, b);
    if (layer + 1 == work_.config.num_layers) firsts_.set();
  }

  /// x of the last rows of the runs that end in this chunk, in order of the runs, by a backend that comes after this
  /// one's work; overwrites context().
  Matrix<float> last_rows(Backend& backend) {
    copy(backend, last_rows_, ends_, 0, 0);
    return work_.context(static_cast<std::int64_t>(ends_));
  }

 private:
  // Sends the other ops' lists of the runs, a batch each, to the backend's memory.
  void lay_out(std::span<const Batch> batches) {
    batches_ = batches;
    const auto simple = std::find_if_not(batches.begin(), batches.end(), [&](const Batch& b) {
      return b.position % work_.config.memory_segment + b.tokens <= work_.config.memory_segment;
    });
    simple_ = batches.first(static_cast<std::size_t>(simple - batches.begin()));
    simple_rows_ = simple_.empty() ? 0 : simple_.back().first_row + simple_.back().tokens;
    const auto attending = std::find_if(simple_.begin(), simple_.end(),
                                        [&](const Batch& b) { return work_.filled_slots(b.position) > 1; });
    calm_ = attending - simple_.begin();
    calm_rows_ = attending == simple_.end() ? simple_rows_ : attending->first_row;

    tables_.clear();
    const std::size_t count = batches.size();
    const auto context = tables_.template place<const std::byte*>(count);
    loads_ = tables_.template place<kernels::RowCopy<A>>(count);
    stores_ = tables_.template place<kernels::RowCopy<A>>(count);
    last_rows_ = tables_.template place<kernels::RowCopy<A>>(count);
    listed_.lay_out(simple_);
    firsts_.clear();
    for (const Batch& b : simple_) firsts_.add(b.slot, b.position + b.tokens);

    ends_ = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const Batch& b = batches[i];
      tables_.host(context)[i] = work_.filled_slots(b.position) == 0 ? nullptr : b.slot + work_.slot.segment_context;
      const auto h = work_.h(b);
      tables_.host(loads_)[i] = {work_.restarts(b.position) ? nullptr : b.slot + work_.slot.h, bytes(h.data),
                                 kRounds<A> ? work_.h_rounded(b).data : nullptr};
      tables_.host(stores_)[i] = {bytes(h.at(0, 0, b.tokens)), b.slot + work_.slot.h};
      if (b.ends) {
        float* const row = work_.context(1).row(0) + static_cast<std::int64_t>(ends_) * work_.dim();
        tables_.host(last_rows_)[ends_++] = {bytes(work_.x(b).at(0, 0, b.tokens - 1)), bytes(row)};
      }
    }
    tables_.send();
    context_ = tables_.device(context);
  }

  // Rows 1.. of every run's h, from the layer's state, and back.
  void recur(std::int64_t layer, const Chunk& chunk, Done& done) {
    const std::int64_t offset = layer * work_.dim() * static_cast<std::int64_t>(sizeof(float));
    copy(work_.backend, loads_, batches_.size(), offset, 0);
    const Batch all{.sequences = 1, .tokens = chunk.rows};
    block_.count(
        done, chunk.rows,
        packed_sweeps(work_.backend, kernels::PackedSweeps<Space, A>{
                                         terms_.sweeps(terms_.layer(layer), all, chunk.options), runs_.begin()}));
    copy(work_.backend, stores_, batches_.size(), 0, offset);
  }

  // From h to the block's output in x, of simple runs.
  void finish_simple(std::int64_t layer) {
    if (simple_.empty()) return;
    const Layer& w = terms_.layer(layer);
    const std::int64_t rows = calm_rows_;
    if (rows != 0) {
      packed_residual_norm(work_.backend,
                           kernels::PackedResidualNorm<Space, A>{
                               .x = work_.x(rows),
                               .h = Matrix<const float>(work_.h(simple_.front()).at(0, 0, 1), rows, work_.dim()),
                               .v = terms_.v(rows),
                               .of_row = runs_.of_row(),
                               .context = context_,
                               .offset = layer * work_.dim() * static_cast<std::int64_t>(sizeof(float)),
                               .bias = w.memory_out_bias,
                               .norm = w.norm2,
                               .u = work_.u(rows)});
    }
    const Batch all{.slot = simple_.front().slot, .sequences = 1, .tokens = simple_rows_};
    if (calm_ != std::ssize(simple_)) {
      const Piece piece{calm_rows_, simple_rows_ - calm_rows_};
      terms_.prepare_attention(w, all, piece);
      listed_.attend(w, layer, all, piece, calm_, std::ssize(simple_) - calm_);
    }
    terms_.feed_forward(w, all, {0, simple_rows_});
    listed_.remember(layer, simple_rows_, 0, std::ssize(simple_));
  }

  static std::byte* bytes(float* row) { return reinterpret_cast<std::byte*>(row); }
  void copy(Backend& backend, Placed<kernels::RowCopy<A>> list, std::size_t count, std::int64_t from_offset,
            std::int64_t to_offset) {
    copy_listed(backend, kernels::CopyListed<Space, A>{.rows = tables_.device(list),
                                                       .count = static_cast<std::int64_t>(count),
                                                       .cols = work_.dim(),
                                                       .from_offset = from_offset,
                                                       .to_offset = to_offset});
  }

  Block<Backend, A>& block_;
  BlockTerms<Backend, A>& terms_;
  Work& work_;
  std::span<const Batch> batches_, simple_;
  std::int64_t simple_rows_ = 0, calm_rows_ = 0;  // calm: of simple runs that do not attend
  std::ptrdiff_t calm_ = 0;                       // such runs
  std::size_t ends_ = 0;                          // runs that end here
  SweptRuns<Backend, A> runs_;                    // simple runs stand first and are not cut
  Tables<Backend> tables_;
  ListedRuns<Backend, A> listed_;
  SegmentContexts<Backend, A> firsts_;  // of simple runs
  Placed<kernels::RowCopy<A>> loads_, stores_, last_rows_;
  const std::byte* const* context_ = nullptr;
};

}  // namespace mmrec::models
