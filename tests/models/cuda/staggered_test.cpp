// Long sequences of small models, whose chunks go through the layers in parts side by side (Staggered): the bits of the
// same sequences two at a time, which go part by part. With segments that divide a part its layers are recorded.

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
    config_ = small_config(40);  // far from a multiple of 64: no padding, and no kernel takes all segments
    config_.carry_state = GetParam().carries_state;
    config_.memory_segment = GetParam().segment;
    const auto model = load_small_model(Config::kModelType, config_, GetParam().type);
    executor_ = model->on_cuda(Precision::kAuto, 0).executor;
  }
  static std::vector<int> tokens_of(int sequence, std::int64_t count) {
    std::vector<int> tokens;
    for (std::int64_t i = 0; i < count; ++i) tokens.push_back(static_cast<int>((i * i * 7 + i * (3 + sequence)) % 50));
    return tokens;
  }
  /// The sequences in lock-step: a call of some tokens, then one of the rest.
  std::vector<Result> score(const std::vector<int>& sequences, std::int64_t some, std::int64_t all) {
    const auto count = static_cast<int>(sequences.size());
    const Slots slots(executor_, count, {});
    executor_->clear(slots.first(), count);
    std::vector<Result> results(sequences.size());
    for (const auto& [begin, end] : {std::pair{std::int64_t{0}, some}, std::pair{some, all}}) {
      std::vector<int> tokens;
      std::vector<models::Run> runs;
      for (int i = 0; i < count; ++i) {
        const std::vector<int> own = tokens_of(sequences[static_cast<std::size_t>(i)], all);
        runs.push_back({slots[i], begin, std::ssize(tokens), end - begin});
        tokens.insert(tokens.end(), own.begin() + begin, own.begin() + end);
      }
      std::vector<float> logprobs(tokens.size());
      executor_->run({.tokens = tokens, .runs = runs, .logprobs = logprobs}, {});
      for (std::size_t i = 0; i < results.size(); ++i) {
        const auto first = logprobs.begin() + runs[i].first_row;
        results[i].logprobs.insert(results[i].logprobs.end(), first, first + runs[i].rows);
      }
    }
    for (int i = 0; i < count; ++i) results[static_cast<std::size_t>(i)].state = executor_->save(slots[i], 1, all);
    return results;
  }

  Config config_;
  std::shared_ptr<Executor> executor_;
};

TEST_P(CudaStaggered, PartsSideBySideHaveTheBitsOfOneAfterAnother) {
  ASSERT_EQ(padded(config_).model_dim, config_.model_dim);
  const std::int64_t part = chunk_plan(config_, kernels::Cuda(0), GetParam().type).part;
  ASSERT_GT(part, 0);
  // From within a part on, two ends of parts, or with recordings so many that each lane has three whole parts; the rows
  // of each part, and of two sequences', are of one class.
  using Lanes = Staggered<kernels::Cuda, kernels::Float16>;
  const std::int64_t lanes = std::min(Lanes::kMostLanes, kernels::ThreadPool::available_processors());
  const std::int64_t whole = part % GetParam().segment == 0 ? 3 * lanes + 1 : 2;
  const std::int64_t some = 40, all = whole * part + 3 * part / 4;
  const std::vector<Result> both = score({0, 1}, some, all);
  for (const int sequence : {0, 1}) {
    const Result alone = score({sequence}, some, all).front();
    const Result& other = both[static_cast<std::size_t>(sequence)];
    EXPECT_EQ(alone.logprobs, other.logprobs);
    EXPECT_EQ(alone.state.parts, other.state.parts);
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
