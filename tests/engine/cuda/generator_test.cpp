// Many requests at once on a GPU, against each on a session of its own: their steps are those of sequences at positions
// of their own, in slots with gaps, that join and leave.
#include "mmrec/generator.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "models/runtime/cuda_device.h"
#include "tests/kernels/cuda/cuda_testing.h"

namespace mmrec {
namespace {

using kernels::test::small_sizes;

TEST(CudaGenerator, EachRequestGetsWhatItGetsAlone) {
  if (const std::string reason = models::cuda_unusable_reason(); !reason.empty()) GTEST_SKIP() << reason;
  const auto folder = small_sizes() ? std::filesystem::path(MMREC_FIXTURES) / "tiny"
                                    : std::filesystem::path(MMREC_WEIGHTS) / "mmrec-12m";
  const Tokenizer tokenizer = Tokenizer::load(folder);
  LoadOptions on_gpu{.device = Device::kCuda, .precision = Precision::kF32};
  const Model model = Model::load(folder, on_gpu);
  const auto prefix = std::make_shared<Session>(model.new_session());
  prefix->prefill(tokenizer.encode("The river"));

  constexpr std::size_t kRequests = 9;
  std::vector<GenerateResult> results(kRequests);
  std::vector<GenerateResult> expected;
  Generator generator(model, tokenizer, {.slots = 4});
  for (std::size_t i = 0; i < kRequests; ++i) {
    GenerateOptions options;
    options.max_tokens =
        small_sizes() ? 1 + static_cast<std::int64_t>(i * 5 % 7) : 20 + static_cast<std::int64_t>(i * 37 % 90);
    options.sampler.seed = i;
    options.sampler.temperature = i % 3 == 0 ? 0.0F : 0.8F;
    if (i % 4 == 1) options.sampler.repetition_penalty = 1.2F;
    options.logprobs = i % 2 == 0;
    GeneratorRequest request{.options = options,
                             .on_finish = [&results, i](GenerateResult result) { results[i] = std::move(result); }};
    if (i % 3 == 2) {
      request.start = prefix;
      Session session = prefix->clone();
      expected.push_back(generate(session, tokenizer, options));
    } else {
      request.prompt = tokenizer.encode(i % 3 == 0 ? "In 1914" : "The history of the city begins");
      Session session = model.new_session();
      session.prefill(request.prompt);
      expected.push_back(generate(session, tokenizer, options));
    }
    generator.submit(std::move(request));
    generator.run_once();
  }
  generator.run();
  for (std::size_t i = 0; i < kRequests; ++i) {
    EXPECT_EQ(results[i].tokens, expected[i].tokens) << i;
    EXPECT_EQ(results[i].text, expected[i].text) << i;
    EXPECT_EQ(results[i].finish_reason, expected[i].finish_reason) << i << ": " << results[i].error;
    // What packs with others goes another way through the kernels, so log-probs agree within a bound.
    ASSERT_EQ(results[i].logprobs.size(), expected[i].logprobs.size()) << i;
    for (std::size_t t = 0; t < expected[i].logprobs.size(); ++t) {
      EXPECT_NEAR(results[i].logprobs[t], expected[i].logprobs[t], 1e-3F) << "request " << i << " token " << t;
    }
  }
}

}  // namespace
}  // namespace mmrec
