// The decayed recurrence on the device against a float64 loop over time.
#include <stdexcept>

#include "kernels/cuda/scan/algo.h"
#include "tests/kernels/cuda/cuda_scan_testing.h"

namespace mmrec::kernels::test {
namespace {

template <class T>
struct Case {
  ScanOperand<T> log_a, b;
  std::vector<float> carry_in;
};

/// Decays in [0.9, 1], one in twenty exactly 1, short spans of up to 1.2; b of both signs with zeros.
template <class T>
Case<T> random_case(const ScanLayout& layout, std::uint64_t stream) {
  Case<T> c{ScanOperand<T>(layout), ScanOperand<T>(layout), {}};
  const std::uint64_t seed = test_seed() + 3 * stream;
  c.log_a.fill(seed, [](std::int64_t t, std::int64_t, Draws& draw) {
    if (draw.uniform(0.0, 1.0) < 0.05) return 0.0;
    return std::log(t % 1024 < 8 ? draw.uniform(1.0, 1.2) : draw.uniform(0.9, 1.0));
  });
  c.b.fill(seed + 1, [](std::int64_t, std::int64_t, Draws& draw) {
    return draw.uniform(0.0, 1.0) < 0.1 ? 0.0 : draw.normal(0.0, 0.1);
  });
  c.carry_in = random_normal<float>(static_cast<std::size_t>(layout.channels()), 0.0, 0.1, seed + 2);
  return c;
}

/// Relative where terms do not cancel, else to a twentieth of what was added up: 1e-5 of that is four units in the last
/// place of fp32, in which a step is computed. Rounding to T is allowed for apart.
inline constexpr double kCancelled = 0.05;
template <class T>
WorstScanError error(const Case<T>& c, const ScanOperand<T>& h, const std::vector<float>& carry_out) {
  struct State {
    double x, size;
  };
  const auto scale = [](const State& s) { return std::max(std::abs(s.x), kCancelled * s.size) + 1e-30; };
  return walk_channels<WorstScanError>(
      c.b,
      [&](std::int64_t ch) {
        const double x = c.carry_in.empty() ? 0.0 : static_cast<double>(c.carry_in[static_cast<std::size_t>(ch)]);
        return State{x, std::abs(x)};
      },
      [&](State& s, std::size_t i, std::int64_t t, std::int64_t ch, WorstScanError& worst) {
        const double a = std::exp(static_cast<double>(to_float(c.log_a.data[i])));
        const auto b = static_cast<double>(to_float(c.b.data[i]));
        const auto got = static_cast<double>(to_float(h.data[i]));
        s = {a * s.x + b, a * s.size + std::abs(b)};
        const double rounding = sizeof(T) == 2 ? kHalfUnit<T> * std::abs(s.x) * 1.001 + 0x1p-25 : 0.0;
        const double off = std::max(0.0, std::abs(got - s.x) - rounding);
        worst.add(std::isnan(got) ? kNan : s.x + off, s.x, scale(s), t, ch);
      },
      [&](const State& s, std::int64_t ch, WorstScanError& worst) {
        if (carry_out.empty()) return;
        worst.add(static_cast<double>(carry_out[static_cast<std::size_t>(ch)]), s.x, scale(s), -1, ch);
      });
}

template <class T>
struct Result {
  ScanOperand<T> h;
  std::vector<float> carry_out;
  ScanAlgo way = {};
};

template <class T>
class DecayScanCuda : public CudaScanTest {
 protected:
  Result<T> run(const Case<T>& c, std::optional<ScanAlgo> way = {}) {
    Result<T> r{ScanOperand<T>(c.b.layout()), {}, {}};
    auto log_a = this->to_device(c.log_a.data), b = this->to_device(c.b.data), h = this->to_device(r.h.data);
    auto carry_in = this->to_device(c.carry_in);
    auto carry_out = this->template poisoned<float>(static_cast<std::size_t>(c.b.layout().channels()));
    const DecayScan<T, Device> op{c.log_a.on(log_a), c.b.on(b), r.h.on(h), carry_in.data(), carry_out.data()};
    r.way = decay_scan(this->cuda(), op, way);
    r.h.data = this->to_host(h);
    r.carry_out = this->to_host(carry_out);
    return r;
  }
};
using Types = ::testing::Types<float, Float16, BFloat16>;
TYPED_TEST_SUITE(DecayScanCuda, Types);

TYPED_TEST(DecayScanCuda, EveryWayGivesTheSameBits) {
  if (this->cuda().compute_capability() < 90) GTEST_SKIP() << "there is one way";
  const auto c = random_case<TypeParam>({.batch = 2, .time = 700, .dim = 520}, 7);
  const auto expected = this->run(c, ScanAlgo::kLoad);
  EXPECT_TRUE(error(c, expected.h, expected.carry_out).below(1e-5));
  for (const ScanAlgo way : {ScanAlgo::kStaged, ScanAlgo::kColumns, ScanAlgo::kGroups}) {
    const auto r = this->run(c, way);
    EXPECT_EQ(r.way, way);
    EXPECT_TRUE(same_bits(r.h.data, expected.h.data)) << "way " << static_cast<int>(way);
    EXPECT_TRUE(same_bits(r.carry_out, expected.carry_out)) << "way " << static_cast<int>(way);
  }
}

TYPED_TEST(DecayScanCuda, TheWayFollowsFromTheOperands) {
  if (this->cuda().compute_capability() < 90) GTEST_SKIP() << "there is one way";
  constexpr std::int64_t kVec = 4 / sizeof(TypeParam);
  const auto way = [&](const ScanLayout& layout) { return this->run(random_case<TypeParam>(layout, 8)).way; };
  const std::int64_t column_each = this->cuda().processors() * 32 * kVec;
  EXPECT_EQ(way({.time = 256, .dim = 3 * column_each}), ScanAlgo::kColumns);
  EXPECT_EQ(way({.time = 300, .dim = 160 * kVec}), ScanAlgo::kStaged);
  EXPECT_EQ(way({.time = 300, .dim = 8}), ScanAlgo::kLoad);
  EXPECT_EQ(way({.time = 300, .dim = 160 * kVec, .offset = 1}), ScanAlgo::kLoad);
  const auto narrow = random_case<TypeParam>({.time = 300, .dim = 8}, 9);
  EXPECT_THROW(this->run(narrow, ScanAlgo::kColumns), std::invalid_argument);
}

TYPED_TEST(DecayScanCuda, MatchesFloat64AtEverySize) {
  std::uint64_t stream = 0;
  for (const auto& [time, dim] : scan_sizes<TypeParam>()) {
    const auto c = random_case<TypeParam>({.time = time, .dim = dim}, ++stream);
    const auto r = this->run(c);
    EXPECT_TRUE(error(c, r.h, r.carry_out).below(1e-5)) << "T " << time << ", D " << dim;
    EXPECT_TRUE(this->flags_are_zero());
  }
}

TYPED_TEST(DecayScanCuda, HeadsAndStrides) {
  for (const bool inside : {false, true}) {
    for (const std::int64_t padding : {0, 3, 8}) {
      for (const std::int64_t time : {5, 700}) {
        for (const std::int64_t dim : {24, 64}) {
          const ScanLayout layout{
              .batch = 2, .heads = 3, .time = time, .dim = dim, .padding = padding, .heads_inside = inside};
          const auto c = random_case<TypeParam>(layout, 7);
          const auto r = this->run(c);
          EXPECT_TRUE(error(c, r.h, r.carry_out).below(1e-5)) << time << " x " << dim << " + " << padding;
          for (std::size_t i = 0; i < r.h.data.size(); ++i) {  // nothing between the rows was written
            if (static_cast<std::int64_t>(i) % (dim + padding) >= dim) {
              ASSERT_TRUE(std::isnan(to_float(r.h.data[i])));
            }
          }
        }
      }
    }
  }
}

TYPED_TEST(DecayScanCuda, AlignmentChangesNoBit) {
  for (const std::int64_t dim : {8, 40, 300, 1024}) {
    ScanLayout layout{.time = 600, .dim = dim};
    if (dim % 8 != 0) layout.padding = 8 - dim % 8;
    const auto aligned = random_case<TypeParam>(layout, 3);
    layout.offset = 1;
    auto shifted = random_case<TypeParam>(layout, 3);
    const auto a = this->run(aligned), b = this->run(shifted);
    for (std::int64_t ch = 0; ch < dim; ++ch) {
      for (std::int64_t t = 0; t < layout.time; ++t) ASSERT_EQ(a.h.value(ch, t), b.h.value(ch, t)) << dim;
    }
    EXPECT_TRUE(same_bits(a.carry_out, b.carry_out));
  }
}

TYPED_TEST(DecayScanCuda, RepeatsToTheBitAloneAndInABatch) {
  const std::int64_t time = small_sizes() ? 700 : 20000, dim = 144;
  const auto c = random_case<TypeParam>({.batch = 5, .time = time, .dim = dim}, 13);
  const auto first = this->run(c);
  for (int i = 0; i < (small_sizes() ? 2 : 20); ++i) {
    const auto again = this->run(c);
    ASSERT_TRUE(same_bits(first.h.data, again.h.data));
    ASSERT_TRUE(same_bits(first.carry_out, again.carry_out));
  }
  const auto count = static_cast<std::ptrdiff_t>(time * dim);
  Case<TypeParam> alone{
      ScanOperand<TypeParam>({.time = time, .dim = dim}), ScanOperand<TypeParam>({.time = time, .dim = dim}), {}};
  alone.log_a.data.assign(c.log_a.data.begin() + 3 * count, c.log_a.data.begin() + 4 * count);
  alone.b.data.assign(c.b.data.begin() + 3 * count, c.b.data.begin() + 4 * count);
  alone.carry_in.assign(c.carry_in.begin() + 3 * dim, c.carry_in.begin() + 4 * dim);
  const std::vector<TypeParam> part(first.h.data.begin() + 3 * count, first.h.data.begin() + 4 * count);
  EXPECT_TRUE(same_bits(this->run(alone).h.data, part));
}

// Wide operands: columns of one block, of two and (160 to 384 channels on few multiprocessors, else 512 and 1,024) of
// four and more, in whole rounds and not, with halves and without, and columns that follow each other. Which way a
// shape goes depends on how many multiprocessors there are, so each goes every way.
TYPED_TEST(DecayScanCuda, ColumnsOfOneBlockAndOfGroups) {
  using enum ScanAlgo;
  for (ScanLayout layout :
       {ScanLayout{.time = 65, .dim = 520}, ScanLayout{.time = 128, .dim = 328}, ScanLayout{.time = 385, .dim = 168},
        ScanLayout{.time = 512, .dim = 328}, ScanLayout{.time = 800, .dim = 328},
        ScanLayout{.batch = 3, .time = 300, .dim = 168}, ScanLayout{.time = 2400, .dim = 160},
        ScanLayout{.time = 2400, .dim = 320}, ScanLayout{.time = 17000, .dim = 192},
        ScanLayout{.time = 8200, .dim = 384}, ScanLayout{.batch = 3, .time = 1000, .dim = 144},
        ScanLayout{.batch = 3, .time = 1000, .dim = 320}, ScanLayout{.time = 140, .dim = 4224},
        ScanLayout{.time = 17000, .dim = 1024}, ScanLayout{.time = 40000, .dim = 512},
        ScanLayout{.time = 1000, .dim = 4096}, ScanLayout{.batch = 2, .time = 1100, .dim = 4224}}) {
    if (small_sizes() && layout.batch * layout.time * layout.dim > 3'300'000) continue;
    const auto c = random_case<TypeParam>(layout, 19);
    const auto r = this->run(c);
    EXPECT_TRUE(error(c, r.h, r.carry_out).below(1e-5)) << layout.time << " x " << layout.dim;
    EXPECT_TRUE(this->flags_are_zero());
    // Rows of up to 512 bytes hand on in another way, which columns have not.
    const bool has_columns = this->cuda().compute_capability() >= 90 && layout.dim * sizeof(TypeParam) > 512;
    for (const ScanAlgo way : {kColumns, kGroups}) {
      if (way == r.way || !has_columns) continue;
      const auto by = this->run(c, way);
      EXPECT_EQ(by.way, way);
      EXPECT_TRUE(same_bits(by.h.data, r.h.data) && same_bits(by.carry_out, r.carry_out))
          << "way " << static_cast<int>(way) << ", " << layout.time << " x " << layout.dim;
      EXPECT_TRUE(this->flags_are_zero());
    }
    layout.offset = 1;
    const auto shifted = this->run(random_case<TypeParam>(layout, 19));
    EXPECT_TRUE(same_bits(r.carry_out, shifted.carry_out)) << layout.time << " x " << layout.dim;
  }
}

TYPED_TEST(DecayScanCuda, MayWriteOverItsInputs) {
  for (const std::int64_t dim : {5, 264}) {
    const auto c = random_case<TypeParam>({.time = 500, .dim = dim}, 17);
    const auto expected = this->run(c);
    for (const bool over_b : {true, false}) {
      auto log_a = this->to_device(c.log_a.data), b = this->to_device(c.b.data);
      auto carry = this->to_device(c.carry_in);
      auto& over = over_b ? b : log_a;
      decay_scan<TypeParam>(this->cuda(), {c.log_a.on(log_a), c.b.on(b), c.b.on(over), carry.data(), carry.data()});
      EXPECT_TRUE(same_bits(this->to_host(over), expected.h.data));
      EXPECT_TRUE(same_bits(this->to_host(carry), expected.carry_out));
    }
  }
}

using DecayScanCudaFloat = DecayScanCuda<float>;

TEST_F(DecayScanCudaFloat, CutsAnywhereAndHandsCarriesOn) {
  const std::int64_t time = small_sizes() ? 1200 : 5000;
  for (const std::int64_t dim : {5, 64}) {
    const auto c = random_case<float>({.time = time, .dim = dim}, 11);
    const auto whole = run(c);
    for (const std::int64_t step : {7, 64, 1023}) {
      auto log_a = to_device(c.log_a.data), b = to_device(c.b.data);
      auto h = poisoned<float>(c.b.data.size());
      auto carry = to_device(c.carry_in);
      for (std::int64_t t = 0; t < time; t += step) {
        const std::int64_t n = std::min(step, time - t);
        decay_scan<float>(cuda(), {times(c.log_a.on(log_a), t, n), times(c.b.on(b), t, n), times(c.b.on(h), t, n),
                                   carry.data(), carry.data()});
      }
      const auto got = to_host(h);
      WorstScanError worst;
      for (std::size_t i = 0; i < got.size(); ++i) {
        const auto expected = static_cast<double>(whole.h.data[i]);
        worst.add(static_cast<double>(got[i]), expected, std::max(std::abs(expected), 0.02),
                  static_cast<std::int64_t>(i), 0);
      }
      EXPECT_TRUE(worst.below(2e-5)) << "D " << dim << ", cuts of " << step;  // each cut rounds the state to fp32
    }
  }
}

// One channel per case that a scan in fp32 or in whole-sequence log space loses.
TEST_F(DecayScanCudaFloat, AMillionSteps) {
  const std::int64_t steps = 1'000'000, cases = 9;
  Case<float> c{ScanOperand<float>({.time = steps, .dim = cases}), ScanOperand<float>({.time = steps, .dim = cases}),
                std::vector<float>(cases, 0.0F)};
  std::mt19937_64 engine(test_seed() + 3);
  std::uniform_real_distribution<float> decay(0.9F, 1.0F), unit(0.0F, 1.0F), close(0.9999F, 1.0F), growth(1.0F, 1.2F);
  std::normal_distribution<float> input;
  for (std::int64_t t = 0; t < steps; ++t) {
    const float signed_b = input(engine), positive_b = unit(engine);
    const auto set = [&](std::int64_t i, float log_a, float b) { c.log_a.at(i, t) = log_a, c.b.at(i, t) = b; };
    set(0, std::log(decay(engine)), positive_b);
    set(1, std::log(decay(engine)), signed_b);
    set(2, 0.0F, 0.1F);                      // a = 1: grows by tenths
    set(3, 0.0F, signed_b);                  // a random walk
    set(4, std::log1p(-1e-6F), positive_b);  // a memory of a million steps: a itself has no fp32 neighbour
    set(5, std::log(close(engine)), signed_b);
    set(6, std::log(decay(engine)), 0.0F);  // from nothing, nothing
    set(7, t % 1000 < 20 ? std::log(growth(engine)) : std::log(decay(engine)), positive_b);
    set(8, t % 777 == 0 ? -kInfinity : 0.0F, signed_b);  // forgets now and then
  }
  const auto r = run(c);
  EXPECT_TRUE(error(c, r.h, r.carry_out).below(1e-5));
  for (std::int64_t t = 0; t < steps; ++t) ASSERT_EQ(r.h.value(6, t), 0.0);
}

TEST_F(DecayScanCudaFloat, SpecialValues) {
  constexpr std::int64_t kCases = 8;
  const float decays[kCases] = {0.0F, -kInfinity, kNan, -86.5F, 60.0F, kInfinity, 80.0F, 0.0F};
  const float inputs[kCases] = {1.0F, 1.0F, 1.0F, 0.0F, 1.0F, 0.0F, 0.0F, 0.0F};
  const std::vector<float> carry{0.0F, 5.0F, 5.0F, 1e38F, 0.0F, 0.0F, 0.0F, kInfinity};
  for (const std::int64_t time : {4, 1028}) {
    Case<float> c{ScanOperand<float>({.time = time, .dim = kCases}), ScanOperand<float>({.time = time, .dim = kCases}),
                  carry};
    // Channel 6 decays by 80 at every step: growth over nothing, beyond any range, is nothing.
    c.log_a.fill([&](std::int64_t t, std::int64_t i) { return t == 1 || i == 6 ? decays[i] : 0.0F; });
    c.b.fill([&](std::int64_t, std::int64_t i) { return inputs[i]; });
    const auto r = run(c);
    const auto n = static_cast<float>(time);
    EXPECT_EQ(r.carry_out[0], n);
    EXPECT_EQ(r.carry_out[1], n - 1.0F);
    EXPECT_EQ(r.h.value(2, 0), 6.0);
    EXPECT_TRUE(std::isnan(r.h.value(2, 1)) && std::isnan(r.carry_out[2]));
    const double small = 1e38 * std::exp(-86.5);
    EXPECT_NEAR(static_cast<double>(r.carry_out[3]), small, 1e-5 * small);
    EXPECT_NEAR(static_cast<double>(r.carry_out[4]), std::exp(60.0), 1e-5 * std::exp(60.0));
    EXPECT_EQ(r.carry_out[5], 0.0F);
    EXPECT_EQ(r.carry_out[6], 0.0F);
    EXPECT_EQ(r.carry_out[7], kInfinity);
  }
}

TEST_F(DecayScanCudaFloat, EmptyShapesPassCarriesOn) {
  const auto in = to_device<float>({1.5F, -2.0F});
  auto out = poisoned<float>(2);
  decay_scan<float>(cuda(), {{nullptr, 1, 0, 2}, {nullptr, 1, 0, 2}, {nullptr, 1, 0, 2}, in.data(), out.data()});
  EXPECT_EQ(to_host(out), (std::vector<float>{1.5F, -2.0F}));
  decay_scan<float>(cuda(), {{nullptr, 0, 5, 2}, {nullptr, 0, 5, 2}, {nullptr, 0, 5, 2}});
  decay_scan<float>(cuda(), {{nullptr, 1, 5, 0}, {nullptr, 1, 5, 0}, {nullptr, 1, 5, 0}});
}

}  // namespace
}  // namespace mmrec::kernels::test
