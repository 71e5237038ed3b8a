// A long sequence in parts side by side (Staggered), with calls to the CUDA runtime that fail in one of them: the
// others stop too, the error is passed on, and the next call of the executor computes what it does without one.

#include "faults.h"
#include "tests/models/small_models.h"
#include "tests/ops/op_test.h"

namespace mmrec::models {
namespace {

TEST(CudaStaggeredFaults, APartThatFailsStopsTheOthersAndTheNextCallIsWhole) {
  constexpr std::int64_t kCall = 2 * 256, kTokens = 3 * kCall - 100;  // parts are run, recorded and replayed
  constexpr std::int64_t kTries = 6;
  Config config = small_config(40);
  config.memory_segment = 32;
  const auto model = load_small_model(Config::kModelType, config, kernels::DType::kF16);
  std::vector<int> tokens;
  for (std::int64_t i = 0; i < kTokens; ++i) tokens.push_back(static_cast<int>(i * i % kSmallVocab));
  const auto score = [&](const std::shared_ptr<Executor>& executor) {
    const Slots slots(executor, 1, {});
    executor->clear(slots.first(), 1);
    std::vector<float> logprobs(tokens.size());
    for (std::int64_t first = 0; first < kTokens; first += kCall) {
      const models::Run run{slots[0], first, 0, std::min(kCall, kTokens - first)};
      const auto at = static_cast<std::size_t>(first), count = static_cast<std::size_t>(run.rows);
      executor->run({.tokens = std::span(tokens).subspan(at, count),
                     .runs = {&run, 1},
                     .logprobs = std::span(logprobs).subspan(at, count)},
                    {});
    }
    return logprobs;
  };
  const auto executor = [&] { return model->on_cuda(Precision::kAuto, 0).executor; };

  cuda_emulation::begin_faults(0);
  const std::vector<float> expected = score(executor());
  const std::int64_t calls = cuda_emulation::end_faults();
  for (std::int64_t n = 1; n <= kTries; ++n) {
    const auto faulty = executor();
    cuda_emulation::begin_faults(calls * n / (kTries + 1));
    std::string error = "none";
    try {
      EXPECT_EQ(score(faulty), expected);
    } catch (const std::system_error& e) {
      error = e.code().category().name();
    }
    cuda_emulation::end_faults();
    EXPECT_TRUE(error == "cuda" || error == "none") << error;
    EXPECT_EQ(score(faulty), expected) << "after failure " << n;
  }
}

}  // namespace
}  // namespace mmrec::models
