#include <gtest/gtest.h>

#include <cmath>

#include "mmrec/scorer.h"

namespace mmrec {
namespace {

// len(re.split(r"\s+", s)) by Python 3.11.
TEST(CountWords, AgreesWithPython) {
  const std::pair<std::string_view, std::int64_t> cases[] = {
      {"", 1},
      {" ", 2},
      {"a", 1},
      {" a", 2},
      {"a b", 2},
      {"a  b ", 3},
      {"a\x0B\x0C"
       "b",
       2},
      {"\n\na\tb\xC2\xA0"
       "c\xE2\x80\x83\xE3\x80\x80"
       "d\x1C\x1F"
       "e\xC2\x85"
       "f\xE2\x80\x8B"
       "g",
       7},
      {"\xE1\x9A\x80x\xE2\x80\xA8y\xE2\x80\xA9z\xE2\x80\xAFw\xE2\x81\x9Fv\xEF\xBB\xBFu", 6},
      {"a\xFF\x85 b", 2},  // bytes that are no UTF-8 are no white space
  };
  for (const auto& [text, words] : cases) EXPECT_EQ(count_words(text), words) << text;
}

DocumentScore document(std::vector<float> logprobs) {
  DocumentScore score;
  for (const float x : logprobs) score.nll -= static_cast<double>(x);
  score.logprobs = std::move(logprobs);
  score.complete = true;
  return score;
}

TEST(Perplexity, AgreesWithPython) {
  PerplexityAccumulator sums;
  sums.add(document({-1.5F, -0.25F, -3.0F}), 30, 5);
  sums.add(document({}), 0, 1);
  sums.add(document({-2.0F, -0.75F}), 10, 3);
  const PerplexitySummary s = sums.summary();
  EXPECT_EQ(s.docs, 3);
  EXPECT_EQ(s.tokens, 5);
  EXPECT_EQ(s.bytes, 40);
  EXPECT_EQ(s.words, 9);
  EXPECT_EQ(s.nll, 7.5);
  EXPECT_DOUBLE_EQ(s.ppl, 4.4816890703380645);
  EXPECT_DOUBLE_EQ(s.ppl_stderr, 2.1551752628236867);
  EXPECT_DOUBLE_EQ(s.bits_per_byte, 0.27050532016668066);
  EXPECT_DOUBLE_EQ(s.word_ppl, 2.300975890892825);
  EXPECT_DOUBLE_EQ(s.byte_ppl, 1.2062302494209807);
}

TEST(Perplexity, PartsOfACorpusAddUp) {
  const std::vector<float> logprobs = {-1.5F, -0.25F, -3.0F, -2.0F, -0.75F, -0.5F};
  PerplexityAccumulator all, sums;
  for (std::size_t i = 0; i < 3; ++i) {
    PerplexityAccumulator part;
    for (std::size_t d = 0; d < i; ++d) {
      const auto one = document({logprobs[i + d], logprobs[2 * i]});
      all.add(one, 10, 2);
      part.add(one, 10, 2);
    }
    const PerplexitySummary s = part.summary();
    sums.add({s.tokens, s.nll, s.nll_m2}, s.bytes, s.words, s.docs);
  }
  EXPECT_EQ(sums.summary().docs, 3);
  EXPECT_EQ(sums.summary().byte_ppl, all.summary().byte_ppl);
  EXPECT_DOUBLE_EQ(sums.summary().ppl_stderr, all.summary().ppl_stderr);
}

TEST(Perplexity, WithoutADenominatorItIsNaN) {
  PerplexityAccumulator sums;
  PerplexitySummary s = sums.summary();
  for (const double x : {s.ppl, s.ppl_stderr, s.bits_per_byte, s.word_ppl, s.byte_ppl}) EXPECT_TRUE(std::isnan(x));
  sums.add(document({-1.0F}), 4, 1);
  s = sums.summary();
  EXPECT_DOUBLE_EQ(s.ppl, std::exp(1.0));
  EXPECT_TRUE(std::isnan(s.ppl_stderr));
}

TEST(Perplexity, TheSpreadOfManyTokensIsStable) {
  // A large mean with a small spread, where a sum of squares would lose all its digits.
  PerplexityAccumulator sums;
  constexpr int kTokens = 200000;
  std::vector<float> logprobs;
  for (int i = 0; i < kTokens; ++i) logprobs.push_back(i % 2 == 0 ? -1000.0F : -1000.0625F);
  DocumentScore score = document(logprobs);
  score.nll = 0.0;  // ppl = 1, so that the error is the mean's
  sums.add(score, 1, 1);
  const double expected = 0.03125 * std::sqrt(static_cast<double>(kTokens) / (kTokens - 1)) / std::sqrt(kTokens);
  EXPECT_NEAR(sums.summary().ppl_stderr, expected, 1e-9 * expected);
}

}  // namespace
}  // namespace mmrec
