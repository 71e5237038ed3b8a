// The MM-Rec equations, written once, template over the backend and its activation type.
//
// A call's tokens are cut into chunks whose inner boundaries lie on a fixed grid of positions, so how a caller splits
// its tokens decides at most which rows stand in one matrix product (docs/numerics.md), never what is computed. A chunk
// runs through all blocks at once; inside a block everything but the recurrence and the memory is parallel over its
// tokens. Activations are sized by the chunk, not by the prompt.
//
// For each block, with u = rmsnorm(x; norm1):
//   q, v, z, k = W u + b                                        γ = decay gate of (z, k)
//   h_t = a_t ⊙ h_{t-1} + b_t, gates from z_t and h_{t-1}       (kernels::GateInputs)
//   c = W_o attend(W_q' h + ½ q; memory) + b_o
//   y = x + h + c + 0.1 v,  x = y + W_2 gelu(W_1 rmsnorm(y; norm2) + b_1) + b_2
// When a segment ends, the mean of the block's outputs over it becomes the newest slot of the block's memory ring. h
// looks at no memory, so the recurrence runs over a whole chunk; where a chunk spans segments, what follows it is done
// piece by piece, a piece ending with its segment. With a single slot filled attend() is that slot, whatever the query,
// so c is one vector for the whole segment: segment_context.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <tuple>
#include <type_traits>
#include <vector>

#include "kernels/backend.h"
#include "models/mmrec/config.h"
#include "models/mmrec/finish_segments.h"
#include "models/mmrec/model_view.h"
#include "models/mmrec/whole_step.h"
#include "models/runner.h"

namespace mmrec::models {

/// How a backend's runner cuts prompts into chunks.
struct ChunkPlan {
  std::int64_t tokens = 0;      // of a sequence in one chunk at most; chunks begin on multiples of it where they can
  std::int64_t tile = 1;        // whole tiles of rows come before what is left; ragged chunks stay below one tile
  std::int64_t rows = 0;        // of all sequences in one chunk at most, unless one sequence's tokens are more
  std::int64_t window = 0;      // tokens of one window of gated_sweeps
  bool spans_segments = false;  // a chunk may run past the end of a memory segment
};

/// Shorter chunks take exact steps: a sweep would cost as much as all of them.
inline constexpr std::int64_t kMinSweepTokens = 16;

/// Tokens of the next chunk from `position` with `remaining` tokens at hand: up to the next tile boundary, else whole
/// tiles up to the end of the grid's cell, else what is left. Where chunks keep to segments the grid starts anew with
/// each.
inline std::int64_t next_chunk(const ChunkPlan& plan, std::int64_t position, std::int64_t remaining,
                               std::int64_t segment) {
  const std::int64_t offset = plan.spans_segments ? position : position % segment;
  const std::int64_t available = plan.spans_segments ? remaining : std::min(remaining, segment - offset);
  const std::int64_t into_tile = offset % plan.tile;
  if (into_tile != 0) return std::min(available, plan.tile - into_tile);
  const std::int64_t whole_tiles = available / plan.tile * plan.tile;
  return whole_tiles == 0 ? available : std::min(whole_tiles, plan.tokens - offset % plan.tokens);
}

/// A model's forward pass with the state of `batch` sequences on one backend. What PrefillMode::kAuto and a tolerance
/// of 0 mean is the runner's to say: here they must be resolved.
template <class Backend, class A = float>
class Forward {
 public:
  using Space = typename Backend::Space;
  template <class T>
  using Buffer = typename Backend::template Buffer<T>;
  template <class T>
  using MatrixOf = kernels::MatrixView<T, Space>;

  Forward(const Config& config, ModelView<Space> model, Backend& backend, int batch, const RunnerOptions& options,
          const ChunkPlan& plan)
      : config_(config),
        model_(std::move(model)),
        backend_(backend),
        options_(options),
        plan_(plan),
        slot_(config),
        batch_(batch),
        max_rows_(std::max<std::int64_t>(plan.tokens, std::min<std::int64_t>(plan.rows, batch * plan.tokens))) {
    const auto rows = static_cast<std::size_t>(max_rows_);
    const auto dim = static_cast<std::size_t>(config.model_dim);
    const auto all = static_cast<std::size_t>(batch);
    const std::int64_t gate_hidden = config.use_dpg ? config.dpg_rank : 2 * config.gate_hidden_dim();
    // One row more per sequence: the carry.
    const std::size_t window_rows = rows + static_cast<std::size_t>(std::min<std::int64_t>(max_rows_, batch));
    tokens_ = backend.template allocate<int>(rows);
    x_ = backend.template allocate<float>(rows * dim);
    u_ = backend.template allocate<A>(rows * dim);
    qvzk_ = backend.template allocate<A>(rows * static_cast<std::size_t>(qvzk_width()));
    gate_z_ = backend.template allocate<A>(rows * dim);
    gamma_ = backend.template allocate<float>(rows * dim);
    context_ = backend.template allocate<float>(rows * dim);
    gate_hidden_ = backend.template allocate<A>(rows * static_cast<std::size_t>(gate_hidden));
    h_window_ = backend.template allocate<float>(window_rows * dim);
    if constexpr (kRounds) {
      attended_ = backend.template allocate<A>(rows * dim);
      h_rounded_ = backend.template allocate<A>(window_rows * dim);
    }
    ffn_ = backend.template allocate<A>(rows * static_cast<std::size_t>(config.ffn_dim));
    if (use_sweeps()) {
      gate_ = backend.template allocate<float>(static_cast<std::size_t>(2 * plan.window) * dim);
      change_ = backend.template allocate<float>(static_cast<std::size_t>(2 * plan.window));
    }
    state_ = backend.template allocate<std::byte>(all * slot_.bytes);
    logprobs_ = backend.template allocate<float>(std::max(rows, all));
    tokens_host_.resize(rows);
    logprobs_host_.resize(std::max(rows, all));
    whole_step_.emplace(config, model_, backend, batch,
                        typename WholeStep<Backend, A>::Memory{.tokens = tokens_.data(),
                                                               .h = state<float>(slot_.h, 0),
                                                               .memory = state<float>(slot_.memory, 0),
                                                               .context = state<float>(slot_.segment_context, 0),
                                                               .segment_sum = state<double>(slot_.segment_sum, 0),
                                                               .logits = state<float>(slot_.logits, 0),
                                                               .slot_bytes = slot_bytes()});
  }

  std::int64_t position() const { return position_; }
  int batch() const { return batch_; }
  const PrefillStats& stats() const { return stats_; }
  /// [B, V] in the backend's memory; meaningful from position 1 on.
  MatrixOf<const float> logits() const {
    return rows_of_slots(state<const float>(slot_.logits, 0), batch_, config_.vocab_size);
  }
  /// The same to contiguous host memory.
  void fetch_logits(float* to) const {
    for (std::int64_t b = 0; b < batch_; ++b) {
      backend_.download(state<const float>(slot_.logits, b), to + b * config_.vocab_size,
                        static_cast<std::size_t>(config_.vocab_size));
    }
  }

  /// Consumes tokens [batch, count] and leaves the logits of the next token in logits(). `exact` forbids sweeps.
  /// Where `logprobs` is not null it receives [batch, count] in host memory: the log-prob of each token, 0 for position
  /// 0.
  void run(std::span<const int> tokens, bool exact, float* logprobs) {
    const std::int64_t count = static_cast<std::int64_t>(tokens.size()) / batch_;
    if (logprobs != nullptr) score_first(tokens, count, logprobs);
    if (count == 1 && steps_at_once()) {  // the bits of a step; there is nothing left to score
      load_step(tokens);
      enqueue_step();
      return finish_step();
    }
    for (std::int64_t done = 0; done < count;) {
      const std::int64_t n = next_chunk(plan_, position_, count - done, config_.memory_segment);
      const std::int64_t group = group_size(n);
      for (std::int64_t b = 0; b < batch_; b += group) {
        const Chunk chunk{b, std::min<std::int64_t>(group, batch_ - b), n};
        load_tokens(tokens, count, done, chunk);
        run_blocks(chunk, exact);
        if (logprobs != nullptr) score_chunk(tokens, count, done, chunk, logprobs);
        if (done + n == count) next_logits(chunk);
      }
      position_ += n;
      done += n;
    }
  }

  // One token of every sequence in three parts, for a runner that records the second and replays it: what
  // enqueue_step() enqueues depends on step_key() alone. Requires: steps_at_once().

  /// Whether one token of all sequences fits one chunk.
  bool steps_at_once() const { return batch_ <= group_size(1); }
  /// Everything but the tokens' values that decides which ops a step consists of and where they write.
  using StepKey = std::tuple<std::int64_t, std::int64_t, bool>;
  StepKey step_key() const {
    const std::int64_t end = position_ + 1;
    return {filled_slots(position_), end % config_.memory_segment == 0 ? ring_slot(end) : -1, restarts()};
  }
  void load_step(std::span<const int> tokens) { load_tokens(tokens, 1, 0, {0, batch_, 1}); }
  /// Where load_step() puts the tokens, for who has them on the device. Other calls write there too.
  int* step_tokens() { return tokens_.data(); }
  void enqueue_step() {
    const Chunk chunk{0, batch_, 1};
    if (!whole_step_->available()) {
      run_blocks(chunk, true);
      next_logits(chunk);
      return;
    }
    if (restarts()) {
      kernels::fill_zero(backend_, rows_of_slots(state<float>(slot_.h, 0), batch_, config_.num_layers * dim()));
    }
    whole_step_->run(backend_, filled_slots(position_));
    for (std::int64_t layer = 0; layer < config_.num_layers; ++layer) close_segment(layer, chunk, position_ + 1);
  }
  void finish_step() { position_ += 1; }

  void reset() {
    const HostState zero = zero_state();
    import_state(zero);
    stats_ = {};
  }

  HostState export_state() const {
    HostState state = zero_state();
    state.position = position_;
    if (position_ > 0) state.logits.resize(static_cast<std::size_t>(batch_ * config_.vocab_size));
    for_each_part(state,
                  [this](auto* host, auto* in_slot, std::size_t count) { backend_.download(in_slot, host, count); });
    return state;
  }

  void import_state(const HostState& state) {
    position_ = state.position;
    for_each_part(
        state, [this](const auto* host, auto* in_slot, std::size_t count) { backend_.upload(host, in_slot, count); });
    if (filled_slots(position_) != 1) return;
    const std::int64_t slot = ring_slot(position_ / config_.memory_segment * config_.memory_segment);
    const std::int64_t rows = std::min<std::int64_t>(max_rows_, batch_);
    for (std::int64_t layer = 0; layer < config_.num_layers; ++layer) {
      for (std::int64_t b = 0; b < batch_; b += rows) {
        set_segment_context(layer, {b, std::min<std::int64_t>(rows, batch_ - b), 1}, slot);
      }
    }
  }

  void set_stats(const PrefillStats& stats) { stats_ = stats; }

 private:
  /// Whether what enters a product is rounded, so that it needs memory of its own.
  static constexpr bool kRounds = !std::is_same_v<A, float>;

  template <class T>
  using Matrix = kernels::MatrixView<T, Space>;
  template <class T>
  using Sequence = kernels::SequenceView<T, Space>;
  using Weight = kernels::WeightView<Space>;
  template <class Y>
  using Job = kernels::Linear<Space, A, Y>;

  /// Sequences [first, first + count), `tokens` tokens each.
  struct Chunk {
    std::int64_t first = 0;
    std::int64_t count = 0;
    std::int64_t tokens = 0;
    std::int64_t rows() const { return count * tokens; }
  };
  /// Times [first, first + tokens) of a chunk, within one memory segment.
  struct Piece {
    std::int64_t first = 0;
    std::int64_t tokens = 0;
  };

  std::int64_t dim() const { return config_.model_dim; }
  // Sequences per chunk. Ragged chunks stay below one row tile in all, so that no row of theirs stands in a whole tile
  // because of its neighbours in the batch.
  std::int64_t group_size(std::int64_t tokens) const {
    const bool ragged = tokens % plan_.tile != 0;
    return std::max<std::int64_t>(1, (ragged ? plan_.tile - 1 : max_rows_) / tokens);
  }
  std::int64_t qvzk_width() const { return (config_.use_dpg ? 3 : 4) * dim(); }
  std::int64_t filled_slots(std::int64_t position) const {
    return std::min(config_.memory_slots, position / config_.memory_segment);
  }
  // Of the slot that the segment ending before position `end` fills.
  std::int64_t ring_slot(std::int64_t end) const { return (end / config_.memory_segment - 1) % config_.memory_slots; }
  bool restarts() const { return !config_.carry_state && position_ % config_.memory_segment == 0; }

  HostState zero_state() const {
    HostState state;
    state.batch = batch_;
    const auto rows = static_cast<std::size_t>(config_.num_layers * batch_ * dim());
    state.h.resize(rows);
    state.memory.resize(rows * static_cast<std::size_t>(config_.memory_slots));
    state.segment_sum.resize(rows);
    return state;
  }
  // visit(host, in slot, count) for all that lies together in both.
  template <class State, class Visit>
  void for_each_part(State& host, Visit visit) const {
    const auto count = static_cast<std::size_t>(dim());
    const auto ring = count * static_cast<std::size_t>(config_.memory_slots);
    for (std::int64_t b = 0; b < batch_; ++b) {
      for (std::int64_t layer = 0; layer < config_.num_layers; ++layer) {
        const auto row = static_cast<std::size_t>(layer * batch_ + b);
        visit(host.h.data() + row * count, state<float>(slot_.h, b) + layer * dim(), count);
        visit(host.memory.data() + row * ring, state<float>(slot_.memory, b) + layer * config_.memory_slots * dim(),
              ring);
        visit(host.segment_sum.data() + row * count, state<double>(slot_.segment_sum, b) + layer * dim(), count);
      }
      const auto vocab = static_cast<std::size_t>(config_.vocab_size);
      if (!host.logits.empty())
        visit(host.logits.data() + static_cast<std::size_t>(b) * vocab, state<float>(slot_.logits, b), vocab);
    }
  }

  std::int64_t slot_bytes() const { return static_cast<std::int64_t>(slot_.bytes); }
  template <class T>
  T* state(std::size_t offset, std::int64_t sequence) const {
    return reinterpret_cast<T*>(const_cast<std::byte*>(state_.data()) + offset +
                                static_cast<std::size_t>(sequence) * slot_.bytes);
  }
  // A row of every sequence from `first` on.
  template <class T>
  Matrix<T> rows_of_slots(T* first, std::int64_t count, std::int64_t cols) const {
    return {first, count, cols, slot_bytes() / std::int64_t{sizeof(T)}};
  }

  // State of one layer for the chunk's sequences.
  Matrix<float> layer_h(std::int64_t layer, const Chunk& c) {
    return rows_of_slots(state<float>(slot_.h, c.first) + layer * dim(), c.count, dim());
  }
  float* layer_memory(std::int64_t layer, const Chunk& c) {
    return state<float>(slot_.memory, c.first) + layer * config_.memory_slots * dim();
  }
  Matrix<double> layer_segment_sum(std::int64_t layer, const Chunk& c) {
    return rows_of_slots(state<double>(slot_.segment_sum, c.first) + layer * dim(), c.count, dim());
  }
  Matrix<float> layer_segment_context(std::int64_t layer, const Chunk& c) {
    return rows_of_slots(state<float>(slot_.segment_context, c.first) + layer * dim(), c.count, dim());
  }

  // [count, tokens, D] at column `column` of rows `width` wide.
  template <class T>
  Sequence<T> activation(Buffer<T>& buffer, const Chunk& c, std::int64_t width, std::int64_t column = 0) {
    Sequence<T> s(buffer.data() + column, c.count, c.tokens, std::min(dim(), width));
    s.batch_stride = c.tokens * width;
    s.time_stride = width;
    return s;
  }
  // The window of h with its carry row: [count, tokens + 1, D].
  Sequence<float> h_window(const Chunk& c) { return {h_window_.data(), c.count, c.tokens + 1, dim()}; }
  Sequence<A> h_rounded(const Chunk& c) {
    if constexpr (kRounds) {
      return {h_rounded_.data(), c.count, c.tokens + 1, dim()};
    } else {
      return h_window(c);
    }
  }
  Buffer<A>& attended() {
    if constexpr (kRounds) {
      return attended_;
    } else {
      return context_;
    }
  }
  // Row `row` of every sequence.
  template <class T>
  static Matrix<T> row_of(const Sequence<T>& s, std::int64_t row) {
    return {s.at(0, 0, row), s.batch, s.dim, s.batch_stride};
  }
  // Times [first, first + count) of every sequence.
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
  // All rows as one matrix, if they lie that way.
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

  void load_tokens(std::span<const int> tokens, std::int64_t count, std::int64_t done, const Chunk& c) {
    for (std::int64_t b = 0; b < c.count; ++b) {
      std::copy_n(tokens.data() + (c.first + b) * count + done, c.tokens, tokens_host_.data() + b * c.tokens);
    }
    backend_.upload(tokens_host_.data(), tokens_.data(), static_cast<std::size_t>(c.rows()));
  }

  void run_blocks(const Chunk& c, bool exact) {
    kernels::embed(backend_, model_.embedding, tokens_.data(), Matrix<float>(x_.data(), c.rows(), dim()));
    for (std::int64_t layer = 0; layer < config_.num_layers; ++layer) run_block(layer, c, exact);
  }

  void run_block(std::int64_t layer, const Chunk& c, bool exact) {
    const LayerView<Space>& w = model_.layers[static_cast<std::size_t>(layer)];
    const std::int64_t rows = c.rows();
    const Matrix<A> u(u_.data(), rows, dim());
    const Matrix<A> qvzk(qvzk_.data(), rows, qvzk_width());

    kernels::rmsnorm(backend_, Matrix<const float>(x_.data(), rows, dim()), w.norm1, u);
    run_linear<A>({{.x = u, .weight = w.qvzk, .bias = w.qvzk_bias, .y = qvzk}});
    compute_gates(w, qvzk, rows);
    compute_h(layer, w, c, exact);
    finish(layer, w, c);
    // Last, because the device waits for the host when sweeps end: first comes what it can work on.
    kernels::copy_rows(backend_, row_of(h_window(c), c.tokens), layer_h(layer, c));
  }

  // From h to the block's output.
  void finish(std::int64_t layer, const LayerView<Space>& w, const Chunk& c) {
    if (finish_pieces_at_once(layer, w, c)) return;
    prepare_attention(w, c);
    for (Piece piece; piece.first < c.tokens; piece.first += piece.tokens) {
      const std::int64_t into_segment = (position_ + piece.first) % config_.memory_segment;
      piece.tokens = std::min(c.tokens - piece.first, config_.memory_segment - into_segment);
      finish_piece(layer, w, c, piece);
    }
  }

  // gate_z = W_mz z + b_m and γ, both free of h.
  void compute_gates(const LayerView<Space>& w, const Matrix<A>& qvzk, std::int64_t rows) {
    const Matrix<const A> z = qvzk.middle_cols(2 * dim(), dim());
    const Matrix<A> gate_z(gate_z_.data(), rows, dim());
    const Matrix<float> gamma(gamma_.data(), rows, dim());
    const Matrix<float> context(context_.data(), rows, dim());
    const Job<A> gate_z_job{.x = z, .weight = w.gate_z, .bias = w.gate_z_bias, .y = gate_z};
    if (config_.use_dpg) {
      const Matrix<A> hidden(gate_hidden_.data(), rows, config_.dpg_rank);
      run_linear<A>({gate_z_job,
                     {.x = z,
                      .weight = w.gamma_in,
                      .bias = w.gamma_in_bias,
                      .y = hidden,
                      .activation = kernels::Activation::kRelu}});
      run_linear<float>({{.x = hidden, .weight = w.gamma_up, .bias = w.gamma_up_bias, .y = gamma}});
      kernels::decay_gate(backend_, {.a = gamma, .gamma = gamma});
      return;
    }
    const std::int64_t g = config_.gate_hidden_dim();
    const Matrix<const A> k = qvzk.middle_cols(3 * dim(), dim());
    const Matrix<A> gamma_hidden(gate_hidden_.data(), rows, g, 2 * g);
    const Matrix<A> context_hidden(gate_hidden_.data() + g, rows, g, 2 * g);
    run_linear<A>({gate_z_job,
                   {.x = z,
                    .weight = w.gamma_in,
                    .bias = w.gamma_in_bias,
                    .y = gamma_hidden,
                    .activation = kernels::Activation::kGelu},
                   {.x = k,
                    .weight = w.context_in,
                    .bias = w.context_in_bias,
                    .y = context_hidden,
                    .activation = kernels::Activation::kGelu}});
    run_linear<float>({{.x = gamma_hidden, .weight = w.gamma_up, .bias = w.gamma_up_bias, .y = gamma},
                       {.x = context_hidden, .weight = w.context_up, .bias = w.context_up_bias, .y = context}});
    kernels::decay_gate(backend_, {.a = gamma, .c = context, .gamma = gamma});
  }

  // Fills rows 1.. of the window with h, from the layer's state.
  void compute_h(std::int64_t layer, const LayerView<Space>& w, const Chunk& c, bool exact) {
    const Matrix<float> state = layer_h(layer, c);
    if (restarts()) kernels::fill_zero(backend_, state);
    kernels::copy_rows(backend_, state, row_of(h_window(c), 0));
    if constexpr (kRounds) kernels::copy_rows(backend_, state, row_of(h_rounded(c), 0));
    const kernels::GateInputs<Space, A> in{.z = activation(qvzk_, c, qvzk_width(), 2 * dim()),
                                           .zm = activation(gate_z_, c, dim()),
                                           .gamma = activation(gamma_, c, dim()),
                                           .h = h_window(c),
                                           .h_rounded = h_rounded(c),
                                           .mdi_mix = config_.mdi_mix};
    if (!exact && c.tokens >= kMinSweepTokens && use_sweeps()) {
      const kernels::SweepCounts counts = kernels::gated_sweeps(
          backend_, kernels::GatedSweeps<Space, A>{.in = in,
                                                   .gate_weight = w.gate,
                                                   .gate_bias = w.gate_bias,
                                                   .tolerance = options_.sweep_tolerance,
                                                   .max_sweeps = options_.max_sweeps,
                                                   .gate = {gate_.data(), plan_.window, 2 * dim()},
                                                   .change = change_.data()});
      stats_.layer_tokens += c.rows();
      stats_.token_sweeps += counts.token_sweeps;
      stats_.windows += counts.windows;
      stats_.fallbacks += counts.fallbacks;
    } else {
      kernels::gated_recurrence(
          backend_, kernels::GatedRecurrence<Space, A>{.in = in, .gate_weight = w.gate, .gate_bias = w.gate_bias});
    }
  }

  bool use_sweeps() const { return options_.prefill == PrefillMode::kSweeps; }

  // From h to the block's output, for tokens within one memory segment.
  void finish_piece(std::int64_t layer, const LayerView<Space>& w, const Chunk& c, const Piece& piece) {
    const Sequence<float> x = times(activation(x_, c, dim()), piece);
    const Sequence<A> u = times(activation(u_, c, dim()), piece);
    Sequence<A> ffn = times(activation(ffn_, c, config_.ffn_dim), piece);
    ffn.dim = config_.ffn_dim;
    if (!mix_and_normalise(layer, w, c, piece)) {
      mix_memory(layer, w, c, piece);
      if (is_matrix(x)) {
        kernels::rmsnorm(backend_, Matrix<const float>(matrix(x)), w.norm2, matrix(u));
      } else {
        for (std::int64_t b = 0; b < c.count; ++b) {
          kernels::rmsnorm(backend_, Matrix<const float>(matrix(x, b)), w.norm2, matrix(u, b));
        }
      }
    }
    run_linear(u, ffn, {.weight = w.ffn_in, .bias = w.ffn_in_bias, .activation = kernels::Activation::kGelu});
    run_linear(ffn, x, {.weight = w.ffn_out, .bias = w.ffn_out_bias}, x);
    remember(layer, c, piece);
  }

  // All pieces by one op, for backends and models that have it. Shorter chunks keep to the chain of ops.
  static constexpr bool kFinishesSegments =
      kRounds && requires(Backend & backend, const kernels::FinishSegments<Space, A>& op) {
    finish_segments(backend, op);
  };
  bool finish_pieces_at_once(std::int64_t layer, const LayerView<Space>& w, const Chunk& c) {
    if constexpr (kFinishesSegments) {
      if (c.tokens < kMinSweepTokens) return false;
      const kernels::FinishSegments<Space, A> op{.x = activation(x_, c, dim()),
                                                 .h = times(h_window(c), 1, c.tokens),
                                                 .v = activation(qvzk_, c, qvzk_width(), dim()),
                                                 .q = activation(attended(), c, dim()),
                                                 .position = position_,
                                                 .segment = config_.memory_segment,
                                                 .heads = config_.num_heads,
                                                 .memory = layer_memory(layer, c),
                                                 .memory_slots = config_.memory_slots,
                                                 .sum = layer_segment_sum(layer, c).data,
                                                 .slot_bytes = slot_bytes(),
                                                 .memory_out = w.memory_out,
                                                 .memory_out_bias = w.memory_out_bias,
                                                 .norm = w.norm2,
                                                 .ffn_in = w.ffn_in,
                                                 .ffn_in_bias = w.ffn_in_bias,
                                                 .ffn_out = w.ffn_out,
                                                 .ffn_out_bias = w.ffn_out_bias};
      if (!finish_segments_supported(backend_, op)) return false;
      project_queries(w, c, attending(c));
      finish_segments(backend_, op);
      const std::int64_t ended = (position_ + c.tokens) / config_.memory_segment * config_.memory_segment;
      if (ended > position_ && filled_slots(ended) == 1) set_segment_context(layer, c, ring_slot(ended));
      return true;
    }
    return false;
  }

  // The chunk's tokens that attend to two slots or more.
  Piece attending(const Chunk& c) const {
    if (config_.memory_slots < 2) return {c.tokens, 0};
    const std::int64_t first = std::clamp<std::int64_t>(2 * config_.memory_segment - position_, 0, c.tokens);
    return {first, c.tokens - first};
  }
  void project_queries(const LayerView<Space>& w, const Chunk& c, const Piece& piece) {
    if (piece.tokens == 0) return;
    run_linear(times(h_rounded(c), piece.first + 1, piece.tokens), times(activation(attended(), c, dim()), piece),
               {.weight = w.memory_q, .bias = w.memory_q_bias, .residual_scale = 0.5F},
               times(activation(qvzk_, c, qvzk_width()), piece));
  }
  // What attention needs that looks at no memory, for all of the chunk's tokens that will attend: their queries, and
  // x = x + h + 0.1 v.
  void prepare_attention(const LayerView<Space>& w, const Chunk& c) {
    const Piece rest = attending(c);
    if (rest.tokens == 0) return;
    project_queries(w, c, rest);
    kernels::block_residual(backend_, residual(c, rest));
  }
  kernels::BlockResidual<Space, A> residual(const Chunk& c, const Piece& piece) {
    const Sequence<float> x = times(activation(x_, c, dim()), piece);
    return {.x = x,
            .h = times(h_window(c), piece.first + 1, piece.tokens),
            .v = times(activation(qvzk_, c, qvzk_width(), dim()), piece),
            .y = x};
  }

  // The same with c, where at most one slot is filled.
  kernels::BlockResidual<Space, A> residual_and_context(std::int64_t layer, const LayerView<Space>& w, const Chunk& c,
                                                        const Piece& piece) {
    const bool no_slots = filled_slots(position_ + piece.first) == 0;
    kernels::BlockResidual<Space, A> op = residual(c, piece);
    op.bias = no_slots ? w.memory_out_bias : layer_segment_context(layer, c).data;
    op.bias_stride = no_slots ? 0 : layer_segment_context(layer, c).stride;
    return op;
  }

  // x = x + h + c + 0.1 v and u = rmsnorm(x; norm2) by one op, for backends that have it and where c needs no query.
  bool mix_and_normalise(std::int64_t layer, const LayerView<Space>& w, const Chunk& c, const Piece& piece) {
    const Sequence<A> u = times(activation(u_, c, dim()), piece);
    if constexpr (requires(kernels::BlockResidual<Space, A> op) {
                    block_residual_norm(backend_, op, w.norm2, matrix(u));
                  }) {
      if (filled_slots(position_ + piece.first) > 1 || !is_matrix(u)) return false;
      block_residual_norm(backend_, residual_and_context(layer, w, c, piece), w.norm2, matrix(u));
      return true;
    }
    return false;
  }

  // x = x + h + c + 0.1 v, where c attends to the memory slots written so far.
  void mix_memory(std::int64_t layer, const LayerView<Space>& w, const Chunk& c, const Piece& piece) {
    const std::int64_t slots = filled_slots(position_ + piece.first);
    if (slots <= 1) return kernels::block_residual(backend_, residual_and_context(layer, w, c, piece));
    const Sequence<A> query = times(activation(attended(), c, dim()), piece);
    Sequence<const float> memory(layer_memory(layer, c), c.count, slots, dim());
    memory.batch_stride = slot_bytes() / std::int64_t{sizeof(float)};
    kernels::memory_attention(backend_, kernels::MemoryAttention<Space, A>{
                                            .q = query, .slots = memory, .heads = config_.num_heads, .out = query});
    const Sequence<float> x = times(activation(x_, c, dim()), piece);
    run_linear(query, x, {.weight = w.memory_out, .bias = w.memory_out_bias}, x);
  }

  // Adds the piece's outputs to the running segment's sum and closes the segment if the piece ends it.
  void remember(std::int64_t layer, const Chunk& c, const Piece& piece) {
    kernels::segment_sum(backend_, {.x = times(activation(x_, c, dim()), piece), .sum = layer_segment_sum(layer, c)});
    close_segment(layer, c, position_ + piece.first + piece.tokens);
  }

  // Position `end` has been reached: the segment that ends there, if one does, becomes a slot.
  void close_segment(std::int64_t layer, const Chunk& c, std::int64_t end) {
    if (end % config_.memory_segment != 0) return;
    const std::int64_t slot = ring_slot(end);
    kernels::segment_close(backend_, layer_segment_sum(layer, c), config_.memory_segment, slot_rows(layer, c, slot));
    if (filled_slots(end) == 1) set_segment_context(layer, c, slot);
  }

  Matrix<float> slot_rows(std::int64_t layer, const Chunk& c, std::int64_t slot) {
    return rows_of_slots(layer_memory(layer, c) + slot * dim(), c.count, dim());
  }

  // c of the segment that begins where one slot is filled: W_o slot + b_o. Row by row, so that its bits depend on
  // nothing but the slot. Uses u_.
  void set_segment_context(std::int64_t layer, const Chunk& c, std::int64_t slot) {
    const LayerView<Space>& w = model_.layers[static_cast<std::size_t>(layer)];
    const Matrix<A> rows(u_.data(), c.count, dim());
    kernels::copy_rows(backend_, slot_rows(layer, c, slot), rows);
    for (std::int64_t b = 0; b < c.count; ++b) {
      run_linear<float>({{.x = rows.middle_rows(b, 1),
                          .weight = w.memory_out,
                          .bias = w.memory_out_bias,
                          .y = layer_segment_context(layer, c).middle_rows(b, 1)}});
    }
  }

  // Logits after the chunk's last token, from x.
  void next_logits(const Chunk& c) {
    const Matrix<const float> last = row_of(activation(x_, c, dim()), c.tokens - 1);
    const Matrix<A> hidden(u_.data(), c.count, dim());
    kernels::rmsnorm(backend_, last, model_.norm, hidden);
    run_linear<float>({{.x = hidden,
                        .weight = model_.head,
                        .y = rows_of_slots(state<float>(slot_.logits, c.first), c.count, config_.vocab_size)}});
  }

  // The first token of a call is predicted by the logits that the previous call left.
  void score_first(std::span<const int> tokens, std::int64_t count, float* logprobs) {
    if (position_ == 0) {
      for (std::int64_t b = 0; b < batch_; ++b) logprobs[b * count] = 0.0F;
      return;
    }
    for (std::int64_t first = 0; first < batch_; first += max_rows_) {
      const std::int64_t n = std::min<std::int64_t>(max_rows_, batch_ - first);
      for (std::int64_t b = 0; b < n; ++b)
        tokens_host_[static_cast<std::size_t>(b)] = tokens[static_cast<std::size_t>((first + b) * count)];
      backend_.upload(tokens_host_.data(), tokens_.data(), static_cast<std::size_t>(n));
      kernels::token_logprobs(
          backend_, kernels::TokenLogprobs<float, int, Space>{
                        .logits = rows_of_slots(state<const float>(slot_.logits, first), n, config_.vocab_size),
                        .targets = tokens_.data(),
                        .logprobs = logprobs_.data()});
      backend_.download(logprobs_.data(), logprobs_host_.data(), static_cast<std::size_t>(n));
      for (std::int64_t b = 0; b < n; ++b) logprobs[(first + b) * count] = logprobs_host_[static_cast<std::size_t>(b)];
    }
  }

  // Log-probs of the tokens that follow each row of the chunk; the call's last row predicts the next call's first
  // token.
  void score_chunk(std::span<const int> tokens, std::int64_t count, std::int64_t done, const Chunk& c,
                   float* logprobs) {
    constexpr int kSkip = -1;
    const std::int64_t scored = done + c.tokens == count ? c.tokens - 1 : c.tokens;
    const Matrix<A> hidden(u_.data(), c.rows(), dim());
    kernels::rmsnorm(backend_, Matrix<const float>(x_.data(), c.rows(), dim()), model_.norm, hidden);
    for (std::int64_t b = 0; b < c.count; ++b) {
      int* to = tokens_host_.data() + b * c.tokens;
      std::copy_n(tokens.data() + (c.first + b) * count + done + 1, scored, to);
      std::fill(to + scored, to + c.tokens, kSkip);
    }
    backend_.upload(tokens_host_.data(), tokens_.data(), static_cast<std::size_t>(c.rows()));
    kernels::hidden_logprobs(
        backend_, kernels::HiddenLogprobs<Space, A>{
                      .hidden = hidden, .head = model_.head, .targets = tokens_.data(), .logprobs = logprobs_.data()});
    backend_.download(logprobs_.data(), logprobs_host_.data(), static_cast<std::size_t>(c.rows()));
    for (std::int64_t b = 0; b < c.count; ++b) {
      std::copy_n(logprobs_host_.data() + b * c.tokens, scored, logprobs + (c.first + b) * count + done + 1);
    }
  }

  template <class Y>
  void run_linear(std::initializer_list<Job<Y>> jobs) {
    kernels::linear(backend_, std::span<const Job<Y>>(jobs.begin(), jobs.size()));
  }
  // y = act(x Wᵀ + bias) + scale * residual over all rows: one product, or one per sequence where the rows of two
  // sequences are not evenly spaced.
  template <class Y>
  void run_linear(const Sequence<A>& x, const Sequence<Y>& y, Job<Y> job, const Sequence<Y>& residual = {}) {
    std::vector<Job<Y>>& jobs = job_list<Y>();
    jobs.clear();
    const bool whole = is_matrix(x) && is_matrix(y) && is_matrix(residual);
    for (std::int64_t b = 0; b < (whole ? 1 : x.batch); ++b) {
      job.x = whole ? matrix(x) : matrix(x, b);
      job.y = whole ? matrix(y) : matrix(y, b);
      if (residual.data != nullptr) job.residual = whole ? matrix(residual) : matrix(residual, b);
      jobs.push_back(job);
    }
    kernels::linear(backend_, std::span<const Job<Y>>(jobs));
  }
  template <class Y>
  std::vector<Job<Y>>& job_list() {
    if constexpr (std::is_same_v<Y, A>) {
      return jobs_;
    } else {
      return wide_jobs_;
    }
  }

  const Config& config_;
  ModelView<Space> model_;
  Backend& backend_;
  RunnerOptions options_;
  ChunkPlan plan_;
  SlotLayout slot_;
  int batch_;
  std::int64_t max_rows_;
  std::int64_t position_ = 0;
  PrefillStats stats_;
  std::vector<Job<A>> jobs_;
  std::vector<Job<float>> wide_jobs_;
  std::vector<int> tokens_host_;
  std::vector<float> logprobs_host_;

  // Activations of one chunk. Widths: D unless named.
  Buffer<int> tokens_;
  Buffer<float> x_, gamma_, context_, h_window_, gate_ /* 2D, one window */, change_ /* change, magnitude */, logprobs_;
  Buffer<A> u_, qvzk_ /* 4D or 3D */, gate_z_, gate_hidden_ /* 2G or R */, attended_, h_rounded_, ffn_ /* F */;
  // State.
  Buffer<std::byte> state_;  // [B] slots
  std::optional<WholeStep<Backend, A>> whole_step_;
};

}  // namespace mmrec::models
