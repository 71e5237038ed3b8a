// The one place that draws tokens: where the logits are if the executor can, else by the host's sampler.
#pragma once

#include <cstddef>
#include <exception>
#include <functional>
#include <span>
#include <vector>

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
  /// Throws what the executor throws.
  void draw(models::Executor& executor, std::span<const models::Draw> draws, bool logprobs, std::span<Sample> samples,
            const Logits& logits, const Failed& failed);

 private:
  std::vector<int> tokens_;      // scratch, of each draw
  std::vector<float> logprobs_;  // likewise, or empty
  Sampler sampler_;
};

}  // namespace mmrec::engine
