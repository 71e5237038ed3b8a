// Models whose prefill takes all memory segments of a chunk at once (finish_segments), against the same tokens one by
// one, which never do: logits and all of the state, at lengths that end before, at and after the ends of segments.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "models/files/checkpoint.h"
#include "tests/models/lockstep.h"
#include "tests/models/small_models.h"
#include "tests/ops/op_test.h"
#include "tests/support/model_folder.h"

namespace mmrec::models {
namespace {

constexpr int kBatch = 2;

struct SegmentsCase {
  Config config;
  friend void PrintTo(const SegmentsCase& c, std::ostream* out) {
    *out << c.config.memory_slots << (c.config.carry_state ? " slots" : " slots, restarting");
  }
};

class CudaSegments : public testing::TestWithParam<SegmentsCase> {
 protected:
  void SetUp() override {
    if (const std::string reason = cuda_unusable_reason(); !reason.empty()) GTEST_SKIP() << reason;
    write_small_model(folder_.path(), Config::kModelType, GetParam().config, kernels::DType::kF16);
    config_ = test::config_of<Config>(folder_.path());
    const HostWeights host = load_weights(Checkpoint::open(folder_.path()), config_);
    executor_ = make_cuda_executor(config_, host, Precision::kF16).executor;
    std::mt19937 engine(11);
    for (int& token : tokens_) token = static_cast<int>(engine() % static_cast<unsigned>(config_.vocab_size));
  }

  std::unique_ptr<Lockstep> make() const { return std::make_unique<Lockstep>(executor_, config_.vocab_size, kBatch); }
  /// Tokens [first, first + count) of both sequences.
  std::vector<int> some(std::int64_t first, std::int64_t count) const {
    std::vector<int> all;
    for (int b = 0; b < kBatch; ++b) {
      const auto from = tokens_.begin() + b * kTokens + first;
      all.insert(all.end(), from, from + count);
    }
    return all;
  }

  static constexpr std::int64_t kTokens = 142;
  mmrec::test::TempFolder folder_;
  Config config_;
  std::shared_ptr<Executor> executor_;
  std::vector<int> tokens_ = std::vector<int>(kBatch * kTokens);
};

TEST_P(CudaSegments, PrefillLeavesTheStateOfSteps) {
  // Rounding may go the other way wherever sums have another order.
  constexpr double kBound = 0.01;
  const auto steps = make();
  std::vector<HostState> after = {steps->state()};
  for (std::int64_t t = 0; t < (kernels::test::few_cases() ? 77 : kTokens); ++t) {
    steps->step(some(t, 1));
    after.push_back(steps->state());
  }
  for (const std::int64_t first : {0, 20, 47, 55}) {
    for (const std::int64_t count : {16, 28, 49, 85}) {
      if (kernels::test::few_cases() && (first != 47 || count != 28)) continue;
      SCOPED_TRACE(testing::Message() << count << " tokens from " << first);
      const auto sequences = make();
      sequences->set_state(after[static_cast<std::size_t>(first)]);
      sequences->prefill(some(first, count));
      for (std::int64_t end = first + count; end < first + count + 2; ++end) {  // and a step more
        const HostState& want = after[static_cast<std::size_t>(end)];
        const HostState got = sequences->state();
        ASSERT_EQ(got.position, end);
        EXPECT_LE(largest_share(got.get("h"), want.get("h")), kBound);
        EXPECT_LE(largest_share(got.get("memory"), want.get("memory")), kBound);
        EXPECT_LE(largest_share(got.get<double>("segment_sum"), want.get<double>("segment_sum")), kBound);
        EXPECT_LE(largest_share(got.get("logits"), want.get("logits")), kBound);
        sequences->step(some(end, 1));
      }
    }
  }
}

// Steps of many sequences go by rows, those of one by one kernel or as a chain of ops: the same within rounding, over
// the ends of segments, after a clone and for sequences that joined at other positions.
TEST_P(CudaSegments, ManySequencesStepAsEachAlone) {
  constexpr double kBound = 0.01;
  constexpr int kMany = 9;
  constexpr std::int64_t kSteps = 30;
  const std::int64_t steps = kernels::test::few_cases() ? 3 : kernels::test::kEmulated ? 8 : kSteps;
  const std::int64_t first = 24 * 2 - steps / 2;  // a segment ends half way
  const auto& executor = executor_;
  Lockstep alone(executor, config_.vocab_size, 1);
  Lockstep many(executor, config_.vocab_size, kMany);
  Lockstep other(executor, config_.vocab_size, 1);
  const std::span<const int> tokens = std::span(tokens_).first(static_cast<std::size_t>(first + steps));
  alone.prefill(tokens.first(static_cast<std::size_t>(first)));
  other.prefill(tokens.first(static_cast<std::size_t>(first) - 5));
  for (int b = 0; b < kMany; ++b) executor->copy(alone.slots()[0], many.slots()[b], 1, first);
  for (std::int64_t t = first; t < first + steps; ++t) {
    std::vector<int> each(kMany, tokens[static_cast<std::size_t>(t)]);
    std::vector<models::Run> runs;
    for (int b = 0; b < kMany; ++b) runs.push_back({many.slots()[b], t, b, 1});
    executor->step(each, runs, {});
    // A list whose sequences differ in position: what stands beside them changes nothing.
    const int pair[] = {tokens[static_cast<std::size_t>(t)], tokens[static_cast<std::size_t>(t - 5)]};
    const models::Run apart[] = {{alone.slots()[0], t, 0, 1}, {other.slots()[0], t - 5, 1, 1}};
    executor->step(pair, apart, {});
    std::vector<float> of_one(static_cast<std::size_t>(config_.vocab_size));
    std::vector<float> of_many(of_one.size());
    executor->logits(alone.slots()[0], 1, of_one);
    for (int b = 0; b < kMany; ++b) {
      executor->logits(many.slots()[b], 1, of_many);
      ASSERT_LE(largest_share(of_many, of_one), kBound) << "sequence " << b << ", position " << t;
    }
  }
  const HostState want = executor->save(alone.slots()[0], 1, first + steps);
  const HostState got = executor->save(many.slots()[kMany - 1], 1, first + steps);
  EXPECT_LE(largest_share(got.get("h"), want.get("h")), kBound);
  EXPECT_LE(largest_share(got.get("memory"), want.get("memory")), kBound);
  EXPECT_LE(largest_share(got.get<double>("segment_sum"), want.get<double>("segment_sum")), kBound);
}

SegmentsCase case_of(std::int64_t slots, bool carry) {
  Config config = small_config();
  config.memory_slots = slots;
  config.carry_state = carry;
  return {config};
}

std::vector<SegmentsCase> cases() {
  if (kernels::test::few_cases()) return {case_of(3, true)};
  if (kernels::test::kEmulated) return {case_of(3, true), case_of(3, false)};
  return {case_of(1, true), case_of(3, true), case_of(9, true), case_of(3, false)};
}

INSTANTIATE_TEST_SUITE_P(Models, CudaSegments, testing::ValuesIn(cases()),
                         [](const testing::TestParamInfo<SegmentsCase>& info) {
                           return "Slots" + std::to_string(info.param.config.memory_slots) +
                                  (info.param.config.carry_state ? "" : "Restarting");
                         });

}  // namespace
}  // namespace mmrec::models
