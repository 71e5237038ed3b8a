// The rules of evaluation: windows against tests/reference/make_windows.py, which states the public rules in Python,
// and pairs of texts against lm-evaluation-harness' definition. And the measures of a corpus.
#include "mmrec/evaluation.h"

#include <nlohmann/json.hpp>

#include "mmrec/errors.h"
#include "mmrec/scorer.h"
#include "mmrec/tokenizer.h"
#include "tests/support/model_folder.h"

namespace mmrec::test {
namespace {

using Json = nlohmann::json;

std::vector<int> numbers(std::size_t count) {
  std::vector<int> ids(count);
  for (std::size_t i = 0; i < count; ++i) ids[i] = static_cast<int>(i);
  return ids;
}

TEST(Windows, AreThoseOfThePublicRules) {
  const Json cases = Json::parse(read_file(folder_of("windows.json")));
  ASSERT_GT(cases.size(), 300U);
  for (const Json& one : cases) {
    const WindowOptions options{.mode = window_mode(one["mode"].get<std::string>()),
                                .window = one["window"],
                                .stride = one.value("stride", 0),
                                .repeats_first = one["mode"] == "llama"};
    const auto ids = numbers(one["tokens"]);
    if (one["windows"].is_null()) {
      EXPECT_THROW(Windows(options, ids.size()), std::invalid_argument) << one.dump();
      continue;
    }
    const Windows windows(options, ids.size());
    Json found = Json::array();
    for (std::size_t i = 0; i < windows.size(); ++i) found.push_back({windows.ids(i, ids), windows[i].scored});
    EXPECT_EQ(found, one["windows"]) << one["mode"] << " " << one["tokens"] << " by " << one["window"];
  }
}

TEST(Windows, OfNothingScoreNothing) {
  for (const std::size_t tokens : {0U, 1U}) {
    for (const std::string_view name : kWindowModeNames) {
      const Windows windows({.mode = window_mode(name), .window = 4, .stride = 2}, tokens);
      EXPECT_EQ(windows.size(), 1U);
      EXPECT_EQ(windows[0].scored, 0U);
    }
  }
}

TEST(Windows, OutOfRangeAreRefused) {
  for (const WindowOptions& options : {WindowOptions{.mode = WindowMode::kRolling, .window = 0},
                                       {.mode = WindowMode::kStrided, .window = 1, .stride = 1},
                                       {.mode = WindowMode::kStrided, .window = 4, .stride = 0},
                                       {.mode = WindowMode::kStrided, .window = 4, .stride = 5},
                                       {.mode = WindowMode::kLlama, .window = 3}}) {
    EXPECT_THROW(Windows(options, 50), std::invalid_argument) << to_string(options.mode);
  }
  EXPECT_EQ(refusal([] { Windows({.mode = static_cast<WindowMode>(77)}, 50); }),
            "mode: found 77, expected a WindowMode");
  EXPECT_THROW(window_mode("Full"), std::invalid_argument);
}

PairTokens encoded(const std::string& context, const std::string& continuation, std::int64_t max_length = 0) {
  static const Tokenizer tokenizer = Tokenizer::load(folder_of("tiny"));
  const std::string text = context + continuation;
  const TextPair pair{text, context.size()};
  return encode_pairs(tokenizer, std::span(&pair, 1), true, max_length).front();
}

TEST(Pairs, WhiteSpaceMovesToTheContinuation) {
  const Tokenizer tokenizer = Tokenizer::load(folder_of("tiny"));
  const std::pair<std::string, std::string> cases[] = {
      {"The cat ", "The cat"},
      {"The cat", "The cat"},
      {"a\xc2\xa0\t\xe3\x80\x80\x1f\n", "a"},
      {"  ", ""},
      {"", ""},
      {"a\xe2\x80\x8b", "a\xe2\x80\x8b"},  // a zero-width space is none
      {"a\xff\x85", "a\xff\x85"},
      {"\xe2\x80 \xe2\x80", "\xe2\x80 \xe2\x80"}};
  for (const auto& [context, kept] : cases) {
    const PairTokens tokens = encoded(context, "sat");
    const auto expected = kept.empty() ? std::vector{*prefix_token(tokenizer)} : tokenizer.encode(kept);
    EXPECT_EQ(std::vector<int>(tokens.ids.begin(), tokens.ids.begin() + std::ptrdiff_t(tokens.context)), expected)
        << context;
  }
}

TEST(Pairs, KeepTheEndOfALongContext) {
  const PairTokens whole = encoded("The cat", " sat");
  const auto continuation = std::ssize(whole.ids) - std::ptrdiff_t(whole.context);
  const PairTokens cut = encoded("The cat", " sat", continuation);
  EXPECT_EQ(cut.context, 1U);
  EXPECT_EQ(cut.ids, std::vector<int>(whole.ids.end() - continuation - 1, whole.ids.end()));
  EXPECT_EQ(encoded("The cat", " sat", 1000).ids, whole.ids);
  EXPECT_THROW(encoded("The cat", " sat", continuation - 1), std::invalid_argument);
}

TEST(Pairs, LogProbsTellWhetherAContinuationIsGreedy) {
  const std::pair<std::vector<float>, std::optional<bool>> cases[] = {{{}, true},
                                                                      {{-0.1F, -0.6F}, true},
                                                                      {{-0.1F, -0.7F}, std::nullopt},
                                                                      {{-1.0F, -8.0F}, false},
                                                                      {{-8.0F, -1.0F}, false}};
  for (const auto& [logprobs, greedy] : cases) EXPECT_EQ(score_pair(logprobs, 1000).is_greedy, greedy);
  EXPECT_EQ(score_pair(std::vector{-1.5F, -0.25F}, 1000).loglikelihood, -1.75);
  EXPECT_THROW(score_pair(std::vector{-1.0F, NAN}, 1000), NumericError);
}

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
}  // namespace mmrec::test
