// Every op case at its small sizes: the call that the benches time gives what the reference wants.

#include "tests/ops/op_test.h"

namespace mmrec::kernels::test {
namespace {

class OpCasesTest : public OpTest {};

TEST_F(OpCasesTest, EveryTimedCallGivesItsReference) {
  std::set<std::string> ops;
  for (const CaseTable table : case_tables()) {
    OpCases cases;
    table(on(), true, cases);
    for (const OpCase& c : cases) {
      SCOPED_TRACE(c.op + " " + c.shape);
      EXPECT_GT(c.work, 0.0);
      try {
        const PreparedOp op = c.prepare();
        op.call();
        op.check();
        ops.insert(c.op);
      } catch (const std::invalid_argument&) {
        EXPECT_TRUE(c.forced);  // then this algorithm does not take the shape
      }
    }
  }
  // Names that scripts/gpu-figures and scripts/bench-peers read.
  std::set<std::string> read = {"decay_scan fp32", "decay_scan bf16", "token_logprobs bf16", "hidden_logprobs bf16"};
  if (kOnCuda)
    read.insert(
        {"matvec chain bf16", "decay_scan fp32 by columns", "sample_tokens greedy", "linear bf16 + bias, gelu"});
  for (const std::string& op : read) EXPECT_EQ(ops.count(op), 1U) << op;
}

}  // namespace
}  // namespace mmrec::kernels::test
