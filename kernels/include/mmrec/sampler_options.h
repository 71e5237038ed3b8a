// How the next token is chosen from logits.
#pragma once

#include <cstdint>

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
  int vocab_limit = 0;     ///< > 0: ids from here on are never drawn (a tokenizer smaller than the model); 0: all
  std::uint64_t seed = 0;  ///< keys the random numbers; any value

  /// Member by member.
  bool operator==(const SamplerOptions&) const = default;
};

}  // namespace mmrec
