// The ops of a forward pass on the device against the same ops on the CPU, in fp32, on one chain of random operands:
// what one of the two understands otherwise than the other shows here, whatever a reference in a test makes of it.
#include <span>

#include "kernels/cpu/cpu.h"
#include "tests/kernels/cuda/dense_testing.h"

namespace mmrec::kernels::test {
namespace {

class CudaCpuAgreementTest : public CudaTest {
 protected:
  struct Shape {
    std::int64_t batch, time, dim;
  };
  static constexpr Shape kShapes[] = {{1, 1, 1}, {2, 3, 7}, {1, 33, 48}, {8, 1, 256}, {3, 131, 96}};

  static MatrixView<float, Host> view(std::vector<float>& values, std::int64_t cols) {
    return {values.data(), static_cast<std::int64_t>(values.size()) / cols, cols};
  }
  static MatrixView<const float, Host> view(const std::vector<float>& values, std::int64_t cols) {
    return {values.data(), static_cast<std::int64_t>(values.size()) / cols, cols};
  }
  static void expect_close(const std::vector<float>& got, const std::vector<float>& want, double bound) {
    EXPECT_LE(largest_error(got, want), bound);
  }

  Cpu cpu_{2};
};

TEST_F(CudaCpuAgreementTest, EmbedAndRmsnorm) {
  for (const auto& [batch, time, dim] : kShapes) {
    const std::int64_t n = batch * time;
    DeviceMatrix<Float16> table = random_matrix<Float16>(cuda(), 19, dim, kPacked, 1);
    DeviceMatrix<float> weight = random_matrix<float>(cuda(), 1, dim, kPacked, 2);
    std::vector<int> tokens;
    for (std::int64_t r = 0; r < n; ++r) tokens.push_back(static_cast<int>(r * 7 % 19));
    const DeviceBuffer<int> device_tokens = to_device(tokens);
    DeviceMatrix<float> x(cuda(), n, dim);
    DeviceMatrix<float> y(cuda(), n, dim);
    embed(cuda(), {table.view().data, DType::kF16, 19, dim}, device_tokens.data(), x.view());
    rmsnorm<float>(cuda(), x.view(), weight.view().data, y.view());
    std::vector<float> x_cpu(static_cast<std::size_t>(n * dim));
    std::vector<float> y_cpu(x_cpu.size());
    embed(cpu_, {table.values().data(), DType::kF16, 19, dim}, tokens.data(), view(x_cpu, dim));
    rmsnorm(cpu_, view(x_cpu, dim), weight.values().data(), view(y_cpu, dim));
    EXPECT_TRUE(same_bits(x.download(), x_cpu));
    expect_close(y.download(), y_cpu, 1e-6);
  }
}

TEST_F(CudaCpuAgreementTest, LinearAndDecayGate) {
  for (const auto& [batch, time, dim] : kShapes) {
    const std::int64_t n = batch * time;
    const std::int64_t out = 2 * dim + 1;
    DeviceMatrix<float> x = random_matrix<float>(cuda(), n, dim, kPacked, 3);
    DeviceMatrix<float> w =
        random_matrix<float>(cuda(), out, dim, kPacked, 4, 1.0 / std::sqrt(static_cast<double>(dim)));
    DeviceMatrix<float> bias = random_matrix<float>(cuda(), 1, out, kPacked, 5);
    DeviceMatrix<float> residual = random_matrix<float>(cuda(), n, out, kPacked, 6);
    DeviceMatrix<float> y(cuda(), n, out);
    DeviceMatrix<float> gamma(cuda(), n, out);
    const Linear<Device> job{.x = x.view(),
                             .weight = {w.view().data, DType::kF32, out, dim},
                             .bias = bias.view().data,
                             .y = y.view(),
                             .activation = Activation::kGelu,
                             .residual = residual.view(),
                             .residual_scale = 0.5F};
    linear(cuda(), std::span(&job, 1));
    decay_gate(cuda(), {.a = y.view(), .c = residual.view(), .gamma = gamma.view()});

    std::vector<float> y_cpu(static_cast<std::size_t>(n * out));
    std::vector<float> gamma_cpu(y_cpu.size());
    const Linear<Host> same{.x = view(x.values(), dim),
                            .weight = {w.values().data(), DType::kF32, out, dim},
                            .bias = bias.values().data(),
                            .y = view(y_cpu, out),
                            .activation = Activation::kGelu,
                            .residual = view(residual.values(), out),
                            .residual_scale = 0.5F};
    linear(cpu_, std::span(&same, 1));
    decay_gate(cpu_, {.a = view(y_cpu, out), .c = view(residual.values(), out), .gamma = view(gamma_cpu, out)});
    expect_close(y.download(), y_cpu, 5e-6);
    expect_close(gamma.download(), gamma_cpu, 5e-6);
  }
}

TEST_F(CudaCpuAgreementTest, AttentionResidualAndSegments) {
  for (const auto& [batch, time, dim] : kShapes) {
    const std::int64_t n = batch * time;
    for (const std::int64_t slots : {1, 2, 37}) {
      const std::int64_t heads = dim % 8 == 0 ? 4 : 1;
      DeviceMatrix<float> q = random_matrix<float>(cuda(), n, dim, kPacked, 7);
      DeviceMatrix<float> memory = random_matrix<float>(cuda(), batch * slots, dim, kPacked, 8);
      DeviceMatrix<float> x = random_matrix<float>(cuda(), n, dim, kPacked, 9);
      DeviceMatrix<float> h = random_matrix<float>(cuda(), n, dim, kPacked, 10);
      DeviceMatrix<float> c(cuda(), n, dim);
      DeviceMatrix<float> y(cuda(), n, dim);
      DeviceMatrix<float> mean(cuda(), batch, dim);
      DeviceBuffer<double> sum = to_device(std::vector<double>(static_cast<std::size_t>(batch * dim), 0.0));
      memory_attention(cuda(), MemoryAttention<Device>{.q = {q.view().data, batch, time, dim},
                                                       .slots = {memory.view().data, batch, slots, dim},
                                                       .heads = heads,
                                                       .out = {c.view().data, batch, time, dim}});
      block_residual(cuda(), BlockResidual<Device>{.x = {x.view().data, batch, time, dim},
                                                   .h = {h.view().data, batch, time, dim},
                                                   .v = {c.view().data, batch, time, dim},
                                                   .bias = memory.view().data,
                                                   .y = {y.view().data, batch, time, dim}});
      segment_sum(cuda(), {.x = {y.view().data, batch, time, dim}, .sum = {sum.data(), batch, dim}});
      segment_close(cuda(), {sum.data(), batch, dim}, time, mean.view());

      std::vector<float> c_cpu(static_cast<std::size_t>(n * dim));
      std::vector<float> y_cpu(c_cpu.size());
      std::vector<float> mean_cpu(static_cast<std::size_t>(batch * dim));
      std::vector<double> sum_cpu(mean_cpu.size(), 0.0);
      memory_attention(cpu_, MemoryAttention<Host>{.q = {q.values().data(), batch, time, dim},
                                                   .slots = {memory.values().data(), batch, slots, dim},
                                                   .heads = heads,
                                                   .out = {c_cpu.data(), batch, time, dim}});
      block_residual(cpu_, BlockResidual<Host>{.x = {x.values().data(), batch, time, dim},
                                               .h = {h.values().data(), batch, time, dim},
                                               .v = {c_cpu.data(), batch, time, dim},
                                               .bias = memory.values().data(),
                                               .y = {y_cpu.data(), batch, time, dim}});
      segment_sum(cpu_, {.x = {y_cpu.data(), batch, time, dim}, .sum = {sum_cpu.data(), batch, dim}});
      segment_close(cpu_, {sum_cpu.data(), batch, dim}, time, view(mean_cpu, dim));
      expect_close(c.download(), c_cpu, 1e-5);
      expect_close(y.download(), y_cpu, 2e-6);
      expect_close(mean.download(), mean_cpu, 2e-6);
    }
  }
}

}  // namespace
}  // namespace mmrec::kernels::test
