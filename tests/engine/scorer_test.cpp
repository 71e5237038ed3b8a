#include "mmrec/scorer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>

#include "tests/engine/toy_runner.h"

namespace mmrec {
namespace {

using test::toy_model;
using test::ToyLog;

std::vector<std::vector<int>> random_documents(const std::vector<std::size_t>& lengths, unsigned seed = 1) {
  std::mt19937 rng(seed);
  std::vector<std::vector<int>> documents;
  for (const std::size_t n : lengths) {
    std::vector<int>& d = documents.emplace_back(n);
    for (int& t : d) t = static_cast<int>(rng() % 11);
  }
  return documents;
}

ScorerOptions batch_of(int batch) {
  ScorerOptions o;
  o.batch = batch;
  return o;
}

TEST(Scorer, ScoresAreThoseOfEachDocumentAloneWhateverTheBatch) {
  const auto documents = random_documents({7, 0, 1, 2, 300, 290, 5, 40, 41, 299, 6000, 4097, 38, 7});
  const Model model = toy_model();
  for (const int batch : {1, 2, 3, 64}) {
    Scorer scorer(model, batch_of(batch));
    const std::vector<DocumentScore> scores = scorer.score(documents);
    ASSERT_EQ(scores.size(), documents.size());
    for (std::size_t d = 0; d < documents.size(); ++d) {
      EXPECT_TRUE(scores[d].complete);
      if (documents[d].size() < 2) {
        EXPECT_TRUE(scores[d].logprobs.empty());
        EXPECT_EQ(scores[d].nll, 0.0);
        continue;
      }
      std::vector<float> expected = model.new_session().score(documents[d]);
      expected.erase(expected.begin());
      EXPECT_EQ(scores[d].logprobs, expected) << "document " << d << " batch " << batch;
      double nll = 0.0;
      for (const float x : expected) nll -= static_cast<double>(x);
      EXPECT_EQ(scores[d].nll, nll);
    }
    EXPECT_GT(scorer.prefill_stats().layer_tokens, 0);
  }
}

TEST(Scorer, GroupsAreAlikeAndCallsBounded) {
  const auto log = std::make_shared<ToyLog>();
  const auto documents = random_documents({100, 99, 98, 97, 50, 49, 3, 2, 20000});
  Scorer scorer(toy_model(log), batch_of(4));
  scorer.score(documents);
  EXPECT_EQ(log->batches, (std::vector<int>{1, 4, 2}));  // 20000 | 100.. | 50, 49, and again for 3, 2
  std::size_t tokens = 0;
  std::size_t padded = 0;
  for (const auto& d : documents) tokens += d.size();
  for (const std::size_t n : log->calls) {
    EXPECT_LE(n, 4096U);
    padded += n;
  }
  EXPECT_LE(static_cast<double>(padded), static_cast<double>(tokens) / 0.75);
}

TEST(Scorer, PaddingStaysBelowAQuarter) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    std::mt19937 rng(seed);
    std::vector<std::size_t> lengths(60);
    for (std::size_t& n : lengths) n = 2 + rng() % (seed % 2 == 0 ? 2000 : 30);
    const auto log = std::make_shared<ToyLog>();
    const auto documents = random_documents(lengths, seed);
    Scorer(toy_model(log), batch_of(8)).score(documents);
    std::size_t tokens = 0;
    std::size_t padded = 0;
    for (const std::size_t n : lengths) tokens += n;
    for (const std::size_t n : log->calls) padded += n;
    EXPECT_LE(static_cast<double>(padded - tokens), 0.25 * static_cast<double>(padded));
    EXPECT_LT(log->batches.size(), 30U);  // and it does group
  }
}

TEST(Scorer, ProgressAddsUpAndCancels) {
  const auto documents = random_documents({9000, 5000, 1, 300});
  std::int64_t tokens = 0;
  double nll = 0.0;
  ScorerOptions options;
  options.on_progress = [&](std::int64_t n, double x) {
    tokens += n;
    nll += x;
    return true;
  };
  const auto all = Scorer(toy_model(), options).score(documents);
  EXPECT_EQ(tokens, 8999 + 4999 + 299);
  EXPECT_NEAR(nll, all[0].nll + all[1].nll + all[3].nll, 1e-6 * nll);

  int calls = 0;
  options.on_progress = [&](std::int64_t, double) { return ++calls < 19; };
  const auto some = Scorer(toy_model(), options).score(documents);
  EXPECT_EQ(calls, 19);
  EXPECT_TRUE(some[0].complete);  // 9000 tokens in 18 calls
  EXPECT_EQ(some[0].logprobs, all[0].logprobs);
  EXPECT_FALSE(some[1].complete);
  EXPECT_EQ(some[1].logprobs.size(), 511U);
  EXPECT_TRUE(std::equal(some[1].logprobs.begin(), some[1].logprobs.end(), all[1].logprobs.begin()));
  EXPECT_TRUE(some[2].complete);  // nothing to score
  EXPECT_FALSE(some[3].complete);
  EXPECT_TRUE(some[3].logprobs.empty());
}

TEST(Scorer, RefusesBadIdsBeforeAnythingIsScored) {
  auto documents = random_documents({5, 6});
  documents[1][4] = 11;
  const auto log = std::make_shared<ToyLog>();
  Scorer scorer(toy_model(log));
  try {
    scorer.score(documents);
    FAIL();
  } catch (const std::invalid_argument& error) {
    EXPECT_STREQ(error.what(), "document 1: token 4 has id 11, expected 0..10");
  }
  EXPECT_TRUE(log->calls.empty());
  EXPECT_THROW(Scorer(toy_model(), batch_of(0)), std::invalid_argument);
  ScorerOptions options;
  options.session.max_sweeps = 0;
  EXPECT_THROW(Scorer(toy_model(), options), std::invalid_argument);
  EXPECT_TRUE(Scorer(toy_model()).score({}).empty());
}

}  // namespace
}  // namespace mmrec
