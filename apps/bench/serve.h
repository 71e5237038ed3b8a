// Many requests of different lengths through a Generator, and as many sequences as it has slots in lock-step.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "mmrec/model.h"
#include "mmrec/session.h"
#include "mmrec/tokenizer.h"

namespace mmrec::apps {

/// Tokens of the prompts, log-uniform, and drawn at least.
inline constexpr std::int64_t kLeastPrompt = 8;
inline constexpr std::int64_t kMostPrompt = 512;
inline constexpr std::int64_t kLeastDrawn = 16;

struct ServedRequest {
  std::vector<int> prompt;
  std::int64_t drawn = 0;  // tokens
};

/// Token ids below `vocab` that look like text to the engine: no two runs alike, the same in every process.
std::vector<int> some_tokens(std::int64_t count, std::int64_t vocab);

/// The same requests in every process; what they draw is uniform in [kLeastDrawn, most_drawn] and on average the middle
/// of that. Prompts are of ids below `vocab`.
std::vector<ServedRequest> some_requests(std::int64_t count, std::int64_t most_drawn, std::int64_t vocab);
/// Tokens of their prompts on average.
std::int64_t mean_prompt(const std::vector<ServedRequest>& requests);
/// Mean number of tokens that such requests draw.
constexpr std::int64_t mean_drawn(std::int64_t most_drawn) { return (kLeastDrawn + most_drawn) / 2; }

/// A sentencepiece model of `vocab` made-up pieces, for models that have no tokenizer: an unknown one, a beginning of
/// sequence, no end of it.
std::string made_up_pieces(std::int64_t vocab);

/// Seconds from the first request's submission to the last one's end, in `slots` slots, with the default chain of
/// samplers. Throws Interrupted.
double serve_seconds(const Model& model, const Tokenizer& tokenizer, const SessionOptions& options, int slots,
                     const std::vector<ServedRequest>& requests);

/// Seconds in which the session's sequences, in lock-step and drawn by the same chain, consume and draw so many tokens
/// each. Requires: a session that stands somewhere.
double lock_step_seconds(Session& session, std::int64_t tokens);

}  // namespace mmrec::apps
