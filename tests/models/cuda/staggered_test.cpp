// Long sequences of small models, whose chunks go through the layers in parts side by side (Staggered): the bits of the
// same tokens part by part, a call for each. With segments that divide a part its layers are recorded.

#include "models/mmrec/cuda/staggered.h"
#include "kernels/cuda/runtime/cuda.h"
#include "models/mmrec/cuda/chunk_plan.h"
#include "models/mmrec/cuda/padded.h"
#include "tests/models/small_models.h"
#include "tests/ops/op_test.h"

namespace mmrec::models {
namespace {

struct StaggeredModel {
  std::string_view name;
  kernels::DType type;  // of products
  bool carries_state = true;
  std::int64_t segment = 24;
};

class CudaStaggered : public testing::TestWithParam<StaggeredModel> {
 protected:
  struct Result {
    std::vector<float> logprobs;
    HostState state;
  };

  void SetUp() override {
    if (const std::string reason = cuda_unusable_reason(); !reason.empty()) GTEST_SKIP() << reason;
    config_ = small_config(40);  // far from a multiple of 64: no padding
    config_.carry_state = GetParam().carries_state;
    config_.memory_segment = GetParam().segment;
    const auto model = load_small_model(Config::kModelType, config_, GetParam().type);
    executor_ = model->on_cuda(Precision::kAuto, 0).executor;
  }
  struct Sequence {
    int number = 0;  // its tokens follow from it
    std::vector<std::int64_t> ends;
  };
  /// The sequences, by calls together that end at these positions of each.
  std::vector<Result> score(const std::vector<Sequence>& sequences) {
    const auto count = static_cast<int>(sequences.size());
    const Slots slots(executor_, count, {});
    executor_->clear(slots.first(), count);
    std::vector<Result> results(sequences.size());
    for (std::size_t call = 0; call < sequences.front().ends.size(); ++call) {
      std::vector<int> tokens;
      std::vector<models::Run> runs;
      for (int i = 0; i < count; ++i) {
        const auto& [number, ends] = sequences[static_cast<std::size_t>(i)];
        const std::int64_t begin = call == 0 ? 0 : ends[call - 1];
        runs.push_back({slots[i], begin, std::ssize(tokens), ends[call] - begin});
        for (std::int64_t t = begin; t < ends[call]; ++t) {
          tokens.push_back(static_cast<int>((t * t * 7 + t * (3 + number)) % 50));
        }
      }
      std::vector<float> logprobs(tokens.size());
      executor_->run({.tokens = tokens, .runs = runs, .logprobs = logprobs}, {});
      for (std::size_t i = 0; i < results.size(); ++i) {
        const auto first = logprobs.begin() + runs[i].first_row;
        results[i].logprobs.insert(results[i].logprobs.end(), first, first + runs[i].rows);
      }
    }
    for (int i = 0; i < count; ++i) {
      const auto at = static_cast<std::size_t>(i);
      results[at].state = executor_->save(slots[i], 1, sequences[at].ends.back());
    }
    return results;
  }

  Config config_;
  std::shared_ptr<Executor> executor_;
};

TEST_P(CudaStaggered, PartsSideBySideHaveTheBitsOfOneAfterAnother) {
  ASSERT_EQ(padded(config_).model_dim, config_.model_dim);
  const ChunkPlan plan = chunk_plan(config_, kernels::Cuda(0));
  ASSERT_GT(plan.part, 0);
  // From within a part on: one call of several parts; or with recordings so many calls of two parts and more that
  // workers run, record and replay.
  const bool is_recorded = plan.part % GetParam().segment == 0;
  std::vector<std::int64_t> calls = {40};
  for (int call = is_recorded ? 1 : 4; call <= 4; ++call) calls.push_back((is_recorded ? 2 : 1) * call * plan.part);
  calls.back() += 3 * plan.part / 4;
  std::vector<std::int64_t> ends = {calls.front()};  // of each part; rows of a part are of one class
  while (ends.back() < calls.back()) ends.push_back(std::min(plan.part_end(ends.back()), calls.back()));
  const std::vector<Result> expected = score({{0, ends}});
  const auto expect_same = [&](const Result& got, const char* what) {
    EXPECT_EQ(got.state.parts, expected.front().state.parts) << what;
    for (std::int64_t t = 0, call = 0; t < calls.back(); ++t) {
      const auto i = static_cast<std::size_t>(t);
      const bool begins_call = t == ends[static_cast<std::size_t>(call)];  // scored by another op
      if (begins_call) ++call;
      const float want = expected.front().logprobs[i];
      ASSERT_NEAR(got.logprobs[i], want, begins_call ? 1e-3F : 0.0F) << what << ", position " << t;
    }
  };
  expect_same(score({{0, calls}}).front(), "alone");
  expect_same(score({{0, calls}, {1, calls}}).front(), "beside another");
}

TEST_P(CudaStaggered, LongRunsBesideShortOnesAreAsEachAlone) {
  constexpr double kBound = 0.01;  // short ones go packed
  const std::int64_t part = chunk_plan(config_, kernels::Cuda(0)).part;
  const std::vector<Sequence> sequences = {{0, {40, 2 * part + 50}}, {1, {7, 30}}, {2, {1, part + 100}}, {3, {9, 60}}};
  const std::vector<Result> together = score(sequences);
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const Result alone = score({sequences[i]}).front();
    SCOPED_TRACE(testing::Message() << "sequence " << i);
    expect_near(together[i].state, alone.state, kBound);
    EXPECT_LE(largest_difference(together[i].logprobs, alone.logprobs), kBound);
  }
}

constexpr StaggeredModel kModels[] = {{"Carried", kernels::DType::kF16},
                                      {"Restarting", kernels::DType::kF16, false},
                                      {"Recorded", kernels::DType::kF16, true, 32},
                                      {"RecordedInFp32", kernels::DType::kF32, true, 32}};
INSTANTIATE_TEST_SUITE_P(Models, CudaStaggered, testing::ValuesIn(kModels),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace mmrec::models
