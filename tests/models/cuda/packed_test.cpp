// Calls of many runs, of any lengths at any positions: logits, log-probs and state of each sequence against the same
// tokens of that sequence alone, one by one.

#include "tests/models/small_models.h"
#include "tests/ops/op_test.h"

namespace mmrec::models {
namespace {

struct PackedModel {
  const char* name;
  Precision precision;
  double bound;  // of the largest value
  std::int64_t slots = 3;
  bool carry = true;
  std::int64_t dim = 64;
  const char* architecture = "mmrec";
};

class PackedRunsTest : public testing::TestWithParam<PackedModel> {
 protected:
  void SetUp() override {
    if (const std::string reason = cuda_unusable_reason(); !reason.empty()) GTEST_SKIP() << reason;
    const PackedModel& model = GetParam();
    Config config = small_config(model.dim);
    config.memory_slots = model.slots;
    config.carry_state = model.carry;
    const auto stored = model.precision == Precision::kBF16 ? kernels::DType::kBF16 : kernels::DType::kF16;
    executor_ = load_small_model(model.architecture, config, stored)->on_cuda(model.precision, 0).executor;
  }
  /// What one sequence has come to.
  struct Sequence {
    std::vector<int> tokens;  // of all its life
    std::int64_t start = 0;   // of the run
    std::vector<float> logprobs;
    std::vector<float> logits;
    HostState state;
  };

  std::vector<Sequence> sequences(std::span<const std::pair<int, int>> starts_and_rows) const {
    std::vector<Sequence> all;
    std::mt19937 engine(11);
    for (const auto& [start, rows] : starts_and_rows) {
      Sequence s;
      s.start = start;
      for (int i = 0; i < start + rows; ++i) {
        s.tokens.push_back(static_cast<int>(engine() % static_cast<unsigned>(kSmallVocab)));
      }
      all.push_back(std::move(s));
    }
    return all;
  }
  /// Brings a sequence to where its run starts, token by token.
  void begin(Slot slot, const Sequence& s) {
    for (std::int64_t t = 0; t < s.start; ++t) step(slot, s, t);
  }
  void step(Slot slot, const Sequence& s, std::int64_t t) {
    const models::Run run = {slot, t, 0, 1};
    executor_->step(std::span(s.tokens).subspan(static_cast<std::size_t>(t), 1), std::span(&run, 1), {});
  }

  static constexpr PrefillMode kDefaultMode[] = {PrefillMode::kAuto};

  static double share(std::span<const float> got, std::span<const float> want) {
    return largest_share(got, want, 1e-3);
  }

  void expect_runs_as_steps(std::span<const std::pair<int, int>> starts_and_rows, std::span<const int> slot_of,
                            std::span<const PrefillMode> modes = kDefaultMode) {
    const auto count = static_cast<int>(starts_and_rows.size());
    std::vector<Sequence> all = sequences(starts_and_rows);
    const Slots alone(executor_, 1, {});
    const Slots begun(executor_, count, {});
    int number = 0;
    for (Sequence& s : all) {
      executor_->clear(alone.first(), 1);
      begin(alone.first(), s);
      executor_->copy(alone.first(), begun[number++], 1, s.start);
      for (auto t = s.start; t < std::ssize(s.tokens); ++t) {
        float logprob = 0.0F;
        if (t > 0) {
          const int token = s.tokens[static_cast<std::size_t>(t)];
          logprob = static_cast<float>(test::logprob_under(logits_of(*executor_, alone.first()), token));
        }
        s.logprobs.push_back(logprob);
        step(alone.first(), s, t);
      }
      s.logits = logits_of(*executor_, alone.first());
      s.state = executor_->save(alone.first(), 1, std::ssize(s.tokens));
    }

    const Slots slots(executor_, count, {});
    std::vector<std::pair<PrefillMode, bool>> cases;
    for (const PrefillMode mode : modes) cases.insert(cases.end(), {{mode, false}, {mode, true}});
    for (const auto& [mode, scores] : cases) {
      executor_->clear(slots.first(), count);
      std::vector<int> tokens;
      std::vector<models::Run> runs;
      for (int i = 0; i < count; ++i) {
        const Sequence& s = all[static_cast<std::size_t>(i)];
        const Slot slot = slots[slot_of[static_cast<std::size_t>(i)]];
        executor_->copy(begun[i], slot, 1, s.start);
        runs.push_back({slot, s.start, std::ssize(tokens), std::ssize(s.tokens) - s.start});
        tokens.insert(tokens.end(), s.tokens.begin() + s.start, s.tokens.end());
      }
      std::vector<float> logprobs(scores ? tokens.size() : 0);
      const Done done = executor_->run({.tokens = tokens, .runs = runs, .logprobs = logprobs}, {.prefill = mode});
      for (std::size_t i = 0; i < runs.size(); ++i) {
        SCOPED_TRACE(testing::Message() << "run " << i << ": " << runs[i].rows << " tokens from " << runs[i].position);
        const Sequence& s = all[i];
        EXPECT_EQ(done.rows[i], runs[i].rows);
        EXPECT_LE(share(logits_of(*executor_, runs[i].slot), s.logits), GetParam().bound);
        expect_near(executor_->save(runs[i].slot, 1, s.state.position), s.state, GetParam().bound, 1e-3);
        if (scores) {
          EXPECT_LE(share(std::span(logprobs).subspan(static_cast<std::size_t>(runs[i].first_row), s.logprobs.size()),
                          s.logprobs),
                    GetParam().bound);
        }
      }
    }
  }

  std::shared_ptr<Executor> executor_;
};

// Documents from their beginning, as scoring has them.
TEST_P(PackedRunsTest, DocumentsAreAsAlone) {
  const std::vector<std::pair<int, int>> documents = {{0, 9}, {0, 24}, {0, 1}, {0, 23}, {0, 25}, {0, 60}, {0, 2}};
  std::vector<int> slots(documents.size());
  std::iota(slots.begin(), slots.end(), 0);
  expect_runs_as_steps(documents, slots);
}

// The last round of the call is one token of each.
TEST_P(PackedRunsTest, RunsThatEndOneTokenIntoASegmentAreAsAlone) {
  const std::vector<std::pair<int, int>> documents(9, {0, 25});
  const std::vector<int> slots = {4, 3, 2, 1, 0, 5, 8, 7, 6};
  expect_runs_as_steps(documents, slots, std::array{PrefillMode::kSweeps, PrefillMode::kSteps});
}

TEST_P(PackedRunsTest, PiecesOfADocumentHaveItsBits) {
  if (kernels::test::kEmulated && GetParam().slots != 0) GTEST_SKIP() << "a chunk takes long";
  const std::int64_t all = 4'200;  // more than a chunk
  const std::vector<Sequence> one = sequences(std::vector<std::pair<int, int>>{{0, static_cast<int>(all)}});
  const std::vector<int>& tokens = one.front().tokens;
  const auto score = [&](bool in_pieces) {
    const Slots slots(executor_, 1, {});
    std::vector<float> logprobs = {0.0F};
    for (std::int64_t at = 0; at < all;) {
      const std::int64_t cut = in_pieces ? executor_->piece(at, std::int64_t{1} << 40, all - 50) : all;
      const std::int64_t rows = std::min(cut, all - at);
      const auto count = static_cast<std::size_t>(rows) + (at + rows < all ? 1 : 0);
      std::vector<float> found(count);
      const models::Run run = {slots[0], at, 0, rows};
      executor_->run({.tokens = std::span(tokens).subspan(static_cast<std::size_t>(at), count),
                      .runs = {&run, 1},
                      .logprobs = found,
                      .is_piece = in_pieces,
                      .wants_logits = false},
                     {});
      logprobs.insert(logprobs.end(), found.begin() + 1, found.end());
      at += rows;
    }
    return logprobs;
  };
  EXPECT_EQ(score(true), score(false));
}

// Sequences that have come to anywhere, before, at and after the ends of segments, in any slots; two are in lock-step.
TEST_P(PackedRunsTest, RunsFromAnyPositionInAnySlotAreAsAlone) {
  if (kernels::test::few_cases()) GTEST_SKIP() << "many launches";
  std::mt19937 engine(5);
  for (int round = 0; round < (kernels::test::kEmulated ? 1 : 4); ++round) {
    std::vector<std::pair<int, int>> runs = {
        {24, 20}, {23, 2}, {47, 30}, {47, 30}, {50, 10}, {5, 19}, {0, kernels::test::kEmulated ? 60 : 130}};
    for (int i = 0; i < 3; ++i) runs.emplace_back(engine() % 80, 1 + engine() % 50);
    std::shuffle(runs.begin(), runs.end(), engine);
    std::vector<int> slots(runs.size());
    std::iota(slots.begin(), slots.end(), 0);
    std::shuffle(slots.begin(), slots.end(), engine);
    expect_runs_as_steps(runs, slots);
  }
}

// One token of each of sequences that come and go, each where it stands, against each alone.
TEST_P(PackedRunsTest, SequencesThatComeAndGoStepAsAlone) {
  if (kernels::test::few_cases()) GTEST_SKIP() << "many launches";
  constexpr int kSlots = 12;
  const int rounds = kernels::test::kEmulated ? 8 : 90;
  struct Live {
    int slot = 0;
    std::size_t sequence = 0;
    std::int64_t position = 0;
  };
  std::mt19937 engine(3);
  std::vector<std::pair<int, int>> lives;
  for (int i = 0; i < 40; ++i)
    lives.emplace_back(1 + static_cast<int>(engine() % (kernels::test::kEmulated ? 30 : 70)),
                       1 + static_cast<int>(engine() % 60));
  const std::vector<Sequence> all = sequences(lives);
  const Slots slots(executor_, kSlots, {});
  const Slots alone(executor_, kSlots, {});
  std::vector<Live> live;
  std::size_t next = 0;
  for (int round = 0; round < rounds; ++round) {
    std::erase_if(live, [&](const Live& l) { return l.position == std::ssize(all[l.sequence].tokens); });
    for (int slot = 0; slot < kSlots && next < all.size(); ++slot) {
      const bool taken = std::any_of(live.begin(), live.end(), [&](const Live& l) { return l.slot == slot; });
      if (taken || engine() % 3 != 0) continue;
      const Sequence& s = all[next];
      executor_->clear(alone[slot], 1);
      begin(alone[slot], s);
      executor_->copy(alone[slot], slots[slot], 1, s.start);
      live.push_back({slot, next++, s.start});
    }
    std::vector<int> tokens;
    std::vector<models::Run> runs;
    for (Live& l : live) {
      const Sequence& s = all[l.sequence];
      tokens.push_back(s.tokens[static_cast<std::size_t>(l.position)]);
      runs.push_back({slots[l.slot], l.position, std::ssize(runs), 1});
      step(alone[l.slot], s, l.position);
      ++l.position;
    }
    if (runs.empty()) continue;
    executor_->step(tokens, runs, {});
    for (const Live& l : live) {
      ASSERT_LE(share(logits_of(*executor_, slots[l.slot]), logits_of(*executor_, alone[l.slot])), GetParam().bound)
          << "round " << round << ", sequence " << l.sequence << " at " << l.position;
    }
  }
  for (const Live& l : live) {
    expect_near(executor_->save(slots[l.slot], 1, l.position), executor_->save(alone[l.slot], 1, l.position),
                GetParam().bound, 1e-3);
  }
}

// step() replays what it has recorded, while positions move on, segments end and sequences begin to attend; run() never
// does.
TEST_P(PackedRunsTest, RecordedStepsHaveTheBitsOfOthers) {
  if (kernels::test::few_cases()) GTEST_SKIP() << "many launches";
  const std::vector<int> slot_of = {4, 0, 8, 2, 1, 9, 3, 6, 5, 7};
  const auto count = static_cast<int>(slot_of.size());
  std::vector<std::pair<int, int>> lives;
  for (int i = 0; i < count; ++i) lives.emplace_back(5 * i % 50, 26);
  const std::vector<Sequence> all = sequences(lives);
  const Slots recorded(executor_, count, {});
  const Slots other(executor_, count, {});
  for (int i = 0; i < count; ++i) {
    begin(recorded[slot_of[static_cast<std::size_t>(i)]], all[static_cast<std::size_t>(i)]);
    executor_->copy(recorded[slot_of[static_cast<std::size_t>(i)]], other[i], 1,
                    all[static_cast<std::size_t>(i)].start);
  }
  for (std::int64_t round = 0; round < 26; ++round) {
    std::vector<int> tokens;
    std::vector<models::Run> stepped, run;
    for (int i = 0; i < count; ++i) {
      const Sequence& s = all[static_cast<std::size_t>(i)];
      tokens.push_back(s.tokens[static_cast<std::size_t>(s.start + round)]);
      stepped.push_back({recorded[slot_of[static_cast<std::size_t>(i)]], s.start + round, i, 1});
      run.push_back({other[i], s.start + round, i, 1});
    }
    executor_->step(tokens, stepped, {});
    executor_->run({.tokens = tokens, .runs = run}, {});
    for (int i = 0; i < count; ++i) {
      ASSERT_EQ(logits_of(*executor_, stepped[static_cast<std::size_t>(i)].slot), logits_of(*executor_, other[i]))
          << round << ", " << i;
    }
  }
  for (int i = 0; i < count; ++i) {
    const std::int64_t position = all[static_cast<std::size_t>(i)].start + 26;
    const HostState got = executor_->save(recorded[slot_of[static_cast<std::size_t>(i)]], 1, position);
    const HostState want = executor_->save(other[i], 1, position);
    for (std::size_t p = 0; p < got.parts.size(); ++p) EXPECT_EQ(got.parts[p].values, want.parts[p].values) << p;
  }
}

std::vector<PackedModel> models() {
  if (kernels::test::few_cases()) return {{"Fp16", Precision::kF16, 0.02}};
  const PackedModel two_stacks = {"Fp16TwoStacks", Precision::kF16, 0.02, 0, true, 64, "mmrec100m"};
  if (kernels::test::kEmulated) {
    return {{"Fp32", Precision::kF32, 1e-4}, {"Fp16Restarting", Precision::kF16, 0.02, 3, false}, two_stacks};
  }
  return {{"Fp32", Precision::kF32, 1e-4},
          {"Fp32OneSlot", Precision::kF32, 1e-4, 1},
          {"Fp16", Precision::kF16, 0.02},
          {"Fp16Restarting", Precision::kF16, 0.02, 3, false},
          {"Fp16Wide", Precision::kF16, 0.02, 9, true, 640},
          {"Bf16", Precision::kBF16, 0.06},
          {"Fp32TwoStacks", Precision::kF32, 1e-4, 0, true, 64, "mmrec100m"},
          two_stacks,
          {"Bf16TwoStacks", Precision::kBF16, 0.06, 0, true, 128, "mmrec100m"}};
}

INSTANTIATE_TEST_SUITE_P(Models, PackedRunsTest, testing::ValuesIn(models()),
                         [](const testing::TestParamInfo<PackedModel>& info) { return info.param.name; });

}  // namespace
}  // namespace mmrec::models
