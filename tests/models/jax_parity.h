// Parity of mmrec-jax with the tensors that the public Flax code computed (fixtures/upstream/jax): one call, another
// and steps behind it, single tokens from the beginning, and the model without a bank. Bounds are on every entry. A
// backend's test instantiates JaxParity with its executors.
#pragma once

#include "models/files/checkpoint.h"
#include "models/files/file.h"
#include "models/mmrec_jax/mmrec_jax.h"
#include "tests/models/lockstep.h"
#include "tests/support/host_state.h"
#include "tests/support/safetensors_reader.h"

namespace mmrec::models {

struct JaxParityCase {
  const char* name;
  std::shared_ptr<Executor> (*make)(const mmrec_jax::Config&, std::shared_ptr<const mmrec_jax::HostWeights>);
  std::string (*unusable)() = nullptr;  // why it cannot run here; "" if it can
  bool relative = false;                // bounds are multiples of the largest |entry|
  float logit_bound = 3e-4F;
  float logprob_bound = 1e-4F;
  float bank_bound = 5e-4F;

  friend void PrintTo(const JaxParityCase& c, std::ostream* out) { *out << c.name; }
};

inline std::string jax_parity_name(const testing::TestParamInfo<JaxParityCase>& info) { return info.param.name; }

class JaxParity : public testing::TestWithParam<JaxParityCase> {
 protected:
  static constexpr int kBatch = 2;

  void SetUp() override {
    const std::string reason = GetParam().unusable == nullptr ? "" : GetParam().unusable();
    if (!reason.empty()) GTEST_SKIP() << reason;
  }

  static std::filesystem::path folder() { return std::filesystem::path(MMREC_FIXTURES) / "upstream/jax"; }
  static mmrec_jax::Config config() {
    return mmrec_jax::Config::parse(read_text(folder() / "config.json", 1 << 20), "config.json");
  }

  std::shared_ptr<Executor> executor(Calls calls, bool bank = true) const {
    mmrec_jax::Config chosen = config();
    chosen.calls = calls;
    chosen.bank = bank;
    return GetParam().make(
        chosen, std::make_shared<const mmrec_jax::HostWeights>(load_weights(Checkpoint::open(folder()), chosen)));
  }
  std::unique_ptr<Lockstep> sequences(const std::shared_ptr<Executor>& executor, int batch = kBatch) const {
    ExecutionOptions options;
    options.threads = 2;
    return std::make_unique<Lockstep>(executor, vocab_, batch, options);
  }

  /// Columns [begin, begin + count) of ids [B, T], of the first `batch` rows.
  std::vector<int> slice(const std::string& name, std::int64_t begin, std::int64_t count, int batch = kBatch) const {
    const test::ReferenceTensor& ids = reference_.at(name);
    return columns_of(ids.integers, ids.dim(1), batch, begin, count);
  }
  std::int64_t length(const std::string& name) const { return reference_.at(name).dim(1); }

  double bound(float of, const std::string& name) const {
    return static_cast<double>(of) * (GetParam().relative ? largest_of(reference_.at(name).values) : 1.0);
  }

  /// Logits [B, V] against time t of a tensor [B, T, V].
  void expect_logits(std::span<const float> got, const std::string& name, std::int64_t t) const {
    const test::ReferenceTensor& want = reference_.at(name);
    const std::int64_t batch = std::ssize(got) / vocab_;
    ASSERT_LE(largest_difference(got, columns_of(want.values, want.dim(1) * vocab_, batch, t * vocab_, vocab_)),
              bound(GetParam().logit_bound, name))
        << name << ", time " << t;
  }
  void expect_bank(Lockstep& sequences, const std::string& name) const {
    const test::ReferenceTensor& want = reference_.at(name);  // [B, S, D]
    const HostState state = sequences.state();
    const std::vector<float>& got = test::tensor_of(state, "bank");  // [B, the rows in use, D]
    const double allowed = bound(GetParam().bank_bound, name);
    const std::int64_t all = want.dim(1) * want.dim(2), used = std::ssize(got) / kBatch;
    ASSERT_LE(largest_difference(got, columns_of(want.values, all, kBatch, 0, used)), allowed) << name;
    ASSERT_LE(largest_of(columns_of(want.values, all, kBatch, used, all - used)), allowed) << name;
  }
  std::vector<double> logprobs_of(const std::string& name, const std::vector<int>& ids, int batch) const {
    const test::ReferenceTensor& logits = reference_.at(name);
    return logprobs_under(logits.values, logits.dim(1), vocab_, ids, batch);
  }
  void expect_scores(Lockstep& sequences, const std::vector<int>& ids, int batch, const std::vector<double>& want,
                     double allowed, bool whole_calls = false) const {
    const auto count = static_cast<std::int64_t>(ids.size()) / batch;
    std::vector<float> got(ids.size(), std::nanf(""));
    sequences.score(ids, got, whole_calls);
    EXPECT_EQ(columns_of(got, count, batch, 0, 1), std::vector<float>(static_cast<std::size_t>(batch)));
    ASSERT_LE(largest_difference(columns_of(got, count, batch, 1, count - 1), want), allowed);
  }

  const test::SafetensorsReader reference_{folder() / "reference.safetensors"};
  std::int64_t vocab_ = config().vocab_size;
};

TEST_P(JaxParity, PromptsAreCallsAndStepsFollow) {
  const auto made = executor(Calls::kPrompt);
  const auto together = sequences(made);
  const std::int64_t first = length("input_ids"), second = length("input_ids2");
  expect_logits(together->prefill(slice("input_ids", 0, first)), "logits", first - 1);
  expect_bank(*together, "memory1");
  expect_logits(together->prefill(slice("input_ids2", 0, second)), "logits2", second - 1);
  for (std::int64_t t = 0; t < length("step_ids"); ++t) {
    expect_logits(together->step(slice("step_ids", t, 1)), "step_logits", t);
  }
  expect_bank(*together, "memory3");
}

TEST_P(JaxParity, WholeCallsScoreWithWhatComesLater) {
  const auto made = executor(Calls::kWhole);
  const std::int64_t count = length("input_ids");
  const auto together = sequences(made);
  expect_logits(together->prefill(slice("input_ids", 0, count)), "logits", count - 1);
  const std::vector<float>& want = reference_.at("logprobs").values;
  const auto scored = sequences(made);
  expect_scores(*scored, slice("input_ids", 0, count), kBatch, {want.begin(), want.end()},
                bound(GetParam().logprob_bound, "logits"), true);
  expect_bank(*scored, "memory1");
}

TEST_P(JaxParity, SingleTokensDoNotDependOnTheirSplit) {
  const auto made = executor(Calls::kStepwise);
  const std::int64_t count = length("logits_stepwise");
  const auto steps = sequences(made);
  for (std::int64_t t = 0; t < count; ++t) expect_logits(steps->step(slice("input_ids", t, 1)), "logits_stepwise", t);
  for (const std::int64_t chunk : {std::int64_t{1}, std::int64_t{7}, count}) {
    const auto together = sequences(made);
    for (std::int64_t t = 0; t < count; t += chunk) {
      const std::int64_t tokens = std::min(chunk, count - t);
      expect_logits(together->prefill(slice("input_ids", t, tokens)), "logits_stepwise", t + tokens - 1);
    }
    EXPECT_EQ(test::tensor_of(together->state(), "bank"), test::tensor_of(steps->state(), "bank"))
        << "chunks of " << chunk;
  }
}

TEST_P(JaxParity, WhatIsScoredGoesTokenByToken) {
  const std::int64_t count = length("logits_stepwise");
  const std::vector<int> ids = slice("input_ids", 0, count);
  const std::vector<double> want = logprobs_of("logits_stepwise", ids, kBatch);
  for (const Calls calls : {Calls::kStepwise, Calls::kPrompt, Calls::kWhole}) {
    const auto scored = sequences(executor(calls));
    expect_scores(*scored, ids, kBatch, want, bound(GetParam().logprob_bound, "logits_stepwise"));
  }
}

TEST_P(JaxParity, WithoutABankTheStateRunsOn) {
  const auto made = executor(Calls::kPrompt, false);
  const std::int64_t count = length("logits_nobank");
  const auto steps = sequences(made, 1);
  for (std::int64_t t = 0; t < count; ++t) expect_logits(steps->step(slice("input_ids", t, 1, 1)), "logits_nobank", t);
  for (const std::int64_t chunk : {std::int64_t{1}, std::int64_t{5}, std::int64_t{17}, count}) {
    const auto alone = sequences(made, 1);
    for (std::int64_t t = 0; t < count; t += chunk) {
      const std::int64_t tokens = std::min(chunk, count - t);
      expect_logits(alone->prefill(slice("input_ids", t, tokens, 1)), "logits_nobank", t + tokens - 1);
    }
  }
  const auto scored = sequences(made, 1);
  const std::vector<int> ids = slice("input_ids", 0, count, 1);
  expect_scores(*scored, ids, 1, logprobs_of("logits_nobank", ids, 1),
                bound(GetParam().logprob_bound, "logits_nobank"));
}

TEST_P(JaxParity, RunsOfAnyLengthsGoTogether) {
  const auto made = executor(Calls::kPrompt);
  const std::int64_t count = length("input_ids");
  ExecutionOptions options;
  options.threads = 1;
  Slots slots(made, 3, options);  // the whole first call, one token of it, and the second sequence's
  const std::vector<int> ids = slice("input_ids", 0, count);
  std::vector<int> tokens(ids.begin(), ids.begin() + count);
  tokens.push_back(ids[0]);
  tokens.insert(tokens.end(), ids.begin() + count, ids.end());
  const std::vector<models::Run> runs = {
      {slots[0], 0, 0, count}, {slots[1], 0, count, 1}, {slots[2], 0, count + 1, count}};
  EXPECT_EQ(made->run({.tokens = tokens, .runs = runs}, options).rows, (std::vector<std::int64_t>{count, 1, count}));
  std::vector<float> logits(3 * static_cast<std::size_t>(vocab_));
  made->logits(slots.first(), 3, logits);
  const auto of = [&](std::size_t slot) {
    return std::vector<float>(logits.begin() + static_cast<std::ptrdiff_t>(slot) * vocab_,
                              logits.begin() + static_cast<std::ptrdiff_t>(slot + 1) * vocab_);
  };
  std::vector<float> both = of(0);
  const std::vector<float> last = of(2);
  both.insert(both.end(), last.begin(), last.end());
  expect_logits(both, "logits", count - 1);
  expect_logits(of(1), "logits_stepwise", 0);
}

TEST_P(JaxParity, ASavedStateGoesOn) {
  for (const bool bank : {true, false}) {
    const auto made = executor(Calls::kPrompt, bank);
    const auto original = sequences(made);
    original->prefill(slice("input_ids", 0, 20));
    const auto restored = sequences(made);
    restored->set_state(original->state());
    for (std::int64_t t = 20; t < 30; ++t) {
      const std::span<const float> a = original->step(slice("input_ids", t, 1));
      const std::span<const float> b = restored->step(slice("input_ids", t, 1));
      ASSERT_TRUE(std::equal(a.begin(), a.end(), b.begin())) << "time " << t;
    }
  }
}

}  // namespace mmrec::models
