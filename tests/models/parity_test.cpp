// Parity of the forward pass with two independent references: the tensors that MM-Rec's public code computed
// (fixtures/upstream) and a float64 rendering of the equations (fixtures/oracle, made by
// tests/reference/make_oracle.py), through steps and through sweeps, for every split of the tokens. Bounds on every
// entry: logits 5e-5, log-probs 2e-5.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "models/checkpoint.h"
#include "models/config.h"
#include "models/runner.h"
#include "models/weights.h"
#include "tests/support/safetensors_reader.h"

namespace mmrec::models {
namespace {

constexpr float kLogitBound = 5e-5F;
constexpr float kLogprobBound = 2e-5F;

struct Fixture {
  Config config;
  std::shared_ptr<const HostWeights> weights;
  std::vector<int> tokens;      // [B, T]
  std::vector<float> logits;    // [B, T, V]
  std::vector<float> logprobs;  // [B, T - 1]
  std::int64_t batch = 0;
  std::int64_t time = 0;
  std::int64_t vocab = 0;

  explicit Fixture(const char* name) : Fixture(std::filesystem::path(MMREC_FIXTURES) / name) {}
  explicit Fixture(const std::filesystem::path& folder)
      : config(load_config(folder / "config.json")), vocab(config.vocab_size) {
    weights = std::make_shared<const HostWeights>(load_weights(Checkpoint::open(folder), config));
    const test::SafetensorsReader reference(folder / "reference.safetensors");
    const auto& ids = reference.at("input_ids");
    tokens = ids.integers;
    batch = ids.dim(0);
    time = ids.dim(1);
    logits = reference.at("logits").values;
    logprobs = reference.at("logprobs").values;
  }

  std::unique_ptr<Runner> runner(PrefillMode mode, int threads = 1) const {
    RunnerOptions options;
    options.threads = threads;
    options.prefill = mode;
    options.sweep_tolerance = 1e-6F;
    return make_cpu_runner(config, weights, static_cast<int>(batch), options);
  }

  /// Tokens [begin, begin + count) of every sequence.
  std::vector<int> slice(std::int64_t begin, std::int64_t count) const {
    std::vector<int> part;
    for (std::int64_t b = 0; b < batch; ++b) {
      const auto first = tokens.begin() + static_cast<std::ptrdiff_t>(b * time + begin);
      part.insert(part.end(), first, first + static_cast<std::ptrdiff_t>(count));
    }
    return part;
  }

  float logit_error(std::span<const float> got, std::int64_t position) const {
    float worst = 0.0F;
    for (std::int64_t b = 0; b < batch; ++b) {
      for (std::int64_t v = 0; v < vocab; ++v) {
        const float difference = std::abs(got[static_cast<std::size_t>(b * vocab + v)] -
                                          logits[static_cast<std::size_t>((b * time + position) * vocab + v)]);
        worst = difference <= worst ? worst : difference;  // keeps NaN
      }
    }
    return worst;
  }

  float logprob_error(const std::vector<float>& got) const {
    float worst = 0.0F;
    for (std::int64_t b = 0; b < batch; ++b) {
      for (std::int64_t t = 1; t < time; ++t) {
        const float difference = std::abs(got[static_cast<std::size_t>(b * time + t)] -
                                          logprobs[static_cast<std::size_t>(b * (time - 1) + t - 1)]);
        worst = difference <= worst ? worst : difference;
      }
    }
    return worst;
  }
};

class Parity : public testing::TestWithParam<const char*> {};

TEST_P(Parity, EveryStep) {
  const Fixture fixture(GetParam());
  const auto runner = fixture.runner(PrefillMode::kSteps);
  for (std::int64_t t = 0; t < fixture.time; ++t) {
    const auto logits = runner->step(fixture.slice(t, 1));
    ASSERT_LE(fixture.logit_error(logits, t), kLogitBound) << "position " << t;
  }
}

TEST_P(Parity, EverySplitByStepsAndBySweeps) {
  const Fixture fixture(GetParam());
  for (const PrefillMode mode : {PrefillMode::kSteps, PrefillMode::kSweeps}) {
    for (const std::int64_t chunk :
         {std::int64_t{1}, std::int64_t{2}, std::int64_t{7}, std::int64_t{64}, std::int64_t{128}, fixture.time}) {
      const auto runner = fixture.runner(mode);
      for (std::int64_t t = 0; t < fixture.time; t += chunk) {
        const std::int64_t count = std::min(chunk, fixture.time - t);
        const auto logits = runner->prefill(fixture.slice(t, count));
        ASSERT_LE(fixture.logit_error(logits, t + count - 1), kLogitBound)
            << "chunks of " << chunk << ", position " << t + count - 1;
      }
      const PrefillStats stats = runner->prefill_stats();
      EXPECT_EQ(stats.windows > 0, mode == PrefillMode::kSweeps && chunk >= 16) << chunk;
      EXPECT_EQ(stats.fallbacks, 0) << chunk;
    }
  }
}

TEST_P(Parity, ScoresForEverySplit) {
  const Fixture fixture(GetParam());
  for (const PrefillMode mode : {PrefillMode::kSteps, PrefillMode::kSweeps}) {
    for (const std::int64_t chunk : {std::int64_t{1}, std::int64_t{33}, std::int64_t{128}, fixture.time}) {
      const auto runner = fixture.runner(mode, 2);
      std::vector<float> got(static_cast<std::size_t>(fixture.batch * fixture.time), std::nanf(""));
      for (std::int64_t t = 0; t < fixture.time; t += chunk) {
        const std::int64_t count = std::min(chunk, fixture.time - t);
        std::vector<float> part(static_cast<std::size_t>(fixture.batch * count), std::nanf(""));
        runner->score(fixture.slice(t, count), part);
        for (std::int64_t b = 0; b < fixture.batch; ++b) {
          std::copy_n(part.begin() + static_cast<std::ptrdiff_t>(b * count), count,
                      got.begin() + static_cast<std::ptrdiff_t>(b * fixture.time + t));
        }
      }
      EXPECT_LE(fixture.logprob_error(got), kLogprobBound) << "chunks of " << chunk;
      for (std::int64_t b = 0; b < fixture.batch; ++b) EXPECT_EQ(got[static_cast<std::size_t>(b * fixture.time)], 0.0F);
    }
  }
}

// max_sweeps = 1 leaves every window unconverged: the exact steps must finish it, and be counted.
TEST_P(Parity, FallbackIsExactAndCounted) {
  const Fixture fixture(GetParam());
  RunnerOptions options;
  options.threads = 1;
  options.prefill = PrefillMode::kSweeps;
  options.max_sweeps = 1;
  const auto runner = make_cpu_runner(fixture.config, fixture.weights, static_cast<int>(fixture.batch), options);
  const auto logits = runner->prefill(fixture.tokens);
  EXPECT_LE(fixture.logit_error(logits, fixture.time - 1), kLogitBound);
  EXPECT_GT(runner->prefill_stats().fallbacks, 0);
  EXPECT_EQ(runner->prefill_stats().fallbacks, runner->prefill_stats().windows);
}

INSTANTIATE_TEST_SUITE_P(Upstream, Parity,
                         testing::Values("upstream/mdi", "upstream/dpg", "upstream/hem", "upstream/segments"),
                         [](const auto& info) { return std::string(info.param).substr(9); });
INSTANTIATE_TEST_SUITE_P(Oracle, Parity,
                         testing::Values("oracle/slots", "oracle/restart", "oracle/core", "oracle/tiles",
                                         "oracle/dpg_bf16", "oracle/hem_f16"),
                         [](const auto& info) { return std::string(info.param).substr(7); });

}  // namespace
}  // namespace mmrec::models
