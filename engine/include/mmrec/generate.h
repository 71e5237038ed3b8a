// Generating text or tokens from a session.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mmrec/export.h"
#include "mmrec/sampler.h"
#include "mmrec/session.h"
#include "mmrec/tokenizer.h"

namespace mmrec {

/// Why a text ended.
enum class FinishReason : std::uint8_t {
  kLength,         ///< max_tokens were drawn
  kEndOfSequence,  ///< one of eos_token_ids was drawn
  kStopString,     ///< one of `stop` was complete
  kCancelled,      ///< a callback said so
  kError,          ///< something went wrong: a Generator's alone, generate() throws
};
/// "length", "eos", "stop", "cancelled", "error".
MMREC_EXPORT std::string_view to_string(FinishReason reason);

/// What to generate, and the callbacks that follow it.
struct GenerateOptions {
  SamplerOptions sampler = {};          ///< ids the tokenizer does not know are never drawn, whatever vocab_limit says
  std::uint64_t sequence = 0;           ///< keys the random numbers beside the seed: one for each of several samples
  std::int64_t max_tokens = 256;        ///< -1: until end of sequence, a stop string or cancellation
  std::vector<std::string> stop = {};   ///< the text ends before the first of these to be complete; UTF-8, not empty
  std::vector<int> eos_token_ids = {};  ///< tokens that end the sequence; not part of the text
  bool logprobs = true;                 ///< whether log-probs are wanted
  /// How many of the likeliest tokens are wanted of each draw, with their log-probs; >= 0. Brings all logits back from
  /// a GPU for each token.
  int top_logprobs = 0;
  /// The tokens that the session has consumed, or the last of them, oldest first: for one that cannot know them,
  /// because it was restored, or that no longer knows as many as repetition_window counts. Empty:
  /// Session::recent_tokens().
  std::span<const int> context = {};
  /// Receives the text as it becomes final: complete characters, never a part of a stop string. Returning false
  /// cancels.
  std::function<bool(std::string_view)> on_text = {};
  /// Asked before each token; returning true cancels.
  std::function<bool()> cancelled = {};
  /// Receives each token as it is drawn, before the text that it completes, and its log-prob (0 where log-probs are not
  /// wanted); end-of-sequence excluded. Returning false cancels.
  std::function<bool(int token, float logprob)> on_token = {};
};

/// What was generated, and why it ended.
struct GenerateResult {
  std::string text;             ///< what on_text received
  std::vector<int> tokens;      ///< drawn tokens, end-of-sequence excluded; may reach past `text` at a stop string
  std::vector<float> logprobs;  ///< of each of `tokens`, under the model's own distribution; empty if not wanted
  /// Of each of `tokens` the likeliest at its place, K of them one after another, likeliest first: [tokens, K], K the
  /// least of options.top_logprobs and the ids that the tokenizer knows. Log-probs are as above.
  std::vector<Sample> top_logprobs;
  FinishReason finish_reason = FinishReason::kLength;  ///< why it ended
  std::string error = {};                              ///< of kError: what went wrong
};

/// Continues the sequence of `session` (batch 1, position >= 1) from where it stands. The session remembers what that
/// needs of the tokens it has consumed (see Session::recent_tokens): the last ones count for the repetition penalty,
/// and the text goes on from theirs (its first space, a character they left incomplete). A session restored from bytes
/// remembers none: unless `options.context` says them, none is penalised and the text begins within a text, at a
/// character.
///
/// The token that becomes position p of the sequence is drawn with the random number of step p, so a run that is cut
/// short, saved, restored and continued with the same seed and context draws what an uninterrupted one would.
///
/// Every drawn token but the last has been consumed by the session: to go on, step() the last of `tokens` first (after
/// kEndOfSequence all of `tokens` are consumed, the end itself is not). After kStopString the state includes what was
/// drawn beyond `text`.
///
/// Blocks until the end; callbacks are called in this thread and must not use the session. Tokens are drawn where the
/// logits are.
///
/// Throws std::invalid_argument before anything is drawn, NumericError, and what the callbacks throw.
MMREC_EXPORT GenerateResult generate(Session& session, const Tokenizer& tokenizer, const GenerateOptions& options = {});

}  // namespace mmrec
