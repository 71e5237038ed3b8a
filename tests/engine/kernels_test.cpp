// The public kernels on the CPU: values against fp64, layouts, carries, and every refusal.
#include "mmrec/kernels.h"

#include "tests/engine/kernels_reference.h"
#include "tests/support/refusal.h"

namespace mmrec::test {
namespace {

TEST(Kernels, ScansLogProbsAndTheirDerivativeAgreeWithTheirEquations) {
  KernelContext context = KernelContext::cpu(2);
  EXPECT_FALSE(context.is_cuda());
  EXPECT_EQ(context.stream(), nullptr);
  check_kernels(context, [] { return HostArena(); });
  context.synchronize();
}

TEST(Kernels, NoTimesHandTheCarryOn) {
  KernelContext context = KernelContext::cpu(1);
  const float in[] = {1.0F, -2.0F, 3.0F};
  float out[] = {0.0F, 0.0F, 0.0F};
  decay_scan(context, {.shape = {.time = 0, .dim = 3}, .carry_in = in, .carry_out = out});
  for (int i = 0; i < 3; ++i) EXPECT_EQ(out[i], in[i]);
  token_logprobs(context, {.rows = 0, .vocab = 10});
  token_logprobs_backward(context, {.rows = 0, .vocab = 0});
}

TEST(Kernels, WhatIsWrongIsNamed) {
  KernelContext context = KernelContext::cpu(1);
  std::vector<float> x(64, 0.5F);
  const std::vector<int> targets = {0, 7, 3, 4};
  const auto scan = [&](auto change) {
    LogSumExpScan op{.shape = {.batch = 2, .time = 4, .dim = 8}, .x = x.data(), .y = x.data()};
    change(op);
    return refusal([&] { logsumexp_scan(context, op); });
  };
  const auto scan_says = [&](const std::string& what, auto change) {
    EXPECT_EQ(scan(change), "logsumexp_scan: " + what);
  };
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max(), kLeast = -kMost - 1;
  EXPECT_EQ(scan([](auto&) {}), "no error");
  scan_says("x: found null, expected an address", [](auto& op) { op.x = nullptr; });
  scan_says("y: found null, expected an address", [](auto& op) { op.y = nullptr; });
  scan_says("shape.time: found -1, expected >= 0", [](auto& op) { op.shape.time = -1; });
  scan_says("shape: has more elements than 64 bits can count", [](auto& op) { op.shape.dim = kMost; });
  scan_says("type: found 9, expected an ElementType", [](auto& op) { op.type = static_cast<ElementType>(9); });
  const auto x_strides_say = [&](const std::string& what, SequenceStrides strides) {
    scan_says("x: " + what, [&](auto& op) { op.x_strides = strides; });
  };
  x_strides_say("found a stride of -32, expected >= 0", {.batch = -32, .time = 8});
  x_strides_say("reaches beyond what 64 bits can address", {.batch = 32, .time = kLeast});
  x_strides_say("reaches beyond what 64 bits can address", {.batch = kMost - 3, .time = 8});
  for (const SequenceStrides strides : {SequenceStrides{.batch = 32, .time = -7}, {.batch = 32, .time = 7}}) {
    scan_says("y: found a stride of 7, with which elements overlap", [&](auto& op) { op.y_strides = strides; });
  }
  scan_says("y: found a stride of 8, with which elements overlap",
            [](auto& op) { op.y_strides = {.batch = 8, .time = 8}; });
  EXPECT_EQ(refusal([&] { decay_scan(context, {.shape = {.time = 1, .dim = 1}, .b = x.data(), .h = x.data()}); }),
            "decay_scan: log_a: found null, expected an address");
  EXPECT_EQ(refusal([&] { exp_product_scan(context, {.shape = {.time = 1, .dim = 1}, .y = x.data()}); }),
            "exp_product_scan: gamma: found null, expected an address");

  std::vector<float> out(4, 42.0F);
  const auto logprobs = [&](auto change) {
    TokenLogprobs op{.rows = 4, .vocab = 8, .logits = x.data(), .targets = targets.data(), .logprobs = out.data()};
    change(op);
    return refusal([&] { token_logprobs(context, op); });
  };
  EXPECT_EQ(logprobs([](auto& op) { op.rows = -1; }), "token_logprobs: rows: found -1, expected >= 0");
  EXPECT_EQ(logprobs([](auto& op) { op.targets = nullptr; }),
            "token_logprobs: targets: found null, expected an address");
  EXPECT_EQ(logprobs([](auto& op) { op.logprobs = nullptr; }),
            "token_logprobs: logprobs: found null, expected an address");
  EXPECT_EQ(logprobs([](auto& op) { op.row_stride = 7; }),
            "token_logprobs: logits: found a row stride of 7, expected at least 8");
  EXPECT_EQ(logprobs([](auto& op) { op.target_type = static_cast<IndexType>(5); }),
            "token_logprobs: target_type: found 5, expected an IndexType");
  EXPECT_NE(logprobs([](auto& op) { op.vocab = 7; }).find("target 7 of row 1"), std::string::npos);
  EXPECT_EQ(out, std::vector<float>(4, 42.0F));  // nothing was written
  EXPECT_EQ(logprobs([](auto&) {}), "no error");

  EXPECT_EQ(refusal([&] {
              token_logprobs_backward(
                  context,
                  {.rows = 4, .vocab = 8, .logits = x.data(), .targets = targets.data(), .d_logits = x.data()});
            }),
            "token_logprobs_backward: grad: found null, expected an address");
  EXPECT_EQ(refusal([] { (void)KernelContext::cpu(-1); }), "kernel context: threads: found -1, expected >= 0");
}

TEST(Kernels, ContextsMove) {
  KernelContext first = KernelContext::cpu(1);
  KernelContext second = std::move(first);
  float x[] = {1.0F, 2.0F};
  logsumexp_scan(second, {.shape = {.time = 2, .dim = 1}, .x = x, .y = x});
  EXPECT_NEAR(x[1], std::log(std::exp(1.0) + std::exp(2.0)), 1e-6);
  first = std::move(second);
  logsumexp_scan(first, {.shape = {.time = 1, .dim = 1}, .x = x, .y = x});
}

}  // namespace
}  // namespace mmrec::test
