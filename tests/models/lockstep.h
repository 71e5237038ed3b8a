// Sequences in lock-step on an executor: what tests of whole models call, without an engine.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "models/runtime/executor.h"

namespace mmrec::models {

/// Columns [begin, begin + count) of the first `batch` rows of ids [B, time].
inline std::vector<int> columns_of(std::span<const int> ids, std::int64_t time, std::int64_t batch, std::int64_t begin,
                                   std::int64_t count) {
  std::vector<int> part;
  for (std::int64_t b = 0; b < batch; ++b) {
    const auto first = ids.begin() + b * time + begin;
    part.insert(part.end(), first, first + count);
  }
  return part;
}
/// log p of ids [batch, count] at times 1.., under logits [batch, time, V].
inline std::vector<double> logprobs_under(std::span<const float> logits, std::int64_t time, std::int64_t vocab,
                                          std::span<const int> ids, std::int64_t batch) {
  const auto count = static_cast<std::int64_t>(ids.size()) / batch;
  std::vector<double> all;
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t t = 0; t + 1 < count; ++t) {
      const float* const row = logits.data() + (b * time + t) * vocab;
      const double top = *std::max_element(row, row + vocab);
      double sum = 0.0;
      for (std::int64_t v = 0; v < vocab; ++v) sum += std::exp(static_cast<double>(row[v]) - top);
      all.push_back(static_cast<double>(row[ids[static_cast<std::size_t>(b * count + t + 1)]]) - top - std::log(sum));
    }
  }
  return all;
}
inline float largest_of(std::span<const float> values) {
  float most = 0.0F;
  for (const float x : values) most = std::max(most, std::abs(x));
  return most;
}

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
