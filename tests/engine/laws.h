// The laws that every session obeys, on real model folders:
//  1. how tokens are split into calls changes nothing: to the bit where docs/numerics.md says so, within a bound
//  elsewhere
//  2. save + restore + continue is the uninterrupted run, to the bit; a clone diverges alone; sessions do not meet
//  3. score is the log-softmax of the step logits
//  4. threads and batch change no bit
//  5. a call that is ended early leaves the state of the tokens it has consumed, and a watched one what an unwatched
//  one does
// A backend's test instantiates Laws with its models.
#pragma once

#include "mmrec/model.h"
#include "tests/engine/sessions.h"
#include "tests/support/compare.h"
#include "tests/support/host_threads.h"

namespace mmrec::test {

/// A model and what is promised of it. Bounds are multiples of the largest |logit|, or of 1 where that is smaller.
struct LawsCase {
  const char* folder;
  Device device = Device::kCpu;
  Precision precision = Precision::kAuto;
  std::vector<std::size_t> chunks_equal_to_steps = {1, 2, 7, 64, 100};  // tokens per call that change no bit
  float split_bound = 2e-5F;                                            // between any two splits
  float sweep_bound = 5e-5F;                                            // between sweeps and steps
  float sweep_tolerance = 1e-6F;
  std::size_t shorten = 1;              // divides the lengths, where time is dear
  std::string (*unusable)() = nullptr;  // why it cannot run here; "" if it can
  VariantOptions variant = {};
  bool batch_invariant = false;
  std::size_t least_batch = 1;  // from so many sequences on, up to 8, their number changes no bit

  friend void PrintTo(const LawsCase& c, std::ostream* out) { *out << c.folder; }
};

/// "oracle/tiles" as a test's name.
inline std::string laws_name(const testing::TestParamInfo<LawsCase>& info) {
  std::string name = info.param.folder;
  if (info.param.variant.calls == Calls::kStepwise) name += "_stepwise";
  if (info.param.variant.bank == false) name += "_nobank";
  if (info.param.batch_invariant) name += "_invariant";
  std::replace_if(
      name.begin(), name.end(), [](char c) { return c == '/' || c == '-'; }, '_');
  return name;
}

inline void expect_same_bits(std::span<const float> a, std::span<const float> b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size_bytes()), 0) << what;
}

/// Prefills in calls that end at the given positions.
inline void prefill_to(Session& session, const std::vector<int>& tokens, const std::vector<std::size_t>& ends) {
  std::size_t begin = 0;
  for (const std::size_t end : ends) {
    session.prefill(std::span(tokens).subspan(begin, end - begin));
    begin = end;
  }
}

inline std::vector<std::size_t> every(std::size_t chunk, std::size_t total) {
  std::vector<std::size_t> ends;
  for (std::size_t end = chunk; end < total; end += chunk) ends.push_back(end);
  ends.push_back(total);
  return ends;
}

/// The largest |logit|, at least 1.
inline double scale_of(std::span<const float> logits) { return largest_of(logits, 1.0); }

class Laws : public testing::TestWithParam<LawsCase> {
 protected:
  void SetUp() override {
    const std::string reason = GetParam().unusable == nullptr ? "" : GetParam().unusable();
    if (!reason.empty()) GTEST_SKIP() << reason;
  }
  static Model load() {
    const LawsCase& c = GetParam();
    return Model::load(
        folder_of(c.folder),
        {.device = c.device, .precision = c.precision, .batch_invariant = c.batch_invariant, .variant = c.variant});
  }
  static SessionOptions options(PrefillMode mode, int threads = 1) {
    return {.threads = threads, .prefill = mode, .sweep_tolerance = GetParam().sweep_tolerance};
  }
  static std::size_t length(std::size_t tokens) { return std::max<std::size_t>(tokens / GetParam().shorten, 1); }
};

TEST_P(Laws, SmallSplitsEqualStepsToTheBit) {
  const Model model = load();
  const auto tokens = random_tokens(model, length(150), 1);
  Session stepped = model.new_session(1, options(PrefillMode::kSteps));
  for (const int token : tokens) stepped.step(std::span(&token, 1));
  for (const std::size_t chunk : GetParam().chunks_equal_to_steps) {
    Session session = model.new_session(1, options(PrefillMode::kSteps));
    prefill_to(session, tokens, every(chunk, tokens.size()));
    expect_same_bits(session.logits(), stepped.logits(), "chunks of " + std::to_string(chunk));
    EXPECT_EQ(session.save(), stepped.save()) << "state, chunks of " << chunk;
  }
}

TEST_P(Laws, EverySplitAgreesWithinTheBound) {
  const Model model = load();
  const auto tokens = random_tokens(model, length(700), 2);
  Session stepped = model.new_session(1, options(PrefillMode::kSteps));
  for (const int token : tokens) stepped.step(std::span(&token, 1));
  const double scale = scale_of(stepped.logits());
  for (const PrefillMode mode : {PrefillMode::kSteps, PrefillMode::kSweeps, PrefillMode::kAuto}) {
    for (const std::size_t chunk : {std::size_t{1}, std::size_t{7}, std::size_t{64}, std::size_t{130}, tokens.size()}) {
      // Single tokens are never swept, and chunks beyond the end are the whole.
      if ((chunk == 1 && mode != PrefillMode::kSteps) || chunk > tokens.size()) continue;
      Session session = model.new_session(1, options(mode));
      prefill_to(session, tokens, every(chunk, tokens.size()));
      const bool sweeps = session.prefill_stats().windows > 0;
      EXPECT_LE(largest_difference(session.logits(), stepped.logits()),
                scale * (sweeps ? GetParam().sweep_bound : GetParam().split_bound))
          << "mode " << static_cast<int>(mode) << ", chunks of " << chunk;
    }
  }
}

TEST_P(Laws, SaveRestoreContinueIsTheUninterruptedRun) {
  const Model model = load();
  const auto tokens = random_tokens(model, length(90), 4);
  const std::size_t cut = tokens.size() * 5 / 9;
  for (const PrefillMode mode : {PrefillMode::kSteps, PrefillMode::kSweeps}) {
    Session session = begun(model, std::span(tokens).first(cut), 1, options(mode));
    const auto state = session.save();
    const auto logits = copy(session.logits());
    session.prefill(std::span(tokens).subspan(cut));
    const auto continued = copy(session.logits());

    Session restored = begun(model, std::span(tokens).first(3), 1, options(mode));
    restored.restore(state);
    EXPECT_EQ(restored.position(), static_cast<std::int64_t>(cut));
    expect_same_bits(restored.logits(), logits, "restored logits");
    restored.prefill(std::span(tokens).subspan(cut));
    expect_same_bits(restored.logits(), continued, "continued logits");
    EXPECT_EQ(restored.save(), session.save());
  }
}

TEST_P(Laws, CloneDivergesAlone) {
  const Model model = load();
  const auto tokens = random_tokens(model, length(60), 5);
  const std::size_t cut = tokens.size() * 2 / 3;
  Session session = begun(model, std::span(tokens).first(cut), 1, options(PrefillMode::kSteps));
  const auto before = session.save();
  Session clone = session.clone();
  EXPECT_EQ(clone.save(), before);
  clone.prefill(std::span(tokens).subspan(cut));
  EXPECT_NE(clone.save(), before);
  EXPECT_EQ(session.save(), before);
  session.prefill(std::span(tokens).subspan(cut));
  EXPECT_EQ(session.save(), clone.save());
}

TEST_P(Laws, ResetIsANewSession) {
  const Model model = load();
  const auto tokens = random_tokens(model, length(45), 6);
  Session fresh = begun(model, tokens, 1, options(PrefillMode::kSteps));
  const auto expected = copy(fresh.logits());
  Session used = begun(model, random_tokens(model, length(77), 7), 1, options(PrefillMode::kSteps));
  used.reset();
  EXPECT_EQ(used.position(), 0);
  EXPECT_TRUE(used.logits().empty());
  used.prefill(tokens);
  expect_same_bits(used.logits(), expected, "after reset");
}

TEST_P(Laws, SessionsInTwoThreadsDoNotMeet) {
  const Model model = load();
  const auto first = random_tokens(model, length(200), 8);
  const auto second = random_tokens(model, length(200), 9);
  const auto run = [&](const std::vector<int>& tokens, std::vector<float>& out) {
    Session session = model.new_session(1, options(PrefillMode::kSteps, 2));
    const std::size_t prompt = tokens.size() * 3 / 4;
    session.prefill(std::span(tokens).first(prompt));
    for (std::size_t i = prompt; i < tokens.size(); ++i) session.step(std::span(&tokens[i], 1));
    out = copy(session.logits());
  };
  std::vector<float> alone_first, alone_second, together_first, together_second;
  run(first, alone_first);
  run(second, alone_second);
  run_together({[&] { run(first, together_first); }, [&] { run(second, together_second); }});
  expect_same_bits(together_first, alone_first, "first");
  expect_same_bits(together_second, alone_second, "second");
}

TEST_P(Laws, ScoreIsTheLogSoftmaxOfStepLogits) {
  const Model model = load();
  const auto tokens = random_tokens(model, length(300), 10);
  const std::size_t first = tokens.size() * 111 / 300;
  double scale = 1.0;
  Session stepped = model.new_session(1, options(PrefillMode::kSteps));
  std::vector<float> expected{0.0F};
  for (std::size_t t = 0; t + 1 < tokens.size(); ++t) {
    stepped.step(std::span(&tokens[t], 1));
    const auto logits = stepped.logits();
    scale = std::max(scale, scale_of(logits));
    expected.push_back(static_cast<float>(logprob_under(logits, tokens[t + 1])));
  }
  for (const PrefillMode mode : {PrefillMode::kSteps, PrefillMode::kSweeps}) {
    Session session = model.new_session(1, options(mode));
    std::vector<float> got = logprobs_of(session, std::span(tokens).first(first));
    const auto rest = logprobs_of(session, std::span(tokens).subspan(first));
    got.insert(got.end(), rest.begin(), rest.end());
    EXPECT_LE(largest_difference(got, expected), scale * GetParam().sweep_bound);
  }
}

TEST_P(Laws, ThreadsChangeNoBit) {
  const Model model = load();
  const auto tokens = random_tokens(model, length(400), 11);
  for (const PrefillMode mode : {PrefillMode::kSteps, PrefillMode::kSweeps, PrefillMode::kAuto}) {
    Session one = begun(model, tokens, 1, options(mode, 1));
    const auto state = one.save();
    const auto logprobs = logprobs_of(one, tokens);
    for (const int threads : {2, 5}) {
      Session many = begun(model, tokens, 1, options(mode, threads));
      EXPECT_EQ(many.save(), state) << threads << " threads";
      expect_same_bits(logprobs_of(many, tokens), logprobs, std::to_string(threads) + " threads, score");
    }
  }
}

TEST_P(Laws, BatchChangesNoBit) {
  const Model model = load();
  constexpr std::size_t kBatch = 3;
  const std::size_t prompt_tokens = length(290);
  constexpr std::size_t kSteps = 5;
  std::vector<std::vector<int>> rows;
  for (unsigned b = 0; b < kBatch; ++b) rows.push_back(random_tokens(model, prompt_tokens + kSteps, 20 + b));
  const auto vocab = static_cast<std::size_t>(model.info().vocab_size);
  for (const PrefillMode mode : {PrefillMode::kSteps, PrefillMode::kSweeps}) {
    Session batched = model.new_session(kBatch, options(mode, 2));
    std::vector<int> prompt;
    for (const auto& row : rows) prompt.insert(prompt.end(), row.begin(), row.begin() + prompt_tokens);
    batched.prefill(prompt);
    for (std::size_t s = 0; s < kSteps; ++s) {
      std::vector<int> next;
      next.reserve(kBatch);
      for (const auto& row : rows) next.push_back(row[prompt_tokens + s]);
      batched.step(next);
    }
    for (std::size_t b = 0; b < kBatch; ++b) {
      const std::size_t copies = GetParam().least_batch;
      std::vector<int> copied;
      for (std::size_t i = 0; i < copies; ++i)
        copied.insert(copied.end(), rows[b].begin(), rows[b].begin() + prompt_tokens);
      Session few = begun(model, copied, static_cast<int>(copies), options(mode));
      for (std::size_t s = 0; s < kSteps; ++s) few.step(std::vector(copies, rows[b][prompt_tokens + s]));
      expect_same_bits(batched.logits().subspan(b * vocab, vocab), few.logits().first(vocab),
                       "sequence " + std::to_string(b));
    }
  }
}

TEST_P(Laws, ACallThatIsEndedStandsWhereItHasCome) {
  const Model model = load();
  // Several chunks: of up to 256 tokens on the CPU, of 4,096 steps or sweeps of 65,536 tokens on a GPU. So many random
  // tokens are for trained weights alone.
  const bool is_long = GetParam().device == Device::kCuda;
  if (is_long && GetParam().folder != std::string("mmrec-12m"))
    GTEST_SKIP() << "one chunk takes all that keeps its numbers small";
  for (const PrefillMode mode : {PrefillMode::kSteps, PrefillMode::kSweeps}) {
    const std::size_t total = !is_long ? length(700) : mode == PrefillMode::kSteps ? 13000 : 150000;
    const auto tokens = random_tokens(model, total, 30);
    for (const bool scores : {false, true}) {
      Session session = model.new_session(1, options(mode));
      std::int64_t asked = 0;
      const CallOptions call{.on_progress = [&](std::int64_t done, std::int64_t all) {
        EXPECT_EQ(all, static_cast<std::int64_t>(total));
        EXPECT_GT(done, asked);
        EXPECT_LT(done, all);
        asked = done;
        return false;
      }};
      std::vector<float> logprobs(total);
      if (scores) {
        session.score(tokens, logprobs, call);
      } else {
        session.prefill(tokens, call);
      }
      const auto done = static_cast<std::size_t>(session.position());
      ASSERT_GT(asked, 0);
      ASSERT_GE(session.position(), asked);
      ASSERT_LT(done, total);

      Session given_less = model.new_session(1, options(mode));
      std::vector<float> expected(done);
      if (scores) {
        given_less.score(std::span(tokens).first(done), expected);
        expect_same_bits(std::span(logprobs).first(done), expected, "log-probs");
      } else {
        given_less.prefill(std::span(tokens).first(done));
      }
      EXPECT_EQ(session.save(), given_less.save());

      // Going on gives what one call gives: a chunk ends where a call may be cut.
      session.prefill(std::span(tokens).subspan(done));
      Session whole = model.new_session(1, options(mode));
      whole.prefill(tokens, {.on_progress = [](std::int64_t, std::int64_t) { return true; }});
      EXPECT_EQ(session.save(), whole.save());
    }
  }
}

}  // namespace mmrec::test
