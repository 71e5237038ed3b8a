// Choosing the next token from logits.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace mmrec {

/// The chain, in this order: repetition penalty, temperature, top-k, top-p, min-p, then one draw. A filter at its
/// neutral value is skipped. Each filter works on what the one before it has left, renormalised.
struct SamplerOptions {
  float temperature = 0.8F;         ///< finite, >= 0; 0 is greedy: the largest logit, ties to the lowest id
  int top_k = 40;                   ///< >= 0; keep the k largest, ties to the lowest ids; 0 or k >= vocab: all
  float top_p = 0.95F;              ///< keep the smallest set with at least this probability; (0, 1]; 1: all
  float min_p = 0.05F;              ///< drop tokens below min_p × the largest probability; [0, 1]; 0: none
  float repetition_penalty = 1.0F;  ///< finite, > 0; divides positive and multiplies negative logits of recent tokens
  int repetition_window = 64;       ///< how many of the last tokens count as recent; >= 0
  int vocab_limit = 0;  ///< > 0: ids from here on are never drawn (a tokenizer smaller than the model); 0: all
  std::uint64_t seed = 0;

  bool operator==(const SamplerOptions&) const = default;
};

struct Sample {
  int token = -1;
  float logprob = 0.0F;  ///< log-softmax of the raw logits at `token`: before the chain, over the whole vocabulary
};

/// Draws tokens. Deterministic: the draw is a counter-based random number (Philox4x32-10) keyed by seed, sequence and
/// step, so equal logits, options and step give the same token whatever was drawn before. The surviving tokens share
/// [0, 1) in order of their ids. Not thread-safe; one per thread.
class Sampler {
 public:
  /// Throws std::invalid_argument naming the option, found and expected.
  explicit Sampler(const SamplerOptions& options = {});

  const SamplerOptions& options() const { return options_; }

  /// logits [vocab]; `recent` are the tokens so far, oldest first (only the last repetition_window count); `step` and
  /// `sequence` key the random number. -inf logits are never drawn. Throws std::invalid_argument for empty logits or a
  /// recent id outside them, and NumericError (see errors.h), naming the step, if a logit is NaN or +inf or if none is
  /// left to draw.
  Sample sample(std::span<const float> logits, std::span<const int> recent, std::uint64_t step,
                std::uint64_t sequence = 0);

 private:
  struct Candidate {
    float logit;
    int token;
  };

  void penalise(std::span<const int> recent);
  int draw(double uniform);

  SamplerOptions options_;
  std::vector<Candidate> candidates_;  // scratch: what may be drawn
  std::vector<int> recent_;            // scratch: distinct recent tokens, sorted
};

}  // namespace mmrec
