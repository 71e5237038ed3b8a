// block_residual: y = x + h + 0.1 v + bias over strided sequences, in place, in every instruction set.
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"
#include "test_util.h"

namespace mmrec::kernels::test {
namespace {

TEST(BlockResidualTest, MatchesFloat64WithTheStateOneRowLonger) {
  for (const int threads : {1, 2, 5}) {
    Cpu cpu(threads);
    for (const std::int64_t dim : {1, 7, 48, 384, 1000}) {
      for (const std::int64_t time : {1, 3, 65}) {
        const std::int64_t batch = 3;
        const std::vector<float> x = random_floats(batch * time * dim, 1);
        const std::vector<float> h = random_floats(batch * (time + 1) * dim, 2);  // row 0 is the carry
        const std::vector<float> v = random_floats(batch * time * dim, 3);
        const std::vector<float> bias = random_floats(dim, 4);
        SequenceView<const float, Host> state(h.data() + dim, batch, time, dim);
        state.batch_stride = (time + 1) * dim;
        for (const bool with_bias : {false, true}) {
          std::vector<double> expected;
          for (std::int64_t b = 0; b < batch; ++b) {
            for (std::int64_t i = 0; i < time * dim; ++i) {
              const auto at = static_cast<std::size_t>(b * time * dim + i);
              expected.push_back(static_cast<double>(x[at]) +
                                 static_cast<double>(h[static_cast<std::size_t>((b * (time + 1) + 1) * dim + i)]) +
                                 0.1 * static_cast<double>(v[at]) +
                                 (with_bias ? static_cast<double>(bias[static_cast<std::size_t>(i % dim)]) : 0.0));
            }
          }
          std::vector<float> y = poisoned(batch * time * dim);
          BlockResidual<Host> op;
          op.x = {x.data(), batch, time, dim};
          op.h = state;
          op.v = {v.data(), batch, time, dim};
          op.bias = with_bias ? bias.data() : nullptr;
          op.y = {y.data(), batch, time, dim};
          block_residual(cpu, op);
          EXPECT_LT(max_error(y, expected), 4e-7);
          std::vector<float> in_place = x;
          op.x = {in_place.data(), batch, time, dim};
          op.y = {in_place.data(), batch, time, dim};
          block_residual(cpu, op);
          EXPECT_TRUE(same_bits(in_place, y));
        }
      }
    }
  }
}

TEST(BlockResidualTest, EveryInstructionSet) {
  for (const SimdKernels* table : supported_simd_kernels()) {
    for (const std::int64_t dim : {1, 3, 16, 53}) {
      const std::vector<float> x = random_floats(dim, 5);
      const std::vector<float> h = random_floats(dim, 6);
      const std::vector<float> v = random_floats(dim, 7);
      std::vector<double> expected;
      for (std::size_t i = 0; i < x.size(); ++i) {
        expected.push_back(static_cast<double>(x[i]) + 2.0 * static_cast<double>(h[i]) +
                           0.1 * static_cast<double>(v[i]));
      }
      std::vector<float> y = poisoned(dim + 1);
      table->pointwise.block_residual(x.data(), h.data(), v.data(), h.data(), y.data(), dim);
      EXPECT_TRUE(std::isnan(y.back()));
      y.pop_back();
      EXPECT_LT(max_error(y, expected), 5e-7) << table->name;
    }
  }
}

}  // namespace
}  // namespace mmrec::kernels::test
