// One gate-frozen sweep of a product on the device against float64, its change and magnitude, and what it must leave
// alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/cuda/recurrence/algo.h"
#include "tests/kernels/cuda/gated_testing.h"

namespace mmrec::kernels {
namespace {

using test::GatedCase;
using test::GatedSize;

template <class A>
struct Sweep {
  std::vector<float> h, change, magnitude;
  std::vector<A> rounded;
};

class GatedScanTest : public test::GatedTest {
 protected:
  template <class A>
  Sweep<A> run(const GatedCase<A>& c, const std::vector<float>& old, const std::vector<float>& gate,
               std::int64_t first) {
    auto on = on_device(c, old);
    const auto gates = to_device(gate);
    const auto times = static_cast<std::size_t>(c.size.time);
    const std::vector<float> zeros(times, 0.0F);
    auto change = to_device(zeros);
    auto magnitude = to_device(zeros);
    gated_scan_raising(cuda(),
                       GatedScan<Device, A>{.in = on.inputs(),
                                            .gate = {gates.data(), c.size.batch, c.size.time, 2 * c.size.dim},
                                            .first = first,
                                            .change = change.data(),
                                            .magnitude = magnitude.data()},
                       nullptr);
    return {to_host(on.h), to_host(change), to_host(magnitude), rounded_of(on)};
  }

  template <class A>
  void check(const GatedSize& size, std::int64_t first) {
    SCOPED_TRACE(::testing::Message() << size.batch << " x " << size.time << " x " << size.dim << " from " << first);
    const GatedCase<A> c(size);
    const auto old = test::random_normal<float>(c.states(), 0.0, 1.0, 20);
    const auto gate = test::random_normal<float>(2 * size.elements(), 0.0, 2.0, 21);
    const Sweep<A> got = run(c, old, gate, first);
    // Channels walk by themselves; each part has the largest change and magnitude of its own, time by time.
    struct Part {
      std::vector<double> change, magnitude;
      double error = 0.0;
    };
    const std::int64_t channels = size.batch * size.dim;
    const std::int64_t most = std::clamp<std::int64_t>(channels / (2 * test::host_processors()), 1, 64);
    const auto parts = test::parallel_map((channels + most - 1) / most, [&](std::int64_t p) {
      const std::vector<double> zeros(static_cast<std::size_t>(size.time), 0.0);
      Part part{zeros, zeros};
      for (std::int64_t n = p * most; n < std::min((p + 1) * most, channels); ++n) {
        const std::int64_t b = n / size.dim, i = n % size.dim;
        auto h = static_cast<double>(old[c.state_index(b, first, i)]);
        for (std::int64_t t = first; t < size.time; ++t) {
          const std::size_t at = c.index(b, t, 0) * 2 + static_cast<std::size_t>(i);
          h = c.next(b, t, i, h, static_cast<double>(gate[at]),
                     static_cast<double>(gate[at + static_cast<std::size_t>(size.dim)]));
          const std::size_t to = c.state_index(b, t + 1, i);
          const auto k = static_cast<std::size_t>(t);
          part.change[k] = std::max(part.change[k], std::abs(h - static_cast<double>(old[to])));
          part.magnitude[k] = std::max(part.magnitude[k], std::abs(h));
          const double error = std::abs(static_cast<double>(got.h[to]) - h) / (1.0 + std::abs(h));
          part.error = std::isnan(error) ? INFINITY : std::max(part.error, error);
        }
      }
      return part;
    });
    double error = 0.0;
    for (const Part& part : parts) error = std::max(error, part.error);
    EXPECT_LT(error, 5e-6);
    for (std::int64_t t = 0; t < size.time; ++t) {
      const auto i = static_cast<std::size_t>(t);
      double change = 0.0, magnitude = 0.0;
      for (const Part& part : parts) {
        change = std::max(change, part.change[i]);
        magnitude = std::max(magnitude, part.magnitude[i]);
      }
      if (t < first) {
        EXPECT_TRUE(got.change[i] == 0.0F && got.magnitude[i] == 0.0F) << "written before `first`";
        continue;
      }
      ASSERT_NEAR(static_cast<double>(got.change[i]), change, 1e-5 * (1.0 + magnitude)) << "time " << t;
      ASSERT_NEAR(static_cast<double>(got.magnitude[i]), magnitude, 1e-5 * (1.0 + magnitude)) << "time " << t;
    }
    ASSERT_EQ(test::first_not_rounded(got.h, got.rounded), got.h.size()) << "h_rounded";
    for (std::int64_t b = 0; b < size.batch; ++b) {
      const auto kept = static_cast<std::ptrdiff_t>(c.state_index(b, first + 1, 0) - c.state_index(b, 0, 0));
      const auto begin = got.h.begin() + static_cast<std::ptrdiff_t>(c.state_index(b, 0, 0));
      EXPECT_TRUE(std::equal(begin, begin + kept, old.begin() + (begin - got.h.begin()))) << "wrote up to `first`";
    }
  }

  template <class A>
  void check_sizes() {
    std::vector<GatedSize> sizes = {{1, 1, 2},   {1, 2, 6},   {3, 31, 48},  {2, 33, 8},
                                    {1, 64, 10}, {1, 65, 16}, {1, 1000, 6}, {2, 1024, 2}};
    // More times than a block takes at once.
    sizes.push_back({1, 2070, 4});
    if (!test::small_sizes()) {
      sizes.insert(sizes.end(), {{1, 4097, 48}, {2, 1000, 4096}, {3, 100003, 6}, {1, 1024, 1024}});
    }
    for (const GatedSize& size : sizes) {
      check<A>(size, 0);
      if (size.time > 5) check<A>(size, 5);
      if (size.time > 1) check<A>(size, size.time - 1);
    }
  }
};

TEST_F(GatedScanTest, MatchesFloat64InFp32) { check_sizes<float>(); }
TEST_F(GatedScanTest, MatchesFloat64InBf16) { check_sizes<BFloat16>(); }
TEST_F(GatedScanTest, MatchesFloat64InFp16) { check_sizes<Float16>(); }

// Decays of 2 for 200 times, then of 1/2: products of decays leave the range of fp32, h does not.
TEST_F(GatedScanTest, DecaysAboveOneDoNotOverflow) {
  GatedCase<float> c({1, 2000, 4});
  c.mix = 0.5F;
  std::fill(c.wide.begin(), c.wide.end(), 0.0F);
  std::fill(c.zm.begin(), c.zm.end(), 0.0F);
  const std::vector<float> old(c.states(), 1e-30F);
  std::vector<float> gate(2 * c.size.elements());
  for (std::int64_t t = 0; t < c.size.time; ++t) {
    const bool grows = t % 400 < 200;  // g = 0 and γ = 1, or g = 1 and γ = 1/3
    for (std::int64_t i = 0; i < 4; ++i) {
      c.gamma[c.index(0, t, i)] = grows ? 1.0F : 1.0F / 3.0F;
      gate[c.index(0, t, 0) * 2 + static_cast<std::size_t>(4 + i)] = grows ? -100.0F : 100.0F;
    }
  }
  const Sweep<float> got = run(c, old, gate, 0);
  double h = static_cast<double>(old[0]);
  for (std::int64_t t = 0; t < c.size.time; ++t) {
    h = c.next(0, t, 0, h, 0.0, static_cast<double>(gate[c.index(0, t, 0) * 2 + 4]));
    ASSERT_NEAR(static_cast<double>(got.h[c.state_index(0, t + 1, 0)]) / h, 1.0, 1e-3) << "time " << t;
  }
}

TEST_F(GatedScanTest, NanCountsAsInfinity) {
  for (const std::int64_t bad : {0, 3, 20, 53}) {
    GatedCase<BFloat16> c({1, 40, 54});
    const std::vector<float> old(c.states(), 0.5F);
    const std::vector<float> gate(2 * c.size.elements(), 0.0F);
    c.gamma[c.index(0, 7, bad)] = std::nanf("");
    const Sweep<BFloat16> got = run(c, old, gate, 0);
    for (std::size_t t = 0; t < 40; ++t) {
      EXPECT_EQ(std::isinf(got.change[t]) && std::isinf(got.magnitude[t]), t >= 7) << t;
      EXPECT_EQ(std::isnan(got.h[c.state_index(0, static_cast<std::int64_t>(t) + 1, bad)]), t >= 7) << t;
      EXPECT_FALSE(std::isnan(got.h[c.state_index(0, static_cast<std::int64_t>(t) + 1, (bad + 1) % 54)]));
    }
  }
}

TEST_F(GatedScanTest, SequencesDoNotDependOnEachOther) {
  const GatedCase<BFloat16> c({3, 100, 20});
  const auto old = test::random_normal<float>(c.states(), 0.0, 1.0, 20);
  const auto gate = test::random_normal<float>(2 * c.size.elements(), 0.0, 2.0, 21);
  const Sweep<BFloat16> all = run(c, old, gate, 0);
  for (std::int64_t b = 0; b < 3; ++b) {
    GatedCase<BFloat16> one({1, 100, 20});
    const auto row = [b](const auto& from, auto& to, std::size_t count) {
      to.assign(from.begin() + b * static_cast<std::int64_t>(count),
                from.begin() + (b + 1) * static_cast<std::int64_t>(count));
    };
    row(c.wide, one.wide, one.size.elements() * 3);
    row(c.zm, one.zm, one.size.elements());
    row(c.gamma, one.gamma, one.size.elements());
    std::vector<float> one_old;
    std::vector<float> one_gate;
    row(old, one_old, one.states());
    row(gate, one_gate, 2 * one.size.elements());
    const Sweep<BFloat16> alone = run(one, one_old, one_gate, 0);
    EXPECT_TRUE(std::equal(alone.h.begin(), alone.h.end(), all.h.begin() + b * static_cast<std::int64_t>(one.states())))
        << "sequence " << b;
  }
}

}  // namespace
}  // namespace mmrec::kernels
