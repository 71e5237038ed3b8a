// Drawing on the device against the chain done in float64 by sorting, and against the engine's sampler. Long,
// because rows go many ways, and draws are timed.

#include "kernels/cuda/runtime/cuda.h"
#include "kernels/cuda/sample/algo.h"
#include "mmrec/errors.h"
#include "mmrec/sampler.h"
#include "tests/ops/op_test.h"
#include "tests/support/sampling.h"

namespace mmrec::kernels::test {
namespace {

using mmrec::test::kPlainSampler;
using mmrec::test::penalise;
using mmrec::test::SampleReference;

SampleReference reference(const SampleRule& rule, const float* logits, std::int64_t words) {
  return mmrec::test::reference_sample(rule.options, {logits, static_cast<std::size_t>(words)}, rule.step,
                                       rule.sequence);
}

class SampleCuda : public OpTest {
 protected:
  /// Rows of `words` logits, `stride` apart; one token for each rule.
  std::vector<int> sample(const std::vector<float>& logits, std::int64_t words, std::int64_t stride,
                          std::vector<SampleRule>& rules, std::int64_t offset = 0) {
    const auto x = upload(on(), logits);
    auto r = upload(on(), rules);
    auto tokens = unwritten<int>(on(), rules.size());
    auto copy = unwritten<int>(on(), rules.size());
    sample_tokens(on(), {.logits = {x.data() + offset, static_cast<std::int64_t>(rules.size()), words, stride},
                         .rules = r.data(),
                         .tokens = tokens.data(),
                         .copy = copy.data()});
    rules = download(on(), r);
    std::vector<int> expected = download(on(), tokens);
    for (int& token : expected) token = std::max(token, 0);
    EXPECT_EQ(download(on(), copy), expected);
    return download(on(), tokens);
  }
  int sample_one(const std::vector<float>& logits, SampleRule rule) {
    std::vector<SampleRule> rules{rule};
    const auto words = static_cast<std::int64_t>(logits.size());
    return sample(logits, words, words, rules).front();
  }
  /// The tokens that `draws` steps of the rule draw.
  std::set<int> support(const std::vector<float>& logits, SampleRule rule) {
    const std::size_t draws = few_cases() ? 24 : small_sizes() ? 50 : 200;
    const auto words = static_cast<std::int64_t>(logits.size());
    std::vector<float> rows;
    std::vector<SampleRule> rules(draws, rule);
    for (std::size_t i = 0; i < draws; ++i) {
      rows.insert(rows.end(), logits.begin(), logits.end());
      rules[i].step = i;
    }
    const std::vector<int> tokens = sample(rows, words, words, rules);
    return {tokens.begin(), tokens.end()};
  }
};

SampleRule neutral() { return {.options = kPlainSampler}; }

// Random rows and rules; logits plain, rounded so that many are equal, flat, steep, and with some masked.
TEST_F(SampleCuda, AgreesWithTheChainDoneBySortingAndWithTheEngine) {
  std::mt19937_64 rng(test_seed());
  const auto pick = [&](auto... values) { return mmrec::test::pick(rng, values...); };
  int compared = 0;
  int close = 0;
  int other_than_greedy = 0;
  const auto check = [&](std::int64_t words, int rows) {
    const std::int64_t offset = pick(0, 0, 1);
    const std::int64_t stride = words + pick(0, 0, 3);
    const bool is_round = pick(0, 0, 1) != 0;
    const double spread = pick(0.01, 1.0, 3.0, 3.0, 12.0);
    const auto values = random_normal<float>(static_cast<std::size_t>(words), pick(0.0, -20.0, 7.0), spread, rng());
    std::vector<float> logits(static_cast<std::size_t>(offset + rows * stride), kNan);
    std::vector<SampleRule> rules;
    for (int r = 0; r < rows; ++r) {
      for (std::int64_t v = 0; v < words; ++v) {
        // Every row another order of the same values.
        float x = values[static_cast<std::size_t>((v * 7 + r * 13) % words)];
        if (is_round) x = std::round(x);
        if (r % 4 == 3 && rng() % 5 == 0) x = -kInfinity;
        logits[static_cast<std::size_t>(offset + r * stride + v)] = x;
      }
      rules.push_back({.options = {.temperature = pick(0.0F, 0.1F, 0.8F, 0.8F, 1.0F, 5.0F),
                                   .top_k = pick(0, 0, 1, 3, 40, 300, 5000),
                                   .top_p = pick(1e-6F, 0.5F, 0.95F, 0.999F, 1.0F, 1.0F),
                                   .min_p = pick(0.0F, 0.0F, 0.05F, 0.5F, 1.0F),
                                   .vocab_limit = pick(0, 0, 30, 100000),
                                   .seed = rng()},
                       .sequence = rng() % 3,
                       .step = rng() % 1000});
    }
    std::vector<SampleRule> after = rules;
    const std::vector<int> tokens = sample(logits, words, stride, after, offset);
    const auto row_of = [&](std::int64_t r) { return logits.data() + offset + r * stride; };
    const auto references = parallel_map(
        rows, [&](std::int64_t r) { return reference(rules[static_cast<std::size_t>(r)], row_of(r), words); });
    const auto drawn = parallel_map(rows, [&](std::int64_t r) {
      const SampleRule& rule = rules[static_cast<std::size_t>(r)];
      if (references[static_cast<std::size_t>(r)].token < 0) return -1;  // which the engine reports by throwing
      Sampler sampler(rule.options);
      return sampler.sample({row_of(r), static_cast<std::size_t>(words)}, {}, rule.step, rule.sequence).token;
    });
    for (int r = 0; r < rows; ++r) {
      const SampleRule& rule = rules[static_cast<std::size_t>(r)];
      const int token = std::max(tokens[static_cast<std::size_t>(r)], -1);
      EXPECT_EQ(after[static_cast<std::size_t>(r)].step, rule.step + 1);
      const float* row = row_of(r);
      const SampleReference& expected = references[static_cast<std::size_t>(r)];
      ++compared;
      if (expected.is_close) {
        ++close;
        continue;
      }
      other_than_greedy += token != static_cast<int>(std::max_element(row, row + words) - row);
      const auto describe = [&] {
        return ::testing::Message() << words << " words, spread " << spread << ", temperature "
                                    << rule.options.temperature << ", k " << rule.options.top_k << ", p "
                                    << rule.options.top_p << ", min " << rule.options.min_p << ", limit "
                                    << rule.options.vocab_limit;
      };
      ASSERT_EQ(token, expected.token) << describe();
      ASSERT_EQ(token, drawn[static_cast<std::size_t>(r)]) << describe();
    }
  };
  for (int round = 0; round < (few_cases() ? 3 : small_sizes() ? 10 : 100); ++round) {
    check(pick(1, 2, 50, 999, 1024, 4097), 16);
    check(pick(5000, 12345), 8);
  }
  for (const std::int64_t words : {32000, 50257}) check(words, few_cases() ? 1 : small_sizes() ? 4 : 64);
  for (const std::int64_t words : {262144, 128256, 262143}) {
    check(words, small_sizes() ? 1 : 16);
    if (few_cases()) break;
  }
  if (!few_cases()) {  // else chance decides
    EXPECT_GT(other_than_greedy, compared / 8);
  }
  EXPECT_LT(close, compared / 20 + 5) << "of " << compared;
}

TEST_F(SampleCuda, GreedyFindsTheLargestWhereverItLies) {  // in any thread, vector and pass
  const SampleRule greedy{.options = {.temperature = 0.0F}};
  std::vector<float> logits(40000, -1.0F);
  for (const std::size_t at : {0U, 1U, 4U, 127U, 128U, 4095U, 4096U, 16383U, 16384U, 32001U, 39999U}) {
    logits[at] = 2.0F;
    EXPECT_EQ(sample_one(logits, greedy), static_cast<int>(at));
    logits[at] = -1.0F;
  }
  EXPECT_EQ(sample_one(std::vector<float>(40000, -3e38F), greedy), 0);
}

TEST_F(SampleCuda, DrawsWhatItsFiltersPromise) {
  for (const mmrec::test::SampleCase& one : mmrec::test::sample_cases()) {
    EXPECT_EQ(support(one.logits, {.options = one.options}), one.tokens) << one.name;
  }
}

// However many blocks a row has, and whichever way it goes: among few candidates, or over the whole row where these are
// too many, because logits are equal or the top-k is wide.
TEST_F(SampleCuda, RowsSharedByBlocksOfAClusterDrawTheSame) {
  std::mt19937_64 rng(test_seed());
  const auto pick = [&](auto... values) { return mmrec::test::pick(rng, values...); };
  constexpr int kWindow = 64;
  const std::vector<std::function<float(std::int64_t)>> kinds = {
      [&](std::int64_t) { return std::normal_distribution<float>(0.0F, 3.0F)(rng); },
      [&](std::int64_t) { return std::round(std::normal_distribution<float>(0.0F, 1.0F)(rng)); },
      [&](std::int64_t) { return 1.5F; },
      [&](std::int64_t i) { return i % 50 == 0 ? -1.0F : -kInfinity; },
      [&](std::int64_t i) { return i % 1000 == 7 ? 60.0F : std::normal_distribution<float>(0.0F, 0.01F)(rng); },
      // More of one size at the k-th place than a list of few holds; and all in one thread.
      [&](std::int64_t i) { return i < 30 ? 5.0F + static_cast<float>(i) : 4.0F; },
      [&](std::int64_t i) { return i / 4 % 512 == 3 ? static_cast<float>(i % 13) : -static_cast<float>(i % 11); },
  };
  const bool has_clusters = on().compute_capability() == 90;
  for (const std::int64_t words : {1, 3, 50, 999, 5000, 8193, few_cases() ? 9001 : 20001}) {
    const int rows = small_sizes() ? 2 : 16;
    for (const auto& kind : kinds) {
      if (few_cases() && rng() % 8 != 0) continue;
      std::vector<int> ways{1, 2, 4, 8};
      if (small_sizes()) ways = {1, pick(2, 4, 8)};
      if (!has_clusters) ways = {1};
      std::vector<float> logits(static_cast<std::size_t>(rows * words));
      for (std::size_t i = 0; i < logits.size(); ++i) {
        logits[i] = kind(static_cast<std::int64_t>(i) % words);
      }
      std::vector<int> ring(static_cast<std::size_t>(rows * kWindow));
      for (int& id : ring) id = static_cast<int>(rng() % static_cast<std::uint64_t>(words));
      const auto x = upload(on(), logits);
      std::vector<SampleRule> rules;
      for (int r = 0; r < rows; ++r) {
        rules.push_back({.options = {.temperature = pick(0.0F, 0.5F, 0.8F, 1.0F),
                                     .top_k = pick(0, 1, 40, 40, 128, 129, 100000),
                                     .top_p = pick(0.3F, 0.92F, 1.0F),
                                     .min_p = pick(0.0F, 0.05F),
                                     .repetition_penalty = pick(1.0F, 1.05F, 0.9F),
                                     .repetition_window = kWindow,
                                     .vocab_limit = pick(0, 0, 700),
                                     .seed = rng()}});
      }
      std::vector<int> first;
      for (const int blocks : ways) {
        const auto recent = upload(on(), ring);
        std::vector<SampleRule> own = rules;
        for (int r = 0; r < rows; ++r) {
          own[static_cast<std::size_t>(r)].recent = const_cast<int*>(recent.data()) + r * kWindow;
          own[static_cast<std::size_t>(r)].recent_count = static_cast<std::uint64_t>(r % 3 == 0 ? 5 : kWindow);
        }
        auto r = upload(on(), own);
        std::vector<int> drawn;
        auto tokens = unwritten<int>(on(), static_cast<std::size_t>(rows));
        for (int step = 0; step < 2; ++step) {  // the second sees what the first has drawn
          sample_tokens(on(), {.logits = {x.data(), rows, words, words}, .rules = r.data(), .tokens = tokens.data()},
                        blocks);
          const std::vector<int> some = download(on(), tokens);
          drawn.insert(drawn.end(), some.begin(), some.end());
        }
        if (blocks == 1) first = drawn;
        ASSERT_EQ(drawn, first) << words << " words by " << blocks << " blocks";
      }
      for (int row = 0; row < rows; ++row) {
        const auto at = static_cast<std::size_t>(row);
        const auto begin = logits.begin() + row * words;
        std::vector<float> penalised(begin, begin + words);
        const int count = row % 3 == 0 ? 5 : kWindow;
        const auto ids = ring.begin() + row * kWindow;
        penalise(penalised, {ids, ids + count}, rules[at].options.repetition_penalty);
        const SampleReference expected = reference(rules[at], penalised.data(), words);
        if (!expected.is_close) {
          ASSERT_EQ(first[at], expected.token) << words << " words, row " << row;
        }
      }
    }
  }
}

TEST_F(SampleCuda, FaultsAreSeenWhereverTheyLie) {
  for (const float temperature : {0.0F, 0.8F}) {
    SampleRule rule{.options = {.temperature = temperature}};
    for (const std::size_t words : {std::size_t{5}, std::size_t{few_cases() ? 4001U : 20001U}}) {
      std::vector<float> logits(words, 0.5F);
      for (const float fault : {kNan, -kNan, kInfinity}) {
        for (const std::size_t at : {std::size_t{0}, words / 2, words - 1}) {
          logits[at] = fault;
          EXPECT_EQ(sample_one(logits, rule), kFaultyRow) << fault << " at " << at;
          rule.options.vocab_limit = 2;  // among ids that cannot be drawn it is one all the same
          EXPECT_EQ(sample_one(logits, rule), kFaultyRow) << fault << " at " << at;
          rule.options.vocab_limit = 0;
          logits[at] = 0.5F;
        }
      }
      EXPECT_GE(sample_one(logits, rule), 0);
      EXPECT_EQ(sample_one(std::vector<float>(words, -kInfinity), rule), kNoCandidate);
    }
    rule.options.vocab_limit = 1;
    EXPECT_EQ(sample_one({-kInfinity, 0.0F}, rule), kNoCandidate);
  }
}

TEST_F(SampleCuda, RulesMayNameTheirRows) {
  constexpr std::int64_t kRows = 5, kWords = 900, kStride = 904;  // a multiple of 16 bytes
  const auto logits = random_normal<float>(kRows * kStride, 0.0, 1.0, 43);
  const auto x = upload(on(), logits);
  std::vector<SampleRule> rules(kRows, neutral());
  for (std::size_t b = 0; b < rules.size(); ++b) rules[b].sequence = b;
  std::vector<SampleRule> named = rules;
  const std::vector<int> expected = sample(logits, kWords, kStride, rules);
  // In another order.
  for (std::size_t b = 0; b < named.size(); ++b) named[b].logits = x.data() + b * kStride;
  std::rotate(named.begin(), named.begin() + 2, named.end());
  auto r = upload(on(), named);
  auto tokens = unwritten<int>(on(), named.size());
  sample_tokens(on(), {.logits = {nullptr, kRows, kWords}, .rules = r.data(), .tokens = tokens.data()});
  std::vector<int> found = download(on(), tokens);
  std::rotate(found.begin(), found.end() - 2, found.end());
  EXPECT_EQ(found, expected);
}

TEST_F(SampleCuda, AReplayedGraphDrawsAnewEveryStep) {
  constexpr std::int64_t kRows = 3, kWords = 700;
  const auto logits = random_normal<float>(kRows * kWords, 0.0, 1.0, 42);
  std::vector<SampleRule> rules;
  for (std::uint64_t b = 0; b < kRows; ++b) {
    rules.push_back({.options = kPlainSampler, .sequence = b, .step = 10 * b});
    rules.back().options.top_k = 300;
    rules.back().options.seed = 5;
  }
  const auto x = upload(on(), logits);
  auto r = upload(on(), rules);
  auto tokens = unwritten<int>(on(), kRows);
  const SampleTokens<Device> op{
      .logits = {x.data(), kRows, kWords, kWords}, .rules = r.data(), .tokens = tokens.data()};
  sample_tokens(on(), op);  // a first launch may load code
  on().upload(rules.data(), r.data(), rules.size());
  const Graph graph(on(), [&] { sample_tokens(on(), op); });
  for (int step = 0; step < (few_cases() ? 4 : 20); ++step) {
    graph.launch(on());
    const std::vector<int> drawn = download(on(), tokens);
    for (std::size_t b = 0; b < kRows; ++b) {
      const SampleReference expected = reference(rules[b], logits.data() + b * kWords, kWords);
      if (!expected.is_close) {
        EXPECT_EQ(drawn[b], expected.token) << "step " << step << " of row " << b;
      }
      ++rules[b].step;
    }
  }
}

// A ring that turns: the tokens drawn last count, each once, and the logits are as they were.
TEST_F(SampleCuda, RecentTokensArePenalisedAndTheDrawnOneCounts) {
  constexpr std::int64_t kWords = 300;
  for (const auto& [window, penalty, temperature] :
       {std::tuple{7, 1.5F, 0.0F}, {1, 3.0F, 0.0F}, {64, 1.2F, 1.0F}, {1024, 0.8F, 1.0F}, {0, 2.0F, 0.0F}}) {
    std::vector<float> logits = random_normal<float>(kWords, 0.0, 1.0, 43);
    logits[3] = -kInfinity;
    std::vector<int> all = {3, 5, 5, 9, 3};
    all.resize(std::min(all.size(), static_cast<std::size_t>(window)));
    std::vector<int> ring(static_cast<std::size_t>(std::max(window, 1)), 0);
    std::copy(all.begin(), all.end(), ring.begin());
    const auto on_device = upload(on(), ring);
    SampleRule rule{.options = kPlainSampler, .sequence = 2, .step = 0};
    rule.options.temperature = temperature;
    rule.options.repetition_penalty = penalty;
    rule.options.repetition_window = window;
    rule.recent = const_cast<int*>(on_device.data());
    rule.recent_count = all.size();
    const auto x = upload(on(), logits);
    auto r = upload(on(), std::vector<SampleRule>{rule});
    auto token = unwritten<int>(on(), 1);
    for (int step = 0; step < (few_cases() ? 10 : 30); ++step) {
      sample_tokens(on(), {.logits = {x.data(), 1, kWords, kWords}, .rules = r.data(), .tokens = token.data()});
      std::vector<float> penalised = logits;
      penalise(penalised, {all.end() - std::min(std::ssize(all), std::ptrdiff_t{window}), all.end()}, penalty);
      rule.step = static_cast<std::uint64_t>(step);
      const SampleReference expected = reference(rule, penalised.data(), kWords);
      const int drawn = download(on(), token).front();
      if (!expected.is_close) {
        ASSERT_EQ(drawn, expected.token) << "window " << window << ", step " << step;
      }
      all.push_back(drawn);
      ASSERT_EQ(download(on(), x), logits);
    }
  }
}

TEST_F(SampleCuda, EmptyBatchesAndRowsOfNoOrTooManyLogits) {
  auto memory = unwritten<float>(on(), 4);
  SampleTokens<Device> op{.logits = {memory.data(), 0, 4}};
  sample_tokens(on(), op);
  op.logits = {memory.data(), 1, 0};
  EXPECT_THROW(sample_tokens(on(), op), std::invalid_argument);
  op.logits = {memory.data(), 1, kMostSampleWords + 1};
  EXPECT_THROW(sample_tokens(on(), op), std::invalid_argument);
}

// ---- cases: draws one after another in a recorded graph, where a launch takes no time of the host's ----

struct TimedChain {
  const char* name;
  SamplerOptions options;
};
const TimedChain kTimedChains[] = {
    {"top-k 40, top-p 0.92, penalty", {.top_p = 0.92F, .min_p = 0.0F, .repetition_penalty = 1.05F}},
    {"top-p 0.95", {.top_k = 0, .min_p = 0.0F}},
    {"greedy", {.temperature = 0.0F}}};

/// Logits are normal with a deviation of 3.
void add_draws(Cuda& on, OpCases& cases, const TimedChain& chain, std::int64_t batch, std::int64_t vocab) {
  constexpr int kRecorded = 32, kRecent = 64;
  struct Operands {
    std::vector<float> logits;
    std::vector<int> ring;
    std::vector<SampleRule> rules;
    Buffer<float> x;
    Buffer<int> recent, tokens;
    Buffer<SampleRule> r;
    Graph graph;
  };
  const auto prepare = [=, &on] {
    const auto in = std::make_shared<Operands>();
    in->logits = random_normal<float>(static_cast<std::size_t>(batch * vocab), 0.0, 3.0, 60);
    for (std::int64_t i = 0; i < batch * kRecent; ++i) in->ring.push_back(static_cast<int>(i * 7919 % vocab));
    in->x = upload(on, in->logits);
    in->recent = upload(on, in->ring);
    in->tokens = unwritten<int>(on, static_cast<std::size_t>(batch));
    for (std::int64_t b = 0; b < batch; ++b) {
      in->rules.push_back({.options = chain.options,
                           .sequence = static_cast<std::uint64_t>(b),
                           .recent = in->recent.data() + b * kRecent,
                           .recent_count = kRecent});
    }
    in->r = upload(on, in->rules);
    const SampleTokens<Device> op{
        .logits = {in->x.data(), batch, vocab}, .rules = in->r.data(), .tokens = in->tokens.data()};
    sample_tokens(on, op);  // a first launch may load code
    in->graph = Graph(on, [&] {
      for (int i = 0; i < kRecorded; ++i) sample_tokens(on, op);
    });
    const auto check = [=, &on] {
      on.upload(in->rules.data(), in->r.data(), in->rules.size());
      on.upload(in->ring.data(), in->recent.data(), in->ring.size());
      sample_tokens(on, op);
      const std::vector<int> got = download(on, in->tokens);
      for (std::int64_t b = 0; b < batch; ++b) {
        std::vector<float> row(in->logits.begin() + b * vocab, in->logits.begin() + (b + 1) * vocab);
        const auto first = in->ring.begin() + b * kRecent;
        const SampleRule& rule = in->rules[static_cast<std::size_t>(b)];
        penalise(row, {first, first + kRecent}, rule.options.repetition_penalty);
        const SampleReference want = reference(rule, row.data(), vocab);
        if (!want.is_close) {
          ASSERT_EQ(got[static_cast<std::size_t>(b)], want.token) << b;
        }
      }
    };
    return PreparedOp{[=, &on] { in->graph.launch(on); }, check};
  };
  OpCase& added = add_case(cases, join("sample_tokens ", chain.name), join("(", batch, ", ", vocab, ")"), Limit::kRead,
                           bytes_of<float>(batch * vocab), prepare);
  added.sets = 1;
  added.ops_in_call = kRecorded;
}

const RegisteredCases kCases([](Cuda& on, bool small, OpCases& cases) {
  std::vector<std::int64_t> vocabularies = {1000};
  if (!small) vocabularies = {8192, 32000, 128256};
  for (const std::int64_t vocab : vocabularies) {
    for (const std::int64_t batch : {1, small ? 3 : 64}) {
      for (const TimedChain& chain : kTimedChains) add_draws(on, cases, chain, batch, vocab);
    }
  }
});

}  // namespace
}  // namespace mmrec::kernels::test
