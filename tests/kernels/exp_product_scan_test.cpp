// The running product of decay gates against a float64 loop over the documented formula.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

#include "tests/kernels/scan_testing.h"

namespace mmrec::kernels {
namespace {

/// clamp(log(gamma + 1e-8), -50, 0)
double log_gate(double gamma) { return std::clamp(std::log(gamma + 1e-8), -50.0, 0.0); }

template <class T>
struct Case {
  Sequence<T> gamma;
  std::vector<float> carry_in;
};

/// Gates in [low, 1], one in twenty exactly 1.
template <class T>
Case<T> random_case(std::int64_t batch, std::int64_t heads, std::int64_t time, std::int64_t dim, unsigned seed,
                    float low = 0.9F) {
  std::mt19937 rng(seed);
  std::uniform_real_distribution<float> gate(low, 1.0F), unit(0.0F, 1.0F);
  Case<T> c{Sequence<T>(batch, heads, time, dim, heads > 1 ? 5 : 0,
                        heads > 1 ? Sequence<T>::Order::kTimeFirst : Sequence<T>::Order::kHeadsFirst),
            {}};
  c.gamma.fill([&] { return unit(rng) < 0.05F ? 1.0F : gate(rng); });
  for (std::int64_t i = 0; i < batch * heads * dim; ++i) c.carry_in.push_back(-unit(rng));
  return c;
}

template <class T>
struct Result {
  Sequence<T> y;
  Sequence<float> log_y;
  std::vector<float> carry_out;
};

template <class T>
Result<T> run(Cpu& cpu, const Case<T>& c) {
  const auto v = c.gamma.read();
  Result<T> r{Sequence<T>(c.gamma), Sequence<float>(v.batch, v.heads, v.time, v.dim), {}};
  r.y.fill([] { return std::numeric_limits<float>::quiet_NaN(); });
  r.carry_out.assign(static_cast<std::size_t>(v.batch * v.heads * v.dim), std::numeric_limits<float>::quiet_NaN());
  exp_product_scan<T>(cpu, {v, r.y.view(), r.log_y.view(), c.carry_in.data(), r.carry_out.data()});
  return r;
}

struct Errors {
  WorstError log_sum, product;
};

template <class T>
Errors errors(const Case<T>& c, const Result<T>& r) {
  Errors e;
  const auto v = c.gamma.read();
  for (std::int64_t b = 0; b < v.batch; ++b) {
    for (std::int64_t h = 0; h < v.heads; ++h) {
      for (std::int64_t ch = 0; ch < v.dim; ++ch) {
        const auto flat = static_cast<std::size_t>((b * v.heads + h) * v.dim + ch);
        double sum = static_cast<double>(c.carry_in[flat]);
        for (std::int64_t t = 0; t < v.time; ++t) {
          sum += log_gate(static_cast<double>(c.gamma.get(b, h, t, ch)));
          const double y = std::exp(sum);
          e.log_sum.add(static_cast<double>(r.log_y.get(b, h, t, ch)), sum, std::abs(sum) + 1e-30, t, ch);
          // e^L is as far off as L is, and then rounded.
          const double scale = y * (kRounding<T> * 1.01 + 1e-6 * (1.0 + std::abs(sum))) +
                               (std::is_same_v<T, Float16> ? 0x1p-25 : 1.2e-38);
          e.product.add(static_cast<double>(r.y.get(b, h, t, ch)), y, scale, t, ch);
        }
        e.log_sum.add(static_cast<double>(r.carry_out[flat]), sum, std::abs(sum) + 1e-30, v.time, ch);
      }
    }
  }
  return e;
}

template <class T>
class ExpProductScanTyped : public ::testing::Test {};
using Types = ::testing::Types<float, Float16, BFloat16>;
TYPED_TEST_SUITE(ExpProductScanTyped, Types);

TYPED_TEST(ExpProductScanTyped, MatchesFloat64AtEverySize) {
  Cpu cpu(2);
  unsigned seed = 1;
  for (std::int64_t time : kTestTimes) {
    for (std::int64_t dim : kTestDims) {
      if (time * dim > kMostElements) continue;
      for (float low : {0.9F, 0.0F}) {
        const auto c = random_case<TypeParam>(1, 1, time, dim, ++seed, low);
        const auto e = errors(c, run(cpu, c));
        EXPECT_TRUE(e.log_sum.below(1e-6)) << "T " << time << ", D " << dim;
        EXPECT_TRUE(e.product.below(1.0)) << "T " << time << ", D " << dim;
      }
    }
  }
}

TYPED_TEST(ExpProductScanTyped, HeadsAndStrides) {
  Cpu cpu(2);
  for (std::int64_t time : {5, 2500}) {
    const auto c = random_case<TypeParam>(2, 3, time, 20, 5);
    const auto e = errors(c, run(cpu, c));
    EXPECT_TRUE(e.log_sum.below(1e-6));
    EXPECT_TRUE(e.product.below(1.0));
  }
}

TEST(ExpProductScan, AMillionSteps) {
  constexpr std::int64_t kSteps = 1'000'000, kCases = 7;
  std::mt19937 rng(3);
  std::uniform_real_distribution<float> gate(0.9F, 1.0F), unit(0.0F, 1.0F), close(0.999999F, 1.0F);
  Case<float> c{Sequence<float>(1, 1, kSteps, kCases), std::vector<float>(kCases, 0.0F)};
  for (std::int64_t t = 0; t < kSteps; ++t) {
    const float gates[kCases] = {gate(rng),
                                 1.0F,
                                 close(rng),
                                 1.0F - 0x1p-24F,                // the largest fp32 below 1
                                 0.9F,                           // one rounding, a million times
                                 t % 100000 == 7 ? 0.0F : 1.0F,  // the clamp at -50
                                 unit(rng)};
    for (std::int64_t i = 0; i < kCases; ++i) c.gamma.set(0, 0, t, i, gates[i]);
  }
  Cpu cpu(2);
  const auto r = run(cpu, c);
  const auto e = errors(c, r);
  EXPECT_TRUE(e.log_sum.below(1e-6));
  EXPECT_TRUE(e.product.below(1.0));
  for (std::int64_t t = 0; t < kSteps; ++t) {
    ASSERT_EQ(r.y.get(0, 0, t, 1), 1.0F);  // gamma = 1 is the identity, exactly
    ASSERT_EQ(r.log_y.get(0, 0, t, 1), 0.0F);
  }
}

// The documents' own measure: bf16 gates against a sequential cumulative product.
TEST(ExpProductScan, BFloat16AgainstACumulativeProduct) {
  Cpu cpu(2);
  for (std::int64_t time : {1000, 32768}) {
    const auto c = random_case<BFloat16>(1, 1, time, 64, 23, 0.9F);
    Sequence<BFloat16> y(1, 1, time, 64);
    exp_product_scan<BFloat16>(cpu, {c.gamma.read(), y.view(), {}, nullptr, nullptr});
    for (std::int64_t ch = 0; ch < 64; ++ch) {
      double product = 1.0;
      for (std::int64_t t = 0; t < time; ++t) {
        product *= static_cast<double>(c.gamma.get(0, 0, t, ch));
        // Storing y in bf16 alone costs up to 2^-9 next to 1: allowed for apart.
        ASSERT_LT(std::abs(static_cast<double>(y.get(0, 0, t, ch)) - product), 1e-3 + 0x1p-9 * product)
            << t << " " << ch;
      }
    }
  }
}

TEST(ExpProductScan, CutsAnywhereAndHandsCarriesOn) {
  Cpu cpu(2);
  for (std::int64_t dim : {5, 300}) {
    const std::int64_t time = 5000;
    const auto c = random_case<float>(1, 1, time, dim, 11);
    const auto whole = run(cpu, c);
    for (std::int64_t step : {7, 64, 1023, 4999}) {
      Sequence<float> y(1, 1, time, dim), log_y(1, 1, time, dim);
      std::vector<float> carry = c.carry_in;
      for (std::int64_t t = 0; t < time; t += step) {
        const std::int64_t n = std::min(step, time - t);
        exp_product_scan<float>(cpu, {middle_times(c.gamma.read(), t, n), middle_times(y.view(), t, n),
                                      middle_times(log_y.view(), t, n), carry.data(), carry.data()});
      }
      WorstError worst;
      for (std::int64_t t = 0; t < time; ++t) {
        for (std::int64_t ch = 0; ch < dim; ++ch) {
          const double expected = static_cast<double>(whole.log_y.get(0, 0, t, ch));
          worst.add(static_cast<double>(log_y.get(0, 0, t, ch)), expected, std::abs(expected), t, ch);
        }
      }
      EXPECT_TRUE(worst.below(1e-5)) << "D " << dim << ", cuts of " << step;
    }
  }
}

TYPED_TEST(ExpProductScanTyped, SameBitsForAnyNumberOfThreads) {
  for (const auto& [batch, heads, time, dim] :
       std::vector<std::array<std::int64_t, 4>>{{1, 1, 20000, 16}, {1, 1, 70, 1100}, {2, 3, 3000, 9}}) {
    const auto c = random_case<TypeParam>(batch, heads, time, dim, 13);
    Cpu one(1), two(2), five(5);
    const auto r1 = run(one, c), r2 = run(two, c), r5 = run(five, c);
    EXPECT_TRUE(r1.y.same_bits(r2.y) && r1.y.same_bits(r5.y));
    EXPECT_TRUE(r1.log_y.same_bits(r2.log_y) && r1.log_y.same_bits(r5.log_y));
    EXPECT_EQ(r1.carry_out, r2.carry_out);
    EXPECT_EQ(r1.carry_out, r5.carry_out);
  }
}

TYPED_TEST(ExpProductScanTyped, MayWriteOverGamma) {
  Cpu cpu(2);
  const auto c = random_case<TypeParam>(1, 1, 3000, 16, 17);
  const auto expected = run(cpu, c);
  Sequence<TypeParam> y(c.gamma);
  const SequenceView<const TypeParam, Host> in = y.read();
  exp_product_scan<TypeParam>(cpu, {in, y.view(), {}, c.carry_in.data(), nullptr});
  EXPECT_TRUE(y.same_bits(expected.y));
}

TEST(ExpProductScan, SpecialValues) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const float gates[] = {0.0F, 1.0F, 1.5F, inf, nan, -1.0F, 1e-30F, 0.75F, std::nextafter(0.75F, 1.0F)};
  constexpr std::int64_t kCount = 9;
  Sequence<float> gamma(1, 1, 1, kCount), y(1, 1, 1, kCount), log_y(1, 1, 1, kCount);
  for (std::int64_t i = 0; i < kCount; ++i) gamma.set(0, 0, 0, i, gates[i]);
  Cpu cpu(1);
  exp_product_scan<float>(cpu, {gamma.read(), y.view(), log_y.view()});
  EXPECT_NEAR(static_cast<double>(log_y.get(0, 0, 0, 0)), std::log(1e-8), 1e-6 * 18.5);
  for (std::int64_t i : {1, 2, 3}) EXPECT_EQ(log_y.get(0, 0, 0, i), 0.0F);
  for (std::int64_t i : {4, 5}) EXPECT_TRUE(std::isnan(y.get(0, 0, 0, i)));
  for (std::int64_t i : {6, 7, 8}) {
    const double expected = log_gate(static_cast<double>(gates[i]));
    EXPECT_NEAR(static_cast<double>(log_y.get(0, 0, 0, i)), expected, 3e-7 * std::abs(expected));
  }
  // A carry of -inf is a product of 0 and stays one.
  const std::vector<float> zero(kCount, -inf);
  std::vector<float> out(kCount);
  gamma.fill([] { return 0.5F; });
  exp_product_scan<float>(cpu, {gamma.read(), y.view(), log_y.view(), zero.data(), out.data()});
  for (std::int64_t i = 0; i < kCount; ++i) {
    EXPECT_EQ(y.get(0, 0, 0, i), 0.0F);
    EXPECT_EQ(out[static_cast<std::size_t>(i)], -inf);
  }
}

TEST(ExpProductScan, EmptyShapesPassCarriesOn) {
  Cpu cpu(2);
  const float in[2] = {-1.5F, -2.0F};
  float out[2] = {};
  exp_product_scan<float>(cpu, {{nullptr, 1, 0, 2}, {nullptr, 1, 0, 2}, {}, in, out});
  EXPECT_EQ(out[0], -1.5F);
  EXPECT_EQ(out[1], -2.0F);
}

TYPED_TEST(ExpProductScanTyped, EveryInstructionSet) {
  for (const SimdKernels* kernels : supported_simd_kernels()) {
    for (std::int64_t dim : {1, 15, 16, 37, 1024}) {
      const auto c = random_case<TypeParam>(1, 1, 300, dim, 19, 0.5F);
      Result<TypeParam> result{Sequence<TypeParam>(1, 1, 300, dim), Sequence<float>(1, 1, 300, dim), {}};
      const std::int64_t plane = (dim + 15) / 16 * 16;
      std::vector<double> state(static_cast<std::size_t>(plane)), total(static_cast<std::size_t>(plane));
      for (std::size_t i = 0; i < c.carry_in.size(); ++i) state[i] = static_cast<double>(c.carry_in[i]);
      ScanRun r{};
      r.in[0] = c.gamma.read().data;
      r.in_stride[0] = r.out_stride = r.log_out_stride = dim;
      r.out = result.y.view().data;
      r.log_out = result.log_y.view().data;
      r.times = 300;
      r.channels = dim;
      r.state = state.data();
      r.plane = plane;
      kernels->scan.exp_product_run[kDTypeOf<TypeParam>](r);
      for (std::int64_t i = 0; i < dim; ++i) {
        result.carry_out.push_back(static_cast<float>(state[static_cast<std::size_t>(i)]));
      }
      const auto e = errors(c, result);
      EXPECT_TRUE(e.log_sum.below(1e-6)) << kernels->name << " " << dim;
      EXPECT_TRUE(e.product.below(1.0)) << kernels->name << " " << dim;
      r.state = total.data();
      r.out = nullptr;
      r.log_out = nullptr;
      kernels->scan.exp_product_total[kDTypeOf<TypeParam>](r);
      for (std::size_t i = 0; i < static_cast<std::size_t>(dim); ++i) {
        EXPECT_NEAR(static_cast<double>(c.carry_in[i]) + total[i], state[i], 1e-12 * std::abs(state[i]));
      }
    }
  }
}

}  // namespace
}  // namespace mmrec::kernels
