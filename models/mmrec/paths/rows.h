// One token of each of many sequences, row by row, on backends that have the ops (kernels::AdvanceNorm and its
// neighbours). The recurrence's gates are one more product. The ops between products also norm their results. Some
// numbers of rows need no ops between: products pass norms on, and the last ones advance the recurrence.
//
// Sequences stand side by side at one position, or anywhere: then lists say where each row's state lies, and the ops
// depend on the shape that lay_out() gives alone, so they can be recorded. Rows of sequences that attend to two slots
// or more come last. Both parts are filled up with rows without a state, so that there are few shapes.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "kernels/ops.h"
#include "models/mmrec/block.h"
#include "models/mmrec/segment_contexts.h"
#include "models/runtime/schedule.h"
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

  static constexpr bool kMayPass = !std::is_same_v<A, kernels::Float16>;
  static constexpr std::int64_t kMostFew = 16;

  explicit Rows(BlockTerms<Backend, A>& terms)
      : terms_(terms), work_(terms.work), rare_(work_.backend), firsts_(terms) {}

  /// Before a step of several batches: makes the lists of its rows, which the caller must send, and zeros the states
  /// that begin anew.
  StepRows lay_out(const Chunk& chunk, Tables<Backend>& tables) {
    tables_ = &tables;
    batches_ = chunk.batches;
    std::int64_t calm = 0, attending = 0;
    for (const Batch& b : batches_) (attends(b) ? attending : calm) += b.sequences;
    StepRows shape = fill_up(calm, attending);
    if (!work_.has_step_rows(shape.all())) shape = {calm, attending};
    set_rows(shape.calm, shape.attending);
    list();
    begin_anew();
    return shape;
  }
  /// Of each sequence of the step, in order.
  std::span<const std::int32_t> row_of() const { return row_of_; }

  /// `normed` receives rmsnorm(x; norm of the model) of all rows with the last layer. Requires: lay_out() if there are
  /// several batches.
  void begin(const Chunk& chunk, Matrix<A> normed) {
    normed_ = normed;
    batches_ = chunk.batches;
    if (!is_listed()) {
      const Batch& b = batches_.front();
      work_.restart(b);
      attends(b) ? set_rows(0, b.sequences) : set_rows(b.sequences, 0);
    }
    choose_products(terms_.layer(0));
    embed_norm(work_.backend,
               kernels::EmbedNorm<Space, A>{.table = terms_.model.embedding,
                                            .tokens = chunk.tokens,
                                            .token_of = is_listed() ? tables_->device(token_of_) : nullptr,
                                            .x = work_.x(rows()),
                                            .norm = terms_.layer(0).norm1,
                                            .u = work_.u(rows()),
                                            .next = next_state(0)});
  }

  void layer(std::int64_t layer, const Chunk& /*chunk*/, Done& /*done*/) {
    if constexpr (kMayPass) {
      if (passes_norms_) return passing_norms(terms_.layer(layer), layer);
    }
    norming(terms_.layer(layer), layer);
  }

  /// After a step that lay_out() began: c of the sequences that have closed their first segment, as set_context() has
  /// it, for all layers at once.
  void end() {
    firsts_.clear();
    for (const Batch& b : batches_) {
      for (std::int64_t s = 0; s < b.sequences; ++s) firsts_.add(slot_of(b, s), b.position + 1);
    }
    firsts_.set();
  }

 private:
  // Rows of a step, filled up so that few shapes recur, because each is recorded anew. Few rows, and up to 128, are
  // other classes of products (kernels/ops.h), which must stay what they are; up to 32, 64 and 128 products cost the
  // same. Beyond, rows are at most a sixteenth too many. The calm part ends at the roundest place that leaves room.
  StepRows fill_up(std::int64_t calm, std::int64_t attending) const {
    constexpr std::int64_t kSome = kernels::kFewRows;
    const std::int64_t count = calm + attending;
    if (count <= kernels::kTileColumns) return {calm, attending};
    const std::int64_t least = count <= most_few(terms_.layer(0)) ? kMostFew : 32;
    const auto ceiling = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(count)));
    const std::int64_t multiple = ceiling / 32;
    const std::int64_t all =
        count <= kSome ? std::max(ceiling, least) : (count + 2 * multiple - 2) / multiple * multiple;
    std::int64_t end = all - attending;
    for (std::int64_t round = all; round > 0; round /= 2) {
      if (end / round * round < calm) continue;
      end = end / round * round;
      break;
    }
    return {end, all - end};
  }
  // A layer whose norms are kernels of their own.
  void norming(const Layer& w, std::int64_t layer) {
    terms_.project(w, rows());
    // The gates' product depends on nothing of this step: it goes beside small ones whose latency would leave memory
    // idle.
    terms_.decay_factors(w, rows(),
                         {.x = Work::row_of(work_.h_rounded(all_), 0),
                          .weight = w.gate,
                          .y = work_.state_gates(all_),
                          .force_row_kernel = true});
    kernels::AdvanceNorm<Space, A> advance = advance_of(w, layer);
    advance.gates = work_.state_gates(all_);
    advance.decay = work_.gamma(rows());
    advance.context_decay = terms_.context_decay(rows());
    advance_norm(work_.backend, advance);
    if (attending_.sequences > 0) {
      attend(w, layer);
      work_.normalise(work_.x(attending_), w.norm2, work_.u(attending_));
    }
    terms_.feed_forward(w, all_, {0, 1});
    sum(layer, next_state(layer + 1));
  }

  // A layer whose products pass norms on. What norming() does at its end is done by the next layer's advance.
  void passing_norms(const Layer& w, std::int64_t layer) {
    const bool is_first = layer == 0, is_last = layer + 1 == work_.config.num_layers;
    const auto passed = work_.passed_rows(all_, part());
    const auto rounded = [&](std::int64_t of_layer) {
      return of_layer % 2 == 0 ? Work::row_of(work_.h_rounded(all_), 0) : passed.h_rounded;
    };
    terms_.project(w, rows(), is_first ? nullptr : passed.squares[0]);
    kernels::GatedAdvance<Space, A> advance{.advance = advance_of(w, layer),
                                            .h = rounded(layer),
                                            .gate_weight = w.gate,
                                            .decay = {work_.gate_hidden(rows(), 0), w.gamma_up, w.gamma_up_bias},
                                            .squares = passed.squares[1],
                                            .part = passed.part};
    if (work_.networks() == 2) {
      advance.context_decay = {work_.gate_hidden(rows(), 1), w.context_up, w.context_up_bias};
    }
    if (!is_last) advance.next = {state(layer + 1), rounded(layer + 1)};
    if (!is_first) {
      advance.sum = segment_sum(layer - 1);
      if (is_listed()) advance.closed = closed(layer - 1);
      advance.segment = work_.config.memory_segment;
    }
    gated_advance(work_.backend, advance);
    if (!is_first) close(layer - 1);
    if (attending_.sequences > 0) attend_passing(w, layer, passed);
    kernels::ScaledRows<Space, A> scaled;
    if (!is_last) scaled = {terms_.layer(layer + 1).norm1, work_.u(rows()), passed.squares[0], passed.part};
    terms_.feed_forward(w, all_, {0, 1}, passed.squares[1], scaled);
    if (is_last) sum(layer, {});
  }
  // x += c for rows that attend, and their scaled rows.
  void attend_passing(const Layer& w, std::int64_t layer, const typename Work::PassedRows& passed) {
    const std::int64_t before = attending_.first_row * kernels::scaled_parts(work_.dim(), passed.part);
    const kernels::ScaledRows<Space, A> scaled{w.norm2, Work::matrix(work_.u(attending_)), passed.squares[1] + before,
                                               passed.part};
    if constexpr (sizeof(A) == 2) {
      const kernels::AttendNorm<Space, A> all = attend_norm_of(w, layer, scaled);
      if (takes_attend_norm(work_.backend, all)) return attend_norm(work_.backend, all);
    }
    attend(w, layer, scaled);
  }
  kernels::AttendNorm<Space, A> attend_norm_of(const Layer& w, std::int64_t layer,
                                               const kernels::ScaledRows<Space, A>& scaled) {
    kernels::AttendNorm<Space, A> op{.h = Work::row_of(work_.h_rounded(attending_), 1),
                                     .q = Work::matrix(work_.q(attending_)),
                                     .query_weight = w.memory_q,
                                     .query_bias = w.memory_q_bias,
                                     .most_slots = work_.config.memory_slots,
                                     .heads = work_.config.num_heads,
                                     .padding = work_.config.head_padding,
                                     .out_weight = w.memory_out,
                                     .out_bias = w.memory_out_bias,
                                     .x = Work::matrix(work_.x(attending_)),
                                     .scaled = scaled};
    if (is_listed()) {
      op.runs = tables_->device(runs_);
      op.offset = layer * work_.config.memory_slots * work_.dim();
    } else {
      op.slots = terms_.slots(layer, batches_.front(), {0, 1});
    }
    return op;
  }
  // Whether products pass norms on. Then those of rows that attend go as those of all rows.
  void choose_products(const Layer& w) {
    is_few_ = rows() <= most_few(w);
    passes_norms_ = can_pass_norms(w, is_few_ ? 1 : std::max<std::int64_t>(rows(), kernels::kTileColumns + 1));
    work_.few_rows = !passes_norms_ ? kernels::kTileColumns : is_few_ ? kMostFew : 0;
  }
  // The most rows that are few (kernels::Linear). With large matrices 5 to 8 rows take less time as more, with small
  // ones 9 to 16 as fewer: one H200, k tokens/s, 8 sequences of 1024 × 12 30.8 and 35.2, 16 of the bundled model 254
  // and 300, in fp32 51 and 140; but of 512 × 4 280 and 254.
  std::int64_t most_few(const Layer& w) const {
    constexpr std::int64_t kSmallLayer = 8 << 20, kLargeLayer = 24 << 20;
    const std::int64_t layer = layer_bytes(decode_shape(work_.config, 1, 0), sizeof(A));
    if (layer < kSmallLayer && can_pass_norms(w, 1)) return kMostFew;
    if (layer >= kLargeLayer && kRounds<A> && can_pass_norms(w, kernels::kTileColumns + 1)) return 4;
    return kernels::kTileColumns;
  }
  int part() const { return is_few_ ? kernels::kFewScaledPart : kernels::kScaledPart; }
  bool can_pass_norms(const Layer& w, std::int64_t count) const {
    std::vector<kernels::WeightView<Space>> weights = {w.qvzk, w.gamma_in, w.gamma_up, w.gate, w.ffn_in, w.ffn_out};
    if (work_.networks() == 2) weights.insert(weights.end(), {w.context_in, w.context_up});
    if (work_.config.memory_slots > 1) weights.insert(weights.end(), {w.memory_q, w.memory_out});
    return kMayPass && work_.dim() % kernels::kScaledPart == 0 &&
           kernels::passes_norms<A>(work_.backend, count, weights);
  }

  // But for the gates and the decay.
  kernels::AdvanceNorm<Space, A> advance_of(const Layer& w, std::int64_t layer) {
    return {.z = terms_.z(rows()),
            .v = terms_.v(rows()),
            .zm = work_.zm(rows()),
            .gate_bias = w.gate_bias,
            .mdi_mix = work_.config.mdi_mix,
            .h = state(layer),
            .h_rounded = Work::row_of(work_.h_rounded(all_), 1),
            .x = work_.x(rows()),
            .c = context(layer),
            .c_bias = context_bias(w),
            .norm = w.norm2,
            .u = work_.u(rows())};
  }
  // The end of a layer: the segment's sum, and the norm that follows.
  void sum(std::int64_t layer, const kernels::RoundState<Space, A>& next) {
    const bool is_last = layer + 1 == work_.config.num_layers;
    sum_norm(work_.backend,
             kernels::SumNorm<Space, A>{.x = work_.x(rows()),
                                        .sum = segment_sum(layer),
                                        .closed = is_listed() ? closed(layer) : View<float>(),
                                        .segment = work_.config.memory_segment,
                                        .norm = is_last ? terms_.model.norm : terms_.layer(layer + 1).norm1,
                                        .u = is_last ? normed_ : work_.u(rows()),
                                        .next = next});
    close(layer);
  }
  // Lists say what a step closes; without them a segment is closed here.
  void close(std::int64_t layer) {
    if (is_listed()) return;
    const Batch& b = batches_.front();
    terms_.close(terms_.layer(layer), layer, b, b.position + 1);
  }

  void set_rows(std::int64_t calm, std::int64_t attending) {
    const Slot first = batches_.front().slot;
    all_ = {.slot = first, .sequences = calm + attending, .tokens = 1};
    attending_ = {first, 0, calm, calm, attending, 1};
  }

  std::int64_t rows() const { return all_.sequences; }
  kernels::RoundState<Space, A> next_state(std::int64_t layer) {
    if (layer == work_.config.num_layers) return {};
    return {state(layer), Work::row_of(work_.h_rounded(all_), 0)};
  }
  View<float> state(std::int64_t layer) {
    return is_listed() ? listed(states_, layer) : View<float>(work_.state(batches_.front(), layer));
  }
  View<float> closed(std::int64_t layer) {
    View<float> slots = listed(closed_, layer);
    slots.offset *= work_.config.memory_slots;
    return slots;
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

  // x += c for rows that attend. Requires: there are some.
  void attend(const Layer& w, std::int64_t layer, const kernels::ScaledRows<Space, A>& scaled = {}) {
    terms_.query(w, attending_, {0, 1});
    if (is_listed()) {
      return terms_.attend_listed(w, layer, attending_, {0, 1}, tables_->device(runs_), attending_.sequences, 1,
                                  scaled);
    }
    terms_.attend(w, layer, batches_.front(), {0, 1}, scaled);
  }

  bool is_listed() const { return batches_.size() > 1 || work_.plan.align != 0; }
  bool attends(const Batch& b) const { return work_.filled_slots(b.position) > 1; }
  template <class T>
  View<T> listed(Placed<T*> list, std::int64_t layer) {
    return {tables_->device(list), rows(), work_.dim(), layer * work_.dim()};
  }

  Slot slot_of(const Batch& b, std::int64_t sequence) const {
    return b.slot + static_cast<std::size_t>(sequence) * work_.slot.bytes;
  }

  void list() {
    if (zeros_.size() == 0) {
      zeros_ = work_.backend.template allocate<float>(std::size_t(work_.config.num_layers * work_.dim()));
    }
    const auto count = static_cast<std::size_t>(rows());
    token_of_ = tables_->template place<std::int32_t>(count);
    states_ = tables_->template place<float*>(count);
    sums_ = tables_->template place<double*>(count);
    closed_ = tables_->template place<float*>(count);
    contexts_ = tables_->template place<const float*>(count);
    runs_ = tables_->template place<kernels::AttendingRun>(static_cast<std::size_t>(attending_.sequences));
    row_of_.clear();
    std::int32_t calm = 0, attending = 0;
    for (const Batch& b : batches_) {
      const std::int64_t slots = work_.filled_slots(b.position), end = b.position + 1;
      for (std::int64_t s = 0; s < b.sequences; ++s) {
        const Slot slot = slot_of(b, s);
        const std::int32_t row = slots < 2 ? calm++ : static_cast<std::int32_t>(attending_.first_row) + attending;
        auto* const memory = work_.template in_slot<float>(slot, work_.slot.memory);
        tables_->host(token_of_)[row] = static_cast<std::int32_t>(row_of_.size());
        tables_->host(states_)[row] = work_.template in_slot<float>(slot, work_.slot.h);
        tables_->host(sums_)[row] = work_.template in_slot<double>(slot, work_.slot.segment_sum);
        tables_->host(contexts_)[row] = slots == 0   ? nullptr
                                        : slots == 1 ? work_.template in_slot<float>(slot, work_.slot.segment_context)
                                                     : zeros_.data();
        if (end % work_.config.memory_segment == 0 && work_.config.memory_slots != 0) {
          tables_->host(closed_)[row] = memory + work_.ring_slot(end) * work_.dim();
        }
        if (slots >= 2) {
          tables_->host(runs_)[attending] = {memory, static_cast<std::int32_t>(slots), attending, 1};
          ++attending;
        }
        row_of_.push_back(row);
      }
    }
  }

  // h = 0 where the segment that begins carries no state on.
  void begin_anew() {
    const auto begins = [&](const Batch& b) { return work_.restarts(b.position); };
    if (std::none_of(batches_.begin(), batches_.end(), begins)) return;
    rare_.clear();
    const auto rows = rare_.template place<kernels::RowCopy<A>>(row_of_.size());
    std::int64_t count = 0;
    for (const Batch& b : batches_) {
      for (std::int64_t s = 0; begins(b) && s < b.sequences; ++s) {
        rare_.host(rows)[count++].to = slot_of(b, s) + work_.slot.h;
      }
    }
    rare_.send();
    copy_listed(work_.backend,
                kernels::CopyListed<Space, A>{
                    .rows = rare_.device(rows), .count = count, .cols = work_.config.num_layers * work_.dim()});
  }

  BlockTerms<Backend, A>& terms_;
  Work& work_;
  Matrix<A> normed_;
  Tables<Backend>* tables_ = nullptr;
  Tables<Backend> rare_;
  std::span<const Batch> batches_;
  Batch all_, attending_;  // for activations alone
  bool passes_norms_ = false, is_few_ = false;
  std::vector<std::int32_t> row_of_;
  SegmentContexts<Backend, A> firsts_;
  Placed<std::int32_t> token_of_;
  Placed<float*> states_, closed_;
  Placed<double*> sums_;
  Placed<const float*> contexts_;
  Placed<kernels::AttendingRun> runs_;
  typename Backend::template Buffer<float> zeros_;  // [L, D]: c of rows that attend
};

}  // namespace mmrec::models
