// Generating text or tokens from a session.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mmrec/sampler.h"
#include "mmrec/session.h"
#include "mmrec/tokenizer.h"

namespace mmrec {

enum class FinishReason : std::uint8_t { kLength, kEndOfSequence, kStopString, kCancelled };
/// "length", "eos", "stop", "cancelled".
std::string_view to_string(FinishReason reason);

struct GenerateOptions {
  SamplerOptions sampler;
  std::int64_t max_tokens = 256;        ///< -1: until end of sequence, a stop string or cancellation
  std::vector<std::string> stop;        ///< the text ends before the first occurrence of any; none may be empty
  std::vector<int> eos_token_ids;       ///< tokens that end the sequence; not part of the text
  std::int64_t vocab_limit = 0;         ///< > 0: ids from here on are never drawn (a tokenizer smaller than the model)
  /// Receives the text as it becomes final: complete characters, never a part of a stop string. Returning false cancels.
  std::function<bool(std::string_view)> on_text;
  /// Asked once per token; returning true cancels.
  std::function<bool()> cancelled;
};

struct GenerateResult {
  std::string text;               ///< what on_text received
  std::vector<int> tokens;        ///< drawn tokens, end-of-sequence excluded; may reach past `text` at a stop string
  std::vector<float> logprobs;    ///< of each, under the model's own distribution
  FinishReason finish_reason = FinishReason::kLength;
};

/// Continues sequence 0 of `session` (batch 1, position >= 1). `prompt` are the tokens consumed so far (for the
/// repetition penalty and for the leading space of the first word). Step 0 of the random numbers is the first token
/// drawn. Every drawn token but the last is consumed by the session. Throws std::invalid_argument, NumericError.
GenerateResult generate(Session& session, const Tokenizer& tokenizer, std::span<const int> prompt,
                        const GenerateOptions& options);

}  // namespace mmrec
