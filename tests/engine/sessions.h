// Models and sessions in one expression.
#pragma once

#include "mmrec/model.h"
#include "mmrec/session.h"
#include "tests/support/model_folder.h"

namespace mmrec::test {

inline Model on_cpu(const std::filesystem::path& folder) { return Model::load(folder, {.device = Device::kCpu}); }

inline std::vector<int> random_tokens(std::int64_t vocab, std::size_t count, unsigned seed) {
  std::mt19937 rng(seed);
  std::vector<int> tokens(count);
  for (int& t : tokens) t = static_cast<int>(rng() % static_cast<unsigned>(vocab));
  return tokens;
}
inline std::vector<int> random_tokens(const Model& model, std::size_t count, unsigned seed) {
  return random_tokens(model.info().vocab_size, count, seed);
}

inline std::vector<float> copy(std::span<const float> x) { return {x.begin(), x.end()}; }

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
