// The bundled model against the code that trained it, and against itself where many sequences run at once.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "mmrec/generator.h"
#include "mmrec/model.h"
#include "mmrec/tokenizer.h"
#include "tests/engine/held_out.h"
#include "tests/engine/sessions.h"

namespace mmrec {
namespace {

class BundledModel : public testing::TestWithParam<PrefillMode> {};

TEST_P(BundledModel, LogprobsAgreeWithTheTrainingCode) {
  LoadOptions on_cpu{.device = Device::kCpu};
  const Model model = Model::load(std::filesystem::path(MMREC_WEIGHTS) / "mmrec-12m", on_cpu);
  Session session = model.new_session(1, {.prefill = GetParam()});
  test::expect_held_out_logprobs(session, 1e-3F, 0.05);
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
    Session session = test::begun(model, prompt);
    expected.push_back(generate(session, tokenizer, options));
  }
  generator.run();
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    EXPECT_FALSE(results[i].text.empty());
    EXPECT_EQ(results[i].text, expected[i].text);
    EXPECT_EQ(results[i].tokens, expected[i].tokens);
    EXPECT_EQ(results[i].logprobs, expected[i].logprobs);
    EXPECT_EQ(results[i].finish_reason, expected[i].finish_reason);
    if (i == 3) continue;  // whose stop string ends the text within a token
    std::vector<int> shown = tokenizer.encode(prompts[i]);
    shown.insert(shown.end(), results[i].tokens.begin(), results[i].tokens.end());
    EXPECT_EQ(prompts[i] + results[i].text, tokenizer.decode(shown));
  }
}

}  // namespace
}  // namespace mmrec
