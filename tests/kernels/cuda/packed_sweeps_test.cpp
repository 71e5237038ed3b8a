// The loop of sweeps over packed runs: each run against float64, alone, and beside others that take their time or
// break.
#include "tests/ops/gated_case.h"

namespace mmrec::kernels::test {
namespace {

/// Runs of these lengths, with a gap between two; operands of gaps are random like the others'.
template <class A>
struct PackedCase {
  std::vector<std::int32_t> first, end, of_row;
  GatedCase<A> c;
  std::vector<float> carries;  // [runs, D]

  PackedCase(const std::vector<std::int32_t>& lengths, std::int64_t dim, std::uint64_t stream = 0)
      : c({1, rows_of(lengths), dim}, stream),
        carries(random_normal<float>(lengths.size() * static_cast<std::size_t>(dim), 0.0, 1.0, stream + 40)) {
    of_row.assign(static_cast<std::size_t>(c.size.time), -1);
    std::int32_t row = 0;
    for (const std::int32_t length : lengths) {
      first.push_back(row);
      end.push_back(row + length);
      std::fill_n(of_row.begin() + row, length, static_cast<std::int32_t>(first.size()) - 1);
      row += length + 1;
    }
  }
  static std::int64_t rows_of(const std::vector<std::int32_t>& lengths) {
    std::int64_t rows = -1;
    for (const std::int32_t length : lengths) rows += length + 1;
    return rows;
  }
  /// The carries where they belong, the rest NaN.
  std::vector<float> fresh_state() const {
    std::vector<float> h(c.states(), kNan);
    for (std::size_t run = 0; run < first.size(); ++run) {
      std::copy_n(carries.begin() + static_cast<std::ptrdiff_t>(run) * c.size.dim, c.size.dim,
                  h.begin() + first[run] * c.size.dim);
    }
    return h;
  }
};

class PackedSweepsTest : public OpTest {
 protected:
  template <class A>
  SweepResult<A> run(const PackedCase<A>& p, const SweepOptions& options) {
    SweepsOn<A> operands(on(), p.c, p.fresh_state(), options);
    const SweepCounts counts = operands.call_packed(p.of_row, p.first, p.end);
    return operands.result(counts);
  }

  template <class A>
  static void check(const PackedCase<A>& p, const SweepResult<A>& got, double bound = kSweepBound<A>) {
    EXPECT_LT(one_time_error(p.c, got.h, got.rounded,
                             [&](std::int64_t t) { return p.of_row[static_cast<std::size_t>(t)] < 0; }),
              bound);
    EXPECT_EQ(first_not_rounded(got.h, got.rounded), got.h.size()) << "h_rounded";
    for (std::size_t run = 0; run < p.first.size(); ++run) {
      for (std::int64_t i = 0; i < p.c.size.dim; ++i) {
        const auto at = static_cast<std::size_t>(p.first[run] * p.c.size.dim + i);
        const auto want = static_cast<std::size_t>(static_cast<std::int64_t>(run) * p.c.size.dim + i);
        ASSERT_EQ(got.h[at], p.carries[want]) << "carry of run " << run;
      }
    }
  }

  std::vector<SweepAlgo> algos() {
    if (on().compute_capability() != 90) return {SweepAlgo::kProductAndScan};
    return {SweepAlgo::kProductAndScan, SweepAlgo::kNarrowTiles, SweepAlgo::kWideTiles};
  }
};

std::vector<std::int32_t> lengths() {
  if (few_cases()) return {1, 33, 2, 1, 1, 70, 16};
  return {1, 30, 33, 2, 63, 1, 1, 40, 100, 16};
}

TEST_F(PackedSweepsTest, EveryRunConvergesToItsRecurrenceInFp32) {
  check(PackedCase<float>({5}, 8), run(PackedCase<float>({5}, 8), {}));
  const PackedCase<float> odd({5, 9, 2}, 7);
  check(odd, run(odd, {.window = 8}));
  const PackedCase<float> p(lengths(), 24);
  for (const std::int64_t window : {64, 50, 400}) {
    const SweepResult<float> got = run(p, {.window = window});
    check(p, got);
    EXPECT_EQ(got.counts.fallbacks, 0);
    EXPECT_GE(got.counts.token_sweeps, p.c.size.time);
    if (few_cases()) return;
  }
  if (small_sizes()) return;
  const PackedCase<float> wide({200, 17, 800, 1, 90, 300}, 1024);
  check(wide, run(wide, {.window = 1024}));
}

TEST_F(PackedSweepsTest, EveryRunConvergesToItsRecurrenceIn16Bits) {
  const auto check_type = [&]<class A>(A) {
    const PackedCase<A> p(lengths(), 40);
    for (const SweepAlgo algo : algos()) {
      SCOPED_TRACE(static_cast<int>(algo));
      check(p, run(p, {.tolerance = 1e-4F, .algo = algo}));
      check(p, run(p, {.window = 600, .tolerance = 1e-4F, .algo = algo}));
      if (few_cases()) continue;
      check(p, run(p, {.window = 130, .tolerance = 1e-4F, .algo = algo}));
    }
  };
  check_type(BFloat16{});
  if (!few_cases()) check_type(Float16{});
}

// Windows in which whole steps settle before the others, and of many tiles.
TEST_F(PackedSweepsTest, ReachesTheFixedPointOfLongWindows) {
  if (few_cases()) GTEST_SKIP() << "many launches";
  const PackedCase<Float16> p({40, 300, 7, 500, 64, 64, 260, 90, 25}, 16);
  for (const SweepAlgo algo : algos()) {
    SCOPED_TRACE(static_cast<int>(algo));
    const SweepOptions options{.window = 1400, .tolerance = 0.0F, .max_sweeps = 2000, .algo = algo};
    const SweepResult<Float16> got = run(p, options);
    check(p, got, 5e-6);
    EXPECT_EQ(got.counts.fallbacks, 0);
    EXPECT_EQ(run(p, options).h, got.h);
  }
  if (small_sizes()) return;
  std::vector<std::int32_t> many(60, 0);
  for (std::size_t i = 0; i < many.size(); ++i) many[i] = static_cast<std::int32_t>(16 + 37 * i % 90);
  const PackedCase<BFloat16> wide(many, 1024);
  check(wide, run(wide, {.window = 2048, .tolerance = 1e-4F}));
  const PackedCase<BFloat16> narrow(many, 384);
  check(narrow, run(narrow, {.window = 4096, .tolerance = 1e-4F}));
}

TEST_F(PackedSweepsTest, FallsBackToExactStepsRunByRun) {
  const auto check_type = [&]<class A>(A) {
    const PackedCase<A> p({20, 45, 3, 60}, 40);
    const SweepResult<A> got = run(p, {.window = 50, .tolerance = 0.0F, .max_sweeps = 2});
    check(p, got, 1e-5);
    EXPECT_EQ(got.counts.windows, 3);
    EXPECT_EQ(got.counts.fallbacks, 3);
  };
  check_type(float{});
  check_type(BFloat16{});
}

// How many sweeps a run takes is its own matter: with the same place in its tile, it has the same bits beside others,
// even beside one that breaks.
TEST_F(PackedSweepsTest, ARunsBitsDependNeitherOnOthersConvergenceNorOnTheirNan) {
  const auto check_type = [&]<class A>(A, SweepAlgo algo) {
    PackedCase<A> p({30, 50, 40, 20}, 32);
    const SweepOptions options{.window = 256, .tolerance = 1e-3F, .max_sweeps = 20, .algo = algo};
    const SweepResult<A> clean = run(p, options);
    check(p, clean, 2e-2);
    const auto same = [&](const SweepResult<A>& got, std::size_t at) {
      const auto begin = p.first[at] * p.c.size.dim;
      const auto end = (p.end[at] + 1) * p.c.size.dim;
      return std::equal(clean.h.begin() + begin, clean.h.begin() + end, got.h.begin() + begin);
    };
    // A run whose gates look at nothing but what is large takes more sweeps.
    PackedCase<A> slow = p;
    for (std::int64_t t = p.first[1]; t < p.end[1]; ++t) {
      for (std::int64_t i = 0; i < 32; ++i) slow.c.gamma[p.c.index(0, t, i)] = 0.999F;
    }
    const SweepResult<A> beside = run(slow, options);
    PackedCase<A> broken = p;
    broken.c.gamma[p.c.index(0, p.first[1] + 10, 5)] = kNan;
    broken.carries[static_cast<std::size_t>(2 * 32 + 3)] = kNan;
    const SweepResult<A> lost = run(broken, options);
    EXPECT_EQ(lost.counts.fallbacks, 1);
    for (const std::size_t at : {std::size_t{0}, std::size_t{3}}) {
      EXPECT_TRUE(same(beside, at)) << "run " << at << " beside one that converges slowly";
      EXPECT_TRUE(same(lost, at)) << "run " << at << " beside NaN";
    }
    EXPECT_TRUE(same(beside, 2));
    EXPECT_TRUE(std::isnan(lost.h[static_cast<std::size_t>(p.end[1] * 32 + 5)]));
    EXPECT_TRUE(std::isnan(lost.h[static_cast<std::size_t>(p.end[2] * 32 + 3)]));
  };
  check_type(float{}, SweepAlgo::kProductAndScan);
  for (const SweepAlgo algo : algos()) {
    if (few_cases() && algo == SweepAlgo::kProductAndScan) continue;
    check_type(BFloat16{}, algo);
  }
}

}  // namespace
}  // namespace mmrec::kernels::test
