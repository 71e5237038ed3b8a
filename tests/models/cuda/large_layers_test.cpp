// Steps of 5 to 8 sequences of layers so large that their products go as those of more rows: the bits of a step of
// more, with and without attention to the memory, and where segments end.
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

TEST(CudaLargeLayers, FewSequencesHaveTheBitsOfMore) {
  if (const std::string reason = cuda_unusable_reason(); !reason.empty()) GTEST_SKIP() << reason;
  Config config = small_config(1024);
  const bool is_small = kernels::test::small_sizes();
  config.ffn_dim = 4096;
  if (is_small) config.memory_segment = 1;
  const int more = is_small ? 9 : 12, steps = is_small ? 3 : 80;  // more than three segments' tokens
  for (const bool dpg : {false, true}) {
    if (is_small && dpg) break;
    config.use_dpg = dpg;
    const auto executor =
        load_small_model(Config::kModelType, config, kernels::DType::kBF16)->on_cuda(Precision::kAuto, 0).executor;
    const auto states = [&](int count) {
      Lockstep sequences(executor, kSmallVocab, count);
      for (int t = 0; t < steps; ++t) {
        std::vector<int> tokens;
        for (int s = 0; s < count; ++s) tokens.push_back((t * 7 + s * 11) % kSmallVocab);
        sequences.step(tokens);
      }
      std::vector<HostState> all;
      for (int s = 0; s < count; ++s) all.push_back(executor->save(sequences.slots()[s], 1, steps));
      return all;
    };
    const std::vector<HostState> of_more = states(more);
    for (const int count : {5, 8}) {
      if (is_small && count == 8) break;
      SCOPED_TRACE(testing::Message() << count << " sequences" << (dpg ? ", one network" : ""));
      const std::vector<HostState> of_few = states(count);
      for (std::size_t s = 0; s < of_few.size(); ++s) expect_same(of_few[s], of_more[s]);
    }
  }
}

}  // namespace
}  // namespace mmrec::models
