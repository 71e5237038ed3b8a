// The CPU executor against the references: logits within 5e-5, log-probs within 2e-5; in bf16 within
// 6 % of the largest logit, as on a GPU.
#include "tests/models/parity.h"

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

}  // namespace
}  // namespace mmrec::models
