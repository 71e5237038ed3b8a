// Vector exp, log, sigmoid and gelu of every instruction set, in units of the last place against float64.

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

void append(std::vector<float>& x, const std::vector<float>& more) { x.insert(x.end(), more.begin(), more.end()); }

using Function = void (*)(const float*, float*, std::int64_t);

/// The largest error of f over x, in units of the last place.
template <class Exact>
double most_ulps(Function f, const std::vector<float>& x, const Exact& exact) {
  const std::vector<float> y = run_over(f, x);
  double worst = 0.0;
  for (std::size_t i = 0; i < x.size(); ++i) worst = std::max(worst, ulps(y[i], exact(static_cast<double>(x[i]))));
  return worst;
}

/// The largest error of y = f(x), relative to |x| where that is above 1.
template <class Exact>
double most_error(const std::vector<float>& x, const std::vector<float>& y, const Exact& exact) {
  double worst = 0.0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const auto wide = static_cast<double>(x[i]);
    worst = std::max(worst, std::abs(static_cast<double>(y[i]) - exact(wide)) / std::max(1.0, std::abs(wide)));
  }
  return worst;
}

/// Pairs of x and f(x); NaN stands for any NaN.
using Values = std::vector<std::pair<float, float>>;
void expect_values(Function f, const Values& values) {
  std::vector<float> x;
  for (const auto& [from, to] : values) x.push_back(from);
  const std::vector<float> y = run_over(f, x);
  for (std::size_t i = 0; i < x.size(); ++i) {
    const float want = values[i].second;
    EXPECT_TRUE(y[i] == want || (std::isnan(y[i]) && std::isnan(want))) << "f(" << x[i] << ") = " << y[i];
  }
}

class SimdMath : public testing::TestWithParam<const SimdKernels*> {};

TEST_P(SimdMath, ExpWithinTwoUlpsEverywhere) {
  std::vector<float> x = random_floats(200001, 1, -110.0F, 92.0F);
  append(x, every_binade(2, true));
  EXPECT_LE(most_ulps(GetParam()->math.exp, x, [](double v) { return std::exp(v); }), 2.0);
}

TEST_P(SimdMath, ExpSpecialValues) {
  expect_values(GetParam()->math.exp, {{-kInfinity, 0.0F},
                                       {kInfinity, kInfinity},
                                       {kNan, kNan},
                                       {0.0F, 1.0F},
                                       {-0.0F, 1.0F},
                                       {1000.0F, kInfinity},
                                       {-1000.0F, 0.0F}});
}

TEST_P(SimdMath, LogWithinTwoUlpsInEveryBinade) {
  std::vector<float> x = every_binade(3, false);
  append(x, random_floats(100003, 4, 0.5F, 2.0F));
  for (int i = -2000; i <= 2000; ++i) x.push_back(1.0F + static_cast<float>(i) * 0x1p-23F);
  EXPECT_LE(most_ulps(GetParam()->math.log, x, [](double v) { return std::log(v); }), 2.0);
}

TEST_P(SimdMath, LogSpecialValues) {
  expect_values(GetParam()->math.log, {{0.0F, -kInfinity},
                                       {-0.0F, -kInfinity},
                                       {-1.0F, kNan},
                                       {kInfinity, kInfinity},
                                       {-kInfinity, kNan},
                                       {kNan, kNan},
                                       {1.0F, 0.0F}});
}

TEST_P(SimdMath, Sigmoid) {
  const std::vector<float> x = random_floats(100001, 7, -87.0F, 30.0F);
  EXPECT_LE(most_ulps(GetParam()->math.sigmoid, x, [](double v) { return sigmoid(v); }), 3.0);
  expect_values(GetParam()->math.sigmoid,
                {{-kInfinity, 0.0F}, {kInfinity, 1.0F}, {kNan, kNan}, {-200.0F, 0.0F}, {200.0F, 1.0F}, {0.0F, 0.5F}});
}

const Values kGeluValues = {{kNan, kNan}, {100.0F, 100.0F}, {-100.0F, 0.0F},
                            {0.0F, 0.0F}, {1e30F, 1e30F},   {-1e30F, 0.0F}};

TEST_P(SimdMath, GeluAgainstErf) {
  const std::vector<float> x = random_floats(300007, 8, -14.0F, 14.0F);
  const std::vector<float> y = run_over(GetParam()->math.gelu, x);
  double tail = 0.0;  // relative, where 1 + erf would have cancelled
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double exact = gelu(static_cast<double>(x[i]));
    if (x[i] < -1.0F && exact < -1e-30) tail = std::max(tail, std::abs(static_cast<double>(y[i]) - exact) / -exact);
  }
  EXPECT_LE(most_error(x, y, [](double v) { return gelu(v); }), 1.2e-7);
  EXPECT_LE(tail, 2e-5);
  expect_values(GetParam()->math.gelu, kGeluValues);
}

TEST_P(SimdMath, GeluTanhAgainstTanh) {
  const std::vector<float> x = random_floats(300007, 8, -14.0F, 14.0F);
  const auto exact = [](double v) {
    return 0.5 * v * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (v + 0.044715 * v * v * v)));
  };
  EXPECT_LE(most_error(x, run_over(GetParam()->math.gelu_tanh, x), exact), 2e-7);
  expect_values(GetParam()->math.gelu_tanh, kGeluValues);
}

TEST_P(SimdMath, EntryDoesNotDependOnItsPosition) {
  const std::vector<float> x = random_floats(67, 9, -5.0F, 5.0F);
  for (const auto f : {GetParam()->math.exp, GetParam()->math.sigmoid, GetParam()->math.gelu}) {
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
    GetParam()->matvec.widen[DType::kF16]({bits.data(), DType::kF16, 1, count}, half.data());
    GetParam()->matvec.widen[DType::kBF16]({bits.data(), DType::kBF16, 1, count}, brain.data());
    for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
      const float h = to_float(Float16{bits[i]});
      const float b = to_float(BFloat16{bits[i]});
      ASSERT_TRUE(std::isnan(h) ? std::isnan(half[i]) : std::bit_cast<int>(h) == std::bit_cast<int>(half[i])) << i;
      ASSERT_TRUE(std::isnan(b) ? std::isnan(brain[i]) : std::bit_cast<int>(b) == std::bit_cast<int>(brain[i])) << i;
    }
  }
}

/// The numbers of E4M3 by their definition: 7 is the exponent's bias, 448 the largest.
std::vector<double> numbers_of_f8() {
  std::vector<double> numbers;
  for (int bits = 0; bits < 127; ++bits) {
    const int exponent = bits >> 3, mantissa = bits & 7;
    numbers.push_back(exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10));
  }
  return numbers;
}

TEST_P(SimdMath, EveryFloat8IsWidenedTimesItsScale) {
  const std::vector<double> numbers = numbers_of_f8();
  std::vector<std::uint8_t> row(256 + sizeof(float));
  const float scale = 0.3F;
  for (std::size_t i = 0; i < 256; ++i) row[i] = static_cast<std::uint8_t>(i);
  std::memcpy(row.data() + 256, &scale, sizeof(scale));
  std::vector<float> wide(256);
  GetParam()->matvec.widen[DType::kF8]({row.data(), DType::kF8, 1, 256}, wide.data());
  for (std::size_t i = 0; i < 127; ++i) {
    const float expected = static_cast<float>(numbers[i] * static_cast<double>(scale));
    EXPECT_EQ(wide[i], expected) << i;
    EXPECT_EQ(wide[i + 128], -expected) << i;
    EXPECT_EQ(static_cast<double>(to_float(Float8{row[i]})), numbers[i]);
    EXPECT_EQ(static_cast<double>(to_float(Float8{row[i + 128]})), -numbers[i]);
  }
  EXPECT_TRUE(std::isnan(to_float(Float8{0x7f})) && std::isnan(to_float(Float8{0xff})));
}

TEST(Float8, RoundsToTheNearestAndOfTwoToTheEven) {
  const std::vector<double> numbers = numbers_of_f8();
  const auto expect = [](double x, std::size_t bits) {
    EXPECT_EQ(from_float<Float8>(static_cast<float>(x)).bits, bits) << x;
    EXPECT_EQ(from_float<Float8>(static_cast<float>(-x)).bits, bits | 0x80U) << -x;
  };
  for (std::size_t i = 0; i + 1 < numbers.size(); ++i) {
    const double middle = (numbers[i] + numbers[i + 1]) / 2;
    expect(numbers[i], i);
    expect(middle * (1 - 1e-6), i);
    expect(middle, i % 2 == 0 ? i : i + 1);
    expect(middle * (1 + 1e-6), i + 1);
  }
  for (const double x : {448.0, 449.0, 1e30, HUGE_VAL}) expect(x, 126);
  EXPECT_EQ(from_float<Float8>(std::numeric_limits<float>::quiet_NaN()).bits & 0x7f, 0x7f);
}

INSTANTIATE_TEST_SUITE_P(All, SimdMath,
                         testing::ValuesIn(supported_simd_kernels().begin(), supported_simd_kernels().end()),
                         [](const auto& info) { return std::string(info.param->name); });

}  // namespace
}  // namespace mmrec::kernels::test
