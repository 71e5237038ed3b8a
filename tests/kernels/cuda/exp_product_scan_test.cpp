// The running product of decay gates on the device against a float64 loop over the documented formula.
#include <optional>
#include <stdexcept>

#include "kernels/cuda/scan/algo.h"
#include "tests/kernels/cuda/cuda_scan_testing.h"

namespace mmrec::kernels::test {
namespace {

/// clamp(log(gamma + 1e-8), -50, 0)
double log_gate(double gamma) { return std::clamp(std::log(gamma + 1e-8), -50.0, 0.0); }

template <class T>
struct Case {
  ScanOperand<T> gamma;
  std::vector<float> carry_in;
};

/// Gates in [low, 1], one in twenty exactly 1.
template <class T>
Case<T> random_case(const ScanLayout& layout, std::uint64_t stream, float low = 0.9F) {
  Case<T> c{ScanOperand<T>(layout), {}};
  const std::uint64_t seed = test_seed() + 2 * stream;
  c.gamma.fill(seed, [&](std::int64_t, std::int64_t, Draws& draw) {
    return draw.uniform(0.0, 1.0) < 0.05 ? 1.0 : draw.uniform(static_cast<double>(low), 1.0);
  });
  c.carry_in = random_uniform<float>(static_cast<std::size_t>(layout.channels()), -1.0, 0.0, seed + 1);
  return c;
}

template <class T>
struct Result {
  ScanOperand<T> y;
  ScanOperand<float> log_y;
  std::vector<float> carry_out;
  ScanAlgo way = {};
};

struct Errors {
  WorstScanError log_sum, product;
  void add(const Errors& other) {
    log_sum.add(other.log_sum);
    product.add(other.product);
  }
};

template <class T>
Errors errors(const Case<T>& c, const Result<T>& r) {
  return walk_channels<Errors>(
      c.gamma, [&](std::int64_t ch) { return static_cast<double>(c.carry_in[static_cast<std::size_t>(ch)]); },
      [&](double& sum, std::size_t i, std::int64_t t, std::int64_t ch, Errors& e) {
        sum += log_gate(static_cast<double>(to_float(c.gamma.data[i])));
        const double y = std::exp(sum);
        e.log_sum.add(static_cast<double>(r.log_y.data[i]), sum, std::abs(sum) + 1e-30, t, ch);
        // e^L is as far off as L is, and then rounded.
        const double scale =
            y * (kHalfUnit<T> * 1.01 + 1e-6 * (1.0 + std::abs(sum))) + (std::is_same_v<T, Float16> ? 0x1p-25 : 1.2e-38);
        e.product.add(static_cast<double>(to_float(r.y.data[i])), y, scale, t, ch);
      },
      [&](double sum, std::int64_t ch, Errors& e) {
        e.log_sum.add(static_cast<double>(r.carry_out[static_cast<std::size_t>(ch)]), sum, std::abs(sum) + 1e-30, -1,
                      ch);
      });
}

template <class T>
class ExpProductScanCuda : public CudaScanTest {
 protected:
  Result<T> run(const Case<T>& c, bool logs = true, std::optional<ScanAlgo> way = {}) {
    Result<T> r{ScanOperand<T>(c.gamma.layout()), ScanOperand<float>(c.gamma.layout()), {}, {}};
    auto gamma = this->to_device(c.gamma.data), y = this->to_device(r.y.data);
    auto log_y = this->to_device(r.log_y.data);
    auto carry_in = this->to_device(c.carry_in);
    auto carry_out = this->template poisoned<float>(c.carry_in.size());
    ExpProductScan<T, Device> op{c.gamma.on(gamma), r.y.on(y), {}, carry_in.data(), carry_out.data()};
    if (logs) op.log_y = r.log_y.on(log_y);
    r.way = exp_product_scan(this->cuda(), op, way);
    r.y.data = this->to_host(y);
    r.log_y.data = this->to_host(log_y);
    r.carry_out = this->to_host(carry_out);
    return r;
  }
};
using Types = ::testing::Types<float, Float16, BFloat16>;
TYPED_TEST_SUITE(ExpProductScanCuda, Types);

TYPED_TEST(ExpProductScanCuda, EveryWayGivesTheSameBitsAndIsTakenByItsShapes) {
  const bool engine = this->cuda().compute_capability() >= 90;
  const auto way = [&](const ScanLayout& layout) { return this->run(random_case<TypeParam>(layout, 8)).way; };
  constexpr std::int64_t kDim = 160 * 4 / sizeof(TypeParam);
  EXPECT_EQ(way({.time = 300, .dim = kDim}), engine ? ScanAlgo::kStaged : ScanAlgo::kLoad);
  EXPECT_EQ(way({.time = 300, .dim = kDim, .offset = 1}), ScanAlgo::kLoad);
  EXPECT_EQ(way({.time = 300, .dim = 8}), ScanAlgo::kLoad);
  const auto c = random_case<TypeParam>({.batch = 2, .time = 700, .dim = kDim}, 7);
  const auto loaded = this->run(c, true, ScanAlgo::kLoad);
  EXPECT_TRUE(same_bits(loaded.y.data, this->run(c).y.data));
  EXPECT_THROW(this->run(c, true, ScanAlgo::kColumns), std::invalid_argument);
}

TYPED_TEST(ExpProductScanCuda, MatchesFloat64AtEverySize) {
  std::uint64_t stream = 0;
  for (const auto& [time, dim] : scan_sizes<TypeParam>()) {
    for (const float low : {0.9F, 0.0F}) {
      if (low == 0.0F && time * dim > 50'000'000) continue;  // what is that large shows with one kind of gates
      const auto c = random_case<TypeParam>({.time = time, .dim = dim}, ++stream, low);
      const auto e = errors(c, this->run(c));
      EXPECT_TRUE(e.log_sum.below(1e-6)) << "T " << time << ", D " << dim;
      EXPECT_TRUE(e.product.below(1.0)) << "T " << time << ", D " << dim;
    }
  }
}

TYPED_TEST(ExpProductScanCuda, HeadsStridesAndNoLogs) {
  for (const bool inside : {false, true}) {
    for (const std::int64_t padding : {0, 3, 8}) {
      const ScanLayout layout{
          .batch = 2, .heads = 3, .time = 500, .dim = 24, .padding = padding, .heads_inside = inside};
      const auto c = random_case<TypeParam>(layout, 5);
      const auto r = this->run(c);
      const auto e = errors(c, r);
      EXPECT_TRUE(e.log_sum.below(1e-6));
      EXPECT_TRUE(e.product.below(1.0));
      const auto without = this->run(c, false);
      EXPECT_TRUE(same_bits(without.y.data, r.y.data));
      EXPECT_TRUE(std::isnan(without.log_y.value(0, 0)));
    }
  }
}

TYPED_TEST(ExpProductScanCuda, RepeatsToTheBitAndMayWriteOverGamma) {
  for (const std::int64_t dim : {5, 200}) {
    const auto c = random_case<TypeParam>({.time = 1500, .dim = dim}, 17);
    const auto expected = this->run(c), again = this->run(c);
    EXPECT_TRUE(same_bits(expected.y.data, again.y.data) && same_bits(expected.log_y.data, again.log_y.data));
    auto gamma = this->to_device(c.gamma.data);
    auto carry = this->to_device(c.carry_in);
    exp_product_scan<TypeParam>(this->cuda(), {c.gamma.on(gamma), c.gamma.on(gamma), {}, carry.data(), carry.data()});
    EXPECT_TRUE(same_bits(this->to_host(gamma), expected.y.data));
    EXPECT_TRUE(same_bits(this->to_host(carry), expected.carry_out));
  }
}

// The documents' own measure: bf16 gates against a sequential cumulative product.
TYPED_TEST(ExpProductScanCuda, AgainstACumulativeProduct) {
  const auto c = random_case<TypeParam>({.time = 4000, .dim = 64}, 23);
  Case<TypeParam> fresh{c.gamma, std::vector<float>(64, 0.0F)};
  const auto r = this->run(fresh);
  for (std::int64_t ch = 0; ch < 64; ++ch) {
    double product = 1.0;
    for (std::int64_t t = 0; t < 4000; ++t) {
      product *= c.gamma.value(ch, t);
      // Storing y costs up to half a unit: allowed for apart.
      ASSERT_LT(std::abs(r.y.value(ch, t) - product), 1e-3 + kHalfUnit<TypeParam> * product) << t << " " << ch;
    }
  }
}

using ExpProductScanCudaFloat = ExpProductScanCuda<float>;

TEST_F(ExpProductScanCudaFloat, AMillionSteps) {
  constexpr std::int64_t kSteps = 1'000'000, kCases = 7;
  std::mt19937_64 engine(test_seed() + 3);
  std::uniform_real_distribution<float> gate(0.9F, 1.0F), unit(0.0F, 1.0F), close(0.999999F, 1.0F);
  Case<float> c{ScanOperand<float>({.time = kSteps, .dim = kCases}), std::vector<float>(kCases, 0.0F)};
  for (std::int64_t t = 0; t < kSteps; ++t) {
    const float gates[kCases] = {gate(engine),
                                 1.0F,
                                 close(engine),
                                 1.0F - 0x1p-24F,                // the largest fp32 below 1
                                 0.9F,                           // one rounding, a million times
                                 t % 100000 == 7 ? 0.0F : 1.0F,  // γ = 0
                                 unit(engine)};
    for (std::int64_t i = 0; i < kCases; ++i) c.gamma.at(i, t) = gates[i];
  }
  const auto r = run(c);
  const auto e = errors(c, r);
  EXPECT_TRUE(e.log_sum.below(1e-6));
  EXPECT_TRUE(e.product.below(1.0));
  for (std::int64_t t = 0; t < kSteps; ++t) {
    ASSERT_EQ(r.y.value(1, t), 1.0);  // gamma = 1 is the identity, exactly
    ASSERT_EQ(r.log_y.value(1, t), 0.0);
  }
}

TEST_F(ExpProductScanCudaFloat, CutsAnywhereAndHandsCarriesOn) {
  const std::int64_t time = 1200;
  for (const std::int64_t dim : {5, 64}) {
    const auto c = random_case<float>({.time = time, .dim = dim}, 11);
    const auto whole = run(c);
    for (const std::int64_t step : {7, 64, 1023}) {
      auto gamma = to_device(c.gamma.data);
      auto y = poisoned<float>(c.gamma.data.size()), log_y = poisoned<float>(c.gamma.data.size());
      auto carry = to_device(c.carry_in);
      for (std::int64_t t = 0; t < time; t += step) {
        const std::int64_t n = std::min(step, time - t);
        exp_product_scan<float>(cuda(), {times(c.gamma.on(gamma), t, n), times(c.gamma.on(y), t, n),
                                         times(c.gamma.on(log_y), t, n), carry.data(), carry.data()});
      }
      const auto got = to_host(log_y);
      WorstScanError worst;
      for (std::size_t i = 0; i < got.size(); ++i) {
        const auto expected = static_cast<double>(whole.log_y.data[i]);
        worst.add(static_cast<double>(got[i]), expected, std::abs(expected), static_cast<std::int64_t>(i), 0);
      }
      EXPECT_TRUE(worst.below(1e-5)) << "D " << dim << ", cuts of " << step;
    }
  }
}

TEST_F(ExpProductScanCudaFloat, SpecialValues) {
  constexpr std::int64_t kCount = 10;
  const float gates[kCount] = {0.0F,  1.0F, 1.5F, kInfinity, kNan, -1.0F, 1e-30F, 0.75F, std::nextafter(0.75F, 1.0F),
                               -1e-8F};
  Case<float> c{ScanOperand<float>({.time = 1, .dim = kCount}), std::vector<float>(kCount, 0.0F)};
  c.gamma.fill([&](std::int64_t, std::int64_t i) { return gates[i]; });
  const auto r = run(c);
  EXPECT_NEAR(r.log_y.value(0, 0), std::log(1e-8), 1e-6 * 18.5);
  for (const std::int64_t i : {1, 2, 3}) EXPECT_EQ(r.log_y.value(i, 0), 0.0);
  for (const std::int64_t i : {4, 5}) EXPECT_TRUE(std::isnan(r.y.value(i, 0)));
  for (const std::int64_t i : {6, 7, 8}) {
    const double expected = log_gate(static_cast<double>(gates[i]));
    EXPECT_NEAR(r.log_y.value(i, 0), expected, 3e-7 * std::abs(expected));
  }
  EXPECT_EQ(r.log_y.value(9, 0), -50.0);
  // A carry of -inf is a product of 0 and stays one; NaN passes on.
  for (const std::int64_t time : {1, 300}) {
    Case<float> half{ScanOperand<float>({.time = time, .dim = 2}), {-kInfinity, kNan}};
    half.gamma.fill([](std::int64_t, std::int64_t) { return 0.5F; });
    const auto s = run(half);
    for (std::int64_t t = 0; t < time; ++t) {
      ASSERT_EQ(s.y.value(0, t), 0.0);
      ASSERT_TRUE(std::isnan(s.y.value(1, t)));
    }
    EXPECT_EQ(s.carry_out[0], -kInfinity);
    EXPECT_TRUE(std::isnan(s.carry_out[1]));
  }
}

TEST_F(ExpProductScanCudaFloat, EmptyShapesPassCarriesOn) {
  const auto in = to_device<float>({-1.5F, -2.0F});
  auto out = poisoned<float>(2);
  exp_product_scan<float>(cuda(), {{nullptr, 1, 0, 2}, {nullptr, 1, 0, 2}, {}, in.data(), out.data()});
  EXPECT_EQ(to_host(out), (std::vector<float>{-1.5F, -2.0F}));
}

}  // namespace
}  // namespace mmrec::kernels::test
