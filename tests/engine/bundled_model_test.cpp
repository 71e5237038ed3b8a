// The bundled model against the code that trained it: log-probs of 4,096 held-out tokens (BOS and the beginning of
// WikiText-2's test split) as weights/train.py computes them from the same bf16 weights in fp32. And against itself,
// where many sequences run at once.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "mmrec/generator.h"
#include "mmrec/model.h"
#include "mmrec/tokenizer.h"
#include "tests/engine/logprobs.h"
#include "tests/support/safetensors_reader.h"

namespace mmrec {
namespace {

constexpr float kBound = 1e-3F;

class BundledModel : public testing::TestWithParam<PrefillMode> {};

TEST_P(BundledModel, LogprobsAgreeWithTheTrainingCode) {
  const test::SafetensorsReader reference(std::filesystem::path(MMREC_FIXTURES) / "mmrec-12m" / "heldout.safetensors");
  const std::vector<int>& ids = reference.at("input_ids").integers;
  const std::vector<float>& expected = reference.at("logprobs").values;
  ASSERT_EQ(ids.size(), 4097U);
  ASSERT_EQ(expected.size(), 4096U);

  LoadOptions on_cpu{.device = Device::kCpu};
  const Model model = Model::load(std::filesystem::path(MMREC_WEIGHTS) / "mmrec-12m", on_cpu);
  SessionOptions options{.prefill = GetParam()};
  Session session = model.new_session(1, options);
  const std::vector<float> logprobs = test::logprobs_of(session, ids);
  ASSERT_EQ(logprobs.size(), ids.size());
  double sum = 0.0;
  double expected_sum = 0.0;
  for (std::size_t t = 0; t < expected.size(); ++t) {
    ASSERT_LE(std::abs(logprobs[t + 1] - expected[t]), kBound) << "token " << t + 1;
    sum += static_cast<double>(logprobs[t + 1]);
    expected_sum += static_cast<double>(expected[t]);
  }
  EXPECT_NEAR(sum, expected_sum, 0.05);
  // 16 segments of 256 tokens: the memory slots took part.
  EXPECT_GT(session.position(), 8 * model.info().memory_segment);
}

INSTANTIATE_TEST_SUITE_P(Modes, BundledModel, testing::Values(PrefillMode::kSteps, PrefillMode::kSweeps),
                         [](const auto& info) { return info.param == PrefillMode::kSteps ? "Steps" : "Sweeps"; });

TEST(BundledGenerator, ManyRequestsGetWhatEachGetsAlone) {
  const auto folder = std::filesystem::path(MMREC_WEIGHTS) / "mmrec-12m";
  const Tokenizer tokenizer = Tokenizer::load(folder);
  LoadOptions on_cpu{.device = Device::kCpu};
  const Model model = Model::load(folder, on_cpu);
  Generator generator(model, tokenizer, {.slots = 3});
  std::vector<GenerateResult> results(5);
  std::vector<GenerateResult> expected;
  const std::vector<std::string> prompts = {"The history of the city begins", "In 1914", "A", "The river", "He said"};
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    GenerateOptions options{.sampler = {.seed = i}, .max_tokens = 10 + 7 * static_cast<std::int64_t>(i)};
    if (i == 2) options.sampler.repetition_penalty = 1.2F;
    if (i == 3) options.stop = {"."};
    const std::vector<int> prompt = tokenizer.encode(prompts[i]);
    generator.submit({.prompt = prompt, .options = options, .on_finish = [&results, i](GenerateResult result) {
                        results[i] = std::move(result);
                      }});
    Session session = model.new_session();
    session.prefill(prompt);
    expected.push_back(generate(session, tokenizer, options));
  }
  generator.run();
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    EXPECT_FALSE(results[i].text.empty());
    EXPECT_EQ(results[i].text, expected[i].text);
    EXPECT_EQ(results[i].tokens, expected[i].tokens);
    EXPECT_EQ(results[i].logprobs, expected[i].logprobs);
    EXPECT_EQ(results[i].finish_reason, expected[i].finish_reason);
  }
}

TEST(BundledTokenizer, MatchesTheModelAndRoundTrips) {
  const auto folder = std::filesystem::path(MMREC_WEIGHTS) / "mmrec-12m";
  const Tokenizer tokenizer = Tokenizer::load(folder);
  LoadOptions on_cpu{.device = Device::kCpu};
  EXPECT_EQ(tokenizer.vocab_size(), Model::load(folder, on_cpu).info().vocab_size);
  EXPECT_TRUE(tokenizer.adds_bos());
  for (const char* text : {"The quick brown fox.", " two  spaces\n\n = Title = \n", "tabs\tand 🚀 naïve", ""}) {
    const std::vector<int> ids = tokenizer.encode(text);
    ASSERT_FALSE(ids.empty());
    EXPECT_EQ(ids.front(), tokenizer.bos_id());
    EXPECT_EQ(tokenizer.decode(ids), text);
  }
}

}  // namespace
}  // namespace mmrec
