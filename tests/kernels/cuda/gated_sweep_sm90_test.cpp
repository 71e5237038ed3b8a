// One gate-frozen sweep on the tensor cores of sm_90a against fp64: the gates from the iterate on entry, then the
// recurrence token after token. What the op reports of its own result must match it to the bit.
#include "tests/ops/gated_case.h"

namespace mmrec::kernels::test {
namespace {

struct Size {
  std::int64_t batch, time, dim;
  std::int64_t first = 0;
};

std::size_t count(std::int64_t n) { return static_cast<std::size_t>(n); }

/// Operands, and an iterate.
template <class A>
struct Case : GatedCase<A> {
  explicit Case(const Size& s)
      : GatedCase<A>({s.batch, s.time, s.dim}),
        first(s.first),
        h(random_normal<float>(this->states(), 0.0, 1.0, 14)),
        rounded(rounded_to<A>(h)) {}
  std::int64_t first;
  std::vector<float> h;
  std::vector<A> rounded;
};

template <class A>
struct Result {
  std::vector<float> h;
  std::vector<A> rounded_next;
  std::vector<float> change, magnitude;
  std::vector<A> settled;
};

class GatedSweepSm90 : public OnSm90<OpTest> {
 public:
  template <class A>
  Result<A> run(const Case<A>& c, GatedCheck check = {}, bool rounds_settled = false,
                std::optional<SweepAlgo> algo = {}) {
    const auto [batch, time, dim] = c.size;
    GatedOn<A> state(on(), c, c.h, c.rounded);
    auto next = unwritten<A>(on(), c.h.size()), kept = unwritten<A>(on(), c.h.size());
    SequenceView<A, Device> settled;
    if (rounds_settled) settled = {kept.data(), batch, time + 1, dim};
    // What is raised starts at 0 from `first` on; before it nothing is to be touched, though a check looks at it.
    std::vector<float> maxima(count(time), check.report == nullptr ? NAN : 0.0F);
    std::fill(maxima.begin() + c.first, maxima.end(), 0.0F);
    auto change = upload(on(), maxima), magnitude = upload(on(), maxima);
    const GatedSweep<Device, A> op{.in = state.inputs(),
                                   .h_rounded_next = {next.data(), batch, time + 1, dim},
                                   .gate_weight = state.gate_weight(),
                                   .gate_bias = state.gate_bias(),
                                   .first = c.first,
                                   .change = change.data(),
                                   .magnitude = magnitude.data()};
    const SweepAlgo chosen = choose_sweep(on(), op);
    EXPECT_NE(chosen, SweepAlgo::kProductAndScan);
    check.times = static_cast<int>(time);
    gated_sweep_sm90(on(), op, algo.value_or(chosen), check, settled);
    return {state.states(), download(on(), next), download(on(), change), download(on(), magnitude),
            download(on(), kept)};
  }

  /// `channels`: how many channels of each sequence are computed in fp64; 0: all.
  template <class A>
  static void check(const Case<A>& c, const Result<A>& got, std::int64_t channels = 0) {
    const std::int64_t time = c.size.time, dim = c.size.dim;
    const std::int64_t step = channels == 0 ? 1 : std::max<std::int64_t>(dim / channels, 1);
    const std::int64_t looked_at = (dim + step - 1) / step;
    const std::vector<double> seen = widened(c.rounded);
    const double worst = parallel_max(c.size.batch * looked_at, [&](std::int64_t n) {
      const std::int64_t b = n / looked_at, i = n % looked_at * step;
      double error = 0.0;
      double h = static_cast<double>(c.h[c.state_index(b, c.first, i)]);
      for (std::int64_t t = c.first; t < time; ++t) {
        h = c.next(b, t, i, h, seen.data() + c.state_index(b, t, 0));
        const double e = std::abs(static_cast<double>(got.h[c.state_index(b, t + 1, i)]) - h) / (1.0 + std::abs(h));
        error = std::isnan(e) ? INFINITY : std::max(error, e);
      }
      return error;
    });
    EXPECT_LT(worst, 1e-5);

    for (std::int64_t t = 0; t < time; ++t) {
      float change = 0.0F, magnitude = 0.0F;
      for (std::int64_t b = 0; b < c.size.batch; ++b) {
        for (std::int64_t i = 0; i < dim; ++i) {
          const std::size_t at = c.state_index(b, t + 1, i);
          if (t < c.first) {
            ASSERT_EQ(got.h[at], c.h[at]) << "a frozen state was touched, time " << t;
            continue;
          }
          change = std::max(change, std::abs(got.h[at] - c.h[at]));
          magnitude = std::max(magnitude, std::abs(got.h[at]));
          ASSERT_EQ(got.rounded_next[at].bits, from_float<A>(got.h[at]).bits) << "time " << t << " channel " << i;
        }
      }
      if (t < c.first) {
        ASSERT_TRUE(std::isnan(got.change[count(t)]) && std::isnan(got.magnitude[count(t)])) << "time " << t;
      } else {
        ASSERT_EQ(got.change[count(t)], change) << "time " << t;
        ASSERT_EQ(got.magnitude[count(t)], magnitude) << "time " << t;
      }
    }
    for (std::int64_t b = 0; b < c.size.batch; ++b) {
      for (std::int64_t i = 0; i < dim; ++i) {
        const std::size_t at = c.state_index(b, c.first, i);
        ASSERT_EQ(got.rounded_next[at].bits, c.rounded[at].bits) << "carry of channel " << i;
        ASSERT_EQ(got.h[c.state_index(b, 0, i)], c.h[c.state_index(b, 0, i)]);
      }
    }
  }

  template <class A>
  void sweep(const Size& size, std::int64_t channels = 0) {
    const Case<A> c(size);
    check(c, run(c), channels);
  }
};

// Narrow tiles: at most one wave of blocks.
TEST_F(GatedSweepSm90, OneTileAndMore) {
  sweep<BFloat16>({1, 1, 8});
  sweep<BFloat16>({1, 2, 48});
  sweep<Float16>({1, 31, 64});
  sweep<BFloat16>({2, 33, 72});
  sweep<BFloat16>({1, 128, 64});
  sweep<BFloat16>({1, 129, 64});  // tiles that wait for each other
  sweep<Float16>({1, 256, 104});
  sweep<BFloat16>({1, 200, 64, 1});  // frozen prefixes
  sweep<BFloat16>({1, 200, 72, 131});
  sweep<BFloat16>({2, 100, 48, 99});
  sweep<BFloat16>({1, 300, 200});  // more blocks than a wave of the emulated device
  sweep<Float16>({2, 270, 136, 7});
  sweep<BFloat16>({1, 1300, 24});  // more earlier tiles than warps
}

TEST_F(GatedSweepSm90, LargeSizes) {
  if (kEmulated) GTEST_SKIP() << "on a device only";
  sweep<BFloat16>({1, 1024, 1024}, 16);
  sweep<BFloat16>({1, 1000, 1024, 37}, 16);
  sweep<Float16>({1, 2048, 1032}, 12);  // wide tiles, more than a wave
  sweep<BFloat16>({3, 512, 2048, 5}, 8);
  sweep<BFloat16>({1, 1024, 4096}, 4);
}

TEST_F(GatedSweepSm90, WithoutBiasAndMix) {
  Case<BFloat16> c({1, 150, 64});
  c.bias.clear();
  c.mix = 0.0F;
  check(c, run(c));
}

TEST_F(GatedSweepSm90, DoesNothingWhereAllIsSettled) {
  const Case<BFloat16> c({1, 150, 64});
  auto settled = upload(on(), std::vector<std::uint32_t>{150});
  std::uint32_t* const report = on().report();
  *report = 7;
  const Result<BFloat16> got = run(c, {.begins = false, .settled = settled.data(), .report = report});
  EXPECT_EQ(got.h, c.h);
  for (const float x : got.change) EXPECT_EQ(x, 0.0F);
  for (const BFloat16 x : got.rounded_next) EXPECT_TRUE(std::isnan(to_float(x)));
  EXPECT_EQ(*report, 7U);
}

TEST_F(GatedSweepSm90, RoundsTheStatesWhereAllIsSettled) {
  const auto check_type = [&]<class A>(A, const Size& size) {
    const Case<A> c(size);
    const auto [batch, time, dim] = c.size;
    auto settled = upload(on(), std::vector<std::uint32_t>{static_cast<std::uint32_t>(time)});
    const GatedCheck done{.begins = false, .settled = settled.data(), .report = on().report()};
    const Result<A> got = run(c, done, /*rounds_settled=*/true);
    EXPECT_EQ(got.h, c.h);
    for (std::size_t i = 0; i < got.settled.size(); ++i) {
      const bool is_carry = static_cast<std::int64_t>(i) / dim % (time + 1) == 0;
      const float want = is_carry ? NAN : to_float(from_float<A>(c.h[i]));
      ASSERT_TRUE(is_carry ? std::isnan(to_float(got.settled[i])) : to_float(got.settled[i]) == want) << i;
    }
    // While anything moves, nobody touches them.
    auto moving = upload(on(), std::vector<std::uint32_t>{0});
    const GatedCheck busy{.begins = false, .settled = moving.data(), .report = on().report()};
    for (const A x : run(c, busy, /*rounds_settled=*/true).settled) ASSERT_TRUE(std::isnan(to_float(x)));
  };
  check_type(BFloat16{}, {2, 150, 72});
  check_type(Float16{}, {1, 1, 8});
  if (!small_sizes()) check_type(BFloat16{}, {1, 2048, 1024});
}

TEST_F(GatedSweepSm90, ReportsWhatHasSettled) {
  for (const std::int64_t first : {0, 40}) {
    Case<BFloat16> c({1, 300, 136, first});
    const Result<BFloat16> alone = run(c);
    c.h = alone.h;  // so that nothing changes ...
    for (const std::int64_t moving : {std::int64_t{45}, std::int64_t{200}, c.size.time}) {
      Case<BFloat16> moved = c;
      for (std::int64_t t = moving; t < c.size.time; ++t)
        moved.h[count((t + 1) * 136 + t % 136)] += 1.0F;  // ... before
      for (const std::uint32_t before : {std::uint32_t{0}, std::uint32_t{47}}) {
        auto settled = upload(on(), std::vector<std::uint32_t>{before});
        std::uint32_t* const report = on().report();
        const Result<BFloat16> got = run(moved, {.first = static_cast<int>(first),
                                                 .tolerance = 1e-3F,
                                                 .begins = before == 0,
                                                 .settled = settled.data(),
                                                 .report = report});
        EXPECT_EQ(got.h, alone.h);
        const auto want = std::max<std::int64_t>(moving, (before == 0 ? first : before) + 1);
        EXPECT_EQ(*report, static_cast<std::uint32_t>(want)) << "from " << first << ", moving from " << moving;
        EXPECT_EQ(download(on(), settled)[0], *report);
        for (std::int64_t t = first; t < c.size.time; ++t)
          EXPECT_EQ(got.change[count(t)], 0.0F) << "for the next sweep";
      }
    }
  }
}

TEST_F(GatedSweepSm90, LeavesOutWhatHasSettled) {
  constexpr std::int64_t kTime = 850, kDim = 72;
  for (const std::int64_t first : {0, 30}) {
    Case<BFloat16> c({1, kTime, kDim, first});
    c.h = run(c).h;
    const std::int64_t start = first + 2 * kGatedSweepStep;
    for (std::int64_t t = 0; t < start; ++t) c.h[count(t * kDim + t % kDim)] += 1.0F;  // what it would not leave so
    auto settled = upload(on(), std::vector<std::uint32_t>{static_cast<std::uint32_t>(start + 100)});
    const GatedCheck check{.first = static_cast<int>(first),
                           .tolerance = 1e-3F,
                           .begins = false,
                           .settled = settled.data(),
                           .report = on().report()};
    const Result<BFloat16> got = run(c, check);
    for (std::int64_t i = 0; i < (kTime + 1) * kDim; ++i) {
      const std::int64_t row = i / kDim;
      const float next = to_float(got.rounded_next[count(i)]);
      if (row <= start) {
        ASSERT_EQ(got.h[count(i)], c.h[count(i)]) << "row " << row;
      } else {
        ASSERT_NEAR(got.h[count(i)], c.h[count(i)], 1e-5F * (1.0F + std::abs(c.h[count(i)]))) << "row " << row;
      }
      if (row < start) {
        ASSERT_TRUE(std::isnan(next)) << "row " << row;
      } else {
        const BFloat16 want = row == start ? c.rounded[count(i)] : from_float<BFloat16>(got.h[count(i)]);
        ASSERT_EQ(next, to_float(want)) << "row " << row;
      }
    }
    EXPECT_EQ(*on().report(), static_cast<std::uint32_t>(kTime));
  }
}

TEST_F(GatedSweepSm90, NotANumberShowsAsInfinity) {
  Case<BFloat16> c({1, 140, 64});
  c.gamma[count(50 * 64 + 3)] = NAN;
  const Result<BFloat16> got = run(c);
  for (std::int64_t t = 0; t < c.size.time; ++t) {
    EXPECT_EQ(std::isnan(got.h[count((t + 1) * 64 + 3)]), t >= 50) << t;
    EXPECT_TRUE(std::isfinite(got.h[count((t + 1) * 64 + 2)])) << t;
    EXPECT_EQ(std::isinf(got.change[count(t)]), t >= 50) << t;
    EXPECT_EQ(std::isinf(got.magnitude[count(t)]), t >= 50) << t;
  }
}

TEST_F(GatedSweepSm90, NarrowAndWideTilesGiveTheSameBits) {
  const Case<BFloat16> c({2, 150, 200, 0});
  const auto narrow = run(c, {}, false, SweepAlgo::kNarrowTiles);
  const auto wide = run(c, {}, false, SweepAlgo::kWideTiles);
  check(c, wide);
  EXPECT_EQ(narrow.h, wide.h);
  // Times before the first are NaN, untouched.
  EXPECT_TRUE(same_bits(narrow.change, wide.change));
  EXPECT_TRUE(same_bits(narrow.magnitude, wide.magnitude));
}

TEST_F(GatedSweepSm90, WhatItDoesNotTake) {
  const auto memory = unwritten<float>(on(), 1 << 16);
  auto* floats = const_cast<float*>(memory.data());
  auto* halves = reinterpret_cast<BFloat16*>(floats);
  const auto supported = [&](std::int64_t time, std::int64_t dim, std::int64_t offset, std::int64_t first) {
    GatedSweep<Device, BFloat16> op;
    op.in.z = {halves + offset, 1, time, dim};
    op.in.zm = {halves, 1, time, dim};
    op.in.gamma = {floats, 1, time, dim};
    op.in.h = {floats, 1, time + 1, dim};
    op.in.h_rounded = {halves, 1, time + 1, dim};
    op.h_rounded_next = {halves, 1, time + 1, dim};
    op.gate_weight = {halves, DType::kBF16, 2 * dim, dim};
    op.first = first;
    return choose_sweep(on(), op) != SweepAlgo::kProductAndScan;
  };
  EXPECT_TRUE(supported(16, 64, 0, 0));
  EXPECT_TRUE(supported(16, 64, 8, 15));
  EXPECT_FALSE(supported(16, 64, 8, 16));  // nothing left
  EXPECT_FALSE(supported(16, 60, 0, 0));
  EXPECT_FALSE(supported(16, 64, 4, 0));
  EXPECT_FALSE(supported(1 << 22, 64, 0, 0));  // more tiles than flags
}

// ---- cases: by both widths of tiles ----

void add_sweep(Backend& on, OpCases& cases, const Size& s, SweepAlgo algo) {
  struct Operands {
    Case<BFloat16> c;
    GatedOn<BFloat16> state;
    Buffer<BFloat16> next;
    Buffer<float> change, magnitude;
    Operands(Backend& b, const Size& size)
        : c(size),
          state(b, c, c.h, c.rounded),
          next(unwritten<BFloat16>(b, c.h.size())),
          change(upload(b, std::vector<float>(count(size.time), 0.0F))),
          magnitude(upload(b, std::vector<float>(count(size.time), 0.0F))) {}
  };
  const double flops = product_flops(s.time, 2 * s.dim, s.dim);
  add_case(cases, "gated_sweep_sm90 bf16", join("T ", s.time, ", D ", s.dim), Limit::kProduct, flops, [=, &on] {
    const auto in = std::make_shared<Operands>(on, s);
    const GatedSweep<Device, BFloat16> op{.in = in->state.inputs(),
                                          .h_rounded_next = {in->next.data(), 1, s.time + 1, s.dim},
                                          .gate_weight = in->state.gate_weight(),
                                          .gate_bias = in->state.gate_bias(),
                                          .change = in->change.data(),
                                          .magnitude = in->magnitude.data()};
    const auto check = [=, &on] {
      const Result<BFloat16> got{
          in->state.states(), download(on, in->next), download(on, in->change), download(on, in->magnitude), {}};
      GatedSweepSm90::check(in->c, got, 16);
    };
    return PreparedOp{[=, &on] { gated_sweep_sm90(on, op, algo); }, check,
                      join(algo == SweepAlgo::kNarrowTiles ? "narrow" : "wide", " tiles",
                           choose_sweep(on, op) == algo ? ", chosen" : "")};
  });
}

const RegisteredCases kCases([](Backend& on, bool small, OpCases& cases) {
  if (on.compute_capability() != 90) return;
  std::vector<Size> sizes = {{1, 100, 64}};
  if (!small) sizes = {{1, 4096, 1024}, {1, 4096, 2048}, {1, 4096, 4096}, {1, 256, 256}};
  for (const Size& s : sizes) {
    for (const SweepAlgo algo : {SweepAlgo::kNarrowTiles, SweepAlgo::kWideTiles}) add_sweep(on, cases, s, algo);
  }
});

}  // namespace
}  // namespace mmrec::kernels::test
