// Sequences in lock-step on an executor: what tests of whole models call, without an engine.
#pragma once

#include "models/runtime/executor.h"
#include "tests/support/compare.h"

namespace mmrec::models {

using test::columns_of;
using test::largest_difference;
using test::largest_of;
using test::largest_share;
using test::logprobs_under;

class Lockstep {
 public:
  Lockstep(std::shared_ptr<Executor> executor, std::int64_t vocab, int batch, const ExecutionOptions& options = {})
      : options_(options),
        slots_(std::move(executor), batch, options),
        logits_(static_cast<std::size_t>(batch) * static_cast<std::size_t>(vocab)) {}

  std::int64_t position() const { return position_; }
  const PrefillStats& stats() const { return stats_; }
  Slots& slots() { return slots_; }

  /// Tokens [batch, count] in, the next token's logits [batch, V] out.
  std::span<const float> prefill(std::span<const int> tokens) {
    run(tokens, {});
    return logits();
  }
  std::span<const float> step(std::span<const int> tokens) {
    executor().step(tokens, runs_of(tokens), options_);
    position_ += 1;
    return logits();
  }
  void score(std::span<const int> tokens, std::span<float> logprobs, bool whole_calls = false) {
    run(tokens, logprobs, whole_calls);
  }
  std::span<const float> logits() {
    executor().logits(slots_.first(), slots_.count(), logits_);
    return logits_;
  }
  HostState state() { return executor().save(slots_.first(), slots_.count(), position_); }
  void set_state(const HostState& state) {
    executor().load(slots_.first(), state);
    position_ = state.position;
  }

 private:
  Executor& executor() { return *slots_.executor(); }
  std::vector<Run> runs_of(std::span<const int> tokens) const {
    const auto count = static_cast<std::int64_t>(tokens.size()) / slots_.count();
    std::vector<Run> runs;
    runs.reserve(static_cast<std::size_t>(slots_.count()));
    for (int b = 0; b < slots_.count(); ++b) runs.push_back({slots_[b], position_, b * count, count});
    return runs;
  }
  void run(std::span<const int> tokens, std::span<float> logprobs, bool whole_calls = false) {
    const std::vector<Run> runs = runs_of(tokens);
    const Done done =
        executor().run({.tokens = tokens, .runs = runs, .logprobs = logprobs, .whole_calls = whole_calls}, options_);
    position_ += done.rows.front();
    stats_ += done.stats;
  }

  ExecutionOptions options_;
  Slots slots_;
  std::int64_t position_ = 0;
  PrefillStats stats_;
  std::vector<float> logits_;
};

}  // namespace mmrec::models
