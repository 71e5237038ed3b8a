// The paths of a device, in 16 bits, where all of them exist: a whole step by one kernel (for one sequence and for a
// few), steps by rows (side by side and apart), sweeps with all segments at once, and packed runs.
#include "tests/models/terms.h"
#include "tests/kernels/cuda/cuda_testing.h"

namespace mmrec::models {
namespace {

INSTANTIATE_TEST_SUITE_P(Cuda, Terms, testing::ValuesIn(terms_models()), terms_name);

TEST_P(Terms, EveryPathFollowsTheReference) {
  if (const std::string reason = cuda_unusable_reason(); !reason.empty()) GTEST_SKIP() << reason;
  expect_all_follow(
      [](const LoadedModel& model) { return model.on_cuda(Precision::kF16, 0).executor; },
      {steps(0), steps(3, false, Path::kWholeStep), steps(11, false, Path::kRows), steps(11, true, Path::kRows),
       prefill(PrefillMode::kSweeps, 0, Path::kSegments), prefill(PrefillMode::kSweeps, 3, Path::kPacked),
       prefill(PrefillMode::kSweeps, 3, Path::kReference)},
      kernels::test::small_sizes() ? 26 : 42, 0.008, kernels::test::small_sizes() ? 9 : 1);
}

}  // namespace
}  // namespace mmrec::models
