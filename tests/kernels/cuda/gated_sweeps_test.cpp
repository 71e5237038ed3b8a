// The loop of sweeps on the device: what it converges to, what it counts, and what its bits do not depend on.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "tests/kernels/cuda/gated_testing.h"

namespace mmrec::kernels {
namespace {

using test::GatedCase;
using test::GatedSize;

using Options = test::SweepOptions;
template <class A>
using Result = test::SweepResult<A>;

class GatedSweepsTest : public test::GatedTest {
 protected:
  template <class A>
  Result<A> run(const GatedCase<A>& c, const Options& options) {
    auto on = on_device(c, c.fresh_state());
    auto gate = poisoned<float>(static_cast<std::size_t>(options.window * 2 * c.size.dim));
    auto change = poisoned<float>(static_cast<std::size_t>(2 * options.window));
    const SweepCounts counts =
        gated_sweeps(cuda(),
                     GatedSweeps<Device, A>{.in = on.inputs(),
                                            .gate_weight = on.gate_weight(),
                                            .gate_bias = on.gate_bias(),
                                            .tolerance = options.tolerance,
                                            .max_sweeps = options.max_sweeps,
                                            .gate = {gate.data(), options.window, 2 * c.size.dim},
                                            .change = change.data()},
                     options.way);
    return {to_host(on.h), rounded_of(on), counts};
  }

  template <class A>
  static void check(const GatedCase<A>& c, const Result<A>& got, double bound) {
    const auto [batch, time, dim] = c.size;
    EXPECT_LT(test::one_time_error(c, got.h, got.rounded), bound) << batch << " x " << time << " x " << dim;
    EXPECT_EQ(test::first_not_rounded(got.h, got.rounded), got.h.size()) << "h_rounded";
  }

  static std::vector<GatedSize> sizes() {
    if (test::few_cases()) return {{2, 65, 24}};
    std::vector<GatedSize> all = {{1, 16, 2}, {1, 100, 6}, {3, 65, 24}, {2, 33, 48}, {1, 200, 64}};
    if (!test::small_sizes()) all.insert(all.end(), {{1, 1000, 1024}, {2, 300, 520}, {1, 150, 4096}});
    return all;
  }
};

TEST_F(GatedSweepsTest, ConvergesToTheRecurrenceInFp32) {
  for (const GatedSize& size : sizes()) {
    const GatedCase<float> c(size);
    const Result<float> got = run(c, {});
    check(c, got, 2e-5);
    EXPECT_EQ(got.counts.windows, size.batch * ((size.time + 63) / 64));
    EXPECT_EQ(got.counts.fallbacks, 0);
    EXPECT_GE(got.counts.token_sweeps, size.batch * size.time);
  }
}

TEST_F(GatedSweepsTest, EveryWayConvergesAndOnesThatCannotBeGoneThrow) {
  const GatedCase<BFloat16> c({1, 100, 64});
  std::vector<SweepAlgo> ways = {SweepAlgo::kProductAndScan};
  if (cuda().compute_capability() == 90) ways.insert(ways.end(), {SweepAlgo::kNarrowTiles, SweepAlgo::kWideTiles});
  for (const SweepAlgo way : ways) check(c, run(c, {.tolerance = 1e-4F, .way = way}), 1e-2);
  EXPECT_THROW(run(GatedCase<BFloat16>({1, 20, 7}), {.way = SweepAlgo::kNarrowTiles}), std::invalid_argument);
  EXPECT_THROW(run(GatedCase<float>({1, 20, 64}), {.way = SweepAlgo::kWideTiles}), std::invalid_argument);
}

// Lanes take channels in pairs.
TEST_F(GatedSweepsTest, AnOddNumberOfChannelsGoesByExactSteps) {
  for (const std::int64_t dim : {1, 7}) {
    const GatedCase<BFloat16> c({2, 70, dim});
    const Result<BFloat16> got = run(c, {.window = 50});
    check(c, got, 1e-5);
    EXPECT_EQ(got.counts.fallbacks, 4);
    EXPECT_EQ(got.counts.token_sweeps, 0);
  }
}

// In 16 bits the last sweep's gates may have seen another rounding of some of the states.
TEST_F(GatedSweepsTest, ConvergesToTheRecurrenceInBf16) {
  for (const GatedSize& size : sizes()) {
    const GatedCase<BFloat16> c(size);
    check(c, run(c, {.tolerance = 1e-4F}), 1e-2);
  }
}
TEST_F(GatedSweepsTest, ConvergesToTheRecurrenceInFp16) {
  for (const GatedSize& size : sizes()) {
    const GatedCase<Float16> c(size);
    check(c, run(c, {.tolerance = 1e-4F}), 2e-3);
  }
}

TEST_F(GatedSweepsTest, WindowsOfManyTiles) {
  std::vector<GatedSize> sizes = {{1, test::few_cases() ? 150 : 300, 40}};
  if (!test::few_cases()) sizes.push_back({2, 560, 24});
  if (!test::small_sizes()) sizes.insert(sizes.end(), {{1, 1000, 384}, {1, 1536, 776}});
  for (const GatedSize& size : sizes) {
    const GatedCase<BFloat16> c(size);
    check(c, run(c, {.window = 2048, .tolerance = 1e-4F}), 1e-2);
    const GatedCase<float> wide(size);
    check(wide, run(wide, {.window = 2048}), 2e-5);
    if (test::few_cases()) continue;
    const GatedCase<Float16> other(size);
    check(other, run(other, {.window = 2048, .tolerance = 1e-4F}), 2e-3);
  }
}

// Gates that do not look at h are right before the first product, whose sweep sees that nothing changes.
TEST_F(GatedSweepsTest, CountsSweeps) {
  GatedCase<float> c({2, 100, 24});
  std::fill(c.weight.begin(), c.weight.end(), 0.0F);
  const Result<float> got = run(c, {});
  check(c, got, 1e-6);
  EXPECT_EQ(got.counts.windows, 4);
  EXPECT_EQ(got.counts.fallbacks, 0);
  EXPECT_EQ(got.counts.token_sweeps, 200);
}

TEST_F(GatedSweepsTest, FallsBackToExactSteps) {
  const auto check_type = [&]<class A>(A) {
    const GatedCase<A> c({2, 70, 40});
    for (const int max_sweeps : {2, 1, 3}) {
      const Result<A> got = run(c, {.window = 50, .tolerance = 0.0F, .max_sweeps = max_sweeps});
      check(c, got, 1e-5);
      EXPECT_EQ(got.counts.windows, 4);
      EXPECT_EQ(got.counts.fallbacks, 4);
      EXPECT_LE(got.counts.token_sweeps, max_sweeps * 140);
      if (test::few_cases()) break;
    }
  };
  check_type(float{});
  check_type(BFloat16{});
}

// A tolerance of 0 ends when no bit changes any more: that is the fixed point itself.
TEST_F(GatedSweepsTest, ReachesTheFixedPoint) {
  const GatedCase<BFloat16> c({1, 60, 32});
  const Result<BFloat16> got = run(c, {.tolerance = 0.0F, .max_sweeps = 200});
  check(c, got, 5e-6);
  EXPECT_EQ(got.counts.fallbacks, 0);
}

// A window long enough that whole tiles settle before the others.
TEST_F(GatedSweepsTest, LeavesOutTilesThatHaveSettled) {
  const GatedCase<Float16> c({1, test::few_cases() ? 100 : 900, 16});
  const Result<Float16> got = run(c, {.window = 900, .tolerance = 0.0F, .max_sweeps = 1000});
  check(c, got, 5e-6);
  EXPECT_EQ(got.counts.fallbacks, 0);
  if (test::few_cases()) return;
  EXPECT_EQ(run(c, {.window = 900, .tolerance = 0.0F, .max_sweeps = 1000}).h, got.h);
}

TEST_F(GatedSweepsTest, NanIsFinishedByStepsAndLeavesWhatComesBefore) {
  const auto check_type = [&]<class A>(A) {
    GatedCase<A> c({2, 60, 32});
    const Options options{.tolerance = 1e-3F, .max_sweeps = 20};
    const Result<A> clean = run(c, options);
    c.gamma[c.index(1, 40, 5)] = std::nanf("");
    const Result<A> got = run(c, options);
    EXPECT_EQ(got.counts.fallbacks, 1);
    for (std::int64_t row = 0; row <= 60; ++row) {
      for (std::int64_t i = 0; i < 32; ++i) {
        const auto at = [&](std::int64_t b) { return c.state_index(b, row, i); };
        ASSERT_EQ(got.h[at(0)], clean.h[at(0)]) << "another sequence";
        const bool lost = row > 41 || (row == 41 && i == 5);
        ASSERT_EQ(std::isnan(got.h[at(1)]), lost) << "row " << row << " channel " << i;
        if (!lost) {
          ASSERT_NEAR(got.h[at(1)], clean.h[at(1)], 2e-2F) << "row " << row << " channel " << i;
        }
      }
    }
  };
  if (!test::few_cases()) check_type(float{});
  check_type(BFloat16{});
}

TEST_F(GatedSweepsTest, BitsDependOnNeitherNeighboursNorTheRun) {
  const auto check_type = [&]<class A>(A) {
    const std::int64_t batch = test::few_cases() ? 2 : 3;
    const GatedCase<A> c({batch, 90, 40});
    const Result<A> all = run(c, {});
    if (!test::few_cases()) {
      EXPECT_EQ(run(c, {}).h, all.h);
    }
    for (std::int64_t b = test::few_cases() ? 1 : 0; b < batch; ++b) {
      GatedCase<A> one({1, 90, 40});
      const auto take = [b](const auto& from, auto& to) {
        std::copy_n(from.begin() + b * static_cast<std::int64_t>(to.size()), to.size(), to.begin());
      };
      take(c.wide, one.wide);
      take(c.zm, one.zm);
      take(c.gamma, one.gamma);
      take(c.carry, one.carry);
      one.bias = c.bias;
      one.weight = c.weight;
      std::vector<float> want(one.states());
      take(all.h, want);
      EXPECT_EQ(run(one, {}).h, want) << "sequence " << b;
    }
  };
  if (!test::few_cases()) check_type(float{});
  check_type(BFloat16{});
}

TEST_F(GatedSweepsTest, WithoutBiasAndWithoutMix) {
  GatedCase<BFloat16> c({2, 40, 24});
  c.bias.clear();
  c.mix = 0.0F;
  check(c, run(c, {.tolerance = 1e-4F}), 1e-2);
}

}  // namespace
}  // namespace mmrec::kernels
