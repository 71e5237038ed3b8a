// The laws that every session obeys, on real model folders:
//  1. how tokens are split into calls changes nothing: to the bit where no whole row tile is cut, within a bound
//  elsewhere
//  2. save + restore + continue is the uninterrupted run, to the bit; a clone diverges alone; sessions do not meet
//  3. score is the log-softmax of the step logits
//  4. threads and batch change no bit
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "mmrec/model.h"

namespace mmrec {
namespace {

constexpr float kSplitBound = 2e-5F;  // between splits that cut a row tile and ones that do not
constexpr float kSweepBound = 5e-5F;  // between sweeps (tolerance 1e-6) and steps

Model load(const std::string& name) {
  const std::filesystem::path root =
      name.starts_with("mmrec-") ? std::filesystem::path(MMREC_WEIGHTS) : std::filesystem::path(MMREC_FIXTURES);
  return Model::load(root / name);
}

SessionOptions options(PrefillMode mode, int threads = 1) {
  SessionOptions o;
  o.prefill = mode;
  o.threads = threads;
  o.sweep_tolerance = 1e-6F;
  return o;
}

std::vector<int> random_tokens(const Model& model, std::size_t count, unsigned seed) {
  std::mt19937 rng(seed);
  std::vector<int> tokens(count);
  for (int& t : tokens) t = static_cast<int>(rng() % static_cast<unsigned>(model.info().vocab_size));
  return tokens;
}

std::vector<float> copy(std::span<const float> x) { return {x.begin(), x.end()}; }

void expect_same_bits(std::span<const float> a, std::span<const float> b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size_bytes()), 0) << what;
}

float largest_difference(std::span<const float> a, std::span<const float> b) {
  float worst = a.size() == b.size() ? 0.0F : INFINITY;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const float d = std::abs(a[i] - b[i]);
    worst = d <= worst ? worst : d;  // keeps NaN
  }
  return worst;
}

/// Prefills in calls that end at the given positions.
void prefill_to(Session& session, const std::vector<int>& tokens, const std::vector<std::size_t>& ends) {
  std::size_t begin = 0;
  for (const std::size_t end : ends) {
    session.prefill(std::span(tokens).subspan(begin, end - begin));
    begin = end;
  }
}

std::vector<std::size_t> every(std::size_t chunk, std::size_t total) {
  std::vector<std::size_t> ends;
  for (std::size_t end = chunk; end < total; end += chunk) ends.push_back(end);
  ends.push_back(total);
  return ends;
}

// The smallest memories, a state that restarts, whole tiles and half-precision weights.
class Laws : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Models, Laws,
                         testing::Values("oracle/tiles", "oracle/slots", "oracle/restart", "oracle/dpg_bf16",
                                         "upstream/hem", "mmrec-12m"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace_if(
                               name.begin(), name.end(), [](char c) { return c == '/' || c == '-'; }, '_');
                           return name;
                         });

TEST_P(Laws, SplitsThatFillNoTileEqualStepsToTheBit) {
  const Model model = load(GetParam());
  const auto tokens = random_tokens(model, 150, 1);
  Session stepped = model.new_session(1, options(PrefillMode::kSteps));
  for (const int token : tokens) stepped.step(std::span(&token, 1));
  for (const std::size_t chunk : {1U, 2U, 7U, 64U, 100U}) {
    Session session = model.new_session(1, options(PrefillMode::kSteps));
    prefill_to(session, tokens, every(chunk, tokens.size()));
    expect_same_bits(session.logits(), stepped.logits(), "chunks of " + std::to_string(chunk));
    EXPECT_EQ(session.save(), stepped.save()) << "state, chunks of " << chunk;
  }
}

TEST_P(Laws, EverySplitAgreesWithinTheBound) {
  const Model model = load(GetParam());
  const auto tokens = random_tokens(model, 700, 2);
  Session stepped = model.new_session(1, options(PrefillMode::kSteps));
  for (const int token : tokens) stepped.step(std::span(&token, 1));
  float scale = 1.0F;
  for (const float x : stepped.logits()) scale = std::max(scale, std::abs(x));
  for (const PrefillMode mode : {PrefillMode::kSteps, PrefillMode::kSweeps, PrefillMode::kAuto}) {
    for (const std::size_t chunk : {1U, 7U, 64U, 130U, 700U}) {
      Session session = model.new_session(1, options(mode));
      prefill_to(session, tokens, every(chunk, tokens.size()));
      EXPECT_LE(largest_difference(session.logits(), stepped.logits()),
                scale * (mode == PrefillMode::kSweeps ? kSweepBound : kSplitBound))
          << "mode " << static_cast<int>(mode) << ", chunks of " << chunk;
    }
  }
}

TEST(SplitLaw, CutsAtTileAndWindowBoundariesChangeNoBit) {
  const Model model = load("oracle/tiles");  // segments of 300: tiles at 0, 128, 256 | 300, 428, 556 | 600
  const auto tokens = random_tokens(model, 700, 3);
  const std::vector<std::pair<PrefillMode, std::vector<std::vector<std::size_t>>>> cases = {
      {PrefillMode::kSteps, {{128, 700}, {256, 300, 428, 700}, {128, 256, 300, 428, 556, 600, 700}}},
      {PrefillMode::kSweeps, {{256, 700}, {300, 600, 700}, {256, 300, 556, 600, 700}}}};
  for (const auto& [mode, splits] : cases) {
    Session whole = model.new_session(1, options(mode));
    whole.prefill(tokens);
    for (const auto& ends : splits) {
      Session session = model.new_session(1, options(mode));
      prefill_to(session, tokens, ends);
      EXPECT_EQ(session.save(), whole.save()) << "first cut at " << ends[0];
    }
  }
}

TEST_P(Laws, SaveRestoreContinueIsTheUninterruptedRun) {
  const Model model = load(GetParam());
  const auto tokens = random_tokens(model, 90, 4);
  for (const PrefillMode mode : {PrefillMode::kSteps, PrefillMode::kSweeps}) {
    Session session = model.new_session(1, options(mode));
    session.prefill(std::span(tokens).first(50));
    const auto state = session.save();
    const auto logits = copy(session.logits());
    const auto continued = copy(session.prefill(std::span(tokens).subspan(50)));

    Session restored = model.new_session(1, options(mode));
    restored.prefill(std::span(tokens).first(3));
    restored.restore(state);
    EXPECT_EQ(restored.position(), 50);
    expect_same_bits(restored.logits(), logits, "restored logits");
    expect_same_bits(restored.prefill(std::span(tokens).subspan(50)), continued, "continued logits");
    EXPECT_EQ(restored.save(), session.save());
  }
}

TEST_P(Laws, CloneDivergesAlone) {
  const Model model = load(GetParam());
  const auto tokens = random_tokens(model, 60, 5);
  Session session = model.new_session(1, options(PrefillMode::kSteps));
  session.prefill(std::span(tokens).first(40));
  const auto before = session.save();
  Session clone = session.clone();
  EXPECT_EQ(clone.save(), before);
  clone.prefill(std::span(tokens).subspan(40));
  EXPECT_NE(clone.save(), before);
  EXPECT_EQ(session.save(), before);
  session.prefill(std::span(tokens).subspan(40));
  EXPECT_EQ(session.save(), clone.save());
}

TEST_P(Laws, ResetIsANewSession) {
  const Model model = load(GetParam());
  const auto tokens = random_tokens(model, 45, 6);
  Session fresh = model.new_session(1, options(PrefillMode::kSteps));
  const auto expected = copy(fresh.prefill(tokens));
  Session used = model.new_session(1, options(PrefillMode::kSteps));
  used.prefill(random_tokens(model, 77, 7));
  used.reset();
  EXPECT_EQ(used.position(), 0);
  EXPECT_TRUE(used.logits().empty());
  expect_same_bits(used.prefill(tokens), expected, "after reset");
}

TEST_P(Laws, SessionsInTwoThreadsDoNotMeet) {
  const Model model = load(GetParam());
  const auto first = random_tokens(model, 200, 8);
  const auto second = random_tokens(model, 200, 9);
  const auto run = [&](const std::vector<int>& tokens, std::vector<float>& out) {
    Session session = model.new_session(1, options(PrefillMode::kSteps, 2));
    session.prefill(std::span(tokens).first(150));
    for (std::size_t i = 150; i < tokens.size(); ++i) session.step(std::span(&tokens[i], 1));
    out = copy(session.logits());
  };
  std::vector<float> alone_first, alone_second, together_first, together_second;
  run(first, alone_first);
  run(second, alone_second);
  std::thread a([&] { run(first, together_first); });
  std::thread b([&] { run(second, together_second); });
  a.join();
  b.join();
  expect_same_bits(together_first, alone_first, "first");
  expect_same_bits(together_second, alone_second, "second");
}

TEST_P(Laws, ScoreIsTheLogSoftmaxOfStepLogits) {
  const Model model = load(GetParam());
  const auto tokens = random_tokens(model, 300, 10);
  Session stepped = model.new_session(1, options(PrefillMode::kSteps));
  std::vector<float> expected{0.0F};
  for (std::size_t t = 0; t + 1 < tokens.size(); ++t) {
    const auto logits = stepped.step(std::span(&tokens[t], 1));
    const double top = *std::max_element(logits.begin(), logits.end());
    double sum = 0.0;
    for (const float x : logits) sum += std::exp(static_cast<double>(x) - top);
    expected.push_back(
        static_cast<float>(static_cast<double>(logits[static_cast<std::size_t>(tokens[t + 1])]) - top - std::log(sum)));
  }
  for (const PrefillMode mode : {PrefillMode::kSteps, PrefillMode::kSweeps}) {
    Session session = model.new_session(1, options(mode));
    std::vector<float> got = session.score(std::span(tokens).first(111));
    const auto rest = session.score(std::span(tokens).subspan(111));
    got.insert(got.end(), rest.begin(), rest.end());
    EXPECT_LE(largest_difference(got, expected), kSweepBound);
  }
}

TEST_P(Laws, ThreadsChangeNoBit) {
  const Model model = load(GetParam());
  const auto tokens = random_tokens(model, 400, 11);
  for (const PrefillMode mode : {PrefillMode::kSteps, PrefillMode::kSweeps, PrefillMode::kAuto}) {
    Session one = model.new_session(1, options(mode, 1));
    one.prefill(tokens);
    const auto state = one.save();
    const auto logprobs = one.score(tokens);
    for (const int threads : {2, 5}) {
      Session many = model.new_session(1, options(mode, threads));
      many.prefill(tokens);
      EXPECT_EQ(many.save(), state) << threads << " threads";
      expect_same_bits(many.score(tokens), logprobs, std::to_string(threads) + " threads, score");
    }
  }
}

TEST_P(Laws, BatchChangesNoBit) {
  const Model model = load(GetParam());
  constexpr std::size_t kBatch = 3;
  constexpr std::size_t kPrompt = 290;
  constexpr std::size_t kSteps = 5;
  std::vector<std::vector<int>> rows;
  for (unsigned b = 0; b < kBatch; ++b) rows.push_back(random_tokens(model, kPrompt + kSteps, 20 + b));
  const auto vocab = static_cast<std::size_t>(model.info().vocab_size);
  for (const PrefillMode mode : {PrefillMode::kSteps, PrefillMode::kSweeps}) {
    Session batched = model.new_session(kBatch, options(mode, 2));
    std::vector<int> prompt;
    for (const auto& row : rows) prompt.insert(prompt.end(), row.begin(), row.begin() + kPrompt);
    batched.prefill(prompt);
    for (std::size_t s = 0; s < kSteps; ++s) {
      std::vector<int> next;
      next.reserve(kBatch);
      for (const auto& row : rows) next.push_back(row[kPrompt + s]);
      batched.step(next);
    }
    for (std::size_t b = 0; b < kBatch; ++b) {
      Session single = model.new_session(1, options(mode));
      single.prefill(std::span(rows[b]).first(kPrompt));
      for (std::size_t s = 0; s < kSteps; ++s) single.step(std::span(&rows[b][kPrompt + s], 1));
      expect_same_bits(batched.logits().subspan(b * vocab, vocab), single.logits(), "sequence " + std::to_string(b));
    }
  }
}

}  // namespace
}  // namespace mmrec
