// The decayed recurrence against a float64 loop over time.
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

template <class T>
struct Case {
  Sequence<T> log_a, b;
  std::vector<float> carry_in;
};

/// Decays in [0.9, 1] with exact ones, spans of up to 1.2, and b of both signs with zeros.
template <class T>
Case<T> random_case(std::int64_t batch, std::int64_t heads, std::int64_t time, std::int64_t dim, unsigned seed,
                    std::int64_t padding = 0, typename Sequence<T>::Order order = Sequence<T>::Order::kHeadsFirst) {
  std::mt19937 rng(seed);
  std::uniform_real_distribution<float> decay(0.9F, 1.0F), growth(1.0F, 1.2F), unit(0.0F, 1.0F);
  std::normal_distribution<float> input(0.0F, 0.1F);
  Case<T> c{
      Sequence<T>(batch, heads, time, dim, padding, order), Sequence<T>(batch, heads, time, dim, padding, order), {}};
  std::int64_t index = 0;
  c.log_a.fill([&] {
    const bool growing = index++ / dim % 1024 < 8;  // eight steps now and then
    return unit(rng) < 0.05F ? 0.0F : std::log(growing ? growth(rng) : decay(rng));
  });
  c.b.fill([&] { return unit(rng) < 0.1F ? 0.0F : input(rng); });
  for (std::int64_t i = 0; i < batch * heads * dim; ++i) c.carry_in.push_back(input(rng));
  return c;
}

/// The recurrence in float64 with, beside it, that of the absolute values: the size of the terms that were added up.
template <class T>
WorstError error_against_reference(const Case<T>& c, const Sequence<T>& h, const std::vector<float>& carry_out) {
  WorstError worst;
  const auto& v = c.log_a.read();
  for (std::int64_t b = 0; b < v.batch; ++b) {
    for (std::int64_t head = 0; head < v.heads; ++head) {
      for (std::int64_t ch = 0; ch < v.dim; ++ch) {
        const auto flat = static_cast<std::size_t>((b * v.heads + head) * v.dim + ch);
        double x = c.carry_in.empty() ? 0.0 : static_cast<double>(c.carry_in[flat]);
        double size = std::abs(x);
        for (std::int64_t t = 0; t < v.time; ++t) {
          const double a = std::exp(static_cast<double>(c.log_a.get(b, head, t, ch)));
          const double in = static_cast<double>(c.b.get(b, head, t, ch));
          x = a * x + in;
          size = a * size + std::abs(in);
          // Relative error where terms do not cancel; where they do, relative to a hundredth of what was added up. What
          // storing the result in T rounds away is allowed for apart.
          const double scale = std::max(std::abs(x), 0.01 * size) + 1e-30;
          const double got = static_cast<double>(h.get(b, head, t, ch));
          const double rounding = sizeof(T) == 2 ? kRounding<T> * std::abs(x) * 1.001 + 0x1p-25 : 0.0;
          const double beyond = std::max(0.0, std::abs(got - x) - rounding);
          worst.add(std::isnan(got) ? got : x + beyond, x, scale, t, ch);
        }
        if (!carry_out.empty()) {
          worst.add(static_cast<double>(carry_out[flat]), x, std::max(std::abs(x), 0.01 * size) + 1e-30, v.time, ch);
        }
      }
    }
  }
  return worst;
}

template <class T>
struct Result {
  Sequence<T> h;
  std::vector<float> carry_out;
};

template <class T>
Result<T> run(Cpu& cpu, const Case<T>& c) {
  Result<T> r{Sequence<T>(c.b), {}};
  r.h.fill([] { return std::numeric_limits<float>::quiet_NaN(); });
  const auto v = c.log_a.read();
  r.carry_out.assign(static_cast<std::size_t>(v.batch * v.heads * v.dim), std::numeric_limits<float>::quiet_NaN());
  decay_scan<T>(cpu, {v, c.b.read(), r.h.view(), c.carry_in.empty() ? nullptr : c.carry_in.data(), r.carry_out.data()});
  return r;
}

template <class T>
class DecayScanTyped : public ::testing::Test {};
using Types = ::testing::Types<float, Float16, BFloat16>;
TYPED_TEST_SUITE(DecayScanTyped, Types);

TYPED_TEST(DecayScanTyped, MatchesFloat64AtEverySize) {
  Cpu cpu(2);
  unsigned seed = 1;
  for (std::int64_t time : kTestTimes) {
    for (std::int64_t dim : kTestDims) {
      if (time * dim > kMostElements) continue;
      const auto c = random_case<TypeParam>(1, 1, time, dim, ++seed);
      const auto r = run(cpu, c);
      EXPECT_TRUE(error_against_reference(c, r.h, r.carry_out).below(1e-5)) << "T " << time << ", D " << dim;
    }
  }
}

TYPED_TEST(DecayScanTyped, HeadsAndStrides) {
  Cpu cpu(2);
  using Order = typename Sequence<TypeParam>::Order;
  for (Order order : {Order::kHeadsFirst, Order::kTimeFirst}) {
    for (std::int64_t time : {5, 2500}) {  // the longer one is cut in time
      for (std::int64_t padding : {0, 3}) {
        const auto c = random_case<TypeParam>(2, 3, time, 20, 7, padding, order);
        const auto r = run(cpu, c);
        EXPECT_TRUE(error_against_reference(c, r.h, r.carry_out).below(1e-5)) << time << " " << padding;
        // Nothing between the rows was written.
        for (std::size_t i = 0; padding != 0 && i < r.h.data().size(); ++i) {
          if (static_cast<std::int64_t>(i) % (20 + padding) >= 20) {
            EXPECT_TRUE(std::isnan(to_float(r.h.data()[i])));
          }
        }
      }
    }
  }
}

// One channel per case that a scan in fp32 or in whole-sequence log space loses; a million steps each.
TEST(DecayScan, AMillionSteps) {
  constexpr std::int64_t kSteps = 1'000'000, kCases = 9;
  std::mt19937 rng(3);
  std::uniform_real_distribution<float> decay(0.9F, 1.0F), unit(0.0F, 1.0F), close(0.9999F, 1.0F), growth(1.0F, 1.2F);
  std::normal_distribution<float> input;
  Case<float> c{Sequence<float>(1, 1, kSteps, kCases), Sequence<float>(1, 1, kSteps, kCases), {}};
  for (std::int64_t t = 0; t < kSteps; ++t) {
    const float signed_b = input(rng), positive_b = unit(rng);
    const auto set = [&](std::int64_t i, float log_a, float b) {
      c.log_a.set(0, 0, t, i, log_a);
      c.b.set(0, 0, t, i, b);
    };
    set(0, std::log(decay(rng)), positive_b);
    set(1, std::log(decay(rng)), signed_b);
    set(2, 0.0F, 0.1F);                      // a = 1: grows to 1e5 by tenths
    set(3, 0.0F, signed_b);                  // a random walk
    set(4, std::log1p(-1e-6F), positive_b);  // a memory of a million steps: a itself has no fp32 neighbour
    set(5, std::log(close(rng)), signed_b);
    set(6, std::log(decay(rng)), 0.0F);  // from nothing, nothing
    set(7, t % 1000 < 20 ? std::log(growth(rng)) : std::log(decay(rng)), positive_b);
    set(8, t % 777 == 0 ? -std::numeric_limits<float>::infinity() : 0.0F, signed_b);  // forgets now and then
  }
  c.carry_in.assign(kCases, 0.0F);
  Cpu cpu(2);
  const auto r = run(cpu, c);
  const WorstError worst = error_against_reference(c, r.h, r.carry_out);
  EXPECT_TRUE(worst.below(1e-5));
  for (std::int64_t t = 0; t < kSteps; ++t) ASSERT_EQ(r.h.get(0, 0, t, 6), 0.0F);
}

TEST(DecayScan, CutsAnywhereAndHandsCarriesOn) {
  Cpu cpu(2);
  for (std::int64_t dim : {5, 300}) {
    const std::int64_t time = 5000;
    const auto c = random_case<float>(1, 1, time, dim, 11);
    const auto whole = run(cpu, c);
    for (std::int64_t step : {1, 7, 64, 1023, 4999}) {
      Sequence<float> h(1, 1, time, dim);
      std::vector<float> carry = c.carry_in;
      for (std::int64_t t = 0; t < time; t += step) {
        const std::int64_t n = std::min(step, time - t);
        decay_scan<float>(cpu, {middle_times(c.log_a.read(), t, n), middle_times(c.b.read(), t, n),
                                middle_times(h.view(), t, n), carry.data(), carry.data()});
      }
      WorstError worst;
      for (std::int64_t t = 0; t < time; ++t) {
        for (std::int64_t ch = 0; ch < dim; ++ch) {
          const double expected = static_cast<double>(whole.h.get(0, 0, t, ch));
          worst.add(static_cast<double>(h.get(0, 0, t, ch)), expected, std::max(std::abs(expected), 0.02), t, ch);
        }
      }
      // Every cut rounds the state to fp32; a memory of ten to twenty steps adds that many roundings up.
      EXPECT_TRUE(worst.below(2e-5)) << "D " << dim << ", cuts of " << step;
    }
  }
}

TYPED_TEST(DecayScanTyped, SameBitsForAnyNumberOfThreads) {
  for (const auto& [batch, heads, time, dim] : std::vector<std::array<std::int64_t, 4>>{
           {1, 1, 20000, 16}, {1, 1, 70, 1100}, {2, 3, 3000, 9}, {3, 5, 400, 100}}) {
    const auto c = random_case<TypeParam>(batch, heads, time, dim, 13);
    Cpu one(1), two(2), five(5);
    const auto r1 = run(one, c), r2 = run(two, c), r5 = run(five, c), again = run(five, c);
    EXPECT_TRUE(r1.h.same_bits(r2.h) && r1.h.same_bits(r5.h) && r5.h.same_bits(again.h)) << time << " x " << dim;
    EXPECT_EQ(r1.carry_out, r2.carry_out);
    EXPECT_EQ(r1.carry_out, r5.carry_out);
  }
}

TYPED_TEST(DecayScanTyped, MayWriteOverB) {
  Cpu cpu(2);
  for (std::int64_t dim : {16, 500}) {
    const auto c = random_case<TypeParam>(1, 1, 3000, dim, 17);
    const auto expected = run(cpu, c);
    Sequence<TypeParam> b(c.b);
    SequenceView<const TypeParam, Host> in = b.read();
    decay_scan<TypeParam>(cpu, {c.log_a.read(), in, b.view(), c.carry_in.data(), nullptr});
    EXPECT_TRUE(b.same_bits(expected.h));
  }
}

// Large enough for stores that bypass the caches; every result must be there when the call returns.
TEST(DecayScan, StreamingStores) {
  Cpu cpu(2);
  const std::int64_t time = 4500, dim = 1024;
  HostBuffer<float> log_a(time * dim), b(time * dim), h(time * dim);
  std::mt19937 rng(29);
  std::uniform_real_distribution<float> unit(-0.1F, 0.0F);
  for (std::size_t i = 0; i < log_a.size(); ++i) {
    log_a.data()[i] = unit(rng);
    b.data()[i] = unit(rng);
    h.data()[i] = std::numeric_limits<float>::quiet_NaN();
  }
  decay_scan<float>(cpu, {{log_a.data(), 1, time, dim}, {b.data(), 1, time, dim}, {h.data(), 1, time, dim}});
  WorstError worst;
  for (std::int64_t c = 0; c < dim; ++c) {
    double x = 0.0;
    for (std::int64_t t = 0; t < time; ++t) {
      x = std::exp(static_cast<double>(log_a.data()[t * dim + c])) * x + static_cast<double>(b.data()[t * dim + c]);
      worst.add(static_cast<double>(h.data()[t * dim + c]), x, std::abs(x) + 1e-30, t, c);
    }
  }
  EXPECT_TRUE(worst.below(1e-6));
}

TEST(DecayScan, SpecialValues) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  Cpu cpu(2);
  for (std::int64_t time : {4, 1028}) {  // in one run, and cut in time
    Sequence<float> log_a(1, 1, time, 5), b(1, 1, time, 5), h(1, 1, time, 5);
    const float decays[] = {0.0F, -inf, nan, -86.5F, 60.0F};
    for (std::int64_t t = 0; t < time; ++t) {
      for (std::int64_t c = 0; c < 5; ++c) {
        log_a.set(0, 0, t, c, t == 1 ? decays[c] : 0.0F);
        b.set(0, 0, t, c, c == 3 ? 0.0F : 1.0F);
      }
    }
    const std::vector<float> carry{0.0F, 5.0F, 5.0F, 1e38F, 0.0F};
    std::vector<float> out(5);
    decay_scan<float>(cpu, {log_a.read(), b.read(), h.view(), carry.data(), out.data()});
    const auto n = static_cast<float>(time);
    EXPECT_EQ(out[0], n);
    EXPECT_EQ(out[1], n - 1.0F);
    EXPECT_EQ(h.get(0, 0, 0, 2), 6.0F);
    EXPECT_TRUE(std::isnan(out[2]) && std::isnan(h.get(0, 0, 1, 2)));
    const double small = 1e38 * std::exp(-86.5);  // next to the least decay there is, yet not nothing
    EXPECT_NEAR(static_cast<double>(out[3]), small, 1e-5 * small);
    EXPECT_NEAR(static_cast<double>(out[4]), std::exp(60.0), 1e-5 * std::exp(60.0));
  }
}

TEST(DecayScan, EmptyShapesPassCarriesOn) {
  Cpu cpu(2);
  const float in[2] = {1.5F, -2.0F};
  float out[2] = {0.0F, 0.0F};
  decay_scan<float>(cpu, {{nullptr, 1, 0, 2}, {nullptr, 1, 0, 2}, {nullptr, 1, 0, 2}, in, out});
  EXPECT_EQ(out[0], 1.5F);
  EXPECT_EQ(out[1], -2.0F);
  decay_scan<float>(cpu, {{nullptr, 0, 5, 2}, {nullptr, 0, 5, 2}, {nullptr, 0, 5, 2}});
  decay_scan<float>(cpu, {{nullptr, 1, 5, 0}, {nullptr, 1, 5, 0}, {nullptr, 1, 5, 0}});
  decay_scan<float>(cpu, {{nullptr, 0, 5000, 2}, {nullptr, 0, 5000, 2}, {nullptr, 0, 5000, 2}});
}

// The vector kernels themselves, for every instruction set this processor has.
TYPED_TEST(DecayScanTyped, EveryInstructionSet) {
  for (const SimdKernels* kernels : supported_simd_kernels()) {
    for (std::int64_t dim : {1, 15, 16, 37, 100}) {
      const auto c = random_case<TypeParam>(1, 1, 700, dim, 19);
      Sequence<TypeParam> h(1, 1, 700, dim);
      const std::int64_t plane = (dim + 15) / 16 * 16;
      std::vector<double> state(static_cast<std::size_t>(2 * plane)), total(static_cast<std::size_t>(2 * plane));
      for (std::size_t i = 0; i < c.carry_in.size(); ++i) state[i] = static_cast<double>(c.carry_in[i]);
      ScanRun r{};
      r.in[0] = c.log_a.read().data;
      r.in[1] = c.b.read().data;
      r.in_stride[0] = r.in_stride[1] = r.out_stride = dim;
      r.out = h.view().data;
      r.times = 700;
      r.channels = dim;
      r.state = state.data();
      r.plane = plane;
      const DType type = kDTypeOf<TypeParam>;
      kernels->scan.decay_run[type](r);
      std::vector<float> out;
      for (std::int64_t i = 0; i < dim; ++i) out.push_back(static_cast<float>(state[static_cast<std::size_t>(i)]));
      EXPECT_TRUE(error_against_reference(c, h, out).below(1e-5)) << kernels->name << " " << dim;
      // The total is the run from nothing and the sum of the decays.
      r.state = total.data();
      r.out = nullptr;
      kernels->scan.decay_total[type](r);
      for (std::int64_t i = 0; i < dim; ++i) {
        const auto k = static_cast<std::size_t>(i);
        const double sum = total[static_cast<std::size_t>(plane) + k];
        EXPECT_NEAR(std::exp(sum) * static_cast<double>(c.carry_in[k]) + total[k], state[k],
                    1e-6 * (1.0 + std::abs(state[k])));
      }
    }
  }
}

}  // namespace
}  // namespace mmrec::kernels
