// The memory of the forward pass: the activations of one chunk, as views, and the places of a sequence's state.
//
// Activations are sized by chunks, not by prompts: reserve() makes them large enough once, before a call that needs
// more.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "kernels/cpu/cpu.h"  // ops are called by their qualified names, which some backend must have declared
#include "kernels/ops.h"
#include "models/mmrec/config.h"
#include "models/mmrec/state.h"
#include "models/runtime/activation.h"
#include "models/runtime/schedule.h"

namespace mmrec::models {

/// Times [first, first + tokens) of a batch's, within one memory segment.
struct Piece {
  std::int64_t first = 0;
  std::int64_t tokens = 0;
};

template <class Backend, class A>
class Workspace {
 public:
  using Space = typename Backend::Space;
  template <class T>
  using Matrix = kernels::MatrixView<T, Space>;
  template <class T>
  using Sequence = kernels::SequenceView<T, Space>;
  template <class Y>
  using Job = kernels::Linear<Space, A, Y>;

  /// Whether weights are composed (layer_fields.h).
  static constexpr bool kComposed = std::is_same_v<Space, kernels::Device>;

  Workspace(const Config& model_config, Backend& model_backend, const ChunkPlan& chunk_plan,
            const SlotLayout& slot_layout)
      : config(model_config),
        backend(model_backend),
        plan(chunk_plan),
        slot(slot_layout),
        x(dim()),
        gamma(dim()),
        context(dim()),
        u(dim()),
        qvzk((config.use_dpg && !kComposed ? 3 : 4) * dim()),
        ffn(config.ffn_dim),
        h_(dim()),
        beside_h_(dim()),
        attended_(dim()),
        zm_(kComposed ? 0 : dim()),
        gate_hidden_(networks() * gate_width()) {}

  const Config& config;
  Backend& backend;
  ChunkPlan plan;
  SlotLayout slot;
  /// Of a chunk's rows; widths D unless named.
  Activation<Backend, float> x, gamma, context;
  Activation<Backend, A> u, qvzk;  // q, v, z and, but for DPG, k; if composed, W_mz z + b_m is the fourth
  Activation<Backend, A> ffn;
  /// Whether the rows of the chunk at hand form no whole tiles.
  bool ragged = false;
  /// See kernels::Linear.
  std::int64_t few_rows = kernels::kTileColumns;

  /// Memory for chunks of as many rows of so many sequences as the plan has, and for sweeps if there will be any; false
  /// if it was there already. Where it throws, the next call begins anew.
  bool reserve(std::int64_t sequences, bool sweeps) {
    if (sweeps && change_.size() == 0) {  // the last of the two
      gate_ = backend.template allocate<float>(static_cast<std::size_t>(2 * plan.window * dim()));
      change_ = backend.template allocate<float>(static_cast<std::size_t>(2 * plan.window));
    }
    const std::int64_t rows = std::max(plan.most_rows(sequences), rows_);
    const std::int64_t carries = std::max(std::min(rows, sequences), carries_);
    if (rows == rows_ && carries == carries_) return false;
    rows_ = carries_ = 0;
    for (auto* activation : {&x, &gamma, &context}) activation->reserve(backend, rows);
    for (auto* activation : {&qvzk, &zm_, &ffn, &gate_hidden_}) activation->reserve(backend, rows);
    u.reserve(backend, std::max(rows, plan.alone));  // all that the largest chunk needs here
    h_.reserve(backend, rows + carries);
    if constexpr (kRounds<A>) attended_.reserve(backend, rows);
    if constexpr (kComposed) beside_h_.reserve(backend, rows + carries);
    rows_ = rows, carries_ = carries;
    return true;
  }
  std::int64_t rows() const { return rows_; }
  /// Whether so many sequences can take a step: state_gates() needs twice their rows.
  bool has_step_rows(std::int64_t count) const { return count <= rows_ && 2 * count <= rows_ + carries_; }

  // --- More activations

  std::int64_t dim() const { return config.model_dim; }
  /// Of decay network 0, that of z, or 1, that of k.
  Matrix<A> gate_hidden(std::int64_t rows, int network) {
    const std::int64_t width = gate_width();
    return gate_hidden_(rows).middle_cols(network * width, width);
  }
  std::int64_t networks() const { return config.use_dpg ? 1 : 2; }  // of the decay
  std::int64_t gate_width() const { return config.use_dpg ? config.dpg_rank : config.gate_hidden_dim(); }
  /// Scratch of sweeps. Requires: reserve() with sweeps.
  Matrix<float> gate_scratch() { return {gate_.data(), plan.window, 2 * dim()}; }
  float* change_scratch() { return change_.data(); }  // [2 * window]

  Sequence<A> q(const Batch& b) { return qvzk.columns(b, 0, dim()); }
  Sequence<A> v(const Batch& b) { return qvzk.columns(b, dim(), dim()); }
  Sequence<A> z(const Batch& b) { return qvzk.columns(b, 2 * dim(), dim()); }
  /// W_mz z + b_m, of which the second gate of the recurrence is made.
  Sequence<A> zm(const Batch& b) { return kComposed ? qvzk.columns(b, 3 * dim(), dim()) : zm_(b); }
  Matrix<A> zm(std::int64_t rows) { return kComposed ? qvzk(rows).middle_cols(3 * dim(), dim()) : zm_(rows); }
  /// Queries of the attention, then its output.
  Sequence<A> attended(const Batch& b) { return if_rounded<A>(attended_, context)(b); }
  /// h with the row before the first token, the carry: [sequences, tokens + 1, D].
  Sequence<float> h(const Batch& b) { return with_carry(h_, b); }
  /// h rounded to A; the same memory for A = float.
  Sequence<A> h_rounded(const Batch& b) { return with_carry(if_rounded<A>(beside_h_, h_), b); }
  /// Where one token of each sequence goes by rows: what the recurrence's gates see of the state, [sequences, 2D]. It
  /// takes the place of whichever of h and h_rounded the rows leave free.
  Matrix<float> state_gates(const Batch& b) {
    return {with_carry(if_rounded<A>(h_, beside_h_), b).data, b.sequences, 2 * dim()};
  }
  /// What such rows keep there instead, where no kernel computes the gates alone: another rounded state, and squares of
  /// rows that are scaled by norm1 and by norm2.
  struct PassedRows {
    Matrix<A> h_rounded;
    float* squares[2];
    int part;  // of these
  };
  PassedRows passed_rows(const Batch& b, int part) {
    float* const begin = state_gates(b).data;
    float* const squares = begin + b.sequences * dim();
    return {{reinterpret_cast<A*>(begin), b.sequences, dim()},
            {squares, squares + b.sequences * kernels::scaled_parts(dim(), part)},
            part};
  }

  // --- State of a layer, of the sequences of a batch.

  template <class T>
  T* in_slot(Slot first, std::size_t offset) const {
    return reinterpret_cast<T*>(first + offset);
  }
  /// A row of each of `count` slots side by side.
  template <class T>
  Matrix<T> of_slots(T* first, std::int64_t count, std::int64_t cols) const {
    return {first, count, cols, static_cast<std::int64_t>(slot.bytes / sizeof(T))};
  }
  Matrix<float> state(const Batch& b, std::int64_t layer) const {
    return of_slots(in_slot<float>(b.slot, slot.h) + layer * dim(), b.sequences, dim());
  }
  Matrix<double> segment_sum(const Batch& b, std::int64_t layer) const {
    return of_slots(in_slot<double>(b.slot, slot.segment_sum) + layer * dim(), b.sequences, dim());
  }
  Matrix<float> segment_context(const Batch& b, std::int64_t layer) const {
    return of_slots(in_slot<float>(b.slot, slot.segment_context) + layer * dim(), b.sequences, dim());
  }
  /// Slot `number` of the memory ring.
  Matrix<float> memory(const Batch& b, std::int64_t layer, std::int64_t number) const {
    return of_slots(in_slot<float>(b.slot, slot.memory) + (layer * config.memory_slots + number) * dim(), b.sequences,
                    dim());
  }

  // --- Memory segments

  /// Slots of the ring that are filled at a position.
  std::int64_t filled_slots(std::int64_t position) const {
    return std::min(config.memory_slots, position / config.memory_segment);
  }
  /// The slot that the segment ending before position `end` fills.
  std::int64_t ring_slot(std::int64_t end) const { return (end / config.memory_segment - 1) % config.memory_slots; }
  /// Tokens of a batch from time `first` on up to where the state restarts or the batch ends.
  std::int64_t until_restart(const Batch& b, std::int64_t first) const {
    const std::int64_t segment = config.memory_segment, left = b.tokens - first;
    return config.carry_state ? left : std::min(left, segment - (b.position + first) % segment);
  }
  bool restarts(std::int64_t position) const { return !config.carry_state && position % config.memory_segment == 0; }
  /// h of all layers begins anew, where the batch's position asks for it.
  void restart(const Batch& b) {
    if (!restarts(b.position)) return;
    kernels::fill_zero(backend, of_slots(state(b, 0).data, b.sequences, config.num_layers * dim()));
  }

  // --- Views of views

  /// Row `row` of every sequence.
  template <class T>
  static Matrix<T> row_of(const Sequence<T>& s, std::int64_t row) {
    return {s.at(0, 0, row), s.batch, s.dim, s.batch_stride};
  }
  /// Times [first, first + count) of every sequence.
  template <class T>
  static Sequence<T> times(Sequence<T> s, std::int64_t first, std::int64_t count) {
    s.data = s.at(0, 0, first);
    s.time = count;
    return s;
  }
  template <class T>
  static Sequence<T> times(const Sequence<T>& s, const Piece& piece) {
    return times(s, piece.first, piece.tokens);
  }
  /// All rows as one matrix, if they lie that way.
  template <class T>
  static bool is_matrix(const Sequence<T>& s) {
    return s.batch == 1 || s.time == 1 || s.batch_stride == s.time * s.time_stride;
  }
  template <class T>
  static Matrix<T> matrix(const Sequence<T>& s) {
    return {s.data, s.batch * s.time, s.dim, s.time == 1 ? s.batch_stride : s.time_stride};
  }
  template <class T>
  static Matrix<T> matrix(const Sequence<T>& s, std::int64_t b) {
    return {s.at(b, 0, 0), s.time, s.dim, s.time_stride};
  }

  // --- Products

  /// A product over rows of the chunk at hand. Callers with several at once must set force_row_kernel themselves.
  template <class Y>
  void linear(Job<Y> job) {
    job.force_row_kernel = ragged;
    kernels::linear(backend, std::span<const Job<Y>>(&job, 1));
  }
  /// y = act(x Wᵀ + bias) + scale * residual over all rows: one product, or one per sequence where the rows of two
  /// sequences are not evenly spaced.
  template <class Y>
  void linear(const Sequence<A>& x, const Sequence<Y>& y, Job<Y> job, const Sequence<Y>& residual = {}) {
    const auto apply = [&](const auto& rows_of) {
      job.x = rows_of(x), job.y = rows_of(y);
      if (residual.data != nullptr) job.residual = rows_of(residual);
      job.force_row_kernel = ragged;
      job.few_rows = few_rows;
      return job;
    };
    if (is_matrix(x) && is_matrix(y) && is_matrix(residual)) {
      return linear<Y>(apply([](const auto& s) { return matrix(s); }));
    }
    std::vector<Job<Y>> jobs;
    for (std::int64_t b = 0; b < x.batch; ++b) jobs.push_back(apply([b](const auto& s) { return matrix(s, b); }));
    kernels::linear(backend, std::span<const Job<Y>>(jobs));
  }
  /// rmsnorm of all rows.
  void normalise(const Sequence<float>& from, const float* weight, const Sequence<A>& to) {
    const bool whole = is_matrix(from) && is_matrix(to);
    for (std::int64_t b = 0; b < (whole ? 1 : from.batch); ++b) {
      kernels::rmsnorm(backend, Matrix<const float>(whole ? matrix(from) : matrix(from, b)), weight,
                       whole ? matrix(to) : matrix(to, b));
    }
  }

 private:
  template <class T>
  Sequence<T> with_carry(Activation<Backend, T>& rows, const Batch& b) {
    return {rows.data() + (b.first_row + b.first_run) * dim(), b.sequences, b.tokens + 1, dim()};
  }

  std::int64_t rows_ = 0, carries_ = 0;  // room in the activations
  Activation<Backend, float> h_;
  Activation<Backend, A> beside_h_;  // h rounded to A, or for A = float state_gates()
  Activation<Backend, A> attended_, zm_, gate_hidden_;
  typename Backend::template Buffer<float> gate_, change_;
};

}  // namespace mmrec::models
