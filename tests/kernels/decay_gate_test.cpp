// decay_gate: both forms, both clamps, aliasing, every instruction set.
#include <algorithm>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"
#include "test_util.h"

namespace mmrec::kernels::test {
namespace {

std::vector<double> reference(const std::vector<float>& a, const std::vector<float>* c) {
  std::vector<double> gamma;
  for (std::size_t i = 0; i < a.size(); ++i) {
    double g = sigmoid(static_cast<double>(a[i]));
    if (c != nullptr) g *= sigmoid(static_cast<double>((*c)[i]));
    gamma.push_back(std::clamp(g, 1e-6, 1.0 - 1e-6));
  }
  return gamma;
}

TEST(DecayGateTest, MatchesFloat64AndMayAlias) {
  for (const int threads : {1, 2, 5}) {
    Cpu cpu(threads);
    for (const std::int64_t dim : {1, 7, 31, 48, 384, 1000}) {
      for (const std::int64_t n : {1, 3, 128, 300}) {
        const std::vector<float> a = random_floats(n * dim, 1, -25.0F, 25.0F);
        const std::vector<float> c = random_floats(n * dim, 2, -25.0F, 25.0F);
        std::vector<float> gamma = poisoned(n * dim);
        decay_gate(cpu, {.a = {a.data(), n, dim}, .c = {c.data(), n, dim}, .gamma = {gamma.data(), n, dim}});
        EXPECT_LT(max_error(gamma, reference(a, &c)), 2e-7);
        std::vector<float> in_place = c;
        decay_gate(cpu, {.a = {a.data(), n, dim}, .c = {in_place.data(), n, dim}, .gamma = {in_place.data(), n, dim}});
        EXPECT_TRUE(same_bits(in_place, gamma));
        gamma = poisoned(n * dim);
        decay_gate(cpu, {.a = {a.data(), n, dim}, .gamma = {gamma.data(), n, dim}});
        EXPECT_LT(max_error(gamma, reference(a, nullptr)), 2e-7);
      }
    }
  }
}

TEST(DecayGateTest, ClampsInEveryInstructionSetAndLetsNanPass) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> a = {-100.0F, 100.0F, -13.0F, -14.0F, 15.0F, 0.0F, nan};
  for (const SimdKernels* table : supported_simd_kernels()) {
    std::vector<float> gamma = poisoned(8);
    table->pointwise.decay_gate(a.data(), nullptr, gamma.data(), 7);
    EXPECT_EQ(gamma[0], 1e-6F) << table->name;
    EXPECT_EQ(gamma[1], 1.0F - 1e-6F);
    EXPECT_NEAR(gamma[2], sigmoid(-13.0), 1e-11);
    EXPECT_EQ(gamma[3], 1e-6F);
    EXPECT_EQ(gamma[4], 1.0F - 1e-6F);
    EXPECT_EQ(gamma[5], 0.5F);
    EXPECT_TRUE(std::isnan(gamma[6]));
    EXPECT_TRUE(std::isnan(gamma[7]));
    const std::vector<float> b = random_floats(101, 3, -20.0F, 20.0F);
    const std::vector<float> c = random_floats(101, 4, -3.0F, 3.0F);
    gamma = poisoned(101);
    table->pointwise.decay_gate(b.data(), c.data(), gamma.data(), 101);
    EXPECT_LT(max_error(gamma, reference(b, &c)), 2e-7) << table->name;
  }
}

}  // namespace
}  // namespace mmrec::kernels::test
