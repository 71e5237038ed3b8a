// The CPU executor against the references: logits within 5e-5, log-probs within 2e-5.
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

}  // namespace
}  // namespace mmrec::models
