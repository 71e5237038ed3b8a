// One model, eight threads: each makes, clones, runs, saves, restores and drops sessions as it pleases, scores and
// generates, and gets what it gets alone. Run under ThreadSanitizer too.
#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "mmrec/generator.h"
#include "mmrec/model.h"
#include "mmrec/scorer.h"
#include "mmrec/tokenizer.h"

namespace mmrec {
namespace {

constexpr int kThreads = 8;
constexpr int kRounds = 25;

std::vector<int> some_tokens(int count) {
  std::vector<int> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back((5 + 7 * i + i * i) % 100);
  return tokens;
}

struct Expected {
  std::vector<float> logits;
  std::vector<std::byte> state;
  double nll = 0.0;
  std::string text;
};

/// What a thread does in a round, by its number; true if all is as expected.
class Work {
 public:
  explicit Work(const std::filesystem::path& folder)
      : model_(Model::load(folder)), tokenizer_(Tokenizer::load(folder)) {
    Session session = model_.new_session();
    session.prefill(some_tokens(30));
    expected_.state = session.save();
    session.prefill(some_tokens(7));
    const auto logits = session.logits();
    expected_.logits.assign(logits.begin(), logits.end());
    expected_.nll = score();
    expected_.text = generate_text();
  }

  bool session() const {
    Session session = model_.new_session(1, {.threads = 2});
    session.prefill(some_tokens(30));
    return is_right(session);
  }
  bool clone() const {
    std::optional<Session> first(model_.new_session());
    first->prefill(some_tokens(30));
    Session second = first->clone();
    first.reset();
    return is_right(second);
  }
  bool restored() const {
    Session session = model_.new_session();
    session.step(some_tokens(1));
    session.restore(expected_.state);
    return session.save() == expected_.state && is_right(session);
  }
  bool scored() const { return score() == expected_.nll; }
  bool generated() const { return generate_text() == expected_.text; }

 private:
  bool is_right(Session& session) const {
    session.prefill(some_tokens(7));
    const auto logits = session.logits();
    return std::vector<float>(logits.begin(), logits.end()) == expected_.logits;
  }
  double score() const {
    Scorer scorer(model_);
    double nll = 0.0;
    for (const DocumentScore& s : scorer.score(std::vector{some_tokens(20), some_tokens(33)})) nll += s.nll;
    return nll;
  }
  std::string generate_text() const {
    Generator generator(model_, tokenizer_, {.slots = 2});
    std::string text;
    for (int i = 0; i < 3; ++i) {
      GeneratorRequest request;
      request.prompt = some_tokens(4 + i);
      request.options.max_tokens = 5;
      request.options.sampler.seed = 1;
      request.on_finish = [&](GenerateResult result) { text += result.text + '\n'; };
      generator.submit(std::move(request));
    }
    generator.run();
    return text;
  }

  Model model_;
  Tokenizer tokenizer_;
  Expected expected_;
};

TEST(Threads, OneModelServesEight) {
  const Work work(std::filesystem::path(MMREC_FIXTURES) / "tiny");
  std::atomic<int> wrong{0};
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        std::mt19937 random(static_cast<unsigned>(t));
        for (int round = 0; round < kRounds; ++round) {
          bool right = false;
          switch (random() % 5) {
            case 0:
              right = work.session();
              break;
            case 1:
              right = work.clone();
              break;
            case 2:
              right = work.restored();
              break;
            case 3:
              right = work.scored();
              break;
            default:
              right = work.generated();
          }
          if (!right) ++wrong;
        }
      });
    }
  }
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace mmrec
