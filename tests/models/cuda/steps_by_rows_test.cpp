// Steps by rows of bf16 have classes of products that depend on the layers' size: of large layers 5 to 8 sequences have
// the bits of more, of small ones 9 to 16 the bits of fewer, with and without attention to the memory, and where
// segments end.
#include "kernels/cuda/runtime/cuda.h"
#include "tests/models/small_models.h"
#include "tests/ops/op_test.h"

namespace mmrec::models {
namespace {

// But for the head's products, which go as they are.
void expect_same(const HostState& got, const HostState& want) {
  ASSERT_EQ(got.parts.size(), want.parts.size());
  for (std::size_t i = 0; i < got.parts.size(); ++i) {
    const bool is_head = got.parts[i].name == "logits";
    EXPECT_TRUE(is_head || got.parts[i] == want.parts[i]) << got.parts[i].name;
  }
  expect_near(got, want, 1e-3);
}

std::vector<HostState> states(const std::shared_ptr<Executor>& executor, int count, int steps) {
  Lockstep sequences(executor, kSmallVocab, count);
  for (int t = 0; t < steps; ++t) {
    std::vector<int> tokens;
    for (int s = 0; s < count; ++s) tokens.push_back((t * 7 + s * 11) % kSmallVocab);
    sequences.step(tokens);
  }
  std::vector<HostState> all;
  for (int s = 0; s < count; ++s) all.push_back(executor->save(sequences.slots()[s], 1, steps));
  return all;
}

/// The states of `few` sequences are those of the first of `more`.
void expect_same_steps(const Config& config, std::initializer_list<int> few, int more, int steps) {
  const auto executor =
      load_small_model(Config::kModelType, config, kernels::DType::kBF16)->on_cuda(Precision::kAuto, 0).executor;
  const std::vector<HostState> of_more = states(executor, more, steps);
  for (const int count : few) {
    SCOPED_TRACE(testing::Message() << count << " sequences" << (config.use_dpg ? ", one network" : ""));
    const std::vector<HostState> of_few = states(executor, count, steps);
    for (std::size_t s = 0; s < of_few.size(); ++s) expect_same(of_few[s], of_more[s]);
  }
}

TEST(CudaStepsByRows, FewSequencesOfLargeLayersHaveTheBitsOfMore) {
  if (const std::string reason = cuda_unusable_reason(); !reason.empty()) GTEST_SKIP() << reason;
  Config config = small_config(1024);
  config.ffn_dim = 4096;
  if (kernels::test::small_sizes()) {
    config.memory_segment = 1;
    return expect_same_steps(config, {5}, 9, 3);
  }
  for (const bool dpg : {false, true}) {
    config.use_dpg = dpg;
    expect_same_steps(config, {5, 8}, 12, 80);  // more than three segments' tokens
  }
}

TEST(CudaStepsByRows, SomeSequencesOfSmallLayersHaveTheBitsOfFew) {
  if (const std::string reason = cuda_unusable_reason(); !reason.empty()) GTEST_SKIP() << reason;
  Config config = small_config(192);
  config.num_heads = 3;
  config.memory_segment = 4;
  expect_same_steps(config, {2, 8, 9}, 16, 15);
}

}  // namespace
}  // namespace mmrec::models
