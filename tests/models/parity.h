// Parity of the forward pass with two independent references: the tensors that MM-Rec's public code computed
// (fixtures/upstream) and a float64 rendering of the equations (fixtures/oracle, made by
// tests/reference/make_oracle.py), through steps and through sweeps, for every split of the tokens. Bounds are on every
// entry. A backend's test instantiates Parity with its executors.
#pragma once

#include "models/architecture.h"
#include "tests/models/lockstep.h"
#include "tests/support/safetensors_reader.h"

namespace mmrec::models {

/// Folders under tests/fixtures.
inline constexpr const char* kParityFixtures[] = {
    "upstream/mdi",   "upstream/dpg", "upstream/hem", "upstream/segments", "oracle/slots",
    "oracle/restart", "oracle/core",  "oracle/tiles", "oracle/dpg_bf16",   "oracle/hem_f16"};

/// What is compared with the references, and how closely.
struct ParityCase {
  const char* fixture;
  /// The model of the fixture's folder on the backend that is tested.
  std::shared_ptr<Executor> (*make)(const LoadedModel& model);
  VariantOptions variant = {};
  const char* logits = "logits";        // the reference's name for them; its log-probs belong to those of this name
  std::string (*unusable)() = nullptr;  // why it cannot run here; "" if it can
  float logit_bound = 5e-5F;
  float logprob_bound = 2e-5F;
  bool relative = false;       // bounds are multiples of the fixture's largest |logit|
  bool may_fall_back = false;  // rounding may keep a window of sweeps from settling
  float sweep_tolerance = 1e-6F;
  void (*prepare)(LoadedModel& model) = nullptr;  // before it is made

  friend void PrintTo(const ParityCase& c, std::ostream* out) { *out << c.fixture; }
};

/// Of fixtures of mmrec100m: both experts, and each alone.
inline std::vector<ParityCase> with_experts(ParityCase c) {
  std::vector<ParityCase> all;
  for (const auto& [expert, logits] : {std::pair{Expert::kBoth, "logits"}, std::pair{Expert::kText, "logits_text"},
                                       std::pair{Expert::kCode, "logits_code"}}) {
    c.fixture = "upstream/mmrec100m";
    c.variant.expert = expert;
    c.logits = logits;
    all.push_back(c);
  }
  return all;
}

/// "upstream/mdi" as a test's name.
inline std::string parity_name(const testing::TestParamInfo<ParityCase>& info) {
  std::string name = info.param.fixture;
  if (std::string_view(info.param.logits) != "logits") name += "/" + std::string(info.param.logits);
  std::replace(name.begin(), name.end(), '/', '_');
  return name;
}

struct ParityFixture {
  const ParityCase& c;
  std::shared_ptr<Executor> executor;  // of all sequences
  std::vector<int> tokens;             // [B, T]
  std::vector<float> logits;           // [B, T, V]
  std::vector<float> logprobs;         // [B, T - 1]
  std::int64_t batch = 0;
  std::int64_t time = 0;
  std::int64_t vocab = 0;
  double logit_bound = 0.0;
  double logprob_bound = 0.0;

  explicit ParityFixture(const ParityCase& parity_case)
      : ParityFixture(parity_case, std::filesystem::path(MMREC_FIXTURES) / parity_case.fixture) {}
  ParityFixture(const ParityCase& parity_case, const std::filesystem::path& folder) : c(parity_case) {
    const std::unique_ptr<LoadedModel> model = load_model(folder, c.variant, {});
    vocab = model->info().vocab_size;
    if (c.prepare != nullptr) c.prepare(*model);
    executor = c.make(*model);
    const test::SafetensorsReader reference(folder / "reference.safetensors");
    const auto& ids = reference.at("input_ids");
    tokens = ids.integers;
    batch = ids.dim(0);
    time = ids.dim(1);
    logits = reference.at(c.logits).values;
    if (std::string_view(c.logits) == "logits") {
      logprobs = reference.at("logprobs").values;
    } else {
      const std::vector<double> of_logits = logprobs_under(logits, time, vocab, tokens, batch);
      logprobs.assign(of_logits.begin(), of_logits.end());
    }
    const double scale = c.relative ? largest_of(logits) : 1.0;
    logit_bound = static_cast<double>(c.logit_bound) * scale;
    logprob_bound = static_cast<double>(c.logprob_bound) * scale;
  }

  std::unique_ptr<Lockstep> sequences(PrefillMode mode, int threads = 1, int max_sweeps = 64) const {
    ExecutionOptions options;
    options.threads = threads;
    options.prefill = mode;
    options.sweep_tolerance = c.sweep_tolerance;
    options.max_sweeps = max_sweeps;
    return std::make_unique<Lockstep>(executor, vocab, static_cast<int>(batch), options);
  }

  /// Tokens [begin, begin + count) of every sequence.
  std::vector<int> slice(std::int64_t begin, std::int64_t count) const {
    return columns_of(tokens, time, batch, begin, count);
  }

  double logit_error(std::span<const float> got, std::int64_t position) const {
    return largest_difference(got, columns_of(logits, time * vocab, batch, position * vocab, vocab));
  }
  double logprob_error(const std::vector<float>& got) const {
    return largest_difference(columns_of(got, time, batch, 1, time - 1), logprobs);
  }
};

class Parity : public testing::TestWithParam<ParityCase> {
 protected:
  void SetUp() override {
    const std::string reason = GetParam().unusable == nullptr ? "" : GetParam().unusable();
    if (!reason.empty()) GTEST_SKIP() << reason;
  }
};

TEST_P(Parity, EveryStep) {
  const ParityFixture fixture(GetParam());
  const auto sequences = fixture.sequences(PrefillMode::kSteps);
  for (std::int64_t t = 0; t < fixture.time; ++t) {
    const auto logits = sequences->step(fixture.slice(t, 1));
    ASSERT_LE(fixture.logit_error(logits, t), fixture.logit_bound) << "position " << t;
  }
}

TEST_P(Parity, EverySplitByStepsAndBySweeps) {
  const ParityFixture fixture(GetParam());
  for (const PrefillMode mode : {PrefillMode::kSteps, PrefillMode::kSweeps}) {
    for (const std::int64_t chunk :
         {std::int64_t{1}, std::int64_t{2}, std::int64_t{7}, std::int64_t{64}, std::int64_t{128}, fixture.time}) {
      // Too few to sweep go the same way in either mode: once is enough.
      if (chunk < 7 && mode == PrefillMode::kSweeps) continue;
      const auto sequences = fixture.sequences(mode);
      for (std::int64_t t = 0; t < fixture.time; t += chunk) {
        const std::int64_t count = std::min(chunk, fixture.time - t);
        const auto logits = sequences->prefill(fixture.slice(t, count));
        ASSERT_LE(fixture.logit_error(logits, t + count - 1), fixture.logit_bound)
            << "chunks of " << chunk << ", position " << t + count - 1;
      }
      const PrefillStats stats = sequences->stats();
      EXPECT_EQ(stats.windows > 0, mode == PrefillMode::kSweeps && chunk >= 16) << chunk;
      EXPECT_TRUE(stats.fallbacks == 0 || GetParam().may_fall_back) << stats.fallbacks << ", chunks of " << chunk;
    }
  }
}

TEST_P(Parity, ScoresForEverySplit) {
  const ParityFixture fixture(GetParam());
  for (const PrefillMode mode : {PrefillMode::kSteps, PrefillMode::kSweeps}) {
    for (const std::int64_t chunk : {std::int64_t{1}, std::int64_t{33}, std::int64_t{128}, fixture.time}) {
      if (chunk == 1 && mode == PrefillMode::kSweeps) continue;
      const auto sequences = fixture.sequences(mode, 2);
      std::vector<float> got(static_cast<std::size_t>(fixture.batch * fixture.time), std::nanf(""));
      for (std::int64_t t = 0; t < fixture.time; t += chunk) {
        const std::int64_t count = std::min(chunk, fixture.time - t);
        std::vector<float> part(static_cast<std::size_t>(fixture.batch * count), std::nanf(""));
        sequences->score(fixture.slice(t, count), part);
        for (std::int64_t b = 0; b < fixture.batch; ++b) {
          std::copy_n(part.begin() + static_cast<std::ptrdiff_t>(b * count), count,
                      got.begin() + static_cast<std::ptrdiff_t>(b * fixture.time + t));
        }
      }
      EXPECT_LE(fixture.logprob_error(got), fixture.logprob_bound) << "chunks of " << chunk;
      for (std::int64_t b = 0; b < fixture.batch; ++b) EXPECT_EQ(got[static_cast<std::size_t>(b * fixture.time)], 0.0F);
    }
  }
}

// max_sweeps = 1 leaves every window unconverged: the exact steps must finish it, and be counted.
TEST_P(Parity, FallbackIsExactAndCounted) {
  const ParityFixture fixture(GetParam());
  const auto sequences = fixture.sequences(PrefillMode::kSweeps, 1, /*max_sweeps=*/1);
  const auto logits = sequences->prefill(fixture.tokens);
  EXPECT_LE(fixture.logit_error(logits, fixture.time - 1), fixture.logit_bound);
  EXPECT_GT(sequences->stats().fallbacks, 0);
  EXPECT_EQ(sequences->stats().fallbacks, sequences->stats().windows);
}

}  // namespace mmrec::models
