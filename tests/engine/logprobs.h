// Scoring in one expression.
#pragma once

#include <span>
#include <vector>

#include "mmrec/session.h"

namespace mmrec::test {

inline std::vector<float> logprobs_of(Session& session, std::span<const int> tokens, const CallOptions& options = {}) {
  std::vector<float> logprobs(tokens.size());
  session.score(tokens, logprobs, options);
  return logprobs;
}

}  // namespace mmrec::test
