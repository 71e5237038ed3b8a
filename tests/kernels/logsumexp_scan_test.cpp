// The running log-sum-exp against a float64 loop.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

#include "tests/kernels/scan_testing.h"

namespace mmrec::kernels {
namespace {

constexpr double kNothing = -std::numeric_limits<double>::infinity();

/// lse(a, b) = max(a, b) + log1p(exp(-|a - b|))
double add(double a, double b) {
  if (a == kNothing) return b;
  if (b == kNothing) return a;
  return std::max(a, b) + std::log1p(std::exp(-std::abs(a - b)));
}

template <class T>
struct Case {
  Sequence<T> x;
  std::vector<float> carry_in;
};

template <class T>
Case<T> random_case(std::int64_t batch, std::int64_t heads, std::int64_t time, std::int64_t dim, unsigned seed,
                    float spread = 3.0F) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> value(0.0F, spread);
  Case<T> c{Sequence<T>(batch, heads, time, dim, heads > 1 ? 5 : 0,
                        heads > 1 ? Sequence<T>::Order::kTimeFirst : Sequence<T>::Order::kHeadsFirst),
            {}};
  c.x.fill([&] { return value(rng); });
  for (std::int64_t i = 0; i < batch * heads * dim; ++i) c.carry_in.push_back(value(rng));
  return c;
}

template <class T>
struct Result {
  Sequence<T> y;
  std::vector<float> carry_out;
};

template <class T>
Result<T> run(Cpu& cpu, const Case<T>& c) {
  const auto v = c.x.read();
  Result<T> r{Sequence<T>(c.x), {}};
  r.y.fill([] { return std::numeric_limits<float>::quiet_NaN(); });
  r.carry_out.assign(static_cast<std::size_t>(v.batch * v.heads * v.dim), std::numeric_limits<float>::quiet_NaN());
  logsumexp_scan<T>(cpu, {v, r.y.view(), c.carry_in.empty() ? nullptr : c.carry_in.data(), r.carry_out.data()});
  return r;
}

/// Relative to max(1, |y|): y crosses zero, where the sum of exponentials is 1.
template <class T>
WorstError error(const Case<T>& c, const Result<T>& r) {
  WorstError worst;
  const auto v = c.x.read();
  for (std::int64_t b = 0; b < v.batch; ++b) {
    for (std::int64_t h = 0; h < v.heads; ++h) {
      for (std::int64_t ch = 0; ch < v.dim; ++ch) {
        const auto flat = static_cast<std::size_t>((b * v.heads + h) * v.dim + ch);
        // log(sum) relative to a fixed reference where it can be: no million roundings in the reference itself.
        double y = c.carry_in.empty() ? kNothing : static_cast<double>(c.carry_in[flat]);
        double m = y, sum = y == kNothing ? 0.0 : 1.0;
        for (std::int64_t t = 0; t < v.time; ++t) {
          const double x = static_cast<double>(c.x.get(b, h, t, ch));
          if (x > m) {
            sum = m == kNothing ? 1.0 : sum * std::exp(m - x) + 1.0;
            m = x;
          } else if (x != kNothing) {
            sum += std::exp(x - m);
          }
          y = m == kNothing ? kNothing : m + std::log(sum);
          const double got = static_cast<double>(r.y.get(b, h, t, ch));
          const double rounding = sizeof(T) == 2 ? kRounding<T> * std::abs(y) * 1.001 : 0.0;
          const double beyond = std::isinf(y) ? (got == y ? 0.0 : 1.0) : std::max(0.0, std::abs(got - y) - rounding);
          worst.add(std::isnan(got) ? got : beyond, 0.0, std::isinf(y) ? 1.0 : std::max(1.0, std::abs(y)), t, ch);
        }
        worst.add(static_cast<double>(r.carry_out[flat]), y, std::isinf(y) ? 1.0 : std::max(1.0, std::abs(y)), v.time,
                  ch);
      }
    }
  }
  return worst;
}

template <class T>
class LogSumExpScanTyped : public ::testing::Test {};
using Types = ::testing::Types<float, Float16, BFloat16>;
TYPED_TEST_SUITE(LogSumExpScanTyped, Types);

TYPED_TEST(LogSumExpScanTyped, MatchesFloat64AtEverySize) {
  Cpu cpu(2);
  unsigned seed = 1;
  for (std::int64_t time : kTestTimes) {
    for (std::int64_t dim : kTestDims) {
      if (time * dim > kMostElements) continue;
      const auto c = random_case<TypeParam>(1, 1, time, dim, ++seed);
      EXPECT_TRUE(error(c, run(cpu, c)).below(1e-6)) << "T " << time << ", D " << dim;
    }
  }
}

TYPED_TEST(LogSumExpScanTyped, HeadsAndStrides) {
  Cpu cpu(2);
  for (std::int64_t time : {5, 2500}) {
    const auto c = random_case<TypeParam>(2, 3, time, 20, 5, 30.0F);
    EXPECT_TRUE(error(c, run(cpu, c)).below(1e-6));
  }
}

TEST(LogSumExpScan, AMillionSteps) {
  constexpr std::int64_t kSteps = 1'000'000, kCases = 8;
  std::mt19937 rng(3);
  std::normal_distribution<float> value;
  Case<float> c{Sequence<float>(1, 1, kSteps, kCases), {}};
  for (std::int64_t t = 0; t < kSteps; ++t) {
    const auto s = static_cast<float>(t);
    const float x[kCases] = {value(rng),
                             -3.0F,       // equal terms: log(t + 1) - 3
                             1e-6F * s,   // a slow climb: the maximum moves at every step
                             -1e-3F * s,  // a descent: the sum stops growing
                             0.1F * s,    // a steep climb
                             50.0F * value(rng),
                             t < 500000 ? -std::numeric_limits<float>::infinity() : value(rng),
                             1e30F};
    for (std::int64_t i = 0; i < kCases; ++i) c.x.set(0, 0, t, i, x[i]);
  }
  Cpu cpu(2);
  EXPECT_TRUE(error(c, run(cpu, c)).below(2e-6));
}

TEST(LogSumExpScan, IsTheScanOfTheDocumentedOperator) {
  Cpu cpu(1);
  const auto c = random_case<float>(1, 1, 500, 3, 31);
  const auto r = run(cpu, c);
  for (std::int64_t ch = 0; ch < 3; ++ch) {
    double y = static_cast<double>(c.carry_in[static_cast<std::size_t>(ch)]);
    for (std::int64_t t = 0; t < 500; ++t) {
      y = add(y, static_cast<double>(c.x.get(0, 0, t, ch)));
      EXPECT_NEAR(static_cast<double>(r.y.get(0, 0, t, ch)), y, 1e-6 * std::max(1.0, std::abs(y)));
    }
  }
}

TEST(LogSumExpScan, CutsAnywhereAndHandsCarriesOn) {
  Cpu cpu(2);
  for (std::int64_t dim : {5, 300}) {
    const std::int64_t time = 5000;
    const auto c = random_case<float>(1, 1, time, dim, 11);
    const auto whole = run(cpu, c);
    for (std::int64_t step : {7, 64, 1023, 4999}) {
      Sequence<float> y(1, 1, time, dim);
      std::vector<float> carry = c.carry_in;
      for (std::int64_t t = 0; t < time; t += step) {
        const std::int64_t n = std::min(step, time - t);
        logsumexp_scan<float>(
            cpu, {middle_times(c.x.read(), t, n), middle_times(y.view(), t, n), carry.data(), carry.data()});
      }
      WorstError worst;
      for (std::int64_t t = 0; t < time; ++t) {
        for (std::int64_t ch = 0; ch < dim; ++ch) {
          const double expected = static_cast<double>(whole.y.get(0, 0, t, ch));
          worst.add(static_cast<double>(y.get(0, 0, t, ch)), expected, std::max(1.0, std::abs(expected)), t, ch);
        }
      }
      // Every cut rounds the carry to fp32; the scan remembers all of them.
      EXPECT_TRUE(worst.below(1e-5)) << "D " << dim << ", cuts of " << step;
    }
  }
}

TYPED_TEST(LogSumExpScanTyped, SameBitsForAnyNumberOfThreads) {
  for (const auto& [batch, heads, time, dim] :
       std::vector<std::array<std::int64_t, 4>>{{1, 1, 20000, 16}, {1, 1, 70, 1100}, {2, 3, 3000, 9}}) {
    const auto c = random_case<TypeParam>(batch, heads, time, dim, 13, 20.0F);
    Cpu one(1), two(2), five(5);
    const auto r1 = run(one, c), r2 = run(two, c), r5 = run(five, c);
    EXPECT_TRUE(r1.y.same_bits(r2.y) && r1.y.same_bits(r5.y));
    EXPECT_EQ(r1.carry_out, r2.carry_out);
    EXPECT_EQ(r1.carry_out, r5.carry_out);
  }
}

TYPED_TEST(LogSumExpScanTyped, MayWriteOverX) {
  Cpu cpu(2);
  const auto c = random_case<TypeParam>(1, 1, 3000, 16, 17);
  const auto expected = run(cpu, c);
  Sequence<TypeParam> y(c.x);
  const SequenceView<const TypeParam, Host> in = y.read();
  logsumexp_scan<TypeParam>(cpu, {in, y.view(), c.carry_in.data(), nullptr});
  EXPECT_TRUE(y.same_bits(expected.y));
}

TEST(LogSumExpScan, SpecialValues) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const float largest = std::numeric_limits<float>::max();
  Cpu cpu(2);
  for (std::int64_t time : {6, 1030}) {  // in one run, and cut in time
    constexpr std::int64_t kCases = 7;
    Sequence<float> x(1, 1, time, kCases), y(1, 1, time, kCases);
    const float first[kCases] = {-inf, inf, nan, 1e30F, -largest, largest, -inf};
    const float rest[kCases] = {-inf, 0.0F, 0.0F, -1e30F, -largest, -largest, 2.0F};
    for (std::int64_t t = 0; t < time; ++t) {
      for (std::int64_t c = 0; c < kCases; ++c) x.set(0, 0, t, c, t == 0 ? first[c] : rest[c]);
    }
    std::vector<float> out(kCases);
    logsumexp_scan<float>(cpu, {x.read(), y.view(), nullptr, out.data()});
    for (std::int64_t t = 0; t < time; ++t) {
      ASSERT_EQ(y.get(0, 0, t, 0), -inf);
      ASSERT_EQ(y.get(0, 0, t, 1), inf);
      ASSERT_TRUE(std::isnan(y.get(0, 0, t, 2)));
      ASSERT_EQ(y.get(0, 0, t, 3), 1e30F);
      ASSERT_EQ(y.get(0, 0, t, 4), -largest);
      ASSERT_EQ(y.get(0, 0, t, 5), largest);
      if (t != 0) {
        ASSERT_NEAR(y.get(0, 0, t, 6), 2.0F + std::log(static_cast<float>(t)), 1e-5F);
      }
    }
    EXPECT_EQ(y.get(0, 0, 0, 6), -inf);
    EXPECT_EQ(out[0], -inf);
    EXPECT_EQ(out[1], inf);
    EXPECT_TRUE(std::isnan(out[2]));
    // Carries of every kind enter again.
    const std::vector<float> carry{-inf, inf, nan, 1e30F, -largest, largest, 0.0F};
    x.fill([] { return 0.0F; });
    logsumexp_scan<float>(cpu, {x.read(), y.view(), carry.data(), out.data()});
    const float n = static_cast<float>(time);
    EXPECT_NEAR(out[0], std::log(n), 1e-5F);
    EXPECT_EQ(out[1], inf);
    EXPECT_TRUE(std::isnan(out[2]));
    EXPECT_EQ(out[3], 1e30F);
    EXPECT_NEAR(out[4], std::log(n), 1e-5F);
    EXPECT_EQ(out[5], largest);
    EXPECT_NEAR(out[6], std::log(n + 1.0F), 1e-5F);
  }
}

TEST(LogSumExpScan, EmptyShapesPassCarriesOn) {
  Cpu cpu(2);
  const float in[2] = {-1.5F, -std::numeric_limits<float>::infinity()};
  float out[2] = {};
  logsumexp_scan<float>(cpu, {{nullptr, 1, 0, 2}, {nullptr, 1, 0, 2}, in, out});
  EXPECT_EQ(out[0], in[0]);
  EXPECT_EQ(out[1], in[1]);
}

TYPED_TEST(LogSumExpScanTyped, EveryInstructionSet) {
  for (const SimdKernels* kernels : supported_simd_kernels()) {
    for (std::int64_t dim : {1, 15, 16, 37, 1024}) {
      auto c = random_case<TypeParam>(1, 1, 300, dim, 19, 10.0F);
      Result<TypeParam> result{Sequence<TypeParam>(1, 1, 300, dim), {}};
      const std::int64_t plane = (dim + 15) / 16 * 16;
      std::vector<double> state(static_cast<std::size_t>(2 * plane), 1.0);
      for (std::size_t i = 0; i < c.carry_in.size(); ++i) state[i] = static_cast<double>(c.carry_in[i]);
      ScanRun r{};
      r.in[0] = c.x.read().data;
      r.in_stride[0] = r.out_stride = dim;
      r.out = result.y.view().data;
      r.times = 300;
      r.channels = dim;
      r.state = state.data();
      r.plane = plane;
      auto total = state;
      kernels->scan.logsumexp_run[kDTypeOf<TypeParam>](r);
      for (std::size_t i = 0; i < static_cast<std::size_t>(dim); ++i) {
        result.carry_out.push_back(static_cast<float>(state[i] + std::log(state[static_cast<std::size_t>(plane) + i])));
      }
      EXPECT_TRUE(error(c, result).below(1e-6)) << kernels->name << " " << dim;
      r.state = total.data();
      r.out = nullptr;
      kernels->scan.logsumexp_total[kDTypeOf<TypeParam>](r);
      for (std::size_t i = 0; i < static_cast<std::size_t>(dim); ++i) {
        EXPECT_EQ(total[i], state[i]);
        EXPECT_EQ(total[static_cast<std::size_t>(plane) + i], state[static_cast<std::size_t>(plane) + i]);
      }
    }
  }
}

}  // namespace
}  // namespace mmrec::kernels
