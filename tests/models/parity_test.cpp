// The CPU executor against the references: logits within 5e-5, log-probs within 2e-5; in bf16 within
// 6 % of the largest logit, as on a GPU. And every path of the CPU follows the reference in every term.
#include "tests/models/parity.h"
#include "models/runtime/forward.h"
#include "tests/models/jax_parity.h"
#include "tests/models/terms.h"

namespace mmrec::models {
namespace {

std::shared_ptr<Executor> make(const LoadedModel& model) { return model.on_cpu(); }

std::vector<ParityCase> cases() {
  std::vector<ParityCase> all = with_experts({.fixture = "", .make = make});
  for (const char* fixture : kParityFixtures) all.push_back({.fixture = fixture, .make = make});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Cpu, Parity, testing::ValuesIn(cases()), parity_name);

std::vector<ParityCase> cases_in_bf16() {
  std::vector<ParityCase> all = cases();
  for (ParityCase& c : all) {
    c.logit_bound = c.logprob_bound = 0.06F;
    c.relative = c.may_fall_back = true;
    c.sweep_tolerance = 0.0F;
    c.prepare = [](LoadedModel& model) { model.round_to_bf16(); };
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(CpuBF16, Parity, testing::ValuesIn(cases_in_bf16()), parity_name);

INSTANTIATE_TEST_SUITE_P(Cpu, JaxParity, testing::Values(JaxParityCase{"fp32", make_cpu_executor<mmrec_jax::Config>}),
                         jax_parity_name);

INSTANTIATE_TEST_SUITE_P(Cpu, Terms, testing::ValuesIn(terms_models()), terms_name);

TEST_P(Terms, EveryPathFollowsTheReference) {
  expect_all_follow(
      make,
      {steps(8), steps(5, true), prefill(PrefillMode::kSteps), prefill(PrefillMode::kSteps, 3),
       prefill(PrefillMode::kSweeps), prefill(PrefillMode::kSweeps, 3),
       prefill(PrefillMode::kSteps, 3, Path::kTogether), prefill(PrefillMode::kSteps, 3, Path::kReference)},
      42, 1e-4);
}

}  // namespace
}  // namespace mmrec::models
