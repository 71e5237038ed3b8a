// Choosing the next token from logits.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "mmrec/export.h"
#include "mmrec/sampler_options.h"

namespace mmrec {

/// A drawn token, whoever drew it: Sampler::sample or Session::draw.
struct Sample {
  int token = -1;        ///< in [0, vocab)
  float logprob = 0.0F;  ///< log-softmax of the raw logits at `token`: before the chain, over the whole vocabulary
};

/// Draws tokens. Deterministic: the draw is a counter-based random number (Philox4x32-10) keyed by seed, sequence and
/// step, so equal logits, options and step give the same token whatever was drawn before. The surviving tokens share
/// [0, 1) in order of their ids. Not thread-safe; one per thread.
class MMREC_EXPORT Sampler {
 public:
  /// Throws std::invalid_argument naming the option, found and expected.
  explicit Sampler(const SamplerOptions& options = {});

  /// As given.
  const SamplerOptions& options() const { return options_; }

  /// logits [vocab]; `recent` are the tokens so far, oldest first (only the last repetition_window count); `step` and
  /// `sequence` key the random number. -inf logits are never drawn. Throws std::invalid_argument for empty logits or a
  /// recent id outside them, and NumericError (see errors.h), naming the step, if a logit is NaN or +inf or if none is
  /// left to draw. Without `logprob` that of the sample is 0, and the draw costs less.
  Sample sample(std::span<const float> logits, std::span<const int> recent, std::uint64_t step, std::uint64_t sequence,
                bool logprob);
  /// The same, with the log-prob.
  Sample sample(std::span<const float> logits, std::span<const int> recent, std::uint64_t step,
                std::uint64_t sequence = 0);

 private:
  struct MMREC_NO_EXPORT Candidate {
    float logit;
    int token;
  };

  MMREC_NO_EXPORT void penalise(std::span<const int> recent);
  MMREC_NO_EXPORT int draw(double uniform);

  SamplerOptions options_;
  std::vector<Candidate> candidates_;  // scratch: what may be drawn
  std::vector<int> recent_;            // scratch: distinct recent tokens, sorted
};

}  // namespace mmrec
