// One model, eight threads: each makes, clones, runs, saves, restores and drops sessions as it pleases, scores,
// generates, cancels and is refused, and gets what it gets alone. Run under ThreadSanitizer too.
// MMREC_SOAK_SECONDS=3600 goes on for so long and holds memory and descriptors to what they were after a tenth of it;
// MMREC_SOAK_DEVICE=cuda: on a GPU, where rounds may be refused for want of memory that others hold.
#include <iostream>

#include "mmrec/generator.h"
#include "mmrec/model.h"
#include "mmrec/scorer.h"
#include "mmrec/tokenizer.h"
#include "tests/engine/sessions.h"

namespace mmrec::test {
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
  Work(const std::filesystem::path& folder, const LoadOptions& options)
      : model_(Model::load(folder, options)), tokenizer_(Tokenizer::load(folder)) {
    Session session = begun(model_, some_tokens(30));
    expected_.state = session.save();
    session.prefill(some_tokens(7));
    const auto logits = session.logits();
    expected_.logits.assign(logits.begin(), logits.end());
    expected_.nll = score();
    expected_.text = generate_text();
  }

  bool round(std::size_t what) const {
    constexpr std::array kAll = {&Work::session, &Work::clone,   &Work::restored,
                                 &Work::scored,  &Work::refused, &Work::generated};
    return (this->*kAll[what])();
  }

 private:
  bool session() const {
    Session session = begun(model_, some_tokens(30), 1, {.threads = 2});
    return is_right(session);
  }
  bool clone() const {
    std::optional<Session> first(begun(model_, some_tokens(30)));
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
  /// Damaged states, tokens that are none, a prefill that is cancelled; and the session goes on.
  bool refused() const {
    Session session = model_.new_session();
    std::vector<std::byte> damaged = expected_.state;
    damaged[damaged.size() / 2] ^= std::byte{1};
    const bool are_refused =
        file_refusal([&] { session.restore(damaged); }) != "no error" && refusal([&] {
                                                                           session.prefill(std::vector<int>{1, -7});
                                                                         }) != "no error";
    session.prefill(some_tokens(300), {.on_progress = [](std::int64_t, std::int64_t) { return false; }});
    session.reset();
    session.prefill(some_tokens(30));
    return are_refused && is_right(session);
  }
  bool scored() const { return score() == expected_.nll; }
  bool generated() const { return generate_text() == expected_.text; }

  bool is_right(Session& session) const {
    session.prefill(some_tokens(7));
    const auto logits = session.logits();
    return std::equal(logits.begin(), logits.end(), expected_.logits.begin(), expected_.logits.end());
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

struct Held {
  long kilobytes = 0;  // resident
  long descriptors = 0;

  static Held now() {
    return {resident_kilobytes(), std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {})};
  }
};

TEST(Threads, OneModelServesEight) {
  using Clock = std::chrono::steady_clock;
  const char* wished = std::getenv("MMREC_SOAK_SECONDS");
  const char* device = std::getenv("MMREC_SOAK_DEVICE");
  const auto length = std::chrono::seconds(wished != nullptr ? std::atoi(wished) : 0);
  LoadOptions options{.device = device != nullptr && std::string_view(device) == "cuda" ? Device::kCuda : Device::kCpu,
                      .precision = Precision::kF32};
  const Work work(folder_of("tiny"), options);
  const Clock::time_point begin = Clock::now();
  std::atomic<int> wrong{0};
  std::atomic<long> rounds{0};
  std::atomic<long> without_memory{0};
  Held warm;
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        std::mt19937 random(static_cast<unsigned>(t));
        for (int round = 0; round < kRounds || Clock::now() - begin < length; ++round, ++rounds) {
          try {
            if (!work.round(random() % 6)) ++wrong;
          } catch (const std::bad_alloc&) {
            ++without_memory;
          } catch (const std::exception& error) {
            ++wrong;
            std::cerr << error.what() << "\n";
          }
        }
      });
    }
    if (length.count() > 0) {
      std::this_thread::sleep_for(length / 10);
      warm = Held::now();
    }
  }
  EXPECT_EQ(wrong, 0);
  if (options.device == Device::kCpu) {
    EXPECT_EQ(without_memory, 0);
  }
  if (length.count() == 0) return;
  const Held end = Held::now();
  std::cout << "  " << rounds << " rounds, " << without_memory << " without memory; " << warm.kilobytes
            << " KiB after a tenth of the time, " << end.kilobytes << " at the end; descriptors " << warm.descriptors
            << ", " << end.descriptors << "\n";
  EXPECT_LE(end.kilobytes, warm.kilobytes * 11 / 10);
  EXPECT_LE(end.descriptors, warm.descriptors);
}

}  // namespace
}  // namespace mmrec::test
