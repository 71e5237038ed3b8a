// Vector exp, log, log1p, sigmoid and gelu of every instruction set, in units of the last place against float64.
#include <algorithm>

#include "kernels/cpu/simd.h"
#include "tests/ops/testing.h"

namespace mmrec::kernels::test {
namespace {

/// Distance in units of the last place of the fp32 nearest to `expected`.
double ulps(float actual, double expected) {
  const auto nearest = static_cast<float>(expected);
  if (std::isinf(nearest) || std::isnan(nearest)) return actual == nearest ? 0.0 : 1e9;
  if (!std::isfinite(actual)) return 1e9;
  const float next = std::nextafter(std::abs(nearest), kInfinity);
  const double unit = static_cast<double>(next) - static_cast<double>(std::abs(nearest));
  return std::abs(static_cast<double>(actual) - expected) / unit;
}

/// f over x through one table, at an odd offset and with a tail, into poison.
std::vector<float> run_over(void (*f)(const float*, float*, std::int64_t), const std::vector<float>& x) {
  std::vector<float> y = poisoned(static_cast<std::int64_t>(x.size()) + 1);
  f(x.data(), y.data(), static_cast<std::int64_t>(x.size()));
  EXPECT_TRUE(std::isnan(y.back())) << "wrote past the end";
  y.pop_back();
  return y;
}

std::vector<float> every_binade(unsigned seed, bool negative) {
  std::vector<float> x;
  std::mt19937 engine(seed);
  for (std::uint32_t exponent = 0; exponent < 255; ++exponent) {
    for (int i = 0; i < 257; ++i) {
      const std::uint32_t sign = negative && (engine() & 1U) != 0 ? 0x80000000U : 0U;
      x.push_back(std::bit_cast<float>(sign | (exponent << 23) | (static_cast<std::uint32_t>(engine()) & 0x7fffffU)));
    }
  }
  return x;
}

class SimdMath : public testing::TestWithParam<const SimdKernels*> {};

TEST_P(SimdMath, ExpWithinTwoUlpsEverywhere) {
  std::vector<float> x = random_floats(200001, 1, -110.0F, 92.0F);
  const std::vector<float> small = every_binade(2, true);
  x.insert(x.end(), small.begin(), small.end());
  const std::vector<float> y = run_over(GetParam()->math.exp, x);
  double worst = 0.0;
  for (std::size_t i = 0; i < x.size(); ++i) worst = std::max(worst, ulps(y[i], std::exp(static_cast<double>(x[i]))));
  EXPECT_LE(worst, 2.0);
}

TEST_P(SimdMath, ExpSpecialValues) {
  const std::vector<float> y =
      run_over(GetParam()->math.exp, {-kInfinity, kInfinity, kNan, 0.0F, -0.0F, 1000.0F, -1000.0F});
  EXPECT_EQ(y[0], 0.0F);
  EXPECT_EQ(y[1], kInfinity);
  EXPECT_TRUE(std::isnan(y[2]));
  EXPECT_EQ(y[3], 1.0F);
  EXPECT_EQ(y[4], 1.0F);
  EXPECT_EQ(y[5], kInfinity);
  EXPECT_EQ(y[6], 0.0F);
}

TEST_P(SimdMath, LogWithinTwoUlpsInEveryBinade) {
  std::vector<float> x = every_binade(3, false);
  const std::vector<float> near_one = random_floats(100003, 4, 0.5F, 2.0F);
  x.insert(x.end(), near_one.begin(), near_one.end());
  for (int i = -2000; i <= 2000; ++i) x.push_back(1.0F + static_cast<float>(i) * 0x1p-23F);
  const std::vector<float> y = run_over(GetParam()->math.log, x);
  double worst = 0.0;
  for (std::size_t i = 0; i < x.size(); ++i) worst = std::max(worst, ulps(y[i], std::log(static_cast<double>(x[i]))));
  EXPECT_LE(worst, 2.0);
}

TEST_P(SimdMath, LogSpecialValues) {
  const std::vector<float> y = run_over(GetParam()->math.log, {0.0F, -0.0F, -1.0F, kInfinity, -kInfinity, kNan, 1.0F});
  EXPECT_EQ(y[0], -kInfinity);
  EXPECT_EQ(y[1], -kInfinity);
  EXPECT_TRUE(std::isnan(y[2]));
  EXPECT_EQ(y[3], kInfinity);
  EXPECT_TRUE(std::isnan(y[4]));
  EXPECT_TRUE(std::isnan(y[5]));
  EXPECT_EQ(y[6], 0.0F);
}

TEST_P(SimdMath, Log1pWithinTwoUlpsAlsoNearZero) {
  std::vector<float> x;
  for (const float v : every_binade(5, true)) {
    if (v > -1.0F) x.push_back(v);
  }
  const std::vector<float> more = random_floats(100003, 6, -0.999F, 3.0F);
  x.insert(x.end(), more.begin(), more.end());
  const std::vector<float> y = run_over(GetParam()->math.log1p, x);
  double worst = 0.0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    worst = std::max(worst, ulps(y[i], std::log1p(static_cast<double>(x[i]))));
  }
  EXPECT_LE(worst, 2.0);
  const std::vector<float> special = run_over(GetParam()->math.log1p, {-1.0F, -2.0F, kInfinity, kNan, 0.0F, -0.0F});
  EXPECT_EQ(special[0], -kInfinity);
  EXPECT_TRUE(std::isnan(special[1]));
  EXPECT_EQ(special[2], kInfinity);
  EXPECT_TRUE(std::isnan(special[3]));
  EXPECT_EQ(special[4], 0.0F);
  EXPECT_TRUE(special[5] == 0.0F && std::signbit(special[5]));
}

TEST_P(SimdMath, Sigmoid) {
  const std::vector<float> x = random_floats(100001, 7, -87.0F, 30.0F);
  const std::vector<float> y = run_over(GetParam()->math.sigmoid, x);
  double worst = 0.0;
  for (std::size_t i = 0; i < x.size(); ++i) worst = std::max(worst, ulps(y[i], sigmoid(static_cast<double>(x[i]))));
  EXPECT_LE(worst, 3.0);
  const std::vector<float> special =
      run_over(GetParam()->math.sigmoid, {-kInfinity, kInfinity, kNan, -200.0F, 200.0F, 0.0F});
  EXPECT_EQ(special[0], 0.0F);
  EXPECT_EQ(special[1], 1.0F);
  EXPECT_TRUE(std::isnan(special[2]));
  EXPECT_EQ(special[3], 0.0F);
  EXPECT_EQ(special[4], 1.0F);
  EXPECT_EQ(special[5], 0.5F);
}

TEST_P(SimdMath, GeluAgainstErf) {
  const std::vector<float> x = random_floats(300007, 8, -14.0F, 14.0F);
  const std::vector<float> y = run_over(GetParam()->math.gelu, x);
  double worst = 0.0;
  double tail = 0.0;  // relative, where 1 + erf would have cancelled
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double exact = gelu(static_cast<double>(x[i]));
    const double error = std::abs(static_cast<double>(y[i]) - exact);
    worst = std::max(worst, error / std::max(1.0, std::abs(static_cast<double>(x[i]))));
    if (x[i] < -1.0F && exact < -1e-30) tail = std::max(tail, error / -exact);
  }
  EXPECT_LE(worst, 1.2e-7);
  EXPECT_LE(tail, 2e-5);
  const std::vector<float> special = run_over(GetParam()->math.gelu, {kNan, 100.0F, -100.0F, 0.0F, 1e30F, -1e30F});
  EXPECT_TRUE(std::isnan(special[0]));
  EXPECT_EQ(special[1], 100.0F);
  EXPECT_EQ(special[2], 0.0F);
  EXPECT_EQ(special[3], 0.0F);
  EXPECT_EQ(special[4], 1e30F);
  EXPECT_EQ(special[5], 0.0F);
}

TEST_P(SimdMath, GeluTanhAgainstTanh) {
  const std::vector<float> x = random_floats(300007, 8, -14.0F, 14.0F);
  const std::vector<float> y = run_over(GetParam()->math.gelu_tanh, x);
  double worst = 0.0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double wide = static_cast<double>(x[i]);
    const double exact = 0.5 * wide * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (wide + 0.044715 * wide * wide * wide)));
    worst = std::max(worst, std::abs(static_cast<double>(y[i]) - exact) / std::max(1.0, std::abs(wide)));
  }
  EXPECT_LE(worst, 2e-7);
  const std::vector<float> special = run_over(GetParam()->math.gelu_tanh, {kNan, 100.0F, -100.0F, 0.0F, 1e30F, -1e30F});
  EXPECT_TRUE(std::isnan(special[0]));
  EXPECT_EQ(special[1], 100.0F);
  EXPECT_EQ(special[2], 0.0F);
  EXPECT_EQ(special[3], 0.0F);
  EXPECT_EQ(special[4], 1e30F);
  EXPECT_EQ(special[5], 0.0F);
}

TEST_P(SimdMath, EntryDoesNotDependOnItsPosition) {
  const std::vector<float> x = random_floats(67, 9, -5.0F, 5.0F);
  for (const auto f : {GetParam()->math.exp, GetParam()->math.log1p, GetParam()->math.sigmoid, GetParam()->math.gelu}) {
    const std::vector<float> all = run_over(f, x);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const std::vector<float> alone = run_over(f, {x[i]});
      EXPECT_TRUE(std::bit_cast<std::uint32_t>(alone[0]) == std::bit_cast<std::uint32_t>(all[i]) ||
                  (std::isnan(alone[0]) && std::isnan(all[i])))
          << i;
    }
  }
}

TEST_P(SimdMath, WideningIsExact) {
  // Every bf16 and every fp16 value, NaN payloads apart.
  std::vector<std::uint16_t> bits(65536);
  for (std::size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<std::uint16_t>(i);
  for (const std::int64_t count : {std::int64_t{65536}, std::int64_t{3}}) {
    std::vector<float> half = poisoned(count);
    std::vector<float> brain = poisoned(count);
    GetParam()->matvec.widen[DType::kF16](bits.data(), half.data(), count);
    GetParam()->matvec.widen[DType::kBF16](bits.data(), brain.data(), count);
    for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
      const float h = to_float(Float16{bits[i]});
      const float b = to_float(BFloat16{bits[i]});
      ASSERT_TRUE(std::isnan(h) ? std::isnan(half[i]) : std::bit_cast<int>(h) == std::bit_cast<int>(half[i])) << i;
      ASSERT_TRUE(std::isnan(b) ? std::isnan(brain[i]) : std::bit_cast<int>(b) == std::bit_cast<int>(brain[i])) << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, SimdMath,
                         testing::ValuesIn(supported_simd_kernels().begin(), supported_simd_kernels().end()),
                         [](const auto& info) { return std::string(info.param->name); });

}  // namespace
}  // namespace mmrec::kernels::test
