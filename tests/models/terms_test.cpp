#include "tests/models/terms.h"

namespace mmrec::models {
namespace {

INSTANTIATE_TEST_SUITE_P(Cpu, Terms, testing::ValuesIn(terms_models()), terms_name);

TEST_P(Terms, EveryPathFollowsTheReference) {
  expect_all_follow(
      [](const LoadedModel& model) { return model.on_cpu(); },
      {steps(8), steps(5, true), prefill(PrefillMode::kSteps), prefill(PrefillMode::kSteps, 3),
       prefill(PrefillMode::kSweeps), prefill(PrefillMode::kSweeps, 3),
       prefill(PrefillMode::kSteps, 3, Path::kTogether), prefill(PrefillMode::kSteps, 3, Path::kReference)},
      42, 1e-4);
}

}  // namespace
}  // namespace mmrec::models
