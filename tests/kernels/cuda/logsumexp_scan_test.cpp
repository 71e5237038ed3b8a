// The running log-sum-exp on the device against a float64 loop.
#include <optional>
#include <stdexcept>

#include "kernels/cuda/scan/algo.h"
#include "tests/kernels/cuda/cuda_scan_testing.h"

namespace mmrec::kernels::test {
namespace {

constexpr double kNothing = -std::numeric_limits<double>::infinity();

template <class T>
struct Case {
  ScanOperand<T> x;
  std::vector<float> carry_in;
};

template <class T>
Case<T> random_case(const ScanLayout& layout, std::uint64_t stream, float spread = 3.0F) {
  Case<T> c{ScanOperand<T>(layout), {}};
  const std::uint64_t seed = test_seed() + 2 * stream;
  const auto deviation = static_cast<double>(spread);
  c.x.fill(seed, [&](std::int64_t, std::int64_t, Draws& draw) { return draw.normal(0.0, deviation); });
  c.carry_in = random_normal<float>(static_cast<std::size_t>(layout.channels()), 0.0, deviation, seed + 1);
  return c;
}

template <class T>
struct Result {
  ScanOperand<T> y;
  std::vector<float> carry_out;
  ScanAlgo way = {};
};

/// Relative to max(1, |y|): y crosses zero, where the sum of exponentials is 1.
template <class T>
WorstScanError error(const Case<T>& c, const Result<T>& r) {
  // log(sum) relative to a fixed reference where it can be: no million roundings in the reference itself.
  struct State {
    double y, m, sum;
  };
  return walk_channels<WorstScanError>(
      c.x,
      [&](std::int64_t ch) {
        const double y = c.carry_in.empty() ? kNothing : static_cast<double>(c.carry_in[static_cast<std::size_t>(ch)]);
        return State{y, y, y == kNothing ? 0.0 : 1.0};
      },
      [&](State& s, std::size_t i, std::int64_t t, std::int64_t ch, WorstScanError& worst) {
        const auto x = static_cast<double>(to_float(c.x.data[i]));
        if (x > s.m) {
          s.sum = s.m == kNothing ? 1.0 : s.sum * std::exp(s.m - x) + 1.0;
          s.m = x;
        } else if (x != kNothing) {
          s.sum += std::exp(x - s.m);
        }
        s.y = s.m == kNothing ? kNothing : s.m + std::log(s.sum);
        const auto got = static_cast<double>(to_float(r.y.data[i]));
        const double rounding = sizeof(T) == 2 ? kHalfUnit<T> * std::abs(s.y) * 1.001 : 0.0;
        const double beyond =
            std::isinf(s.y) ? (got == s.y ? 0.0 : 1.0) : std::max(0.0, std::abs(got - s.y) - rounding);
        worst.add(std::isnan(got) ? got : beyond, 0.0, std::isinf(s.y) ? 1.0 : std::max(1.0, std::abs(s.y)), t, ch);
      },
      [&](const State& s, std::int64_t ch, WorstScanError& worst) {
        worst.add(static_cast<double>(r.carry_out[static_cast<std::size_t>(ch)]), s.y,
                  std::isinf(s.y) ? 1.0 : std::max(1.0, std::abs(s.y)), -1, ch);
      });
}

template <class T>
class LogSumExpScanCuda : public CudaScanTest {
 protected:
  Result<T> run(const Case<T>& c, std::optional<ScanAlgo> way = {}) {
    Result<T> r{ScanOperand<T>(c.x.layout()), {}, {}};
    auto x = this->to_device(c.x.data), y = this->to_device(r.y.data);
    auto carry_in = this->to_device(c.carry_in);
    auto carry_out = this->template poisoned<float>(static_cast<std::size_t>(c.x.layout().channels()));
    const LogSumExpScan<T, Device> op{c.x.on(x), r.y.on(y), carry_in.data(), carry_out.data()};
    r.way = logsumexp_scan(this->cuda(), op, way);
    r.y.data = this->to_host(y);
    r.carry_out = this->to_host(carry_out);
    return r;
  }
};
using Types = ::testing::Types<float, Float16, BFloat16>;
TYPED_TEST_SUITE(LogSumExpScanCuda, Types);

TYPED_TEST(LogSumExpScanCuda, EveryWayGivesTheSameBitsAndIsTakenByItsShapes) {
  const bool engine = this->cuda().compute_capability() >= 90;
  const auto way = [&](const ScanLayout& layout) { return this->run(random_case<TypeParam>(layout, 8)).way; };
  constexpr std::int64_t kDim = 160 * 4 / sizeof(TypeParam);
  EXPECT_EQ(way({.time = 300, .dim = kDim}), engine ? ScanAlgo::kStaged : ScanAlgo::kLoad);
  EXPECT_EQ(way({.time = 300, .dim = kDim, .offset = 1}), ScanAlgo::kLoad);
  EXPECT_EQ(way({.time = 300, .dim = 8}), ScanAlgo::kLoad);
  const auto c = random_case<TypeParam>({.batch = 2, .time = 700, .dim = kDim}, 7);
  const auto loaded = this->run(c, ScanAlgo::kLoad);
  EXPECT_TRUE(same_bits(loaded.y.data, this->run(c).y.data));
  EXPECT_THROW(this->run(c, ScanAlgo::kColumns), std::invalid_argument);
}

TYPED_TEST(LogSumExpScanCuda, MatchesFloat64AtEverySize) {
  std::uint64_t stream = 0;
  for (const auto& [time, dim] : scan_sizes<TypeParam>()) {
    const auto c = random_case<TypeParam>({.time = time, .dim = dim}, ++stream);
    EXPECT_TRUE(error(c, this->run(c)).below(1e-6)) << "T " << time << ", D " << dim;
  }
}

TYPED_TEST(LogSumExpScanCuda, HeadsAndStridesAndWideSpreads) {
  for (const bool inside : {false, true}) {
    for (const std::int64_t padding : {0, 3, 8}) {
      for (const float spread : {30.0F, 1000.0F}) {
        const ScanLayout layout{
            .batch = 2, .heads = 3, .time = 500, .dim = 24, .padding = padding, .heads_inside = inside};
        const auto c = random_case<TypeParam>(layout, 5, spread);
        EXPECT_TRUE(error(c, this->run(c)).below(1e-6)) << spread;
      }
    }
  }
}

TYPED_TEST(LogSumExpScanCuda, RepeatsToTheBitAndMayWriteOverX) {
  for (const std::int64_t dim : {5, 200}) {
    for (const float spread : {20.0F, 500.0F}) {  // the second takes the stepwise path, which reads x again
      const auto c = random_case<TypeParam>({.time = 1500, .dim = dim}, 17, spread);
      const auto expected = this->run(c), again = this->run(c);
      EXPECT_TRUE(same_bits(expected.y.data, again.y.data));
      auto x = this->to_device(c.x.data);
      auto carry = this->to_device(c.carry_in);
      logsumexp_scan<TypeParam>(this->cuda(), {c.x.on(x), c.x.on(x), carry.data(), carry.data()});
      EXPECT_TRUE(same_bits(this->to_host(x), expected.y.data));
      EXPECT_TRUE(same_bits(this->to_host(carry), expected.carry_out));
    }
  }
}

using LogSumExpScanCudaFloat = LogSumExpScanCuda<float>;

TEST_F(LogSumExpScanCudaFloat, AMillionSteps) {
  constexpr std::int64_t kSteps = 1'000'000, kCases = 8;
  std::mt19937_64 engine(test_seed() + 3);
  std::normal_distribution<float> value;
  Case<float> c{ScanOperand<float>({.time = kSteps, .dim = kCases}), {}};
  for (std::int64_t t = 0; t < kSteps; ++t) {
    const auto s = static_cast<float>(t);
    const float x[kCases] = {value(engine),
                             -3.0F,       // equal terms: log(t + 1) - 3
                             1e-6F * s,   // a slow climb: the maximum moves at every step
                             -1e-3F * s,  // a descent: the sum stops growing
                             0.1F * s,    // a steep climb
                             50.0F * value(engine),
                             t < 500000 ? -kInfinity : value(engine),
                             1e30F};
    for (std::int64_t i = 0; i < kCases; ++i) c.x.at(i, t) = x[i];
  }
  EXPECT_TRUE(error(c, run(c)).below(2e-6));
}

TEST_F(LogSumExpScanCudaFloat, CutsAnywhereAndHandsCarriesOn) {
  const std::int64_t time = 1200;
  for (const std::int64_t dim : {5, 64}) {
    const auto c = random_case<float>({.time = time, .dim = dim}, 11);
    const auto whole = run(c);
    for (const std::int64_t step : {7, 64, 1023}) {
      auto x = to_device(c.x.data);
      auto y = poisoned<float>(c.x.data.size());
      auto carry = to_device(c.carry_in);
      for (std::int64_t t = 0; t < time; t += step) {
        const std::int64_t n = std::min(step, time - t);
        logsumexp_scan<float>(cuda(), {times(c.x.on(x), t, n), times(c.x.on(y), t, n), carry.data(), carry.data()});
      }
      const auto got = to_host(y);
      WorstScanError worst;
      for (std::size_t i = 0; i < got.size(); ++i) {
        const auto expected = static_cast<double>(whole.y.data[i]);
        worst.add(static_cast<double>(got[i]), expected, std::max(1.0, std::abs(expected)),
                  static_cast<std::int64_t>(i), 0);
      }
      EXPECT_TRUE(worst.below(1e-5)) << "D " << dim << ", cuts of " << step;  // each cut rounds the carry to fp32
    }
  }
}

TEST_F(LogSumExpScanCudaFloat, SpecialValues) {
  const float largest = std::numeric_limits<float>::max();
  for (const std::int64_t time : {6, 1030}) {
    constexpr std::int64_t kCases = 7;
    Case<float> c{ScanOperand<float>({.time = time, .dim = kCases}), std::vector<float>(kCases, -kInfinity)};
    const float first[kCases] = {-kInfinity, kInfinity, kNan, 1e30F, -largest, largest, -kInfinity};
    const float rest[kCases] = {-kInfinity, 0.0F, 0.0F, -1e30F, -largest, -largest, 2.0F};
    c.x.fill([&](std::int64_t t, std::int64_t i) { return t == 0 ? first[i] : rest[i]; });
    const auto r = run(c);
    for (std::int64_t t = 0; t < time; ++t) {
      ASSERT_EQ(r.y.value(0, t), kNothing);
      ASSERT_EQ(r.y.value(1, t), -kNothing);
      ASSERT_TRUE(std::isnan(r.y.value(2, t)));
      ASSERT_EQ(r.y.value(3, t), static_cast<double>(1e30F));
      ASSERT_EQ(r.y.value(4, t), static_cast<double>(-largest));
      ASSERT_EQ(r.y.value(5, t), static_cast<double>(largest));
      if (t != 0) {
        ASSERT_NEAR(r.y.value(6, t), 2.0 + std::log(static_cast<double>(t)), 1e-5);
      }
    }
    EXPECT_EQ(r.y.value(6, 0), kNothing);
    EXPECT_EQ(r.carry_out[0], -kInfinity);
    EXPECT_EQ(r.carry_out[1], kInfinity);
    EXPECT_TRUE(std::isnan(r.carry_out[2]));
    // Carries of every kind enter again.
    Case<float> zero{ScanOperand<float>({.time = time, .dim = kCases}),
                     {-kInfinity, kInfinity, kNan, 1e30F, -largest, largest, 0.0F}};
    zero.x.fill([](std::int64_t, std::int64_t) { return 0.0F; });
    const auto out = run(zero).carry_out;
    const double n = static_cast<double>(time);
    EXPECT_NEAR(static_cast<double>(out[0]), std::log(n), 1e-5);
    EXPECT_EQ(out[1], kInfinity);
    EXPECT_TRUE(std::isnan(out[2]));
    EXPECT_EQ(out[3], 1e30F);
    EXPECT_NEAR(static_cast<double>(out[4]), std::log(n), 1e-5);
    EXPECT_EQ(out[5], largest);
    EXPECT_NEAR(static_cast<double>(out[6]), std::log(n + 1.0), 1e-5);
  }
}

TEST_F(LogSumExpScanCudaFloat, EmptyShapesPassCarriesOn) {
  const auto in = to_device<float>({-1.5F, -kInfinity});
  auto out = poisoned<float>(2);
  logsumexp_scan<float>(cuda(), {{nullptr, 1, 0, 2}, {nullptr, 1, 0, 2}, in.data(), out.data()});
  EXPECT_EQ(to_host(out), (std::vector<float>{-1.5F, -kInfinity}));
}

}  // namespace
}  // namespace mmrec::kernels::test
