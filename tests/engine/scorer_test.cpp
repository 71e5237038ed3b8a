#include "mmrec/scorer.h"

#include "tests/engine/sessions.h"
#include "tests/engine/toy_executor.h"
#include "tests/support/refusal.h"

namespace mmrec::test {
namespace {

Documents random_documents(const std::vector<std::size_t>& lengths) {
  std::mt19937 rng(1);
  Documents documents;
  for (const std::size_t n : lengths) documents.push_back(random_tokens(11, n, rng));
  return documents;
}

ScorerOptions batch_of(int batch) { return {.batch = batch}; }

TEST(Scorer, ScoresAreThoseOfEachDocumentAloneWhateverTheBatch) {
  const auto documents = random_documents({7, 0, 1, 2, 300, 290, 5, 40, 41, 299, 6000, 4097, 38, 7});
  const Model model = toy_model();
  for (const int batch : {0, 1, 2, 3, 64}) {
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
      Session session = model.new_session();
      std::vector<float> expected = logprobs_of(session, documents[d]);
      expected.erase(expected.begin());
      EXPECT_EQ(scores[d].logprobs, expected) << "document " << d << " batch " << batch;
      double nll = 0.0;
      for (const float x : expected) nll -= static_cast<double>(x);
      EXPECT_EQ(scores[d].nll, nll);
    }
    EXPECT_GT(scorer.prefill_stats().layer_tokens, 0);
  }
}

TEST(Scorer, AGroupIsOneCallOfDocumentsAsTheyAre) {
  const auto log = logged();
  const auto documents = random_documents({100, 3, 98, 1, 97, 50, 49, 99, 2, 20000, 0});
  Scorer scorer(toy_model(log), batch_of(4));
  scorer.score(documents);
  EXPECT_EQ(log->acquired, std::vector<int>{4});  // once for all groups
  EXPECT_EQ(log->calls, (std::vector<std::vector<std::int64_t>>{{20000, 100, 99, 98}, {97, 50, 49, 3}, {2}}));
  scorer.score(random_documents({5, 6}));
  EXPECT_EQ(log->acquired.back(), 2);  // no more slots than documents
}

TEST(Scorer, TakesWhatTheExecutorLikesWhereNoLimitIsGiven) {
  const auto log = logged();
  Scorer(toy_model(log)).score(random_documents({5, 6, 7, 8}));
  EXPECT_EQ(log->calls, (std::vector<std::vector<std::int64_t>>{{5}, {8, 7, 6}})) << "the first document's group first";
}

TEST(Scorer, TakesFewerWhereMemoryIsShortUnlessItWasTold) {
  const auto log = logged({.most_slots = 1});
  const auto documents = random_documents({5, 6, 7});
  EXPECT_EQ(Scorer(toy_model(log)).score(documents)[2].logprobs, Scorer(toy_model()).score(documents)[2].logprobs);
  EXPECT_EQ(log->acquired, std::vector<int>{1});
  EXPECT_THROW(Scorer(toy_model(log), batch_of(2)).score(documents), std::bad_alloc);
  log->most_slots = 0;
  EXPECT_THROW(Scorer(toy_model(log)).score(documents), std::bad_alloc);
}

TEST(Scorer, AScoreComesBeforeTheNextGroupIsScored) {
  const auto log = logged();
  std::size_t given = 0;
  std::vector<std::size_t> calls;  // before each score
  EXPECT_TRUE(Scorer(toy_model(log), batch_of(2))
                  .score_stream(
                      [&](std::vector<int>& ids) {
                        ids.assign(given == 2 || given == 3 ? 9 : 4, 1);  // the longest in between
                        return given++ < 40;
                      },
                      [&](std::size_t document, auto&, auto&) {
                        calls.push_back(log->calls.size());
                        EXPECT_LE(given, (document / 16 + 1) * 16) << "reads eight groups ahead";
                        return true;
                      }));
  ASSERT_EQ(calls.size(), 40U);
  for (std::size_t d = 0; d < calls.size(); ++d) EXPECT_EQ(calls[d], d / 2 + 1) << d;
}

TEST(Scorer, AStreamThatProgressEndsHandsOverWhatIsScored) {
  int left = 10;
  ScorerOptions options = batch_of(2);
  int asked = 0;
  options.on_progress = [&](std::int64_t, double) { return ++asked < 3; };
  std::size_t received = 0;
  EXPECT_FALSE(Scorer(toy_model(), options)
                   .score_stream(
                       [&](std::vector<int>& ids) {
                         ids.assign(4, 1);
                         return left-- > 0;
                       },
                       [&](std::size_t, auto&, auto&) { return ++received > 0; }));
  EXPECT_EQ(received, 6U) << "three groups of two";
}

TEST(Scorer, ProgressAddsUp) {
  const auto documents = random_documents({9000, 5000, 1, 300});
  const auto log = logged();
  for (const int batch : {1, 3}) {
    std::int64_t tokens = 0;
    double nll = 0.0;
    ScorerOptions options = batch_of(batch);
    options.on_progress = [&](std::int64_t n, double x) {
      EXPECT_GT(n, 0);
      EXPECT_LE(n, batch * log->chunk);
      tokens += n;
      nll += x;
      return true;
    };
    const auto all = Scorer(toy_model(log), options).score(documents);
    EXPECT_EQ(tokens, 8999 + 4999 + 299);
    EXPECT_NEAR(nll, all[0].nll + all[1].nll + all[3].nll, 1e-6 * nll);
  }
}

TEST(Scorer, ReturnsWhatIsFinishedWhenItIsCancelled) {
  const auto documents = random_documents({9000, 5000, 1, 300});
  const auto all = Scorer(toy_model()).score(documents);
  const auto log = logged({.chunk = 500});
  for (const int batch : {1, 2}) {
    int calls = 0;
    ScorerOptions options = batch_of(batch);
    // With one document at a time 9000 tokens are 18 reports; two reach their 4,000th token in 8.
    const int most = batch == 1 ? 19 : 8;
    options.on_progress = [&](std::int64_t, double) { return ++calls < most; };
    const auto some = Scorer(toy_model(log), options).score(documents);
    EXPECT_EQ(calls, most) << "is not asked again";
    EXPECT_EQ(some[0].complete, batch == 1);
    EXPECT_FALSE(some[1].complete);
    EXPECT_EQ(some[0].logprobs.size(), batch == 1 ? 8999U : 4499U);
    EXPECT_EQ(some[1].logprobs.size(), batch == 1 ? 999U : 4499U) << "the next chunk is the last";
    for (const std::size_t d : {0U, 1U}) {
      EXPECT_TRUE(std::equal(some[d].logprobs.begin(), some[d].logprobs.end(), all[d].logprobs.begin()));
    }
    EXPECT_TRUE(some[2].complete);  // nothing to score
    EXPECT_FALSE(some[3].complete);
    EXPECT_TRUE(some[3].logprobs.empty());
  }
}

TEST(Scorer, WhatTheCallbackThrowsArrives) {
  ScorerOptions options;
  options.on_progress = [](std::int64_t, double) -> bool { throw std::out_of_range("enough"); };
  EXPECT_THROW(Scorer(toy_model(), options).score(random_documents({100})), std::out_of_range);
  EXPECT_THROW(Scorer(toy_model(), options).score(random_documents({10})), std::out_of_range);
}

TEST(Scorer, RefusesBadIdsBeforeAnythingIsScored) {
  auto documents = random_documents({5, 6});
  documents[1][4] = 11;
  const auto log = logged();
  Scorer scorer(toy_model(log));
  EXPECT_EQ(refusal([&] { scorer.score(documents); }), "document 1: token 4 has id 11, expected 0..10");
  EXPECT_TRUE(log->calls.empty());
  EXPECT_THROW(Scorer(toy_model(), batch_of(-1)), std::invalid_argument);
  ScorerOptions options;
  options.session.max_sweeps = 0;
  EXPECT_THROW(Scorer(toy_model(), options), std::invalid_argument);
  EXPECT_TRUE(Scorer(toy_model()).score({}).empty());
}

}  // namespace
}  // namespace mmrec::test
