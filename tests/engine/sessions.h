// Models and sessions in one expression; and documents of random tokens, as streams too, and their scores compared.
#pragma once

#include <unistd.h>

#include "mmrec/model.h"
#include "mmrec/scorer.h"
#include "mmrec/session.h"
#include "tests/support/model_folder.h"

namespace mmrec::test {

inline Model on_cpu(const std::filesystem::path& folder) { return Model::load(folder, {.device = Device::kCpu}); }

inline std::vector<int> random_tokens(std::int64_t vocab, std::size_t count, std::mt19937& rng) {
  std::vector<int> tokens(count);
  for (int& t : tokens) t = static_cast<int>(rng() % static_cast<unsigned>(vocab));
  return tokens;
}
inline std::vector<int> random_tokens(std::int64_t vocab, std::size_t count, unsigned seed) {
  std::mt19937 rng(seed);
  return random_tokens(vocab, count, rng);
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

/// Memory of this process, in KiB.
inline long resident_kilobytes() {
  long pages = 0;
  std::ifstream status("/proc/self/statm");
  status >> pages >> pages;
  return pages * (::sysconf(_SC_PAGESIZE) / 1024);
}

inline std::vector<float> logprobs_of(Session& session, std::span<const int> tokens) {
  std::vector<float> logprobs(tokens.size());
  session.score(tokens, logprobs);
  return logprobs;
}

using Documents = std::vector<std::vector<int>>;

/// One after another, for Scorer::score_stream(). `given` counts them.
inline auto stream_of(const Documents& documents, std::size_t& given) {
  return [&](std::vector<int>& ids) {
    if (given == documents.size()) return false;
    ids = documents[given++];
    return true;
  };
}

inline void expect_begins(const std::vector<DocumentScore>& found, const std::vector<DocumentScore>& expected) {
  ASSERT_LE(found.size(), expected.size());
  for (std::size_t d = 0; d < found.size(); ++d) {
    EXPECT_EQ(found[d].logprobs, expected[d].logprobs) << "document " << d;
    EXPECT_EQ(found[d].nll, expected[d].nll) << "document " << d;
    EXPECT_EQ(found[d].complete, expected[d].complete) << "document " << d;
  }
}

}  // namespace mmrec::test
