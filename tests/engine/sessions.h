// Sessions in one expression.
#pragma once

#include <span>
#include <vector>

#include "mmrec/model.h"
#include "mmrec/session.h"

namespace mmrec::test {

/// A session that has consumed `tokens`.
inline Session begun(const Model& model, std::span<const int> tokens, int batch = 1,
                     const SessionOptions& options = {}) {
  Session session = model.new_session(batch, options);
  session.prefill(tokens);
  return session;
}

inline std::vector<float> logprobs_of(Session& session, std::span<const int> tokens) {
  std::vector<float> logprobs(tokens.size());
  session.score(tokens, logprobs);
  return logprobs;
}

}  // namespace mmrec::test
