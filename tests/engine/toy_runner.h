// Runners small enough to check by eye, for tests of the engine that need no weights.
#pragma once

#include <cmath>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "engine/access.h"
#include "mmrec/errors.h"
#include "mmrec/sampler.h"
#include "models/runner.h"

namespace mmrec::test {

/// What toy runners were asked, shared by those of one model.
struct ToyLog {
  std::vector<int> batches;        // of runners made
  std::vector<std::size_t> calls;  // tokens of each prefill, step, advance and score
  models::RunnerOptions options;   // of the last runner made
  bool draws = false;              // set by a test: runners draw by themselves, as one on a device does
  int drawn = 0;                   // draws they made
  int fetched = 0;                 // times their logits were asked for
};

inline models::Config toy_config(std::int64_t vocab = 11) {
  models::Config config;
  config.vocab_size = vocab;
  config.model_dim = 4;
  config.num_layers = 2;
  config.num_heads = 1;
  config.ffn_dim = 4;
  config.memory_segment = 5;
  config.memory_slots = 3;
  return config;
}

/// A recurrent model in form: hidden state, memory ring and running sum as models::HostState has them, every logit a
/// function of all of them, sequences independent, no result dependent on how tokens are cut into calls.
class ToyRunner final : public models::Runner {
 public:
  /// Logits [V] of the next token from a summary of the state and the tokens consumed by the sequence.
  using Logits = std::function<float(double summary, std::int64_t position, int token)>;

  ToyRunner(const models::Config& config, int batch, std::shared_ptr<ToyLog> log = nullptr, Logits logits = {})
      : config_(config), log_(std::move(log)), logits_of_(std::move(logits)) {
    state_.batch = batch;
    reset();
  }

  std::span<const float> prefill(std::span<const int> tokens) override {
    consume(tokens, {});
    return state_.logits;
  }
  std::span<const float> step(std::span<const int> tokens) override { return prefill(tokens); }
  void advance(std::span<const int> tokens) override { consume(tokens, {}); }
  void score(std::span<const int> tokens, std::span<float> logprobs) override { consume(tokens, logprobs); }
  std::span<const float> logits() const override {
    if (log_) ++log_->fetched;
    return state_.logits;
  }
  bool draw(const models::DrawOptions& options, std::uint64_t step, std::uint64_t first_sequence,
            std::span<int> tokens) override {
    if (!log_ || !log_->draws) return false;
    ++log_->drawn;
    Sampler sampler({.temperature = options.temperature,
                     .top_k = options.top_k,
                     .top_p = options.top_p,
                     .min_p = options.min_p,
                     .vocab_limit = options.vocab_limit,
                     .seed = options.seed});
    const std::size_t vocab = state_.logits.size() / tokens.size();
    for (std::size_t b = 0; b < tokens.size(); ++b) {
      try {
        tokens[b] =
            sampler.sample(std::span(state_.logits).subspan(b * vocab, vocab), {}, step, first_sequence + b).token;
      } catch (const NumericError&) {
        tokens[b] = -1;
      }
    }
    return true;
  }
  std::int64_t position() const override { return state_.position; }
  int batch() const override { return static_cast<int>(state_.batch); }
  models::PrefillStats prefill_stats() const override { return {state_.position, 2 * state_.position, 3, 1}; }
  void reset() override {
    const auto cells = static_cast<std::size_t>(config_.num_layers * state_.batch * config_.model_dim);
    state_.position = 0;
    state_.h.assign(cells, 0.0F);
    state_.memory.assign(cells * static_cast<std::size_t>(config_.memory_slots), 0.0F);
    state_.segment_sum.assign(cells, 0.0);
    state_.logits.clear();
  }
  std::unique_ptr<models::Runner> clone() const override { return std::make_unique<ToyRunner>(*this); }
  models::HostState export_state() const override { return state_; }
  void import_state(const models::HostState& state) override { state_ = state; }

 private:
  void consume(std::span<const int> tokens, std::span<float> logprobs) {
    if (log_) log_->calls.push_back(tokens.size());
    const auto batch = static_cast<std::size_t>(state_.batch);
    const std::size_t count = tokens.size() / batch;
    for (std::size_t t = 0; t < count; ++t) {
      for (std::size_t b = 0; b < batch; ++b) {
        const int token = tokens[b * count + t];
        if (!logprobs.empty()) logprobs[b * count + t] = state_.position == 0 ? 0.0F : logprob(b, token);
      }
      for (std::size_t b = 0; b < batch; ++b) consume_one(b, tokens[b * count + t]);
      ++state_.position;
      const auto vocab = static_cast<std::size_t>(config_.vocab_size);
      state_.logits.resize(batch * vocab);
      for (std::size_t b = 0; b < batch; ++b) {
        const double summary = summarise(b);
        for (std::size_t v = 0; v < vocab; ++v) {
          state_.logits[b * vocab + v] =
              logits_of_ ? logits_of_(summary, state_.position, static_cast<int>(v))
                         : static_cast<float>(3.0 * std::sin(summary + 0.7 * static_cast<double>(v)));
        }
      }
    }
  }

  void consume_one(std::size_t b, int token) {
    const auto layers = static_cast<std::size_t>(config_.num_layers);
    const auto dim = static_cast<std::size_t>(config_.model_dim);
    const auto slots = static_cast<std::size_t>(config_.memory_slots);
    for (std::size_t cell_layer = 0; cell_layer < layers; ++cell_layer) {
      for (std::size_t d = 0; d < dim; ++d) {
        const std::size_t cell = (cell_layer * static_cast<std::size_t>(state_.batch) + b) * dim + d;
        state_.h[cell] =
            0.9F * state_.h[cell] + static_cast<float>(std::sin(token + 1.0 + static_cast<double>(d + cell_layer)));
        state_.segment_sum[cell] += static_cast<double>(state_.h[cell]);
        if ((state_.position + 1) % config_.memory_segment == 0) {
          const auto slot = static_cast<std::size_t>(state_.position / config_.memory_segment % config_.memory_slots);
          const std::size_t at = ((cell_layer * static_cast<std::size_t>(state_.batch) + b) * slots + slot) * dim + d;
          state_.memory[at] =
              static_cast<float>(state_.segment_sum[cell] / static_cast<double>(config_.memory_segment));
          state_.segment_sum[cell] = 0.0;
        }
      }
    }
  }

  double summarise(std::size_t b) const {
    const auto batch = static_cast<std::size_t>(state_.batch);
    double sum = 0.0;
    const auto add = [&](const auto& values) {
      const std::size_t per = values.size() / static_cast<std::size_t>(config_.num_layers) / batch;
      for (std::size_t layer = 0; layer < static_cast<std::size_t>(config_.num_layers); ++layer) {
        for (std::size_t i = 0; i < per; ++i) sum += static_cast<double>(values[(layer * batch + b) * per + i]);
      }
    };
    add(state_.h);
    add(state_.memory);
    add(state_.segment_sum);
    return sum;
  }

  float logprob(std::size_t b, int token) const {
    const auto vocab = static_cast<std::size_t>(config_.vocab_size);
    const std::span<const float> row = std::span(state_.logits).subspan(b * vocab, vocab);
    double sum = 0.0;
    for (const float x : row) sum += std::exp(static_cast<double>(x));
    return static_cast<float>(static_cast<double>(row[static_cast<std::size_t>(token)]) - std::log(sum));
  }

  models::Config config_;
  std::shared_ptr<ToyLog> log_;
  Logits logits_of_;
  models::HostState state_;
};

inline constexpr std::uint64_t kToyFingerprint = 0x1122334455667788;

inline Session toy_session(int batch = 1, const models::Config& config = toy_config(),
                           std::uint64_t fingerprint = kToyFingerprint) {
  return engine::Access::session(std::make_unique<ToyRunner>(config, batch), config, fingerprint);
}

inline Model toy_model(std::shared_ptr<ToyLog> log = nullptr, const models::Config& config = toy_config(),
                       ToyRunner::Logits logits = {}) {
  ModelInfo info;
  info.vocab_size = config.vocab_size;
  info.fingerprint = kToyFingerprint;
  return engine::Access::model(info, config, [=](int batch, const models::RunnerOptions& options) {
    if (log) {
      log->batches.push_back(batch);
      log->options = options;
    }
    return std::make_unique<ToyRunner>(config, batch, log, logits);
  });
}

/// A model that, greedily sampled, continues a prompt of `start` tokens with `script`, then repeats its last token.
inline Model scripted_model(std::vector<int> script, std::int64_t vocab, std::int64_t start = 1) {
  return toy_model(nullptr, toy_config(vocab),
                   [script = std::move(script), start](double, std::int64_t position, int token) {
                     const std::int64_t at = std::min(position - start, static_cast<std::int64_t>(script.size()) - 1);
                     return at >= 0 && token == script[static_cast<std::size_t>(at)] ? 20.0F : 0.0F;
                   });
}

}  // namespace mmrec::test
