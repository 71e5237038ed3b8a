// One token of each of many sequences, row by row, on backends that have the ops (kernels::AdvanceNorm and its
// neighbours). The recurrence's gates are one more product. The ops between products also norm their results.
//
// Sequences stand side by side at one position, or anywhere: then lists say where each row's state lies. Sequences that
// attend to two slots or more come last.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/ops.h"
#include "models/mmrec/block.h"
#include "models/runtime/tables.h"

namespace mmrec::models {

template <class Backend, class A>
class Rows {
 public:
  using Work = Workspace<Backend, A>;
  using Space = typename Work::Space;
  using Layer = LayerView<Space>;
  template <class T>
  using Matrix = typename Work::template Matrix<T>;
  template <class T>
  using View = kernels::RowsView<T, Space>;

  explicit Rows(BlockTerms<Backend, A>& terms) : terms_(terms), work_(terms.work), tables_(work_.backend) {}

  /// `normed` receives rmsnorm(x; norm of the model) of all rows with the last layer.
  void begin(const Chunk& chunk, Matrix<A> normed) {
    normed_ = normed;
    for (const Batch& b : chunk.batches) work_.restart(b);
    place(chunk.batches);
    embed_norm(work_.backend, kernels::EmbedNorm<Space, A>{.table = terms_.model.embedding,
                                                           .tokens = chunk.tokens,
                                                           .x = work_.x(rows()),
                                                           .norm = terms_.layer(0).norm1,
                                                           .u = work_.u(rows()),
                                                           .next = next_state(0)});
  }

  void layer(std::int64_t layer, const Chunk& /*chunk*/, Done& /*done*/) {
    const Layer& w = terms_.layer(layer);
    terms_.project(w, rows());
    terms_.hide(w, rows());
    // The gates' product depends on nothing of this step: it goes beside small ones whose latency would leave memory
    // idle.
    terms_.decay_factors(w, rows(),
                         {.x = Work::row_of(work_.h_rounded(all_), 0), .weight = w.gate, .y = work_.state_gates(all_)});
    advance_norm(work_.backend, kernels::AdvanceNorm<Space, A>{.z = terms_.z(rows()),
                                                               .v = terms_.v(rows()),
                                                               .zm = work_.gate_z(rows()),
                                                               .gates = work_.state_gates(all_),
                                                               .gate_bias = w.gate_bias,
                                                               .decay = work_.gamma(rows()),
                                                               .context_decay = terms_.context_decay(rows()),
                                                               .mdi_mix = work_.config.mdi_mix,
                                                               .h = state(layer),
                                                               .h_rounded = Work::row_of(work_.h_rounded(all_), 1),
                                                               .x = work_.x(rows()),
                                                               .c = context(layer),
                                                               .c_bias = context_bias(w),
                                                               .norm = w.norm2,
                                                               .u = work_.u(rows())});
    if (attending_.sequences > 0) attend(w, layer);
    terms_.feed_forward(w, all_, {0, 1});
    const bool is_last = layer + 1 == work_.config.num_layers;
    sum_norm(work_.backend,
             kernels::SumNorm<Space, A>{.x = work_.x(rows()),
                                        .sum = segment_sum(layer),
                                        .norm = is_last ? terms_.model.norm : terms_.layer(layer + 1).norm1,
                                        .u = is_last ? normed_ : work_.u(rows()),
                                        .next = next_state(layer + 1)});
    for (const Batch& b : batches_) terms_.close(w, layer, b, b.position + 1);
  }

 private:
  // Batches of one token each, in order of rows; those that attend come last.
  void place(std::span<const Batch> batches) {
    batches_ = batches;
    const Batch& last = batches.back();
    all_ = {.slot = batches.front().slot, .sequences = last.first_row + last.sequences, .tokens = 1};
    const auto attending = std::find_if(batches.begin(), batches.end(), [&](const Batch& b) { return attends(b); });
    const std::int64_t calm = attending == batches.end() ? all_.sequences : attending->first_row;
    attending_ = {all_.slot, 0, calm, calm, all_.sequences - calm, 1};
    if (batches.size() > 1) list();
  }

  std::int64_t rows() const { return all_.sequences; }
  kernels::RoundState<Space, A> next_state(std::int64_t layer) {
    if (layer == work_.config.num_layers) return {};
    return {state(layer), Work::row_of(work_.h_rounded(all_), 0)};
  }
  View<float> state(std::int64_t layer) {
    return is_listed() ? listed(states_, layer) : View<float>(work_.state(batches_.front(), layer));
  }
  View<double> segment_sum(std::int64_t layer) {
    return is_listed() ? listed(sums_, layer) : View<double>(work_.segment_sum(batches_.front(), layer));
  }
  // c of the rows that do not attend; null rows have the bias alone.
  View<const float> context(std::int64_t layer) {
    if (is_listed()) return listed(contexts_, layer);
    const Batch& b = batches_.front();
    return work_.filled_slots(b.position) == 1 ? View<const float>(work_.segment_context(b, layer))
                                               : View<const float>();
  }
  // The value of c where context() is null. Rows that attend get their c later.
  const float* context_bias(const Layer& w) const {
    return !is_listed() && attends(batches_.front()) ? nullptr : w.memory_out_bias;
  }

  // x += c, u = rmsnorm(x; norm2) for rows that attend. Requires: there are some.
  void attend(const Layer& w, std::int64_t layer) {
    terms_.query(w, attending_, {0, 1});
    if (is_listed()) {
      return terms_.attend_listed(w, layer, attending_, {0, 1}, tables_.device(runs_), attending_.sequences, 1,
                                  most_slots_);
    }
    terms_.attend(w, layer, batches_.front(), {0, 1});
    work_.normalise(work_.x(attending_), w.norm2, work_.u(attending_));
  }

  bool is_listed() const { return batches_.size() > 1; }
  bool attends(const Batch& b) const { return work_.filled_slots(b.position) > 1; }
  template <class T>
  View<T> listed(Placed<T*> list, std::int64_t layer) {
    return {tables_.device(list), rows(), work_.dim(), layer * work_.dim()};
  }

  void list() {
    if (zeros_.size() == 0) {
      zeros_ = work_.backend.template allocate<float>(std::size_t(work_.config.num_layers * work_.dim()));
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
        tables_.host(states_)[row] = work_.template in_slot<float>(slot, work_.slot.h);
        tables_.host(sums_)[row] = work_.template in_slot<double>(slot, work_.slot.segment_sum);
        tables_.host(contexts_)[row] = slots == 0   ? nullptr
                                       : slots == 1 ? work_.template in_slot<float>(slot, work_.slot.segment_context)
                                                    : zeros_.data();
        if (slots < 2) continue;
        const auto first = static_cast<std::int32_t>(static_cast<std::int64_t>(row) - attending_.first_row);
        tables_.host(runs_)[first] = {work_.template in_slot<float>(slot, work_.slot.memory),
                                      static_cast<std::int32_t>(slots), first, 1};
      }
    }
    tables_.send();
  }

  BlockTerms<Backend, A>& terms_;
  Work& work_;
  Matrix<A> normed_;
  Tables<Backend> tables_;
  std::span<const Batch> batches_;
  Batch all_, attending_;  // for activations alone
  Placed<float*> states_;
  Placed<double*> sums_;
  Placed<const float*> contexts_;
  Placed<kernels::AttendingRun> runs_;
  std::int64_t most_slots_ = 0;
  typename Backend::template Buffer<float> zeros_;  // [L, D]: c of rows that attend
};

}  // namespace mmrec::models
