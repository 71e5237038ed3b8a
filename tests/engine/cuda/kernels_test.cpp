// The public kernels on a GPU: the same checks as on the CPU, on streams of the context's own and of the caller.
#include "mmrec/kernels.h"

#include <deque>

#include "kernels/cuda/runtime/cuda.h"
#include "tests/engine/kernels_reference.h"
#include "tests/support/refusal.h"

namespace mmrec::test {
namespace {

class DeviceArena final : public Arena {
 public:
  explicit DeviceArena(KernelContext& context) : context_(context) {}
  void* put(const Bytes& bytes) override {
    auto& block = blocks_.emplace_back(bytes.size());
    transfers_.upload(bytes.data(), block.data(), bytes.size());
    transfers_.synchronize();
    return block.data();
  }
  Bytes get(const void* data, std::size_t size) override {
    context_.synchronize();
    Bytes bytes(size);
    transfers_.download(static_cast<const std::uint8_t*>(data), bytes.data(), size);
    return bytes;
  }

 private:
  KernelContext& context_;
  kernels::Cuda transfers_;
  std::deque<kernels::DeviceBuffer<std::uint8_t>> blocks_;
};

class CudaKernels : public testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = kernels::cuda_unusable_reason();
    if (!reason.empty()) GTEST_SKIP() << "no usable CUDA device: " << reason;
  }
};

TEST_F(CudaKernels, ScansLogProbsAndTheirDerivativeAgreeWithTheirEquations) {
  KernelContext context = KernelContext::cuda();
  EXPECT_TRUE(context.is_cuda());
  EXPECT_NE(context.stream(), nullptr);
  check_kernels(context, [&] { return DeviceArena(context); });
}

TEST_F(CudaKernels, WorkGoesToTheCallersStream) {
  kernels::Cuda owner;  // for its stream
  KernelContext context = KernelContext::cuda(0, owner.stream());
  EXPECT_EQ(context.stream(), owner.stream());
  DeviceArena arena(context);
  check_scans<float>(context, arena, {{.batch = 1, .time = 100, .dim = 16}, false});
  KernelContext on_default = KernelContext::cuda(0, nullptr);
  EXPECT_EQ(on_default.stream(), nullptr);
  DeviceArena other(on_default);
  check_scans<float>(on_default, other, {{.batch = 1, .time = 100, .dim = 16}, false});
}

TEST_F(CudaKernels, ABadTargetIsNamedAndNothingIsWritten) {
  KernelContext context = KernelContext::cuda();
  DeviceArena arena(context);
  const std::vector<float> logits(24, 0.5F);
  for (const std::int32_t bad : {8, -1, 1 << 30}) {
    float* out = arena.put_all(std::vector<float>(3, 42.0F));
    TokenLogprobs op{.rows = 3,
                     .vocab = 8,
                     .logits = arena.put_all(logits),
                     .targets = arena.put_all(std::vector<std::int32_t>{0, bad, 0}),
                     .logprobs = out};
    expect_says(refusal([&] { token_logprobs(context, op); }), {"target " + std::to_string(bad) + " of row 1"});
    EXPECT_EQ(arena.get_all(out, 3), std::vector<float>(3, 42.0F));
    op.check_targets = false;
    token_logprobs(context, op);
    const std::vector<float> got = arena.get_all(out, 3);
    EXPECT_NEAR(got[0], -std::log(8.0F), 1e-6F);
    EXPECT_TRUE(std::isnan(got[1])) << got[1];
    EXPECT_NEAR(got[2], -std::log(8.0F), 1e-6F);
  }
  // The context goes on.
  check_logprobs<BFloat16, std::int32_t>(context, arena, 3, 100, 100);
}

TEST_F(CudaKernels, ADeviceThatIsNotThereIsAnError) {
  EXPECT_THROW((void)KernelContext::cuda(-1), std::invalid_argument);
  EXPECT_THROW((void)KernelContext::cuda(4096), std::system_error);
}

}  // namespace
}  // namespace mmrec::test
