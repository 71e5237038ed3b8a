// The one place that draws tokens: where the logits are if the executor can, else by the host's sampler.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <span>
#include <vector>

#include "mmrec/errors.h"
#include "mmrec/sampler.h"
#include "models/runtime/executor.h"

namespace mmrec::engine {

class Drawer {
 public:
  /// The logits of `count` draws whose slots lie side by side, [count, V], on the host until the next call.
  using Logits = std::function<std::span<const float>(std::size_t first, std::size_t count)>;
  /// Called for a draw that gave no token, while its exception is handled, and may throw it on.
  using Failed = std::function<void(std::size_t draw, const std::exception& error)>;

  /// Draws samples[i] as draws[i] says, whose options must be in range. Without `logprobs` those of the samples are 0.
  /// Throws what the executor throws. If there are runs to step `ahead`, as for Executor::draw_and_step, returns
  /// whether they were.
  bool draw(models::Executor& executor, const models::ExecutionOptions& options, std::span<const models::Draw> draws,
            bool logprobs, std::span<Sample> samples, const Logits& logits, const Failed& failed,
            std::span<const models::Run> ahead = {}) {
    tokens_.assign(draws.size(), models::Executor::kFaultyRow);
    logprobs_.resize(logprobs ? draws.size() : 0);
    const bool has_stepped = !ahead.empty() && executor.draw_and_step(draws, ahead, tokens_, logprobs_);
    const bool can_draw = has_stepped || (!draws.empty() && executor.draw(draws, tokens_, logprobs_));
    for (std::size_t begin = 0; begin < draws.size();) {
      if (can_draw && tokens_[begin] >= 0) {
        samples[begin] = {tokens_[begin], logprobs ? logprobs_[begin] : 0.0F};
        ++begin;
        continue;
      }
      std::size_t count = 1;
      while (count < kMostFetched && begin + count < draws.size() && (!can_draw || tokens_[begin + count] < 0) &&
             draws[begin + count].slot == draws[begin].slot + count * executor.slot_bytes()) {
        ++count;
      }
      const std::span<const float> rows = logits(begin, count);
      const std::size_t vocab = rows.size() / count;
      samplers_.resize(count > 1 ? models::Executor::kMostThreads : std::max<std::size_t>(samplers_.size(), 1));
      faults_.assign(count, nullptr);
      const auto sample = [&](std::int64_t item, int thread) {
        const auto n = static_cast<std::size_t>(item);
        const models::Draw& draw = draws[begin + n];
        Sample& to = samples[begin + n];
        try {
          const Sampler sampler(draw.options);
          Sampler& own = samplers_[static_cast<std::size_t>(thread)];
          own = sampler;  // a copy: this one keeps the memory of its scratch
          to = own.sample(rows.subspan(n * vocab, vocab), draw.recent, draw.step, draw.sequence, logprobs);
          // If the device found nothing to draw, the host's sampler mostly has told more by now. A sequence that has
          // stepped has other logits, mostly with the same fault.
          if (can_draw) {
            throw NumericError(fmt::format("step {}: {}", draw.step,
                                           tokens_[begin + n] == models::Executor::kNoCandidate
                                               ? "all logits that may be drawn are -inf"
                                               : "a logit is NaN or +inf, expected finite numbers or -inf"));
          }
        } catch (...) {
          faults_[n] = std::current_exception();
        }
      };
      if (count > 1) {
        executor.share(static_cast<std::int64_t>(count), options, sample);
      } else {
        sample(0, 0);
      }
      for (std::size_t n = 0; n < count; ++n, ++begin) {
        if (!faults_[n]) continue;
        try {
          std::rethrow_exception(faults_[n]);
        } catch (const std::exception& error) {
          failed(begin, error);
        }
      }
    }
    return has_stepped;
  }

 private:
  static constexpr std::size_t kMostFetched = 64;  // rows of logits at a time

  std::vector<int> tokens_;        // scratch, of each draw
  std::vector<float> logprobs_;    // likewise, or empty
  std::vector<Sampler> samplers_;  // of each thread
  std::vector<std::exception_ptr> faults_;
};

}  // namespace mmrec::engine
