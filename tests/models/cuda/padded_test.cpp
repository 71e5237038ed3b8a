// Models of widths that a GPU's weights are padded from, and one of whole widths: the CPU, which pads nothing, is the
// reference. The state of a sequence has the model's own widths, and moves between the two.

#include "models/runtime/cuda/padding.h"
#include "tests/models/small_models.h"
#include "tests/ops/op_test.h"

namespace mmrec::models {
namespace {

TEST(Padding, FillsHeadsUpToAMultipleOf64) {
  struct Case {
    std::int64_t dim, heads, padding;
  };
  for (const auto& [dim, heads, padding] :
       {Case{500, 4, 3}, {504, 8, 1}, {513, 1, 63}, {520, 8, 7}, {528, 4, 12}, {600, 12, 14}, {1100, 4, 13}}) {
    EXPECT_EQ(head_padding(dim, heads), padding) << dim << ", " << heads << " heads";
    EXPECT_EQ((dim + heads * padding) % 64, 0) << dim << ", " << heads << " heads";
  }
}
TEST(Padding, LeavesWholeWidthsAndThoseThatWouldGrowByMoreThanAThird) {
  EXPECT_EQ(head_padding(512, 8), 0);
  EXPECT_EQ(head_padding(512, 128), 0);
  EXPECT_EQ(head_padding(32, 2), 0);
  EXPECT_EQ(head_padding(504, 7), 0);
  EXPECT_EQ(head_padding(48, 1), 16);
}

struct PaddedModel {
  const char* name;
  const char* architecture;
  Config config;
  friend void PrintTo(const PaddedModel& model, std::ostream* out) { *out << model.name; }
};

class CudaPadded : public testing::TestWithParam<PaddedModel> {
 protected:
  void SetUp() override {
    if (const std::string reason = cuda_unusable_reason(); !reason.empty()) GTEST_SKIP() << reason;
    const Config& config = GetParam().config;
    const std::unique_ptr<LoadedModel> model = load_small_model(GetParam().architecture, config, kernels::DType::kF32);
    cpu_ = model->on_cpu();
    gpu_ = model->on_cuda(Precision::kF32, 0).executor;
    for (int& token : tokens_) token = static_cast<int>((&token - tokens_.data()) * 7 % config.vocab_size);
  }

  std::unique_ptr<Lockstep> on(const std::shared_ptr<Executor>& executor,
                               PrefillMode mode = PrefillMode::kSteps) const {
    return std::make_unique<Lockstep>(executor, GetParam().config.vocab_size, kBatch,
                                      ExecutionOptions{.threads = 1, .prefill = mode, .sweep_tolerance = 1e-6F});
  }
  /// Tokens [begin, begin + count) of both sequences.
  std::vector<int> some(std::int64_t begin, std::int64_t count) const {
    return columns_of(tokens_, kTokens, kBatch, begin, count);
  }
  static constexpr int kBatch = 2;
  static constexpr std::int64_t kTokens = 40;
  static constexpr std::int64_t kPrompt = 33;  // ends in the third segment
  static constexpr double kBound = 5e-5;
  std::shared_ptr<Executor> cpu_, gpu_;
  std::vector<int> tokens_ = std::vector<int>(kBatch * kTokens);
};

TEST_P(CudaPadded, StepsSweepsAndScoresFollowTheCpu) {
  const auto cpu = on(cpu_), steps = on(gpu_), sweeps = on(gpu_, PrefillMode::kSweeps);
  cpu->prefill(some(0, kPrompt));
  steps->prefill(some(0, kPrompt));
  sweeps->prefill(some(0, kPrompt));
  expect_near(steps->state(), cpu->state(), kBound);
  expect_near(sweeps->state(), cpu->state(), kBound);

  std::vector<float> got(kBatch * kPrompt), want(kBatch * kPrompt);
  on(cpu_)->score(some(0, kPrompt), want);
  on(gpu_, PrefillMode::kSweeps)->score(some(0, kPrompt), got);
  EXPECT_LE(largest_share(got, want), kBound);
}

TEST_P(CudaPadded, StatesMoveBetweenDevices) {
  const auto cpu = on(cpu_), gpu = on(gpu_), back = on(cpu_);
  cpu->prefill(some(0, kPrompt));
  const HostState state = cpu->state();
  gpu->step(some(0, 1));  // something to be overwritten
  gpu->set_state(state);
  EXPECT_EQ(gpu->state().parts, state.parts);
  for (std::int64_t t = kPrompt; t < kPrompt + 4; ++t) {
    cpu->step(some(t, 1));
    gpu->step(some(t, 1));
  }
  expect_near(gpu->state(), cpu->state(), kBound);
  back->set_state(gpu->state());
  cpu->step(some(kPrompt + 4, 1));
  back->step(some(kPrompt + 4, 1));
  expect_near(back->state(), cpu->state(), kBound);
}

PaddedModel model_of(const char* name, std::int64_t dim, std::int64_t heads, const char* architecture = "mmrec") {
  PaddedModel model{name, architecture, small_config(dim)};
  model.config.vocab_size = 51;
  model.config.num_heads = heads;
  model.config.ffn_dim = 79;
  model.config.memory_segment = 12;
  return model;
}

std::vector<PaddedModel> padded_models() {
  std::vector<PaddedModel> all = {model_of("Heads", 60, 2),   model_of("Fused", 52, 4),
                                  model_of("LowRank", 51, 1), model_of("Hidden", 64, 4),
                                  model_of("Whole", 64, 2),   model_of("Experts", 60, 1, "mmrec100m")};
  all[1].config.use_hem = true;
  all[2].config.use_dpg = true;
  all[2].config.dpg_rank = 13;
  all[3].config.memory_slots = 1;
  all[4].config.ffn_dim = 128;  // nothing is padded
  return all;
}

INSTANTIATE_TEST_SUITE_P(Models, CudaPadded, testing::ValuesIn(padded_models()),
                         [](const testing::TestParamInfo<PaddedModel>& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace mmrec::models
