// mmrec-jax at a width whose recurrence goes by clusters and whose calls are long enough for attention by products: a
// device's logits against the CPU's, of prompts together, steps behind them and the model without a bank.
#include "models/mmrec_jax/mmrec_jax.h"
#include "models/runtime/cuda_device.h"
#include "models/weights/synthetic.h"
#include "tests/models/lockstep.h"
#include "tests/support/model_folder.h"

namespace mmrec::models {
namespace {

constexpr std::int64_t kVocab = 96;

class JaxWide : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = cuda_unusable_reason(); !reason.empty()) GTEST_SKIP() << reason;
    config_.vocab_size = kVocab;
    config_.model_dim = 256;
    config_.num_layers = 2;
    config_.num_heads = 4;
    config_.long_mem_len = 40;
    write_synthetic_model(folder_.path(), config_, kernels::DType::kBF16, 5);
    weights_ = std::make_shared<const mmrec_jax::HostWeights>(load_weights(Checkpoint::open(folder_.path()), config_));
  }

  /// Logits [2, V] behind a prompt, behind another and behind a step.
  std::vector<float> logits(const std::shared_ptr<Executor>& executor) const {
    Lockstep sequences(executor, kVocab, 2);
    std::vector<float> all;
    for (const std::size_t count : {std::size_t{20}, std::size_t{17}, std::size_t{1}}) {
      std::vector<int> tokens;
      for (std::size_t i = 0; i < 2 * count; ++i) tokens.push_back(static_cast<int>((i * 31 + 7 * count) % kVocab));
      const std::span<const float> got = count == 1 ? sequences.step(tokens) : sequences.prefill(tokens);
      all.insert(all.end(), got.begin(), got.end());
    }
    return all;
  }

  void expect_agreement(Precision precision, float bound) {
    for (const bool bank : {true, false}) {
      config_.bank = bank;
      const std::vector<float> want = logits(make_cpu_executor<mmrec_jax::Config>(config_, weights_));
      const std::vector<float> got = logits(make_cuda_executor(config_, *weights_, precision).executor);
      EXPECT_LE(largest_share(got, want), bound) << (bank ? "" : "no bank");
    }
  }

  test::TempFolder folder_;
  mmrec_jax::Config config_;
  std::shared_ptr<const mmrec_jax::HostWeights> weights_;
};

TEST_F(JaxWide, Float32) { expect_agreement(Precision::kF32, 1e-4F); }
TEST_F(JaxWide, BFloat16) { expect_agreement(Precision::kBF16, 0.06F); }
TEST_F(JaxWide, Float16) { expect_agreement(Precision::kF16, 0.01F); }

}  // namespace
}  // namespace mmrec::models
