// The MM-Rec equations, written once, template over the backend.
//
// A call's tokens are cut into chunks that never cross a memory segment and whose inner boundaries lie on a fixed grid
// of positions, so how a caller splits its tokens decides at most which rows stand in whole row tiles
// (kernels/backend.h), never what is computed. A chunk runs through all blocks at once; inside a block everything but
// the recurrence is parallel over its tokens. Activations are sized by the window, not by the prompt.
//
// For each block, with u = rmsnorm(x; norm1):
//   q, v, z, k = W u + b                                        γ = decay gate of (z, k)
//   h_t = a_t ⊙ h_{t-1} + b_t, gates from z_t and h_{t-1}       (kernels::GateInputs)
//   c = W_o attend(W_q' h + ½ q; memory) + b_o
//   y = x + h + c + 0.1 v,  x = y + W_2 gelu(W_1 rmsnorm(y; norm2) + b_1) + b_2
// When a segment ends, the mean of the block's outputs over it becomes the newest slot of the block's memory ring.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/backend.h"
#include "models/config.h"
#include "models/model_view.h"
#include "models/runner.h"

namespace mmrec::models {

/// Tokens of a sequence in one chunk at most: the sweep window. Two row tiles.
inline constexpr std::int64_t kWindow = 2 * kernels::kRowTile;
/// Rows (tokens of all sequences) in one chunk at most, unless a single sequence's window is longer.
inline constexpr std::int64_t kMaxRows = 4 * kWindow;
/// Shorter chunks take exact steps: a sweep would cost as much as all of them.
inline constexpr std::int64_t kMinSweepTokens = 16;

/// Tokens of the next chunk from `position` with `remaining` tokens at hand: up to the next row tile boundary, else
/// whole tiles up to the end of the window, else what is left; never past the end of the memory segment. The grid
/// starts anew with each segment.
inline std::int64_t next_chunk(std::int64_t position, std::int64_t remaining, std::int64_t segment) {
  const std::int64_t offset = position % segment;
  const std::int64_t available = std::min(remaining, segment - offset);
  const std::int64_t into_tile = offset % kernels::kRowTile;
  if (into_tile != 0) return std::min(available, kernels::kRowTile - into_tile);
  const std::int64_t whole_tiles = available / kernels::kRowTile * kernels::kRowTile;
  return whole_tiles == 0 ? available : std::min(whole_tiles, kWindow - offset % kWindow);
}

/// A model's forward pass with the state of `batch` sequences on one backend. What PrefillMode::kAuto means is the
/// runner's to say: here it must be resolved.
template <class Backend>
class Forward {
 public:
  using Space = typename Backend::Space;
  template <class T>
  using Buffer = typename Backend::template Buffer<T>;

  Forward(const Config& config, ModelView<Space> model, Backend& backend, int batch, const RunnerOptions& options)
      : config_(config),
        model_(std::move(model)),
        backend_(backend),
        options_(options),
        batch_(batch),
        max_rows_(std::max<std::int64_t>(kWindow, std::min<std::int64_t>(kMaxRows, batch * kWindow))) {
    const auto rows = static_cast<std::size_t>(max_rows_);
    const auto dim = static_cast<std::size_t>(config.model_dim);
    const auto all = static_cast<std::size_t>(batch);
    const auto layers = static_cast<std::size_t>(config.num_layers);
    const std::int64_t gate_hidden = config.use_dpg ? config.dpg_rank : 2 * config.gate_hidden_dim();
    tokens_ = backend.template allocate<int>(rows);
    x_ = backend.template allocate<float>(rows * dim);
    u_ = backend.template allocate<float>(rows * dim);
    qvzk_ = backend.template allocate<float>(rows * static_cast<std::size_t>(qvzk_width()));
    gate_z_ = backend.template allocate<float>(rows * dim);
    gamma_ = backend.template allocate<float>(rows * dim);
    context_ = backend.template allocate<float>(rows * dim);
    gate_hidden_ = backend.template allocate<float>(rows * static_cast<std::size_t>(gate_hidden));
    // One row more per sequence: the carry.
    h_window_ = backend.template allocate<float>(
        (rows + static_cast<std::size_t>(std::min<std::int64_t>(max_rows_, batch))) * dim);
    ffn_ = backend.template allocate<float>(rows * static_cast<std::size_t>(config.ffn_dim));
    if (use_sweeps()) {
      gate_ = backend.template allocate<float>(static_cast<std::size_t>(2 * kWindow) * dim);
      change_ = backend.template allocate<float>(2 * kWindow);
      change_host_.resize(2 * kWindow);
    }
    h_ = backend.template allocate<float>(layers * all * dim);
    memory_ = backend.template allocate<float>(layers * all * static_cast<std::size_t>(config.memory_slots) * dim);
    segment_sum_ = backend.template allocate<double>(layers * all * dim);
    logits_ = backend.template allocate<float>(all * static_cast<std::size_t>(config.vocab_size));
    logprobs_ = backend.template allocate<float>(std::max(rows, all));
  }

  std::int64_t position() const { return position_; }
  int batch() const { return batch_; }
  const PrefillStats& stats() const { return stats_; }
  /// [B, V] in the backend's memory; meaningful from position 1 on.
  const float* logits() const { return logits_.data(); }

  /// Consumes tokens [batch, count] and leaves the logits of the next token in logits(). `exact` forbids sweeps.
  /// Where `logprobs` is not null it receives [batch, count] in host memory: the log-prob of each token, 0 for position
  /// 0.
  void run(std::span<const int> tokens, bool exact, float* logprobs) {
    const std::int64_t count = static_cast<std::int64_t>(tokens.size()) / batch_;
    if (logprobs != nullptr) score_first(tokens, count, logprobs);
    for (std::int64_t done = 0; done < count;) {
      const std::int64_t n = next_chunk(position_, count - done, config_.memory_segment);
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

  void reset() {
    const HostState zero = zero_state();
    import_state(zero);
    stats_ = {};
  }

  HostState export_state() const {
    HostState state = zero_state();
    state.position = position_;
    backend_.download(h_.data(), state.h.data(), state.h.size());
    backend_.download(memory_.data(), state.memory.data(), state.memory.size());
    backend_.download(segment_sum_.data(), state.segment_sum.data(), state.segment_sum.size());
    if (position_ > 0) {
      state.logits.resize(logits_.size());
      backend_.download(logits_.data(), state.logits.data(), state.logits.size());
    }
    return state;
  }

  void import_state(const HostState& state) {
    position_ = state.position;
    backend_.upload(state.h.data(), h_.data(), state.h.size());
    backend_.upload(state.memory.data(), memory_.data(), state.memory.size());
    backend_.upload(state.segment_sum.data(), segment_sum_.data(), state.segment_sum.size());
    backend_.upload(state.logits.data(), logits_.data(), state.logits.size());
  }

  void set_stats(const PrefillStats& stats) { stats_ = stats; }

 private:
  using Matrix = kernels::MatrixView<float, Space>;
  using ConstMatrix = kernels::MatrixView<const float, Space>;
  using Sequence = kernels::SequenceView<float, Space>;
  using Job = kernels::Linear<Space>;

  /// Sequences [first, first + count), `tokens` tokens each.
  struct Chunk {
    std::int64_t first = 0;
    std::int64_t count = 0;
    std::int64_t tokens = 0;
    std::int64_t rows() const { return count * tokens; }
  };

  std::int64_t dim() const { return config_.model_dim; }
  // Sequences per chunk. Ragged chunks stay below one row tile in all, so that no row of theirs stands in a whole tile
  // because of its neighbours in the batch.
  std::int64_t group_size(std::int64_t tokens) const {
    const bool ragged = tokens % kernels::kRowTile != 0;
    return std::max<std::int64_t>(1, (ragged ? kernels::kRowTile - 1 : max_rows_) / tokens);
  }
  std::int64_t qvzk_width() const { return (config_.use_dpg ? 3 : 4) * dim(); }
  std::int64_t filled_slots() const { return std::min(config_.memory_slots, position_ / config_.memory_segment); }

  HostState zero_state() const {
    HostState state;
    state.batch = batch_;
    state.h.resize(h_.size());
    state.memory.resize(memory_.size());
    state.segment_sum.resize(segment_sum_.size());
    return state;
  }

  // State of one layer for the chunk's sequences.
  Matrix layer_h(std::int64_t layer, const Chunk& c) {
    return {h_.data() + (layer * batch_ + c.first) * dim(), c.count, dim()};
  }
  float* layer_memory(std::int64_t layer, const Chunk& c) {
    return memory_.data() + (layer * batch_ + c.first) * config_.memory_slots * dim();
  }
  double* layer_segment_sum(std::int64_t layer, const Chunk& c) {
    return segment_sum_.data() + (layer * batch_ + c.first) * dim();
  }

  // [count, tokens, D] at column `column` of rows `width` wide.
  Sequence activation(Buffer<float>& buffer, const Chunk& c, std::int64_t width, std::int64_t column = 0) {
    Sequence s(buffer.data() + column, c.count, c.tokens, dim());
    s.batch_stride = c.tokens * width;
    s.time_stride = width;
    return s;
  }
  // The window of h with its carry row: [count, tokens + 1, D].
  Sequence h_window(const Chunk& c) { return {h_window_.data(), c.count, c.tokens + 1, dim()}; }
  // Row `row` of every sequence of the window.
  Matrix h_window_row(const Chunk& c, std::int64_t row) {
    return {h_window_.data() + row * dim(), c.count, dim(), (c.tokens + 1) * dim()};
  }
  // Times [first, first + count) of sequence b.
  static Sequence slice(Sequence s, std::int64_t b, std::int64_t first, std::int64_t count) {
    s.data = s.at(b, 0, first);
    s.batch = 1;
    s.time = count;
    return s;
  }

  void load_tokens(std::span<const int> tokens, std::int64_t count, std::int64_t done, const Chunk& c) {
    for (std::int64_t b = 0; b < c.count; ++b) {
      backend_.upload(tokens.data() + (c.first + b) * count + done, tokens_.data() + b * c.tokens,
                      static_cast<std::size_t>(c.tokens));
    }
  }

  void run_blocks(const Chunk& c, bool exact) {
    kernels::embed(backend_, model_.embedding, tokens_.data(), Matrix(x_.data(), c.rows(), dim()));
    for (std::int64_t layer = 0; layer < config_.num_layers; ++layer) run_block(layer, c, exact);
  }

  void run_block(std::int64_t layer, const Chunk& c, bool exact) {
    const LayerView<Space>& w = model_.layers[static_cast<std::size_t>(layer)];
    const std::int64_t rows = c.rows();
    const std::int64_t width = qvzk_width();
    const Matrix x(x_.data(), rows, dim());
    const Matrix u(u_.data(), rows, dim());
    const Matrix qvzk(qvzk_.data(), rows, width);

    kernels::rmsnorm(backend_, x, w.norm1, u);
    run_linear({{.x = u, .weight = w.qvzk, .bias = w.qvzk_bias, .y = qvzk}});
    compute_gates(w, qvzk, rows);
    compute_h(layer, w, c, exact);
    mix_memory(layer, w, c);

    kernels::rmsnorm(backend_, x, w.norm2, u);
    const Matrix ffn(ffn_.data(), rows, config_.ffn_dim);
    run_linear(
        {{.x = u, .weight = w.ffn_in, .bias = w.ffn_in_bias, .y = ffn, .activation = kernels::Activation::kGelu}});
    run_linear({{.x = ffn, .weight = w.ffn_out, .bias = w.ffn_out_bias, .y = x, .residual = x}});
    remember(layer, c);
  }

  // gate_z = W_mz z + b_m and γ, both free of h.
  void compute_gates(const LayerView<Space>& w, const Matrix& qvzk, std::int64_t rows) {
    const ConstMatrix z = qvzk.middle_cols(2 * dim(), dim());
    const Matrix gate_z(gate_z_.data(), rows, dim());
    const Matrix gamma(gamma_.data(), rows, dim());
    const Matrix context(context_.data(), rows, dim());
    const Job gate_z_job{.x = z, .weight = w.gate_z, .bias = w.gate_z_bias, .y = gate_z};
    if (config_.use_dpg) {
      const Matrix hidden(gate_hidden_.data(), rows, config_.dpg_rank);
      run_linear({gate_z_job,
                  {.x = z,
                   .weight = w.gamma_in,
                   .bias = w.gamma_in_bias,
                   .y = hidden,
                   .activation = kernels::Activation::kRelu}});
      run_linear({{.x = hidden, .weight = w.gamma_up, .bias = w.gamma_up_bias, .y = gamma}});
      kernels::decay_gate(backend_, {.a = gamma, .gamma = gamma});
      return;
    }
    const std::int64_t g = config_.gate_hidden_dim();
    const ConstMatrix k = qvzk.middle_cols(3 * dim(), dim());
    const Matrix gamma_hidden(gate_hidden_.data(), rows, g, 2 * g);
    const Matrix context_hidden(gate_hidden_.data() + g, rows, g, 2 * g);
    run_linear({gate_z_job,
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
    run_linear({{.x = gamma_hidden, .weight = w.gamma_up, .bias = w.gamma_up_bias, .y = gamma},
                {.x = context_hidden, .weight = w.context_up, .bias = w.context_up_bias, .y = context}});
    kernels::decay_gate(backend_, {.a = gamma, .c = context, .gamma = gamma});
  }

  // Fills rows 1.. of the window with h and leaves the last one as the layer's state.
  void compute_h(std::int64_t layer, const LayerView<Space>& w, const Chunk& c, bool exact) {
    const Matrix state = layer_h(layer, c);
    if (!config_.carry_state && position_ % config_.memory_segment == 0) kernels::fill_zero(backend_, state);
    kernels::copy_rows(backend_, state, h_window_row(c, 0));
    if (!exact && c.tokens >= kMinSweepTokens && use_sweeps()) {
      // Each sequence converges by itself, so that its bits do not depend on its neighbours in the batch.
      for (std::int64_t b = 0; b < c.count; ++b) sweep(w, c, b);
    } else {
      kernels::gated_recurrence(backend_, {.in = gate_inputs(c), .gate_weight = w.gate, .gate_bias = w.gate_bias});
    }
    kernels::copy_rows(backend_, h_window_row(c, c.tokens), state);
  }

  bool use_sweeps() const { return options_.prefill == PrefillMode::kSweeps; }

  kernels::GateInputs<Space> gate_inputs(const Chunk& c) {
    return {.z = activation(qvzk_, c, qvzk_width(), 2 * dim()),
            .zm = activation(gate_z_, c, dim()),
            .gamma = activation(gamma_, c, dim()),
            .h = h_window(c),
            .mdi_mix = config_.mdi_mix};
  }
  // The same for times [first, tokens) of sequence b.
  kernels::GateInputs<Space> gate_inputs(const Chunk& c, std::int64_t b, std::int64_t first) {
    const std::int64_t n = c.tokens - first;
    return {.z = slice(activation(qvzk_, c, qvzk_width(), 2 * dim()), b, first, n),
            .zm = slice(activation(gate_z_, c, dim()), b, first, n),
            .gamma = slice(activation(gamma_, c, dim()), b, first, n),
            .h = slice(h_window(c), b, first, n + 1),
            .mdi_mix = config_.mdi_mix};
  }

  // Gate-frozen sweeps for sequence b of the chunk. A prefix whose change is below the tolerance is frozen and takes no
  // part in later sweeps; what has not converged after max_sweeps is finished by exact steps.
  void sweep(const LayerView<Space>& w, const Chunk& c, std::int64_t b) {
    const std::int64_t n = c.tokens;
    const Sequence h = slice(h_window(c), b, 0, n + 1);
    kernels::fill_zero(backend_, Matrix(h.at(0, 0, 1), n, dim()));
    stats_.windows += 1;
    stats_.layer_tokens += n;
    float scale = 0.0F;
    std::int64_t first = 0;
    for (int i = 0; i < options_.max_sweeps && first < n; ++i) {
      const std::int64_t active = n - first;
      const ConstMatrix previous(h.at(0, 0, first), active, dim());
      const Matrix gate(gate_.data(), active, 2 * dim());
      run_linear({{.x = previous,
                   .weight = w.gate.middle_rows(0, dim()),
                   .bias = w.gate_bias,
                   .y = gate.middle_cols(0, dim())},
                  {.x = previous, .weight = w.gate.middle_rows(dim(), dim()), .y = gate.middle_cols(dim(), dim())}});
      kernels::GatedScan<Space> op{.in = gate_inputs(c, b, first),
                                   .gate = {gate_.data(), 1, active, 2 * dim()},
                                   .first = 0,
                                   .change = change_.data(),
                                   .magnitude = change_.data() + kWindow};
      kernels::gated_scan(backend_, op);
      backend_.download(change_.data(), change_host_.data(), change_host_.size());
      stats_.token_sweeps += active;
      const float* magnitude = change_host_.data() + kWindow;
      for (std::int64_t t = 0; t < active; ++t) scale = std::max(scale, magnitude[t]);
      const float bound = options_.sweep_tolerance * scale;
      std::int64_t frozen = 0;
      // NaN never freezes: it falls through to the exact steps and shows in the result.
      while (frozen < active && change_host_[static_cast<std::size_t>(frozen)] <= bound) ++frozen;
      // The first active row had exact gates, so it is final whatever it changed by.
      first += std::max<std::int64_t>(frozen, 1);
    }
    if (first < n) {
      stats_.fallbacks += 1;
      kernels::gated_recurrence(backend_,
                                {.in = gate_inputs(c, b, first), .gate_weight = w.gate, .gate_bias = w.gate_bias});
    }
  }

  // x = x + h + c + 0.1 v, where c attends to the memory slots written so far.
  void mix_memory(std::int64_t layer, const LayerView<Space>& w, const Chunk& c) {
    const Sequence x = activation(x_, c, dim());
    Sequence h = h_window(c);
    h.data = h.at(0, 0, 1);
    h.time = c.tokens;
    const auto v = activation(qvzk_, c, qvzk_width(), dim());
    const std::int64_t slots = filled_slots();
    if (slots == 0) {
      kernels::block_residual(backend_, {.x = x, .h = h, .v = v, .bias = w.memory_out_bias, .y = x});
      return;
    }
    const Matrix context(context_.data(), c.rows(), dim());
    const Matrix q = Matrix(qvzk_.data(), c.rows(), qvzk_width()).middle_cols(0, dim());
    jobs_.clear();
    if (c.tokens == 1) {
      jobs_.push_back(memory_query(w, {h.data, c.count, dim(), h.batch_stride}, q, context));
    } else {
      for (std::int64_t b = 0; b < c.count; ++b) {
        jobs_.push_back(memory_query(w, {h.at(b, 0, 0), c.tokens, dim()}, q.middle_rows(b * c.tokens, c.tokens),
                                     context.middle_rows(b * c.tokens, c.tokens)));
      }
    }
    kernels::linear(backend_, jobs_);
    kernels::SequenceView<const float, Space> memory(layer_memory(layer, c), c.count, slots, dim());
    memory.batch_stride = config_.memory_slots * dim();
    const Sequence attended = activation(context_, c, dim());
    kernels::memory_attention(backend_, {.q = attended, .slots = memory, .heads = config_.num_heads, .out = attended});
    kernels::block_residual(backend_, {.x = x, .h = h, .v = v, .y = x});
    const Matrix y(x_.data(), c.rows(), dim());
    run_linear({{.x = context, .weight = w.memory_out, .bias = w.memory_out_bias, .y = y, .residual = y}});
  }

  static Job memory_query(const LayerView<Space>& w, ConstMatrix h, const Matrix& q, const Matrix& out) {
    return {.x = h, .weight = w.memory_q, .bias = w.memory_q_bias, .y = out, .residual = q, .residual_scale = 0.5F};
  }

  // Adds the block's outputs to the running segment's sum and closes the segment if the chunk ends it.
  void remember(std::int64_t layer, const Chunk& c) {
    double* sum = layer_segment_sum(layer, c);
    kernels::segment_sum(backend_, {.x = activation(x_, c, dim()), .sum = sum});
    const std::int64_t end = position_ + c.tokens;
    if (end % config_.memory_segment != 0) return;
    const std::int64_t slot = (end / config_.memory_segment - 1) % config_.memory_slots;
    kernels::segment_close(backend_, sum, config_.memory_segment,
                           Matrix(layer_memory(layer, c) + slot * dim(), c.count, dim(), config_.memory_slots * dim()));
  }

  // Logits after the chunk's last token, from x.
  void next_logits(const Chunk& c) {
    const ConstMatrix last(x_.data() + (c.tokens - 1) * dim(), c.count, dim(), c.tokens * dim());
    const Matrix hidden(u_.data(), c.count, dim());
    kernels::rmsnorm(backend_, last, model_.norm, hidden);
    run_linear({{.x = hidden,
                 .weight = model_.head,
                 .y = Matrix(logits_.data() + c.first * config_.vocab_size, c.count, config_.vocab_size)}});
  }

  // The first token of a call is predicted by the logits that the previous call left.
  void score_first(std::span<const int> tokens, std::int64_t count, float* logprobs) {
    if (position_ == 0) {
      for (std::int64_t b = 0; b < batch_; ++b) logprobs[b * count] = 0.0F;
      return;
    }
    for (std::int64_t b = 0; b < batch_; ++b) {
      backend_.upload(tokens.data() + b * count, tokens_.data(), 1);
      kernels::token_logprobs(backend_, kernels::TokenLogprobs<float, int, Space>{
                                            .logits = {logits_.data() + b * config_.vocab_size, 1, config_.vocab_size},
                                            .targets = tokens_.data(),
                                            .logprobs = logprobs_.data()});
      backend_.download(logprobs_.data(), logprobs + b * count, 1);
    }
  }

  // Log-probs of the tokens that follow each row of the chunk; the call's last row predicts the next call's first
  // token.
  void score_chunk(std::span<const int> tokens, std::int64_t count, std::int64_t done, const Chunk& c,
                   float* logprobs) {
    const Matrix hidden(u_.data(), c.rows(), dim());
    kernels::rmsnorm(backend_, ConstMatrix(x_.data(), c.rows(), dim()), model_.norm, hidden);
    constexpr int kSkip = -1;
    const bool last = done + c.tokens == count;
    for (std::int64_t b = 0; b < c.count; ++b) {
      const int* from = tokens.data() + (c.first + b) * count + done + 1;
      int* to = tokens_.data() + b * c.tokens;
      backend_.upload(from, to, static_cast<std::size_t>(last ? c.tokens - 1 : c.tokens));
      if (last) backend_.upload(&kSkip, to + c.tokens - 1, 1);
    }
    kernels::hidden_logprobs(
        backend_, {.hidden = hidden, .head = model_.head, .targets = tokens_.data(), .logprobs = logprobs_.data()});
    for (std::int64_t b = 0; b < c.count; ++b) {
      backend_.download(logprobs_.data() + b * c.tokens, logprobs + (c.first + b) * count + done + 1,
                        static_cast<std::size_t>(last ? c.tokens - 1 : c.tokens));
    }
  }

  void run_linear(std::initializer_list<Job> jobs) { kernels::linear(backend_, {jobs.begin(), jobs.size()}); }

  const Config& config_;
  ModelView<Space> model_;
  Backend& backend_;
  RunnerOptions options_;
  int batch_;
  std::int64_t max_rows_;
  std::int64_t position_ = 0;
  PrefillStats stats_;
  std::vector<Job> jobs_;

  // Activations of one chunk. Widths: D unless named.
  Buffer<int> tokens_;
  Buffer<float> x_, u_, qvzk_ /* 4D or 3D */, gate_z_, gamma_, context_, gate_hidden_ /* 2G or R */, h_window_,
      ffn_ /* F */, gate_ /* 2D, one sequence */, change_ /* change, magnitude */, logprobs_;
  std::vector<float> change_host_;
  // State.
  Buffer<float> h_;             // [L, B, D]
  Buffer<float> memory_;        // [L, B, M, D]
  Buffer<double> segment_sum_;  // [L, B, D]
  Buffer<float> logits_;        // [B, V]
};

}  // namespace mmrec::models
