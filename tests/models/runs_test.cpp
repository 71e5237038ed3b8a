// Calls of many runs on a processor, of any lengths at any positions: logits, log-probs and state of each sequence are
// to the bit those of its run alone, for any number of threads.

#include "tests/models/lockstep.h"
#include "tests/models/small_models.h"
#include "tests/ops/testing.h"

namespace mmrec::models {
namespace {

struct RunsModel {
  const char* name;
  std::int64_t segment = 24;
  std::int64_t slots = 3;
  bool carry = true;
  bool dpg = false;
  PrefillMode prefill = PrefillMode::kAuto;
  const char* architecture = "mmrec";
  VariantOptions variant = {};
  bool scores = true;  // mmrec-jax scores token by token what is else one call
};
std::ostream& operator<<(std::ostream& os, const RunsModel& model) { return os << model.name; }

class RunsTest : public testing::TestWithParam<RunsModel> {
 protected:
  void SetUp() override {
    const RunsModel& model = GetParam();
    Config config = small_config();
    config.memory_segment = model.segment;
    config.memory_slots = model.slots;
    config.carry_state = model.carry;
    config.use_dpg = model.dpg;
    executor_ = load_small_model(model.architecture, config, kernels::DType::kBF16, model.variant)->on_cpu();
  }

  /// A run, what comes before it, and what it comes to.
  struct Sequence {
    std::vector<int> before, tokens;
    std::vector<float> logprobs, logits;
    HostState state;
  };
  std::vector<Sequence> random_sequences(const std::vector<std::pair<int, int>>& before_and_rows) const {
    std::mt19937 engine(11);
    const auto draw = [&](int count) {
      std::vector<int> tokens(static_cast<std::size_t>(count));
      for (int& t : tokens) t = static_cast<int>(engine() % static_cast<unsigned>(kSmallVocab));
      return tokens;
    };
    std::vector<Sequence> all;
    all.reserve(before_and_rows.size());
    for (const auto& [before, rows] : before_and_rows) {
      all.push_back({.before = draw(before), .tokens = draw(rows), .logprobs = {}, .logits = {}, .state = {}});
    }
    return all;
  }

  /// The sequences' runs in one call.
  void run(std::span<Sequence> sequences, int threads) {
    const ExecutionOptions options{.threads = threads, .prefill = GetParam().prefill};
    const Slots slots(executor_, static_cast<int>(sequences.size()), options);
    std::vector<int> tokens;
    std::vector<models::Run> runs;
    for (std::size_t i = 0; i < sequences.size(); ++i) {
      const Sequence& s = sequences[i];
      const Slot slot = slots[static_cast<int>(i)];
      if (!s.before.empty()) {
        const models::Run before{slot, 0, 0, std::ssize(s.before)};
        executor_->run({.tokens = s.before, .runs = {&before, 1}}, options);
      }
      runs.push_back({slot, std::ssize(s.before), std::ssize(tokens), std::ssize(s.tokens)});
      tokens.insert(tokens.end(), s.tokens.begin(), s.tokens.end());
    }
    std::vector<float> logprobs(GetParam().scores ? tokens.size() : 0);
    executor_->run({.tokens = tokens, .runs = runs, .logprobs = logprobs}, options);
    for (std::size_t i = 0; i < sequences.size(); ++i) {
      Sequence& s = sequences[i];
      if (GetParam().scores) {
        const auto first = logprobs.begin() + runs[i].first_row;
        s.logprobs.assign(first, first + runs[i].rows);
      }
      s.logits = logits_of(*executor_, runs[i].slot);
      s.state = executor_->save(runs[i].slot, 1, runs[i].position + runs[i].rows);
    }
  }

  void expect_runs_as_alone(const std::vector<std::pair<int, int>>& before_and_rows) {
    std::vector<Sequence> alone = random_sequences(before_and_rows);
    for (Sequence& s : alone) run({&s, 1}, 1);
    const std::vector<int> counts = kernels::test::few_cases() ? std::vector{5} : std::vector{1, 2, 5};
    for (const int threads : counts) {
      std::vector<Sequence> together = random_sequences(before_and_rows);
      run(together, threads);
      for (std::size_t i = 0; i < alone.size(); ++i) {
        SCOPED_TRACE(testing::Message() << "run " << i << ": " << alone[i].tokens.size() << " tokens from "
                                        << alone[i].before.size() << ", " << threads << " threads");
        EXPECT_EQ(together[i].logprobs, alone[i].logprobs);
        EXPECT_EQ(together[i].logits, alone[i].logits);
        EXPECT_EQ(together[i].state.parts, alone[i].state.parts);
      }
    }
  }

  std::shared_ptr<Executor> executor_;
};

TEST_P(RunsTest, OfAnyLengthsFromTheStart) {
  std::vector<std::pair<int, int>> runs;
  for (const int rows : {61, 60, 60, 60, 59, 33, 47, 3, 1, 24, 25, 90, 90, 8, 2, 71, 31}) runs.emplace_back(0, rows);
  expect_runs_as_alone(runs);
}

TEST_P(RunsTest, AtAnyPositions) {
  expect_runs_as_alone({{0, 40}, {5, 40}, {24, 40}, {70, 40}, {71, 300}, {0, 300}, {100, 129}, {48, 1}, {47, 1}});
}

TEST_P(RunsTest, ManyOfAFewTokens) {
  std::vector<std::pair<int, int>> runs;
  runs.reserve(140);
  for (int i = 0; i < 140; ++i) runs.emplace_back(i % 3, 1 + i % 4);
  expect_runs_as_alone(runs);
}

TEST_P(RunsTest, ManyOfOneToken) { expect_runs_as_alone(std::vector<std::pair<int, int>>(140, {3, 1})); }

TEST_P(RunsTest, WholeTiles) { expect_runs_as_alone({{0, 256}, {0, 128}, {0, 384}, {0, 128}, {128, 128}, {0, 127}}); }

// A document in pieces: what is scored, and the state afterwards, are those of one call.
TEST_P(RunsTest, PiecesGoOnAsOneRun) {
  if (!GetParam().scores) GTEST_SKIP() << "a call is what it is";
  Sequence whole = random_sequences({{0, 1500}}).front();
  run({&whole, 1}, 2);
  std::mt19937 rng(3);
  for (int repeat = 0; repeat < (kernels::test::few_cases() ? 1 : 4); ++repeat) {
    const ExecutionOptions options{.threads = 2, .prefill = GetParam().prefill};
    const Slots slots(executor_, 1, options);
    std::vector<float> logprobs = {0.0F};
    for (std::int64_t at = 0, left = 1500; left > 0;) {
      constexpr std::int64_t kAnyRows = 1 << 30;  // the document's end is not known
      std::int64_t rows = executor_->piece(at, kAnyRows, 300 + rng() % 300);
      const bool is_last = rows >= left;
      rows = std::min(rows, left);
      const auto tokens = std::span(whole.tokens).subspan(static_cast<std::size_t>(at));
      const std::size_t count = static_cast<std::size_t>(rows) + (is_last ? 0 : 1);
      std::vector<float> found(count, 1.0F);
      const models::Run piece{slots[0], at, 0, rows};
      executor_->run({.tokens = tokens.first(count), .runs = {&piece, 1}, .logprobs = found, .is_piece = true},
                     options);
      EXPECT_EQ(found.front(), 0.0F);
      logprobs.insert(logprobs.end(), found.begin() + 1, found.end());
      at += rows, left -= rows;
    }
    EXPECT_EQ(logprobs, whole.logprobs);
    EXPECT_EQ(executor_->save(slots[0], 1, 1500).parts, whole.state.parts);
  }
}

// The second executor has run nothing yet, so its buffers are small when it loads the state.
TEST(States, OfMoreSequencesThanAChunkHasRowsAreLoaded) {
  constexpr int kSequences = 700, kSegment = 4;
  Config config = small_config();
  config.memory_segment = kSegment;
  const auto executor = [&] { return load_small_model(Config::kModelType, config, kernels::DType::kF32)->on_cpu(); };
  const auto token = [](int s, int t) { return (s * 5 + t * 3) % kSmallVocab; };
  Lockstep all(executor(), kSmallVocab, kSequences);
  std::vector<int> tokens;
  for (int s = 0; s < kSequences; ++s) {
    for (int t = 0; t <= kSegment; ++t) tokens.push_back(token(s, t));
  }
  all.prefill(tokens);
  Lockstep loaded(executor(), kSmallVocab, kSequences);
  loaded.set_state(all.state());
  tokens.clear();
  for (int s = 0; s < kSequences; ++s) tokens.push_back(token(s, kSegment + 1));
  const std::span<const float> want = all.step(tokens), got = loaded.step(tokens);
  EXPECT_TRUE(std::equal(got.begin(), got.end(), want.begin(), want.end()));
}

INSTANTIATE_TEST_SUITE_P(
    Models, RunsTest,
    testing::Values(
        RunsModel{.name = "segments", .segment = 24}, RunsModel{.name = "one_slot", .segment = 24, .slots = 1},
        RunsModel{.name = "restarts", .segment = 24, .carry = false},
        RunsModel{.name = "dpg", .segment = 50, .dpg = true}, RunsModel{.name = "tiles", .segment = 256},
        RunsModel{.name = "sweeps", .segment = 24, .prefill = PrefillMode::kSweeps},
        RunsModel{.name = "two_stacks", .architecture = "mmrec100m"},
        RunsModel{.name = "two_stacks_by_sweeps", .prefill = PrefillMode::kSweeps, .architecture = "mmrec100m"},
        RunsModel{.name = "jax", .architecture = "mmrec-jax", .scores = false},
        RunsModel{
            .name = "jax_without_bank", .architecture = "mmrec-jax", .variant = {.bank = false}, .scores = false}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace mmrec::models
