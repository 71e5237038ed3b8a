// Steps of 5 to 8 sequences of layers so large that their products go as those of more rows: the bits of a step of
// more, with and without attention to the memory, and where segments end.
#include "tests/models/small_models.h"
#include "tests/ops/op_test.h"

namespace mmrec::models {
namespace {

TEST(CudaLargeLayers, FewSequencesHaveTheBitsOfMore) {
  if (kernels::test::small_sizes()) GTEST_SKIP() << "large sizes";
  if (const std::string reason = cuda_unusable_reason(); !reason.empty()) GTEST_SKIP() << reason;
  Config config = small_config(1024);
  config.ffn_dim = 4096;
  constexpr int kMore = 12, kSteps = 80;  // segments have 24 tokens
  for (const bool dpg : {false, true}) {
    config.use_dpg = dpg;
    const auto executor =
        load_small_model(Config::kModelType, config, kernels::DType::kBF16)->on_cuda(Precision::kAuto, 0).executor;
    const auto states = [&](int count) {
      Lockstep sequences(executor, kSmallVocab, count);
      for (int t = 0; t < kSteps; ++t) {
        std::vector<int> tokens;
        for (int s = 0; s < count; ++s) tokens.push_back((t * 7 + s * 11) % kSmallVocab);
        sequences.step(tokens);
      }
      std::vector<HostState> all;
      for (int s = 0; s < count; ++s) all.push_back(executor->save(sequences.slots()[s], 1, kSteps));
      return all;
    };
    const std::vector<HostState> of_more = states(kMore);
    for (const int count : {5, 8}) {
      SCOPED_TRACE(testing::Message() << count << " sequences" << (dpg ? ", one network" : ""));
      const std::vector<HostState> of_few = states(count);
      for (std::size_t s = 0; s < of_few.size(); ++s) expect_near(of_few[s], of_more[s], 0.0);
    }
  }
}

}  // namespace
}  // namespace mmrec::models
