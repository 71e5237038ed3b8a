// rmsnorm against float64, with the epsilon beside the root and inside, in place, and in every instruction set.
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"
#include "test_util.h"

namespace mmrec::kernels::test {
namespace {

std::vector<double> reference(const std::vector<float>& x, const std::vector<float>& weight,
                              NormEpsilon epsilon = NormEpsilon::kBesideRoot) {
  const std::size_t dim = weight.size();
  std::vector<double> y(x.size());
  for (std::size_t r = 0; r < x.size() / dim; ++r) {
    double squares = 0.0;
    for (std::size_t c = 0; c < dim; ++c) squares += std::pow(static_cast<double>(x[r * dim + c]), 2);
    const double mean = squares / static_cast<double>(dim);
    const double norm = epsilon == NormEpsilon::kInsideRoot ? std::sqrt(mean + 1e-6) : std::sqrt(mean) + 1e-6;
    for (std::size_t c = 0; c < dim; ++c) {
      y[r * dim + c] = static_cast<double>(weight[c]) * static_cast<double>(x[r * dim + c]) / norm;
    }
  }
  return y;
}

TEST(RmsnormTest, MatchesFloat64) {
  Cpu cpu(2);
  for (const std::int64_t dim : {1, 7, 31, 48, 384, 1000, 4096}) {
    for (const std::int64_t n : {1, 2, 3, 127, 129, 300}) {
      const std::vector<float> x = random_floats(n * dim, 1, -3.0F, 3.0F);
      const std::vector<float> weight = random_floats(dim, 2, 0.5F, 1.5F);
      std::vector<float> y = poisoned(n * dim);
      rmsnorm(cpu, {x.data(), n, dim}, weight.data(), {y.data(), n, dim});
      EXPECT_LT(max_error(y, reference(x, weight)), 2e-6) << n << " x " << dim;
    }
  }
}

TEST(RmsnormTest, EpsilonCountsWhereTheRowIsSmall) {
  Cpu cpu(1);
  const std::vector<float> weight(48, 1.0F);
  for (const float scale : {0.0F, 1e-7F, 1e-6F, 1e-3F, 1e-20F, 1e18F}) {
    std::vector<float> x = random_floats(48, 3);
    for (float& v : x) v *= scale;
    for (const NormEpsilon epsilon : {NormEpsilon::kBesideRoot, NormEpsilon::kInsideRoot}) {
      std::vector<float> y = poisoned(48);
      rmsnorm(cpu, {x.data(), 1, 48}, weight.data(), {y.data(), 1, 48}, epsilon);
      EXPECT_LT(max_error(y, reference(x, weight, epsilon)), 1e-6) << scale;
    }
  }
}

TEST(RmsnormTest, InPlaceAndAnyThreadsGiveTheSameBits) {
  const std::int64_t n = 301;
  const std::int64_t dim = 100;
  const std::vector<float> x = random_floats(n * dim, 4);
  const std::vector<float> weight = random_floats(dim, 5);
  Cpu one(1);
  std::vector<float> expected = poisoned(n * dim);
  rmsnorm(one, {x.data(), n, dim}, weight.data(), {expected.data(), n, dim});
  for (const int threads : {1, 2, 5}) {
    Cpu cpu(threads);
    std::vector<float> y = x;
    rmsnorm(cpu, {y.data(), n, dim}, weight.data(), {y.data(), n, dim});
    EXPECT_TRUE(same_bits(y, expected)) << threads;
    for (std::int64_t r = 0; r < n; ++r) {  // a row alone
      std::vector<float> row = poisoned(dim);
      rmsnorm(cpu, {x.data() + r * dim, 1, dim}, weight.data(), {row.data(), 1, dim});
      ASSERT_TRUE(same_bits(row, {expected.data() + r * dim, row.size()})) << r;
    }
  }
}

TEST(RmsnormTest, EveryInstructionSet) {
  for (const SimdKernels* table : supported_simd_kernels()) {
    for (const std::int64_t dim : {1, 3, 7, 16, 31, 48, 1000}) {
      const std::vector<float> x = random_floats(dim, 6);
      const std::vector<float> weight = random_floats(dim, 7);
      double squares = 0.0;
      std::vector<double> scaled;
      for (std::size_t i = 0; i < x.size(); ++i) {
        squares += static_cast<double>(x[i]) * static_cast<double>(x[i]);
        scaled.push_back(static_cast<double>(x[i]) * static_cast<double>(weight[i]) * 0.75);
      }
      EXPECT_NEAR(table->pointwise.sum_squares(x.data(), dim), squares, 1e-13 * squares) << table->name;
      std::vector<float> y = poisoned(dim);
      table->pointwise.scale_by(x.data(), weight.data(), 0.75F, y.data(), dim);
      EXPECT_LT(max_error(y, scaled), 2e-7) << table->name;
    }
  }
}

}  // namespace
}  // namespace mmrec::kernels::test
