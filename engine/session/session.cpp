// Session: argument checks around slots of an executor. Everything is checked before the executor is touched, so a call
// that throws std::invalid_argument or a restore that throws std::runtime_error has changed nothing.
#include "mmrec/session.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "engine/require.h"
#include "engine/session/access.h"
#include "engine/session/session_impl.h"

namespace mmrec {
namespace {

constexpr int kMaxBatch = 65536;
constexpr int kMaxThreads = 256;

}  // namespace

Session::Session(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Session::Session(Session&&) noexcept = default;
Session& Session::operator=(Session&&) noexcept = default;
Session::~Session() = default;

int Session::batch() const { return impl_->slots.count(); }
std::int64_t Session::vocab_size() const { return impl_->vocab_size; }
std::int64_t Session::position() const { return impl_->position; }

void Session::prefill(std::span<const int> tokens, const CallOptions& options) {
  impl_->check_tokens(tokens);
  impl_->consume(tokens, {}, options);
}

void Session::step(std::span<const int> tokens) {
  impl_->check_one_each(tokens.size(), "tokens");
  impl_->check_tokens(tokens);
  impl_->has_logits = false;
  impl_->executor().step(tokens, impl_->runs_of(1), impl_->options);
  impl_->recent.push(tokens, 1, 1);
  ++impl_->position;
}

void Session::score(std::span<const int> tokens, std::span<float> logprobs, const CallOptions& options) {
  impl_->check_tokens(tokens);
  engine::require(logprobs.size() == tokens.size(), "found room for {} log-probs, expected one per token: {}",
                  logprobs.size(), tokens.size());
  impl_->consume(tokens, logprobs, options);
}

std::span<const float> Session::logits() const { return impl_->fetched_logits(); }

void Session::draw(const SamplerOptions& options, std::uint64_t step, std::uint64_t first_sequence,
                   std::span<Sample> samples, bool logprobs) {
  impl_->check_one_each(samples.size(), "samples");
  engine::require(position() != 0, "draw: found a session at position 0, expected a prompt");
  engine::require(options.repetition_penalty == 1.0F, "draw: found a repetition penalty of {}, expected 1",
                  options.repetition_penalty);
  const Sampler checked(options);
  impl_->draws.clear();
  for (int b = 0; b < batch(); ++b) {
    impl_->draws.push_back({impl_->slots[b], options, first_sequence + static_cast<std::uint64_t>(b), step});
  }
  impl_->draw(impl_->draws, logprobs, samples);
}

std::span<const int> Session::recent_tokens(int sequence) const {
  engine::require(sequence >= 0 && sequence < batch(), "found sequence {}, expected 0..{}", sequence, batch() - 1);
  return impl_->recent.of(sequence);
}

PrefillStats Session::prefill_stats() const { return impl_->stats; }

Session Session::clone() const {
  auto copy = std::make_unique<Impl>(models::Slots(impl_->slots.executor(), batch(), impl_->options), impl_->shape,
                                     impl_->vocab_size, impl_->options);
  impl_->executor().copy(impl_->slots.first(), copy->slots.first(), batch(), impl_->position);
  copy->position = impl_->position;
  copy->recent = impl_->recent;
  copy->stats = impl_->stats;
  return Session(std::move(copy));
}

void Session::reset() {
  impl_->has_logits = false;
  impl_->executor().clear(impl_->slots.first(), batch());
  impl_->position = 0;
  impl_->recent.clear();
  impl_->stats = {};
}

std::vector<std::byte> Session::save() const {
  return engine::encode_state(impl_->executor().save(impl_->slots.first(), batch(), impl_->position), impl_->shape);
}

void Session::restore(std::span<const std::byte> state, std::span<const int> recent) {
  if (!recent.empty()) impl_->check_tokens(recent);
  const models::HostState host = engine::decode_state(state, impl_->shape);
  const std::size_t count = recent.size() / impl_->batch();
  engine::require(static_cast<std::int64_t>(count) <= host.position,
                  "recent: found {} tokens of a sequence, expected at most the {} it has consumed", count,
                  host.position);
  impl_->has_logits = false;
  impl_->executor().load(impl_->slots.first(), host);
  impl_->position = host.position;
  impl_->recent.clear();
  if (count > 0) impl_->recent.push(recent, count, count);
}

namespace engine {

Access::SessionImpl& Access::impl(Session& session) { return *session.impl_; }

Session Access::session(std::shared_ptr<models::Executor> executor, models::StateLayout layout, std::int64_t vocab_size,
                        std::uint64_t fingerprint, int batch, const models::ExecutionOptions& options) {
  return Session(std::make_unique<Session::Impl>(models::Slots(std::move(executor), batch, options),
                                                 StateShape{fingerprint, batch, std::move(layout)}, vocab_size,
                                                 options));
}

const models::Slots& Access::slots(const Session& session) { return session.impl_->slots; }

void check_batch(int batch) {
  require(batch >= 1 && batch <= kMaxBatch, "batch: found {}, expected 1..{}", batch, kMaxBatch);
}

void check_ids(std::span<const int> ids, std::int64_t vocab, std::string_view what, std::size_t first) {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    require(ids[i] >= 0 && ids[i] < vocab, "{}token {} has id {}, expected 0..{}", what, first + i, ids[i], vocab - 1);
  }
}

models::ExecutionOptions execution_options(const SessionOptions& options) {
  require(options.threads >= 0, "session option threads: found {}, expected >= 0", options.threads);
  const auto prefill = static_cast<std::size_t>(options.prefill);
  require(prefill < kPrefillModeNames.size(), "session option prefill: found {}, expected a PrefillMode", prefill);
  require(options.sweep_tolerance >= 0.0F && std::isfinite(options.sweep_tolerance),
          "session option sweep_tolerance: found {}, expected a finite number >= 0", options.sweep_tolerance);
  require(options.max_sweeps >= 1, "session option max_sweeps: found {}, expected >= 1", options.max_sweeps);
  return {.threads = std::min(options.threads, kMaxThreads),
          .prefill = options.prefill,
          .sweep_tolerance = options.sweep_tolerance,
          .max_sweeps = options.max_sweeps};
}

}  // namespace engine
}  // namespace mmrec
