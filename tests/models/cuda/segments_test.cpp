// Prefill over memory segments, against the same tokens one by one: logits and all of the state, at lengths that end
// before, at and after the ends of segments.

#include "tests/models/small_models.h"
#include "tests/ops/op_test.h"

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
    const auto model = load_small_model(Config::kModelType, GetParam().config, kernels::DType::kF16);
    executor_ = model->on_cuda(Precision::kF16, 0).executor;
    std::mt19937 engine(11);
    for (int& token : tokens_) token = static_cast<int>(engine() % static_cast<unsigned>(kSmallVocab));
  }

  std::unique_ptr<Lockstep> make() const { return std::make_unique<Lockstep>(executor_, kSmallVocab, kBatch); }
  /// Tokens [first, first + count) of both sequences.
  std::vector<int> some(std::int64_t first, std::int64_t count) const {
    return columns_of(tokens_, kTokens, kBatch, first, count);
  }

  static constexpr std::int64_t kTokens = 142;
  std::shared_ptr<Executor> executor_;
  std::vector<int> tokens_ = std::vector<int>(kBatch * kTokens);
};

TEST_P(CudaSegments, PrefillLeavesTheStateOfSteps) {
  // Rounding may go the other way wherever sums have another order.
  constexpr double kBound = 0.01;
  const auto steps = make();
  std::vector<HostState> after = {steps->state()};
  const bool few = kernels::test::small_sizes();  // three segments end in one call
  for (std::int64_t t = 0; t < (few ? 98 : kTokens); ++t) {
    steps->step(some(t, 1));
    after.push_back(steps->state());
  }
  for (const std::int64_t first : {0, 20, 47, 55}) {
    for (const std::int64_t count : {16, 28, 49, 85}) {
      if (few && (first != 47 || (count != 28 && count != 49))) continue;
      SCOPED_TRACE(testing::Message() << count << " tokens from " << first);
      const auto sequences = make();
      sequences->set_state(after[static_cast<std::size_t>(first)]);
      sequences->prefill(some(first, count));
      for (std::int64_t end = first + count; end < first + count + 2; ++end) {  // and a step more
        const HostState& want = after[static_cast<std::size_t>(end)];
        const HostState got = sequences->state();
        ASSERT_EQ(got.position, end);
        expect_near(got, want, kBound);
        sequences->step(some(end, 1));
      }
    }
  }
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
