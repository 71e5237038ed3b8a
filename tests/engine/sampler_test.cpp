#include "mmrec/sampler.h"

#include <nlohmann/json.hpp>

#include "mmrec/errors.h"
#include "tests/support/refusal.h"
#include "tests/support/sampling.h"

namespace mmrec::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

std::vector<float> random_logits(std::size_t count, unsigned seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0.0F, 3.0F);
  std::vector<float> logits(count);
  for (float& x : logits) x = normal(rng);
  return logits;
}

TEST(Sampler, AgreesWithTheChainDoneBySorting) {
  std::mt19937 rng(1);
  const auto pick = [&](auto... values) { return mmrec::test::pick(rng, values...); };
  int distinct_from_greedy = 0;
  for (unsigned round = 0; round < 400; ++round) {
    std::vector<float> logits = random_logits(pick(1U, 2U, 50U, 999U), round);
    if (pick(0, 1) != 0) {
      for (float& x : logits) x = std::round(x);  // ties
    }
    SamplerOptions o{.temperature = pick(0.0F, 0.1F, 0.8F, 1.0F, 5.0F),
                     .top_k = pick(0, 1, 3, 40, 5000),
                     .top_p = pick(1e-6F, 0.5F, 0.95F, 0.999F, 1.0F),
                     .min_p = pick(0.0F, 0.05F, 0.5F, 1.0F),
                     .repetition_penalty = pick(1.0F, 1.3F, 0.7F),
                     .repetition_window = pick(0, 2, 64),
                     .vocab_limit = pick(0, 1, 30, 100000),
                     .seed = round};
    std::vector<int> recent;
    for (int i = pick(0, 1, 5, 100); i > 0; --i) recent.push_back(static_cast<int>(rng() % logits.size()));
    Sampler sampler(o);
    std::vector<float> penalised = logits;
    const auto window = std::min(std::ssize(recent), std::ptrdiff_t{o.repetition_window});
    penalise(penalised, {recent.end() - window, recent.end()}, o.repetition_penalty);
    for (std::uint64_t step = 0; step < 20; ++step) {
      const int token = sampler.sample(logits, recent, step).token;
      ASSERT_EQ(token, reference_sample(o, penalised, step).token) << "round " << round << " step " << step;
      distinct_from_greedy +=
          token != static_cast<int>(std::max_element(logits.begin(), logits.end()) - logits.begin());
    }
  }
  EXPECT_GT(distinct_from_greedy, 1000);
}

TEST(Sampler, LogprobIsTheRawLogSoftmax) {
  SamplerOptions o{.temperature = 0.0F, .repetition_penalty = 3.0F, .vocab_limit = 2};
  const std::vector<float> logits = {1.0F, 2.0F, 3.0F, -kInf};
  const std::vector<int> recent = {1};
  const Sample s = Sampler(o).sample(logits, recent, 0);
  EXPECT_EQ(s.token, 0);
  EXPECT_NEAR(s.logprob, 1.0 - std::log(std::exp(1.0) + std::exp(2.0) + std::exp(3.0)), 1e-6);
  EXPECT_NEAR(Sampler(kPlainSampler).sample(std::vector<float>{3e38F, 3e38F}, {}, 0).logprob, -std::log(2.0), 1e-6);
}

TEST(Sampler, DependsOnSeedSequenceAndStepOnly) {
  const std::vector<float> logits = random_logits(500, 3);
  SamplerOptions o{.seed = 9};
  Sampler a(o);
  Sampler b(o);
  std::vector<int> forward;
  for (std::uint64_t step = 0; step < 50; ++step) forward.push_back(a.sample(logits, {}, step, 4).token);
  for (std::uint64_t step = 50; step-- > 0;) EXPECT_EQ(b.sample(logits, {}, step, 4).token, forward[step]);
  const auto differs = [&](std::uint64_t seed, std::uint64_t sequence) {
    o.seed = seed;
    Sampler other(o);
    int count = 0;
    for (std::uint64_t step = 0; step < 50; ++step)
      count += other.sample(logits, {}, step, sequence).token != forward[step];
    return count;
  };
  EXPECT_EQ(differs(9, 4), 0);
  EXPECT_GT(differs(10, 4), 10);
  EXPECT_GT(differs(9, 5), 10);
}

TEST(Sampler, DrawsFollowTheDistribution) {
  std::vector<float> logits;
  const std::vector<double> p = {0.5, 0.25, 0.15, 0.07, 0.03};
  for (const double x : p) logits.push_back(static_cast<float>(std::log(x)));
  Sampler sampler(kPlainSampler);
  constexpr int kDraws = 100000;
  std::vector<int> counts(p.size());
  for (int i = 0; i < kDraws; ++i)
    ++counts[static_cast<std::size_t>(sampler.sample(logits, {}, static_cast<std::uint64_t>(i)).token)];
  double chi_square = 0.0;
  for (std::size_t i = 0; i < p.size(); ++i) {
    const double expected = p[i] * kDraws;
    chi_square += (counts[i] - expected) * (counts[i] - expected) / expected;
  }
  EXPECT_LT(chi_square, 18.5);  // 4 degrees of freedom: probability 0.001
}

TEST(Sampler, DrawsWhatItsFiltersPromise) {
  for (const SampleCase& one : sample_cases()) {
    Sampler sampler(one.options);
    std::set<int> tokens;
    for (std::uint64_t step = 0; step < 2000; ++step) tokens.insert(sampler.sample(one.logits, {}, step).token);
    EXPECT_EQ(tokens, one.tokens) << one.name;
  }
}

TEST(Sampler, PenaltyAppliesOncePerTokenInsideTheWindow) {
  SamplerOptions o{.temperature = 0.0F, .repetition_penalty = 2.0F, .repetition_window = 3};
  Sampler sampler(o);
  const std::vector<float> logits = {4.0F, 2.5F, 1.5F};
  const auto token = [&](std::vector<int> recent) { return sampler.sample(logits, recent, 0).token; };
  EXPECT_EQ(token({}), 0);
  EXPECT_EQ(token({0}), 1);           // 2.0 < 2.5
  EXPECT_EQ(token({0, 0, 0}), 1);     // once: 2.0, not 0.5
  EXPECT_EQ(token({0, 1, 1, 1}), 0);  // 0 is out of the window
  EXPECT_EQ(token({0, 1}), 0);        // 2.0, 1.25, 1.5
  EXPECT_EQ(sampler.sample(std::vector<float>{-1.0F, -1.5F}, std::vector<int>{0}, 0).token, 1);  // negatives multiply
  o.repetition_penalty = 1e-38F;
  EXPECT_EQ(Sampler(o).sample(std::vector<float>{3.0F, 2.0F}, std::vector<int>{1}, 0).token, 1);
  o.repetition_penalty = 1e38F;
  EXPECT_EQ(Sampler(o).sample(std::vector<float>{-3e38F, -kInf}, std::vector<int>{0, 1}, 0).token, 0);
  o.repetition_penalty = 1.5F;
  EXPECT_THROW(Sampler(o).sample(logits, std::vector<int>{3}, 0), std::invalid_argument);
  EXPECT_THROW(Sampler(o).sample(logits, std::vector<int>{-1}, 0), std::invalid_argument);
}

TEST(Sampler, TheSchemaOfItsOptionsSaysWhatTheTableSays) {
  std::ifstream file(MMREC_SOURCE_DIR "/docs/schemas/sampler.schema.json");
  const nlohmann::json schema = nlohmann::json::parse(file);
  std::set<std::string> expected;
  for (const SamplerOption& option : kSamplerOptions) {
    const bool is_integer = std::holds_alternative<int SamplerOptions::*>(option.member);
    if (!option.in_programs() || option.name == "seed") continue;
    expected.emplace(option.name);
    const nlohmann::json& found = schema["properties"][std::string(option.name)];
    EXPECT_EQ(found["type"], (nlohmann::json{is_integer ? "integer" : "number", "null"})) << option.name;
    EXPECT_EQ(found[option.above_min ? "exclusiveMinimum" : "minimum"], option.min) << option.name;
    const double most = is_integer ? std::numeric_limits<int>::max() : 1000.0;  // of programs, if there is no bound
    EXPECT_EQ(found["maximum"], std::min(option.max, most)) << option.name;
  }
  std::set<std::string> names;
  for (const auto& [name, value] : schema["properties"].items()) names.insert(name);
  EXPECT_EQ(names, expected);
  EXPECT_EQ(schema["$defs"]["all"]["required"].get<std::set<std::string>>(), expected);
}

TEST(Sampler, NamesTheNumericFaultAndTheStep) {
  Sampler sampler;
  const auto fault = [&](std::vector<float> logits) {
    return refusal<NumericError>([&] { sampler.sample(logits, {}, 17); });
  };
  EXPECT_EQ(fault({1.0F, std::nanf("")}), "step 17: logit of token 1 is NaN, expected a finite number or -inf");
  EXPECT_EQ(fault({kInf, 1.0F}), "step 17: logit of token 0 is +inf, expected a finite number or -inf");
  EXPECT_EQ(fault({-kInf, -kInf}), "step 17: all 2 logits are -inf");
  EXPECT_THROW(sampler.sample({}, {}, 0), std::invalid_argument);
  SamplerOptions o{.vocab_limit = 1};
  EXPECT_EQ(refusal<NumericError>([&] {
              Sampler(o).sample(std::vector<float>{-kInf, 0.0F}, {}, 3);
            }),
            "step 3: all 1 logits that may be drawn are -inf");
  // A fault among the ids that cannot be drawn is one all the same: the distribution is not one.
  EXPECT_THROW(Sampler(o).sample(std::vector<float>{0.0F, std::nanf("")}, {}, 3), NumericError);
  EXPECT_EQ(sampler.sample(std::vector<float>{0.0F, 1.0F}, {}, 0).token >= 0, true);  // still usable
}

TEST(Sampler, RefusesOptionsOutOfRange) {
  const auto refused = [](auto member, auto value) {
    SamplerOptions o;
    o.*member = value;
    return refusal([&] { Sampler sampler(o); });
  };
  const float nan = std::nanf("");
  EXPECT_EQ(refused(&SamplerOptions::temperature, -0.5F),
            "sampler option temperature: found -0.5, expected a finite number >= 0");
  for (const float x : {nan, kInf, -kInf}) EXPECT_NE(refused(&SamplerOptions::temperature, x), "no error");
  EXPECT_NE(refused(&SamplerOptions::top_k, -1), "no error");
  for (const float x : {0.0F, -0.1F, 1.1F, nan}) EXPECT_NE(refused(&SamplerOptions::top_p, x), "no error");
  for (const float x : {-0.1F, 1.1F, nan}) EXPECT_NE(refused(&SamplerOptions::min_p, x), "no error");
  for (const float x : {0.0F, -1.0F, nan, kInf}) EXPECT_NE(refused(&SamplerOptions::repetition_penalty, x), "no error");
  EXPECT_NE(refused(&SamplerOptions::repetition_window, -1), "no error");
  EXPECT_NE(refused(&SamplerOptions::vocab_limit, -1), "no error");
  EXPECT_EQ(refused(&SamplerOptions::top_k, std::numeric_limits<int>::max()), "no error");
}

}  // namespace
}  // namespace mmrec::test
