// The MM-Rec block, written once, over the rows of a chunk: the model at a glance.
//
//   u = rmsnorm(x; norm1)
//   q, v, z, k = W u + b                                        γ = decay gate of (z, k)
//   h_t = a_t ⊙ h_{t-1} + b_t, gates from z_t and h_{t-1}       (kernels::GateInputs)
//   y = x + h + c + 0.1 v,  c = attention to the memory of past segments
//   x = y + W_2 gelu(W_1 rmsnorm(y; norm2) + b_1) + b_2         (segment_memory.h, from y on)
//
// Norms, products and the gate see all rows of a chunk; the recurrence and the memory take it batch by batch, or where
// the backend has it and no sweep is asked for all sequences at once, whatever their lengths. Chunks of one token of
// many sequences, whose products are one reading of the weights for all of them, go by rows: the recurrence's gates are
// one more product, and what lies between products is normed where it is computed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/backend.h"
#include "models/mmrec/mmrec.h"
#include "models/mmrec/packed.h"
#include "models/mmrec/segment_memory.h"
#include "models/mmrec/token_rows.h"
#include "models/mmrec/workspace.h"
#include "models/runtime/executor.h"

namespace mmrec::models {

template <class Backend, class A>
class Block {
 public:
  using Work = Workspace<Backend, A>;
  using Space = typename Work::Space;
  using Layer = LayerView<Space>;
  using Job = typename Work::template Job<float>;
  template <class T>
  using Matrix = typename Work::template Matrix<T>;

  Block(const ModelView<Space>& model, Work& work)
      : model_(model), work_(work), memory_(work), packed_(work), token_rows_(work) {}

  /// Whether the runs of a chunk can go all at once.
  static constexpr bool kPacks = PackedChunk<Backend, A>::kBackendHasIt;

  /// Tokens in, the last block's x out: all rows of the batches, which are packed runs if it says so. True if `normed`
  /// is rmsnorm(x; norm) besides.
  bool run(const int* tokens, std::span<const Batch> batches, std::int64_t rows, bool packed,
           const RecurrenceOptions& options, Matrix<A> normed, PrefillStats& stats) {
    if (!packed && goes_by_rows(batches)) {
      run_rows(tokens, batches, normed);
      return true;
    }
    if constexpr (kPacks) {
      if (packed) packed_.begin(batches, rows);
    }
    kernels::embed(work_.backend, model_.embedding, tokens, work_.x(rows));
    for (std::int64_t layer = 0; layer < work_.config.num_layers; ++layer) {
      const Layer& w = model_.layers[static_cast<std::size_t>(layer)];
      kernels::rmsnorm(work_.backend, Matrix<const float>(work_.x(rows)), w.norm1, work_.u(rows));
      project(w, rows);
      hide(w, rows);
      kernels::linear(work_.backend, decay_jobs(w, rows));
      kernels::decay_gate(work_.backend,
                          {.a = work_.gamma(rows), .c = context_decay(rows), .gamma = work_.gamma(rows)});
      if (packed) {
        finish_packed(w, layer, rows, options, stats);
        continue;
      }
      if (kRecursTogether && !options.sweeps && !work_.plan.spans_segments && batches.size() > 1) {
        finish_together(w, layer, batches, rows);
        continue;
      }
      for (const Batch& b : batches) {
        recur(w, layer, b, options, stats);
        memory_.finish(w, layer, b);
        // Last, because the device waits for the host when sweeps end: first comes what it can work on.
        end_recurrence(layer, b);
      }
    }
    return false;
  }

  SegmentMemory<Backend, A>& memory() { return memory_; }
  /// Of the chunk that run() had last, if it was packed.
  PackedChunk<Backend, A>& packed() { return packed_; }

 private:
  // --- From u to what the recurrence takes

  // Without q where there is no memory to attend to.
  void project(const Layer& w, std::int64_t rows) {
    const std::int64_t first = work_.config.memory_slots == 0 ? work_.dim() : 0, count = work_.qvzk_width() - first;
    work_.template linear<A>({.x = work_.u(rows),
                              .weight = w.qvzk.middle_rows(first, count),
                              .bias = w.qvzk_bias + first,
                              .y = work_.qvzk(rows).middle_cols(first, count)});
  }
  Matrix<const A> part(std::int64_t rows, std::int64_t number) {  // q, v, z, k
    return work_.qvzk(rows).middle_cols(number * work_.dim(), work_.dim());
  }
  // W_mz z + b_m and the decay networks' hidden layers.
  void hide(const Layer& w, std::int64_t rows) {
    using Hidden = typename Work::template Job<A>;
    const auto activation = work_.config.use_dpg ? kernels::Activation::kRelu : kernels::Activation::kGelu;
    const Hidden jobs[] = {{.x = part(rows, 2),
                            .weight = w.gate_z,
                            .bias = w.gate_z_bias,
                            .y = work_.gate_z(rows),
                            .ragged = work_.ragged},
                           {.x = part(rows, 2),
                            .weight = w.gamma_in,
                            .bias = w.gamma_in_bias,
                            .y = work_.gate_hidden(rows, 0),
                            .activation = activation,
                            .ragged = work_.ragged},
                           {.x = part(rows, 3),
                            .weight = w.context_in,
                            .bias = w.context_in_bias,
                            .y = work_.gate_hidden(rows, 1),
                            .activation = activation,
                            .ragged = work_.ragged}};
    kernels::linear(work_.backend, std::span<const Hidden>(jobs).first(static_cast<std::size_t>(1 + work_.networks())));
  }
  // The decay networks' outputs, γ's two factors before their logistic functions.
  std::span<const Job> decay_jobs(const Layer& w, std::int64_t rows) {
    jobs_[1] = {.x = work_.gate_hidden(rows, 0),
                .weight = w.gamma_up,
                .bias = w.gamma_up_bias,
                .y = work_.gamma(rows),
                .ragged = work_.ragged};
    jobs_[2] = {.x = work_.gate_hidden(rows, 1),
                .weight = w.context_up,
                .bias = w.context_up_bias,
                .y = work_.context(rows),
                .ragged = work_.ragged};
    return std::span<const Job>(jobs_).subspan(1, static_cast<std::size_t>(work_.networks()));
  }
  Matrix<const float> context_decay(std::int64_t rows) {
    return work_.config.use_dpg ? Matrix<const float>() : Matrix<const float>(work_.context(rows));
  }

  // --- The recurrence: rows 1.. of the batch's h, from the layer's state

  void recur(const Layer& w, std::int64_t layer, const Batch& b, const RecurrenceOptions& options,
             PrefillStats& stats) {
    begin_recurrence(layer, b);
    const kernels::GateInputs<Space, A> in = gate_inputs(b);
    if (!options.sweeps || b.tokens < kMinSweepTokens) {
      return kernels::gated_recurrence(
          work_.backend, kernels::GatedRecurrence<Space, A>{.in = in, .gate_weight = w.gate, .gate_bias = w.gate_bias});
    }
    add(stats, b.rows(), kernels::gated_sweeps(work_.backend, sweeps_of(w, in, options)));
  }
  // The carry.
  void begin_recurrence(std::int64_t layer, const Batch& b) {
    const Matrix<float> state = work_.state(b, layer);
    if (work_.restarts(b.position)) kernels::fill_zero(work_.backend, state);
    kernels::copy_rows(work_.backend, Matrix<const float>(state), Work::row_of(work_.h(b), 0));
    if constexpr (Work::kRounds) {
      kernels::copy_rows(work_.backend, Matrix<const float>(state), Work::row_of(work_.h_rounded(b), 0));
    }
  }
  void end_recurrence(std::int64_t layer, const Batch& b) {
    kernels::copy_rows(work_.backend, Matrix<const float>(Work::row_of(work_.h(b), b.tokens)), work_.state(b, layer));
  }
  kernels::GateInputs<Space, A> gate_inputs(const Batch& b) {
    return {.z = work_.z(b),
            .zm = work_.gate_z(b),
            .gamma = work_.gamma(b),
            .h = work_.h(b),
            .h_rounded = work_.h_rounded(b),
            .mdi_mix = work_.config.mdi_mix};
  }
  kernels::GatedSweeps<Space, A> sweeps_of(const Layer& w, const kernels::GateInputs<Space, A>& in,
                                           const RecurrenceOptions& options) {
    return {.in = in,
            .gate_weight = w.gate,
            .gate_bias = w.gate_bias,
            .tolerance = options.tolerance,
            .max_sweeps = options.max_sweeps,
            .gate = work_.gate_scratch(),
            .change = work_.change_scratch()};
  }
  static void add(PrefillStats& stats, std::int64_t rows, const kernels::SweepCounts& counts) {
    stats += {rows, counts.token_sweeps, counts.windows, counts.fallbacks};
  }

  // --- All batches of a chunk at once, by exact steps

  static constexpr bool kRecursTogether = requires(Backend & backend, const kernels::GatedRecurrences<Space, A>& op) {
    gated_recurrences(backend, op);
  };
  void finish_together(const Layer& w, std::int64_t layer, std::span<const Batch> batches, std::int64_t rows) {
    if constexpr (kRecursTogether) {
      inputs_.clear();
      for (const Batch& b : batches) {
        begin_recurrence(layer, b);
        inputs_.push_back(gate_inputs(b));
      }
      gated_recurrences(work_.backend, kernels::GatedRecurrences<Space, A>{
                                           .in = inputs_, .gate_weight = w.gate, .gate_bias = w.gate_bias});
      memory_.finish_together(w, layer, batches, rows);
      for (const Batch& b : batches) end_recurrence(layer, b);
    }
  }

  // --- All runs of a chunk at once, packed

  void finish_packed(const Layer& w, std::int64_t layer, std::int64_t rows, const RecurrenceOptions& options,
                     PrefillStats& stats) {
    if constexpr (kPacks) {
      const Batch all{.sequences = 1, .tokens = rows};
      add(stats, rows, packed_.recur(sweeps_of(w, gate_inputs(all), options), layer));
      packed_.finish(w, layer, memory_);
    }
  }

  // --- One token of each of many sequences

  static constexpr bool kHasRows = TokenRows<Backend, A>::kBackendHasIt;
  bool goes_by_rows(std::span<const Batch> batches) const {
    if constexpr (kHasRows) {
      // Sequences apart have no other way that takes them all at once.
      constexpr std::int64_t kManyRows = 9;
      std::int64_t rows = 0;
      for (const Batch& b : batches) {
        if (b.tokens != 1 || b.first_row != rows) return false;  // a gap before it: its chunk was laid out to be packed
        rows += b.sequences;
      }
      return token_rows_pay(work_.backend, batches.size() == 1 ? rows : kManyRows, work_.dim());
    }
    return false;
  }

  void run_rows(const int* tokens, std::span<const Batch> batches, Matrix<A> normed) {
    if constexpr (kHasRows) {
      for (const Batch& b : batches) work_.restart(b);
      token_rows_.begin(batches);
      const Batch& b = token_rows_.all();
      const std::int64_t rows = b.rows();
      const std::int64_t layers = work_.config.num_layers;
      const auto next_state = [&](std::int64_t layer) -> kernels::RoundState<Space, A> {
        if (layer == layers) return {};
        return {token_rows_.state(layer), Work::row_of(work_.h_rounded(b), 0)};
      };
      embed_norm(work_.backend, kernels::EmbedNorm<Space, A>{.table = model_.embedding,
                                                             .tokens = tokens,
                                                             .x = work_.x(rows),
                                                             .norm = model_.layers.front().norm1,
                                                             .u = work_.u(rows),
                                                             .next = next_state(0)});
      for (std::int64_t layer = 0; layer < layers; ++layer) {
        const Layer& w = model_.layers[static_cast<std::size_t>(layer)];
        project(w, rows);
        hide(w, rows);
        // The gates' product depends on nothing of this step: it goes beside small ones whose latency would leave
        // memory idle.
        decay_jobs(w, rows);
        jobs_[0] = {.x = Work::row_of(work_.h_rounded(b), 0), .weight = w.gate, .y = work_.state_gates(b)};
        kernels::linear(work_.backend,
                        std::span<const Job>(jobs_).first(static_cast<std::size_t>(1 + work_.networks())));
        advance_norm(work_.backend, kernels::AdvanceNorm<Space, A>{.z = part(rows, 2),
                                                                   .v = part(rows, 1),
                                                                   .zm = work_.gate_z(rows),
                                                                   .gates = work_.state_gates(b),
                                                                   .gate_bias = w.gate_bias,
                                                                   .decay = work_.gamma(rows),
                                                                   .context_decay = context_decay(rows),
                                                                   .mdi_mix = work_.config.mdi_mix,
                                                                   .h = token_rows_.state(layer),
                                                                   .h_rounded = Work::row_of(work_.h_rounded(b), 1),
                                                                   .x = work_.x(rows),
                                                                   .c = token_rows_.context(layer),
                                                                   .c_bias = token_rows_.context_bias(w),
                                                                   .norm = w.norm2,
                                                                   .u = work_.u(rows)});
        if (token_rows_.attending().sequences > 0) token_rows_.attend(w, layer, memory_);
        memory_.feed_forward(w, b, {0, 1});
        const bool last = layer + 1 == layers;
        sum_norm(work_.backend,
                 kernels::SumNorm<Space, A>{
                     .x = work_.x(rows),
                     .sum = token_rows_.segment_sum(layer),
                     .norm = last ? model_.norm : model_.layers[static_cast<std::size_t>(layer) + 1].norm1,
                     .u = last ? normed : work_.u(rows),
                     .next = next_state(layer + 1)});
        for (const Batch& part : batches) memory_.close(w, layer, part, part.position + 1);
      }
    }
  }

  const ModelView<Space>& model_;
  Work& work_;
  SegmentMemory<Backend, A> memory_;
  PackedChunk<Backend, A> packed_;
  TokenRows<Backend, A> token_rows_;
  std::vector<kernels::GateInputs<Space, A>> inputs_;  // of the batches of a chunk that recur together
  Job jobs_[3];                                        // the gates', and the decay networks' last layers
};

}  // namespace mmrec::models
