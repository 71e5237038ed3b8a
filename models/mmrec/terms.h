// The terms of the block's equations, each written once. block.h calls them in order. The paths of paths/ call the
// terms that they do not compute by ops of their own.
//
// A term takes all rows of a chunk, or the tokens of a batch, or a piece of a batch that ends with its memory segment.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "kernels/ops.h"
#include "models/mmrec/mmrec.h"
#include "models/mmrec/workspace.h"
#include "models/runtime/executor.h"
#include "models/runtime/schedule.h"

namespace mmrec::models {

template <class Backend, class A>
class BlockTerms {
 public:
  using Work = Workspace<Backend, A>;
  using Space = typename Work::Space;
  using Layer = LayerView<Space>;
  using Job = typename Work::template Job<float>;
  template <class T>
  using Matrix = typename Work::template Matrix<T>;
  template <class T>
  using Sequence = typename Work::template Sequence<T>;

  BlockTerms(const ModelView<Space>& its_model, Work& its_work) : model(its_model), work(its_work) {}

  const ModelView<Space>& model;
  Work& work;

  const Layer& layer(std::int64_t number) const { return model.layers[static_cast<std::size_t>(number)]; }

  // --- From x to the recurrence's inputs, for all rows of a chunk

  /// x = embedding[token].
  void embed(const Chunk& chunk) { kernels::embed(work.backend, model.embedding, chunk.tokens, work.x(chunk.rows)); }
  /// u = rmsnorm(x; norm1).
  void norm(const Layer& w, std::int64_t rows) {
    kernels::rmsnorm(work.backend, Matrix<const float>(work.x(rows)), w.norm1, work.u(rows));
  }
  /// q, v, z, k = W u + b; W_mz z + b_m; and the hidden layers of the decay networks, of z and of k. Without q in
  /// models without memory slots. On a device all of them are products with u (layer_fields.h), which has W_mz z in
  /// place of k; u_squares: of a u that is scaled.
  void project(const Layer& w, std::int64_t rows, const float* u_squares = nullptr) {
    const std::int64_t first = work.config.memory_slots == 0 ? work.dim() : 0, count = w.qvzk.rows - first;
    const auto activation = work.config.use_dpg ? kernels::Activation::kRelu : kernels::Activation::kGelu;
    const auto of_u = job(work.u(rows), w.qvzk.middle_rows(first, count), w.qvzk_bias + first,
                          work.qvzk(rows).middle_cols(first, count));
    const Matrix<const A> of_gamma = Work::kComposed ? work.u(rows) : z(rows);
    const Matrix<const A> of_context = Work::kComposed ? work.u(rows) : k(rows);
    typename Work::template Job<A> jobs[] = {
        Work::kComposed ? of_u : job(z(rows), w.gate_z, w.gate_z_bias, work.zm(rows)),
        job(of_gamma, w.gamma_in, w.gamma_in_bias, work.gate_hidden(rows, 0), activation),
        job(of_context, w.context_in, w.context_in_bias, work.gate_hidden(rows, 1), activation)};
    for (auto& each : jobs) each.x_squares = u_squares;
    if (!Work::kComposed) kernels::linear(work.backend, std::span(&of_u, 1));
    kernels::linear(work.backend, std::span<const typename Work::template Job<A>>(
                                      jobs, static_cast<std::size_t>(1 + work.networks())));
  }
  Matrix<const A> v(std::int64_t rows) { return work.qvzk(rows).middle_cols(work.dim(), work.dim()); }
  Matrix<const A> z(std::int64_t rows) { return work.qvzk(rows).middle_cols(2 * work.dim(), work.dim()); }
  Matrix<const A> k(std::int64_t rows) { return work.qvzk(rows).middle_cols(3 * work.dim(), work.dim()); }
  /// Last layers of the decay networks: the two factors of γ before their logistic functions. `beside`, if it has a y,
  /// is a product that runs at the same time.
  void decay_factors(const Layer& w, std::int64_t rows, const Job& beside = {}) {
    const Job jobs[] = {beside, job(work.gate_hidden(rows, 0), w.gamma_up, w.gamma_up_bias, work.gamma(rows)),
                        job(work.gate_hidden(rows, 1), w.context_up, w.context_up_bias, work.context(rows))};
    const std::size_t first = beside.y.data == nullptr ? 1 : 0;
    kernels::linear(work.backend, std::span(jobs).subspan(first, std::size_t(1 + work.networks()) - first));
  }
  Matrix<const float> context_decay(std::int64_t rows) {
    return work.config.use_dpg ? Matrix<const float>() : Matrix<const float>(work.context(rows));
  }
  /// γ.
  void decay(const Layer& w, std::int64_t rows) {
    decay_factors(w, rows);
    kernels::decay_gate(work.backend, {.a = work.gamma(rows), .c = context_decay(rows), .gamma = work.gamma(rows)});
  }

  // --- The recurrence: rows 1.. of a batch's h

  /// Row 0, from the layer's state.
  void carry_in(std::int64_t layer, const Batch& b) {
    const Matrix<float> state = work.state(b, layer);
    if (work.restarts(b.position)) kernels::fill_zero(work.backend, state);
    kernels::copy_rows(work.backend, Matrix<const float>(state), Work::row_of(work.h(b), 0));
    round_carry(b, state, 0);
  }
  /// The state before time `first` becomes 0.
  void zero_carry(const Batch& b, std::int64_t first) {
    const Matrix<float> carry = Work::row_of(work.h(b), first);
    kernels::fill_zero(work.backend, carry);
    round_carry(b, carry, first);
  }
  /// The last row, to the layer's state.
  void carry_out(std::int64_t layer, const Batch& b) {
    kernels::copy_rows(work.backend, Matrix<const float>(Work::row_of(work.h(b), b.tokens)), work.state(b, layer));
  }
  kernels::GateInputs<Space, A> gate_inputs(const Batch& b) { return gate_inputs(b, {0, b.tokens}); }
  kernels::GateInputs<Space, A> gate_inputs(const Batch& b, const Piece& piece) {
    return {.z = Work::times(work.z(b), piece),
            .zm = Work::times(work.zm(b), piece),
            .gamma = Work::times(work.gamma(b), piece),
            .h = Work::times(work.h(b), piece.first, piece.tokens + 1),
            .h_rounded = Work::times(work.h_rounded(b), piece.first, piece.tokens + 1),
            .mdi_mix = work.config.mdi_mix};
  }
  kernels::GatedSweeps<Space, A> sweeps(const Layer& w, const Batch& b, const RecurrenceOptions& options) {
    return {.in = gate_inputs(b),
            .gate_weight = w.gate,
            .gate_bias = w.gate_bias,
            .tolerance = options.tolerance,
            .max_sweeps = options.max_sweeps,
            .gate = work.gate_scratch(),
            .change = work.change_scratch()};
  }

  // --- From h to y

  /// The batch's tokens that attend to two slots or more.
  Piece attending(const Batch& b) const {
    if (work.config.memory_slots < 2) return {b.tokens, 0};
    const std::int64_t first = std::clamp<std::int64_t>(2 * work.config.memory_segment - b.position, 0, b.tokens);
    return {first, b.tokens - first};
  }
  /// Queries of a piece: W_q' h + ½ q.
  void query(const Layer& w, const Batch& b, const Piece& piece) {
    if (piece.tokens == 0) return;
    work.template linear<A>(
        Work::times(work.h_rounded(b), piece.first + 1, piece.tokens), Work::times(work.attended(b), piece),
        {.weight = w.memory_q, .bias = w.memory_q_bias, .residual_scale = 0.5F}, Work::times(work.q(b), piece));
  }
  /// The part of attention that needs no memory, for tokens that will attend: their queries, and x = x + h + 0.1 v.
  void prepare_attention(const Layer& w, const Batch& b, const Piece& piece) {
    if (piece.tokens == 0) return;
    query(w, b, piece);
    kernels::block_residual(work.backend, residual(b, piece));
  }
  /// What a piece attends to, the filled slots of each sequence.
  Sequence<const float> slots(std::int64_t layer, const Batch& b, const Piece& piece) const {
    const Matrix<float> memory = work.memory(b, layer, 0);
    Sequence<const float> rings(memory.data, b.sequences, work.filled_slots(b.position + piece.first), work.dim());
    rings.batch_stride = memory.stride;
    return rings;
  }
  /// x += W_o attend(queries; memory) + b_o, where two slots or more are filled.
  void attend(const Layer& w, std::int64_t layer, const Batch& b, const Piece& piece,
              const kernels::ScaledRows<Space, A>& scaled = {}) {
    const Sequence<A> query = Work::times(work.attended(b), piece);
    kernels::memory_attention(work.backend, kernels::MemoryAttention<Space, A>{.q = query,
                                                                               .slots = slots(layer, b, piece),
                                                                               .heads = work.config.num_heads,
                                                                               .out = query,
                                                                               .padding = work.config.head_padding});
    add_attended(w, b, piece, scaled);
  }
  /// x += W_o attended + b_o. scaled: what x leaves, or nothing.
  void add_attended(const Layer& w, const Batch& b, const Piece& piece,
                    const kernels::ScaledRows<Space, A>& scaled = {}) {
    const Sequence<float> x = Work::times(work.x(b), piece);
    work.template linear<float>(Work::times(work.attended(b), piece), x,
                                {.weight = w.memory_out, .bias = w.memory_out_bias, .scaled = scaled}, x);
  }
  /// The same for rows of runs whose memories lie anywhere. `runs` lists `count` runs, each with at most `rows` rows.
  void attend_listed(const Layer& w, std::int64_t layer, const Batch& b, const Piece& piece,
                     const kernels::AttendingRun* runs, std::int64_t count, std::int64_t rows,
                     const kernels::ScaledRows<Space, A>& scaled = {}) {
    const Matrix<A> query = Work::matrix(work.attended(b));
    packed_attention(work.backend,
                     kernels::PackedAttention<Space, A>{.q = query,
                                                        .out = query,
                                                        .heads = work.config.num_heads,
                                                        .runs = runs,
                                                        .count = count,
                                                        .offset = layer * work.config.memory_slots * work.dim(),
                                                        .most_rows = rows,
                                                        .most_slots = work.config.memory_slots,
                                                        .padding = work.config.head_padding});
    add_attended(w, b, piece, scaled);
  }
  /// c where at most one slot is filled: [D] for all sequences (stride 0), or a row for each.
  Matrix<const float> context(const Layer& w, std::int64_t layer, const Batch& b, std::int64_t position) const {
    if (work.filled_slots(position) != 0) return work.segment_context(b, layer);
    return {w.memory_out_bias, b.sequences, work.dim(), 0};
  }
  /// x = x + h + c + 0.1 v and u = rmsnorm(x; norm2). Requires: prepare_attention().
  void mix(const Layer& w, std::int64_t layer, const Batch& b, const Piece& piece) {
    const Sequence<float> x = Work::times(work.x(b), piece);
    const Sequence<A> u = Work::times(work.u(b), piece);
    if (work.filled_slots(b.position + piece.first) > 1) {
      attend(w, layer, b, piece);
      return work.normalise(x, w.norm2, u);
    }
    kernels::BlockResidual<Space, A> op = residual(b, piece);
    const Matrix<const float> c = context(w, layer, b, b.position + piece.first);
    op.bias = c.data, op.bias_stride = c.stride;
    if constexpr (requires { block_residual_norm(work.backend, op, w.norm2, Work::matrix(u)); }) {
      if (Work::is_matrix(u)) return block_residual_norm(work.backend, op, w.norm2, Work::matrix(u));
    }
    kernels::block_residual(work.backend, op);
    work.normalise(x, w.norm2, u);
  }

  // --- From y to x, and the memory

  /// x += W_2 gelu(W_1 u + b_1) + b_2. u_squares: of a u that is scaled. scaled: what x leaves, or nothing.
  void feed_forward(const Layer& w, const Batch& b, const Piece& piece, const float* u_squares = nullptr,
                    const kernels::ScaledRows<Space, A>& scaled = {}) {
    const Sequence<float> x = Work::times(work.x(b), piece);
    const Sequence<A> ffn = Work::times(work.ffn(b), piece);
    work.template linear<A>(
        Work::times(work.u(b), piece), ffn,
        {.weight = w.ffn_in, .bias = w.ffn_in_bias, .activation = kernels::Activation::kGelu, .x_squares = u_squares});
    work.template linear<float>(ffn, x, {.weight = w.ffn_out, .bias = w.ffn_out_bias, .scaled = scaled}, x);
  }
  /// Adds a piece's x to the running segment's sum. If the segment ends with the piece, its mean becomes a slot.
  void remember(const Layer& w, std::int64_t layer, const Batch& b, const Piece& piece) {
    kernels::segment_sum(work.backend, {.x = Work::times(work.x(b), piece), .sum = work.segment_sum(b, layer)});
    close(w, layer, b, b.position + piece.first + piece.tokens);
  }
  /// Makes a slot of the segment that ends at position `end`, if one does.
  void close(const Layer& w, std::int64_t layer, const Batch& b, std::int64_t end) {
    if (end % work.config.memory_segment != 0) return;
    kernels::segment_close(work.backend, work.segment_sum(b, layer), work.config.memory_segment,
                           work.memory(b, layer, work.ring_slot(end)));
    set_context(w, layer, b, end);
  }
  /// Sets c of the segment that position `end` begins or lies in, if just one slot is filled. Then attend() is that
  /// slot for every query, so c = W_o slot + b_o. Overwrites the attention's queries.
  void set_context(const Layer& w, std::int64_t layer, const Batch& b, std::int64_t end) {
    if (work.filled_slots(end) != 1) return;
    const Matrix<float> contexts = work.segment_context(b, layer);
    const Matrix<const float> slots(work.memory(b, layer, work.ring_slot(end)));
    // A state that is loaded may have more sequences than a chunk has rows.
    const std::int64_t most = std::max<std::int64_t>(work.rows() / b.tokens, 1);
    for (std::int64_t first = 0; first < b.sequences; first += most) {
      const std::int64_t count = std::min(most, b.sequences - first);
      const Matrix<A> rounded = Work::row_of(work.attended(b), 0).middle_rows(0, count);
      kernels::copy_rows(work.backend, slots.middle_rows(first, count), rounded);
      std::vector<Job> jobs;
      add_context_jobs(w, rounded, contexts.middle_rows(first, count), jobs);
      kernels::linear(work.backend, std::span<const Job>(jobs));
    }
  }
  /// Jobs for c = W_o slot + b_o of every slot [n, D]. Each has so few rows that the bits depend on the slot alone.
  static void add_context_jobs(const Layer& w, Matrix<const A> slots, Matrix<float> c, std::vector<Job>& jobs) {
    constexpr std::int64_t kAtOnce = std::is_same_v<Space, kernels::Host> ? 1 : kernels::kTileColumns;
    for (std::int64_t first = 0; first < slots.rows; first += kAtOnce) {
      const std::int64_t rows = std::min(kAtOnce, slots.rows - first);
      jobs.push_back({.x = slots.middle_rows(first, rows),
                      .weight = w.memory_out,
                      .bias = w.memory_out_bias,
                      .y = c.middle_rows(first, rows),
                      .force_row_kernel = true});
    }
  }

 private:
  void round_carry(const Batch& b, Matrix<const float> state, std::int64_t time) {
    if constexpr (kRounds<A>) kernels::copy_rows(work.backend, state, Work::row_of(work.h_rounded(b), time));
  }
  template <class Y>
  typename Work::template Job<Y> job(Matrix<const A> x, const kernels::WeightView<Space>& weight, const float* bias,
                                     Matrix<Y> y, kernels::Activation activation = kernels::Activation::kNone) {
    return {.x = x,
            .weight = weight,
            .bias = bias,
            .y = y,
            .activation = activation,
            .force_row_kernel = work.ragged,
            .few_rows = work.few_rows};
  }
  kernels::BlockResidual<Space, A> residual(const Batch& b, const Piece& piece) {
    const Sequence<float> x = Work::times(work.x(b), piece);
    return {
        .x = x, .h = Work::times(work.h(b), piece.first + 1, piece.tokens), .v = Work::times(work.v(b), piece), .y = x};
  }
};

}  // namespace mmrec::models
