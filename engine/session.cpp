// Session: argument checks around a runner. Everything is checked before the runner is touched, so a call that throws
// std::invalid_argument or a restore that throws std::runtime_error has changed nothing.
#include "mmrec/session.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <stdexcept>
#include <utility>

#include "engine/access.h"
#include "engine/state_format.h"
#include "mmrec/errors.h"

namespace mmrec {
namespace {

constexpr int kMaxBatch = 65536;
constexpr int kMaxThreads = 256;

}  // namespace

struct Session::Impl {
  std::unique_ptr<models::Runner> runner;
  engine::StateShape shape;
  std::optional<Sampler> sampler = {};  // of the last draw, for its scratch

  Sampler& sampler_for(const SamplerOptions& options) {
    if (!sampler || sampler->options() != options) sampler = Sampler(options);
    return *sampler;
  }
  std::span<const float> logits_of(std::size_t sequence) const {
    const auto vocab = static_cast<std::size_t>(shape.vocab_size);
    return runner->logits().subspan(sequence * vocab, vocab);
  }

  void check_one_each(std::span<const int> tokens) const {
    if (tokens.size() == static_cast<std::size_t>(runner->batch())) return;
    throw std::invalid_argument(
        fmt::format("found {} tokens, expected one per sequence: {}", tokens.size(), runner->batch()));
  }
  void check_tokens(std::span<const int> tokens) const {
    const auto batch = static_cast<std::size_t>(runner->batch());
    if (tokens.empty() || tokens.size() % batch != 0) {
      throw std::invalid_argument(
          fmt::format("found {} tokens, expected a positive multiple of the batch of {}", tokens.size(), batch));
    }
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      if (tokens[i] < 0 || tokens[i] >= shape.vocab_size) {
        throw std::invalid_argument(
            fmt::format("token {} has id {}, expected 0..{}", i, tokens[i], shape.vocab_size - 1));
      }
    }
  }
};

Session::Session(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Session::Session(Session&&) noexcept = default;
Session& Session::operator=(Session&&) noexcept = default;
Session::~Session() = default;

int Session::batch() const { return impl_->runner->batch(); }
std::int64_t Session::vocab_size() const { return impl_->shape.vocab_size; }
std::int64_t Session::position() const { return impl_->runner->position(); }

std::span<const float> Session::prefill(std::span<const int> tokens) {
  impl_->check_tokens(tokens);
  return impl_->runner->prefill(tokens);
}

std::span<const float> Session::step(std::span<const int> tokens) {
  impl_->check_one_each(tokens);
  impl_->check_tokens(tokens);
  return impl_->runner->step(tokens);
}

void Session::advance(std::span<const int> tokens) {
  impl_->check_one_each(tokens);
  impl_->check_tokens(tokens);
  impl_->runner->advance(tokens);
}

void Session::draw(const SamplerOptions& options, std::uint64_t step, std::uint64_t first_sequence,
                   std::span<int> tokens) {
  impl_->check_one_each(tokens);
  if (position() == 0) throw std::invalid_argument("draw: found a session at position 0, expected a prompt");
  if (options.repetition_penalty != 1.0F) {
    throw std::invalid_argument(
        fmt::format("draw: found a repetition penalty of {}, expected 1", options.repetition_penalty));
  }
  Sampler& sampler = impl_->sampler_for(options);
  const models::DrawOptions chain{.temperature = options.temperature,
                                  .top_k = options.top_k,
                                  .top_p = options.top_p,
                                  .min_p = options.min_p,
                                  .vocab_limit = options.vocab_limit,
                                  .seed = options.seed};
  const bool drawn = impl_->runner->draw(chain, step, first_sequence, tokens);
  for (std::size_t b = 0; b < tokens.size(); ++b) {
    if (drawn && tokens[b] >= 0) continue;
    // Where the device found nothing to draw, the host's sampler knows the words for it.
    tokens[b] = sampler.sample(impl_->logits_of(b), {}, step, first_sequence + b).token;
    if (drawn) throw NumericError(fmt::format("step {}: the device found no token to draw for sequence {}", step, b));
  }
}

std::vector<float> Session::score(std::span<const int> tokens) {
  impl_->check_tokens(tokens);
  std::vector<float> logprobs(tokens.size());
  impl_->runner->score(tokens, logprobs);
  return logprobs;
}

std::span<const float> Session::logits() const { return impl_->runner->logits(); }

PrefillStats Session::prefill_stats() const {
  const models::PrefillStats stats = impl_->runner->prefill_stats();
  return {stats.layer_tokens, stats.token_sweeps, stats.windows, stats.fallbacks};
}

Session Session::clone() const { return Session(std::make_unique<Impl>(Impl{impl_->runner->clone(), impl_->shape})); }

void Session::reset() { impl_->runner->reset(); }

std::vector<std::byte> Session::save() const {
  return engine::encode_state(impl_->runner->export_state(), impl_->shape);
}

void Session::restore(std::span<const std::byte> state) {
  impl_->runner->import_state(engine::decode_state(state, impl_->shape));
}

namespace engine {

Session Access::session(std::unique_ptr<models::Runner> runner, const models::Config& config,
                        std::uint64_t fingerprint) {
  const StateShape shape = shape_of(config, runner->batch(), fingerprint);
  return Session(std::make_unique<Session::Impl>(Session::Impl{std::move(runner), shape}));
}

void check_batch(int batch) {
  if (batch < 1 || batch > kMaxBatch) {
    throw std::invalid_argument(fmt::format("batch: found {}, expected 1..{}", batch, kMaxBatch));
  }
}

void check_options(const SessionOptions& options) {
  if (options.threads < 0) {
    throw std::invalid_argument(fmt::format("session option threads: found {}, expected >= 0", options.threads));
  }
  if (options.prefill != PrefillMode::kAuto && options.prefill != PrefillMode::kSweeps &&
      options.prefill != PrefillMode::kSteps) {
    throw std::invalid_argument(
        fmt::format("session option prefill: found {}, expected a PrefillMode", static_cast<int>(options.prefill)));
  }
  if (!(options.sweep_tolerance >= 0.0F) || !std::isfinite(options.sweep_tolerance)) {
    throw std::invalid_argument(fmt::format("session option sweep_tolerance: found {}, expected a finite number >= 0",
                                            options.sweep_tolerance));
  }
  if (options.max_sweeps < 1) {
    throw std::invalid_argument(fmt::format("session option max_sweeps: found {}, expected >= 1", options.max_sweeps));
  }
}

models::RunnerOptions runner_options(const SessionOptions& options) {
  models::RunnerOptions to;
  to.threads = std::min(options.threads, kMaxThreads);
  switch (options.prefill) {
    case PrefillMode::kAuto:
      to.prefill = models::PrefillMode::kAuto;
      break;
    case PrefillMode::kSweeps:
      to.prefill = models::PrefillMode::kSweeps;
      break;
    case PrefillMode::kSteps:
      to.prefill = models::PrefillMode::kSteps;
      break;
  }
  to.sweep_tolerance = options.sweep_tolerance;
  to.max_sweeps = options.max_sweeps;
  return to;
}

}  // namespace engine
}  // namespace mmrec
