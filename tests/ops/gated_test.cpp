// The gated recurrence against float64: exact steps, one gate-frozen sweep, and the loop of sweeps. What they compute,
// count and report; the same bits for any cut into calls, any batch, any threads and beside any others. Long,
// because the three ops compute one recurrence and are held against each other.

#include "tests/ops/gated_case.h"

namespace mmrec::kernels::test {
namespace {

// ---- gated_recurrence -----------------------------------------------------------------------------------------------

/// h and what the products saw of it, [B, T + 1, D].
template <class A>
struct Result {
  std::vector<float> h;
  std::vector<A> rounded;
};
using test::same_bits;
template <class A>
bool same_bits(const Result<A>& a, const Result<A>& b) {
  return same_bits(a.h, b.h) && same_bits(a.rounded, b.rounded);
}

class GatedRecurrenceTest : public OpTest {
 protected:
  /// In calls of these many tokens, again and again to the end.
  template <class A>
  static Result<A> run(Backend& on, const GatedCase<A>& c, GatedOn<A>& state, const std::vector<std::int64_t>& cuts) {
    state.restart(c.fresh_state());
    for (std::int64_t t = 0, call = 0; t < c.size.time; ++call) {
      const std::int64_t n = std::min(cuts[static_cast<std::size_t>(call) % cuts.size()], c.size.time - t);
      gated_recurrence(
          on, GatedRecurrence<Space, A>{
                  .in = state.inputs(t, n), .gate_weight = state.gate_weight(), .gate_bias = state.gate_bias()});
      t += n;
    }
    return {state.states(), state.rounded_states()};
  }
  template <class A>
  static Result<A> run(Backend& on, const GatedCase<A>& c) {
    GatedOn<A> state(on, c, c.fresh_state());
    return run(on, c, state, {c.size.time});
  }

  /// On a CPU from the carry; on a GPU each time from the h that the op itself left.
  template <class A>
  void check(const GatedCase<A>& c) {
    SCOPED_TRACE(testing::Message() << c.size << ", " << name_of(c.format));
    GatedOn<A> state(on(), c, c.fresh_state());
    std::vector<double> exact;
    if (!kOnCuda) exact = c.exact_states();
    on_every([&](Backend& on) { return run(on, c, state, {c.size.time}); },
             [&](const Result<A>& got) {
               EXPECT_EQ(first_not_rounded(got.h, got.rounded), got.h.size()) << "h_rounded";
               if (kOnCuda) {
                 EXPECT_LT(one_time_error(c, got.h, got.rounded), 5e-6);
               } else {
                 EXPECT_LT(max_error(got.h, exact), 1e-5);
               }
             });
  }
};

TEST_F(GatedRecurrenceTest, MatchesFloat64) {
  std::vector<GatedSize> sizes = {{1, 1, 1},  {1, 5, 7},   {3, 2, 48},  {1, 31, 64}, {8, 3, 40},
                                  {9, 1, 33}, {17, 2, 16}, {2, 4, 100}, {33, 1, 48}, {40, 1, 33}};
  if (gpu_sizes()) {
    sizes.insert(sizes.end(), {{1, 257, 1024}, {64, 3, 512}, {1, 9, 2048}, {64, 1, 2048}, {2, 3, 4096}, {1, 5, 1500}});
  }
  if (!kOnCuda) {
    for (const std::int64_t dim : {1, 7, 31, 48, 100, 384}) {
      for (const std::int64_t batch : {1, 2, 5}) sizes.push_back({batch, dim > 100 ? 4 : 23, dim});
    }
  }
  for_weights([&]<class A>(A, WeightFormat format) {
    for (const GatedSize& size : sizes) check(GatedCase<A>(size, 0, format));
  });
}

TEST_F(GatedRecurrenceTest, WithoutBiasAndWithoutMix) {
  for_activations([&]<class A>(A) {
    GatedCase<A> c({2, 3, 24});
    c.mix = 0.0F;
    check(c);
    c.bias.clear();
    check(c);
  });
}

TEST_F(GatedRecurrenceTest, BitsDependNeitherOnBatchNorOnCuts) {
  for_weights([&]<class A>(A, WeightFormat format) {
    for (const std::int64_t dim : {96, 104, 384, 1024}) {
      if (kOnCuda ? dim != (small_sizes() ? 96 : 1024) : dim == 1024) continue;
      const GatedCase<A> c({11, gpu_sizes() ? 40 : 10, dim}, 0, format);
      GatedOn<A> state(on(), c, c.fresh_state());
      on_every([&](Backend& on) {
        const Result<A> whole = run(on, c, state, {c.size.time});
        for (const std::vector<std::int64_t>& cuts :
             {std::vector<std::int64_t>{1}, {3}, {1, 2, 7}, {4, 6}, {1, 1, 8}}) {
          EXPECT_TRUE(same_bits(run(on, c, state, cuts).h, whole.h)) << "calls of " << cuts[0] << ", ...";
          if (kOnCuda && cuts[0] == 3) break;
        }
        for (const std::int64_t b : {0, 5, 10}) {
          EXPECT_TRUE(same_bits(run(on, c.alone(b)).h, c.sequence(whole.h, b))) << "sequence " << b;
        }
      });
    }
  });
}

// A NaN whose bits are all ones looks like an element that was not written. It must neither stop the recurrence nor
// vanish, and sequences beside it must not notice.
TEST_F(GatedRecurrenceTest, NanPassesThrough) {
  on_every([](Backend& on) {
    for_activations([&]<class A>(A) {
      GatedCase<A> c({2, 4, 16});
      const Result<A> clean = run(on, c);
      c.wide[c.index(1, 1, 0) * 3 + 16 + 5] = nan_of<A>();  // z_5 of sequence 1 at time 1
      const Result<A> got = run(on, c);
      for (std::int64_t i = 0; i < 5 * 16; ++i)
        ASSERT_EQ(got.h[c.state_index(0, 0, i)], clean.h[c.state_index(0, 0, i)]);
      EXPECT_TRUE(std::isnan(got.h[c.state_index(1, 2, 5)]));
      EXPECT_FALSE(std::isnan(got.h[c.state_index(1, 2, 4)]));
      for (std::int64_t i = 0; i < 16; ++i) EXPECT_TRUE(std::isnan(got.h[c.state_index(1, 3, i)]));
    });
  });
}

#if !defined(MMREC_TEST_CUDA)

// Lengths fall, rise and repeat; few sequences share channels, many are shared between threads in groups.
TEST_F(GatedRecurrenceTest, SequencesOfAnyLengthsGoTogether) {
  std::uint64_t seed = 900;
  for (const std::int64_t dim : {7, 48, 200}) {
    for (const std::int64_t inputs : {1, 2, 5, 13, 30, 61}) {
      std::vector<GatedCase<float>> cases;
      std::vector<std::vector<double>> exact;
      for (std::int64_t i = 0; i < inputs; ++i) {
        GatedCase<float>& c =
            cases.emplace_back(GatedSize{1 + i % 3, (i * 7) % 19, dim}, seed += 10, kAllDTypes[inputs % 3]);
        c.weight = cases.front().weight;
        c.bias = cases.front().bias;
        exact.push_back(c.exact_states());
      }
      std::vector<GatedOn<float>> together;
      std::vector<GateInputs<Host>> in;
      for (const GatedCase<float>& c : cases) {
        together.emplace_back(on(), c, c.fresh_state());
        in.push_back(together.back().inputs());
      }
      on_every([&](Backend& on) {
        for (std::size_t i = 0; i < cases.size(); ++i) together[i].restart(cases[i].fresh_state());
        gated_recurrences(on,
                          {.in = in, .gate_weight = together[0].gate_weight(), .gate_bias = together[0].gate_bias()});
        for (std::size_t i = 0; i < cases.size(); ++i) {
          const std::vector<float> got = together[i].states();
          if (on.threads() != 2) continue;  // on_every compares the bits
          EXPECT_LT(max_error(got, exact[i]), 1e-5);
          const std::uint64_t bits = downloaded();
          EXPECT_TRUE(same_bits(got, run(on, cases[i], together[i], {19}).h))
              << i << " of " << inputs << ", dim " << dim;
          downloaded() = bits;
        }
      });
    }
  }
}

#endif

// ---- gated_scan -----------------------------------------------------------------------------------------------------

template <class A>
struct Sweep {
  std::vector<float> h, change, magnitude;
  std::vector<A> rounded;
};
template <class A>
bool same_bits(const Sweep<A>& a, const Sweep<A>& b) {
  return same_bits(a.h, b.h) && same_bits(a.change, b.change) && same_bits(a.magnitude, b.magnitude) &&
         same_bits(a.rounded, b.rounded);
}

class GatedScanTest : public OpTest {
 public:
  // The largest changes and magnitudes are raised from 0 on a GPU, and written on a CPU.
  static constexpr float kBefore = kOnCuda ? 0.0F : kNan;

  /// A case in the backend's memory. The first call goes on from `old`.
  template <class A>
  struct Operands {
    Backend& on;
    GatedSize size;
    std::int64_t first;
    GatedOn<A> state;
    Buffer<float> gates, change, magnitude;

    Operands(Backend& backend, const GatedCase<A>& c, const std::vector<float>& old, const std::vector<float>& gate,
             std::int64_t from)
        : on(backend), size(c.size), first(from), state(on, c, old), gates(upload(on, gate)) {
      const std::vector<float> before(static_cast<std::size_t>(size.time), kBefore);
      change = upload(on, before);
      magnitude = upload(on, before);
    }
    void call() {
      const GatedScan<Space, A> op{.in = state.inputs(),
                                   .gate = {gates.data(), size.batch, size.time, 2 * size.dim},
                                   .first = first,
                                   .change = change.data(),
                                   .magnitude = magnitude.data()};
#if defined(MMREC_TEST_CUDA)
      gated_scan_raising(on, op, nullptr);
#else
      gated_scan(on, op);
#endif
    }
    Sweep<A> result() const {
      return {state.states(), download(on, change), download(on, magnitude), state.rounded_states()};
    }
  };
  template <class A>
  static Sweep<A> run(Backend& on, const GatedCase<A>& c, const std::vector<float>& old, const std::vector<float>& gate,
                      std::int64_t first) {
    Operands<A> operands(on, c, old, gate, first);
    operands.call();
    return operands.result();
  }
  template <class A>
  static std::pair<std::vector<float>, std::vector<float>> random_states_and_gates(const GatedCase<A>& c) {
    return {random_normal<float>(c.states(), 0.0, 1.0, 20), random_normal<float>(2 * c.size.elements(), 0.0, 2.0, 21)};
  }

  template <class A>
  void check(const GatedSize& size, std::int64_t first) {
    SCOPED_TRACE(testing::Message() << size << " from " << first);
    const GatedCase<A> c(size);
    const auto host = random_states_and_gates(c);
    on_every([&](Backend& on) { return run(on, c, host.first, host.second, first); },
             [&](const Sweep<A>& got) { expect_correct(c, host.first, host.second, first, got); });
  }
  template <class A>
  static void expect_correct(const GatedCase<A>& c, const std::vector<float>& old, const std::vector<float>& gate,
                             std::int64_t first, const Sweep<A>& got) {
    const GatedSize& size = c.size;
    // Channels walk by themselves; each part has the largest change and magnitude of its own, time by time.
    struct Part {
      std::vector<double> change, magnitude;
      double error = 0.0;
    };
    const std::int64_t channels = size.batch * size.dim;
    const std::int64_t most = std::clamp<std::int64_t>(channels / (2 * host_processors()), 1, 64);
    const auto parts = parallel_map((channels + most - 1) / most, [&](std::int64_t p) {
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
          const double error = std::abs(static_cast<double>(got.h[to]) - h) / (kOnCuda ? 1.0 + std::abs(h) : 1.0);
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
        EXPECT_TRUE(same_bits<float>({got.change[i], got.magnitude[i]}, {kBefore, kBefore})) << "before `first`";
        continue;
      }
      const double bound = 1e-5 * (kOnCuda ? 1.0 + magnitude : 1.0);
      ASSERT_NEAR(static_cast<double>(got.change[i]), change, bound) << "time " << t;
      ASSERT_NEAR(static_cast<double>(got.magnitude[i]), magnitude, bound) << "time " << t;
    }
    ASSERT_EQ(first_not_rounded(got.h, got.rounded), got.h.size()) << "h_rounded";
    for (std::int64_t b = 0; b < size.batch; ++b) {
      const auto begin = static_cast<std::ptrdiff_t>(c.state_index(b, 0, 0));
      const auto end = static_cast<std::ptrdiff_t>(c.state_index(b, first + 1, 0));
      EXPECT_TRUE(std::equal(got.h.begin() + begin, got.h.begin() + end, old.begin() + begin)) << "wrote up to `first`";
    }
  }
};

TEST_F(GatedScanTest, OneSweepMatchesFloat64) {
  std::vector<GatedSize> sizes = {{1, 1, 2},   {1, 2, 6},   {3, 31, 48},  {2, 33, 8},
                                  {1, 64, 10}, {1, 65, 16}, {1, 1000, 6}, {2, 1024, 2}};
  sizes.push_back({1, 2070, 4});  // more times than a GPU's block takes at once
  if (gpu_sizes()) sizes.insert(sizes.end(), {{1, 4097, 48}, {2, 1000, 4096}, {3, 100003, 6}, {1, 1024, 1024}});
  if (!kOnCuda) sizes.insert(sizes.end(), {{3, 40, 1}, {3, 40, 7}, {3, 40, 64}, {3, 40, 100}, {3, 40, 384}});
  for_activations([&]<class A>(A) {
    for (const GatedSize& size : sizes) {
      check<A>(size, 0);
      if (size.time > 5) check<A>(size, 5);
      if (size.time > 1) check<A>(size, size.time - 1);
    }
  });
}

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
  const Sweep<float> got = run(on(), c, old, gate, 0);
  double h = static_cast<double>(old[0]);
  for (std::int64_t t = 0; t < c.size.time; ++t) {
    h = c.next(0, t, 0, h, 0.0, static_cast<double>(gate[c.index(0, t, 0) * 2 + 4]));
    ASSERT_NEAR(static_cast<double>(got.h[c.state_index(0, t + 1, 0)]) / h, 1.0, 1e-3) << "time " << t;
  }
}

TEST_F(GatedScanTest, NanCountsAsInfinity) {
  on_every([](Backend& on) {
    for_activations([&]<class A>(A) {
      for (const std::int64_t bad : {0, 3, 20, 53}) {
        GatedCase<A> c({1, 40, 54});
        const std::vector<float> old(c.states(), 0.5F);
        const std::vector<float> gate(2 * c.size.elements(), 0.0F);
        c.gamma[c.index(0, 7, bad)] = kNan;
        const Sweep<A> got = run(on, c, old, gate, 0);
        for (std::int64_t t = 0; t < 40; ++t) {
          const auto i = static_cast<std::size_t>(t);
          EXPECT_EQ(std::isinf(got.change[i]) && std::isinf(got.magnitude[i]), t >= 7) << t;
          EXPECT_EQ(std::isnan(got.h[c.state_index(0, t + 1, bad)]), t >= 7) << t;
          EXPECT_FALSE(std::isnan(got.h[c.state_index(0, t + 1, (bad + 1) % 54)]));
        }
      }
    });
  });
}

TEST_F(GatedScanTest, SequencesDoNotDependOnEachOther) {
  on_every([](Backend& on) {
    for_activations([&]<class A>(A) {
      const GatedCase<A> c({3, 100, 20});
      const auto [old, gate] = random_states_and_gates(c);
      const Sweep<A> all = run(on, c, old, gate, 0);
      for (std::int64_t b = 0; b < 3; ++b) {
        const Sweep<A> alone = run(on, c.alone(b), c.sequence(old, b), c.sequence(gate, b), 0);
        EXPECT_TRUE(same_bits(alone.h, c.sequence(all.h, b))) << "sequence " << b;
      }
    });
  });
}

#if !defined(MMREC_TEST_CUDA)

TEST_F(GatedScanTest, BitsDoNotDependOnTheFrozenPrefix) {
  on_every([](Backend& on) {
    const GatedCase<float> c({3, 60, 200}, 9);
    const auto [old, gate] = random_states_and_gates(c);
    const Sweep<float> whole = run(on, c, old, gate, 0);
    for (const std::int64_t first : {1, 2, 31}) {
      std::vector<float> frozen = old;
      for (std::int64_t b = 0; b < 3; ++b) {
        const std::size_t at = c.state_index(b, 0, 0);
        std::copy_n(&whole.h[at], (first + 1) * 200, &frozen[at]);
      }
      const Sweep<float> s = run(on, c, frozen, gate, first);
      EXPECT_TRUE(same_bits(s.h, whole.h));
      const auto rest = [&](const std::vector<float>& x) { return std::vector(x.begin() + first, x.end()); };
      EXPECT_TRUE(same_bits(rest(s.change), rest(whole.change)));
      EXPECT_TRUE(same_bits(rest(s.magnitude), rest(whole.magnitude)));
    }
  });
}

#endif

// ---- gated_sweeps ---------------------------------------------------------------------------------------------------

class GatedSweepsTest : public OpTest {
 public:
  template <class A>
  SweepResult<A> run(const GatedCase<A>& c, const SweepOptions& options) {
    SweepsOn<A> operands(on(), c, c.fresh_state(), options);
    return operands.result(operands.call());
  }

  template <class A>
  static void check(const GatedCase<A>& c, const SweepResult<A>& got, double bound = kSweepBound<A>) {
    EXPECT_LT(one_time_error(c, got.h, got.rounded), bound) << c.size;
    EXPECT_EQ(first_not_rounded(got.h, got.rounded), got.h.size()) << "h_rounded";
  }

  /// f(A{}) for every type; where launches are dear for bf16 alone.
  template <class F>
  static void for_some_activations(const F& f) {
    if constexpr (kOnCuda) {
      if (few_cases()) return f(BFloat16{});
    }
    for_activations(f);
  }
};

TEST_F(GatedSweepsTest, ConvergesToTheRecurrence) {
  std::vector<GatedSize> sizes = {{2, 65, 24}};
  if (!few_cases()) sizes = {{1, 16, 2}, {1, 100, 6}, {3, 65, 24}, {2, 33, 48}, {1, 200, 64}};
  if (gpu_sizes()) sizes.insert(sizes.end(), {{1, 1000, 1024}, {2, 300, 520}, {1, 150, 4096}});
  for (const GatedSize& size : sizes) {
    for_activations([&]<class A>(A) {
      const GatedCase<A> c(size);
      const SweepResult<A> got = run(c, {.tolerance = kSweepTolerance<A>});
      check(c, got);
      if (sizeof(A) == 2) return;
      EXPECT_EQ(got.counts.windows, size.batch * ((size.time + 63) / 64));
      EXPECT_EQ(got.counts.fallbacks, 0);
      EXPECT_GE(got.counts.token_sweeps, size.batch * size.time);
    });
  }
}

TEST_F(GatedSweepsTest, WindowsOfManyTiles) {
  std::vector<GatedSize> sizes = {{1, few_cases() ? 150 : 300, 40}};
  if (!few_cases()) sizes.push_back({2, 560, 24});
  if (gpu_sizes()) sizes.insert(sizes.end(), {{1, 1000, 384}, {1, 1536, 776}});
  for (const GatedSize& size : sizes) {
    for_activations([&]<class A>(A) {
      if (few_cases() && std::is_same_v<A, Float16>) return;
      const GatedCase<A> c(size);
      check(c, run(c, {.window = 2048, .tolerance = kSweepTolerance<A>}));
    });
  }
}

TEST_F(GatedSweepsTest, FallsBackToExactSteps) {
  for_activations([&]<class A>(A) {
    const GatedCase<A> c({2, 70, 40});
    for (const int max_sweeps : {2, 1, 3}) {
      const SweepResult<A> got = run(c, {.window = 50, .tolerance = 0.0F, .max_sweeps = max_sweeps});
      check(c, got, 1e-5);
      EXPECT_EQ(got.counts.windows, 4);
      EXPECT_EQ(got.counts.fallbacks, 4);
      EXPECT_LE(got.counts.token_sweeps, max_sweeps * 140);
      if (few_cases()) break;
    }
  });
}

// A tolerance of 0 ends when no bit changes any more: that is the fixed point itself. In the second window whole tiles
// settle before the others.
TEST_F(GatedSweepsTest, ReachesTheFixedPoint) {
  for_some_activations([&]<class A>(A) {
    const GatedCase<A> c({1, 60, 32});
    const SweepResult<A> got = run(c, {.tolerance = 0.0F, .max_sweeps = 200});
    check(c, got, 5e-6);
    EXPECT_EQ(got.counts.fallbacks, 0);
  });
  using Type = std::conditional_t<kOnCuda, Float16, float>;
  const GatedCase<Type> c({1, few_cases() ? 100 : 900, 16});
  const SweepOptions options{.window = 900, .tolerance = 0.0F, .max_sweeps = 1000};
  const SweepResult<Type> got = run(c, options);
  check(c, got, 5e-6);
  EXPECT_EQ(got.counts.fallbacks, 0);
  if (few_cases()) return;
  EXPECT_EQ(run(c, options).h, got.h);
}

TEST_F(GatedSweepsTest, NanIsFinishedByStepsAndLeavesWhatComesBefore) {
  for_some_activations([&]<class A>(A) {
    GatedCase<A> c({2, 60, 32});
    const SweepOptions options{.tolerance = 1e-3F, .max_sweeps = 20};
    const SweepResult<A> clean = run(c, options);
    c.gamma[c.index(1, 40, 5)] = kNan;
    const SweepResult<A> got = run(c, options);
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
  });
}

TEST_F(GatedSweepsTest, BitsDependOnNeitherNeighboursNorTheRun) {
  for_some_activations([&]<class A>(A) {
    const std::int64_t batch = few_cases() ? 2 : 3;
    const GatedCase<A> c({batch, 90, 40});
    const SweepResult<A> all = run(c, {});
    if (!few_cases()) {
      EXPECT_EQ(run(c, {}).h, all.h);
    }
    for (std::int64_t b = few_cases() ? 1 : 0; b < batch; ++b) {
      EXPECT_EQ(run(c.alone(b), {}).h, c.sequence(all.h, b)) << "sequence " << b;
    }
  });
}

TEST_F(GatedSweepsTest, WithoutBiasAndWithoutMix) {
  for_some_activations([&]<class A>(A) {
    GatedCase<A> c({2, 40, 24});
    c.bias.clear();
    c.mix = 0.0F;
    check(c, run(c, {.tolerance = 1e-4F}), 1e-2);
  });
}

#if defined(MMREC_TEST_CUDA)

// Gates that do not look at h are right before the first product, whose sweep sees that nothing changes.
TEST_F(GatedSweepsTest, CountsSweeps) {
  GatedCase<float> c({2, 100, 24});
  std::fill(c.weight.begin(), c.weight.end(), 0.0);
  const SweepResult<float> got = run(c, {});
  check(c, got, 1e-6);
  EXPECT_EQ(got.counts.windows, 4);
  EXPECT_EQ(got.counts.fallbacks, 0);
  EXPECT_EQ(got.counts.token_sweeps, 200);
}

TEST_F(GatedSweepsTest, EveryAlgoConvergesAndThrowsWhereItCannotTakeTheOp) {
  const GatedCase<BFloat16> c({1, 100, 64});
  std::vector<SweepAlgo> algos = {SweepAlgo::kProductAndScan};
  if (on().compute_capability() == 90) algos.insert(algos.end(), {SweepAlgo::kNarrowTiles, SweepAlgo::kWideTiles});
  for (const SweepAlgo algo : algos) check(c, run(c, {.tolerance = 1e-4F, .algo = algo}));
  EXPECT_THROW(run(GatedCase<BFloat16>({1, 20, 7}), {.algo = SweepAlgo::kNarrowTiles}), std::invalid_argument);
  EXPECT_THROW(run(GatedCase<float>({1, 20, 64}), {.algo = SweepAlgo::kWideTiles}), std::invalid_argument);
}

// Packed runs that begin at, before and after the borders of tiles and windows. Each begins with the state 0, whatever
// stands before it, NaN included.
TEST_F(GatedSweepsTest, RunsWithoutAGapBeginWithNothing) {
  const std::vector<std::int32_t> firsts = {0, 11, 64, 65, 128, 140, 256};
  const std::vector<std::int32_t> ends = {11, 64, 65, 128, 140, 256, 270};
  std::vector<std::int32_t> of_row;
  for (std::size_t i = 0; i < firsts.size(); ++i) of_row.resize(static_cast<std::size_t>(ends[i]), std::int32_t(i));
  const auto begins = [&](std::int64_t t) {
    return t > 0 && std::find(firsts.begin(), firsts.end(), t) != firsts.end();
  };
  const auto run_packed = [&]<class A>(const GatedCase<A>& c, const SweepOptions& options) {
    SweepsOn<A> operands(on(), c, c.fresh_state(), options);
    const SweepCounts counts = operands.call_packed(of_row, firsts, ends);
    return operands.result(counts);
  };
  for_some_activations([&]<class A>(A) {
    std::vector<std::optional<SweepAlgo>> algos = {SweepAlgo::kProductAndScan};
    if (sizeof(A) == 2 && on().compute_capability() == 90) {
      algos.insert(algos.end(), {SweepAlgo::kNarrowTiles, SweepAlgo::kWideTiles});
    }
    for (const auto& algo : algos) {
      for (const std::int64_t window : {128, 512}) {
        SCOPED_TRACE(testing::Message() << "windows of " << window);
        GatedCase<A> c({1, 270, 24});
        const SweepOptions options{.window = window, .tolerance = kSweepTolerance<A>, .max_sweeps = 20, .algo = algo};
        const SweepResult<A> got = run_packed(c, options);
        EXPECT_EQ(first_not_rounded(got.h, got.rounded), got.h.size());
        EXPECT_LT(one_time_error(c, got.h, got.rounded, begins), kSweepBound<A>);
        const std::vector<double> nothing(24);
        for (std::int64_t t = 0; t < 270; ++t) {
          for (std::int64_t i = 0; begins(t) && i < 24; ++i) {
            ASSERT_NEAR(static_cast<double>(got.h[c.state_index(0, t + 1, i)]), c.next(0, t, i, 0.0, nothing.data()),
                        1e-5)
                << "time " << t;
          }
        }
        c.gamma[c.index(0, 70, 5)] = kNan;
        const SweepResult<A> lost = run_packed(c, options);
        EXPECT_GE(lost.counts.fallbacks, 1);
        for (std::int64_t t = 0; t < 270; ++t) {
          ASSERT_EQ(std::isnan(lost.h[c.state_index(0, t + 1, 5)]), t >= 70 && t < 128) << "time " << t;
        }
      }
    }
  });
}

// Lanes take channels in pairs.
TEST_F(GatedSweepsTest, AnOddNumberOfChannelsGoesByExactSteps) {
  for (const std::int64_t dim : {1, 7}) {
    const GatedCase<BFloat16> c({2, 70, dim});
    const SweepResult<BFloat16> got = run(c, {.window = 50});
    check(c, got, 1e-5);
    EXPECT_EQ(got.counts.fallbacks, 4);
    EXPECT_EQ(got.counts.token_sweeps, 0);
  }
}

#else

TEST_F(GatedSweepsTest, ReachesTheExactRecurrenceBitForBit) {
  on_every([](Backend& on) {
    for (const std::int64_t dim : {1, 17, 48, 64, 100}) {
      GatedCase<float> c({2, 63, dim}, 5, DType::kBF16);
      for (double& weight : c.weight) weight *= 0.5;  // so that some sweeps do
      GatedOn<float> exact(on, c, c.fresh_state());
      gated_recurrence(on, {.in = exact.inputs(), .gate_weight = exact.gate_weight(), .gate_bias = exact.gate_bias()});
      SweepsOn<float> swept(on, c, c.fresh_state(), {.tolerance = 0.0F, .max_sweeps = 62});
      EXPECT_EQ(swept.call().fallbacks, 0);
      EXPECT_TRUE(same_bits(swept.state.states(), exact.states())) << dim;
    }
  });
}

#endif

// ---- cases ----------------------------------------------------------------------------------------------------------

/// A case of the benches: one sequence, gates that are alive and converge.
template <class A>
GatedCase<A> timed_case(std::int64_t time, std::int64_t dim) {
  GatedCase<A> c({1, time, dim}, 50);
  for (double& weight : c.weight) weight *= 0.5;  // exact in every format
  return c;
}

template <class A>
void add_sweeps(Backend& on, OpCases& cases, std::int64_t time, std::int64_t dim, std::int64_t window) {
  const double token_flops = product_flops(1, 2 * dim, dim);
  const std::string shape = join("T ", time, ", D ", dim, ", windows of ", window);
  add_case(cases, typed<A>("gated_sweeps"), shape, Limit::kProduct, token_flops * static_cast<double>(time), [=, &on] {
    const auto c = std::make_shared<GatedCase<A>>(timed_case<A>(time, dim));
    const SweepOptions options{.window = window, .tolerance = sizeof(A) == 4 ? 1e-5F : 1e-3F};
    const auto in = std::make_shared<SweepsOn<A>>(on, *c, c->fresh_state(), options);
    const SweepCounts counts = in->call();
    const auto sweeps = static_cast<double>(counts.token_sweeps);
    const auto check = [=] {
      EXPECT_LT(one_time_error(*c, in->state.states(), in->state.rounded_states()), sizeof(A) == 4 ? 2e-4 : 2e-2);
    };
    return PreparedOp{[=] { in->call(); }, check,
                      join(sweeps / static_cast<double>(time), " sweeps a token, ", counts.fallbacks, " fallbacks of ",
                           counts.windows),
                      token_flops * sweeps};
  });
}

template <class A>
void add_cases(Backend& on, OpCases& cases, std::int64_t time, std::int64_t dim, std::int64_t window) {
  const std::string shape = join("T ", time, ", D ", dim);
  const double flops = product_flops(time, 2 * dim, dim);
  add_case(cases, typed<A>("gated_recurrence"), shape, Limit::kProduct, flops, [=, &on] {
    const auto c = std::make_shared<GatedCase<A>>(timed_case<A>(time, dim));
    const auto in = std::make_shared<GatedOn<A>>(on, *c, c->fresh_state());
    const auto call = [=, &on] {
      gated_recurrence(on, GatedRecurrence<Space, A>{
                               .in = in->inputs(), .gate_weight = in->gate_weight(), .gate_bias = in->gate_bias()});
    };
    return PreparedOp{call, [=] { EXPECT_LT(one_time_error(*c, in->states(), in->rounded_states()), 5e-6); }};
  });
  // z, zm, gamma, both gates and the old h in; h and its rounding out.
  const double bytes = bytes_of<A>((sizeof(A) == 4 ? 2 : 3) * time * dim) + bytes_of<float>(5 * time * dim);
  add_case(cases, typed<A>("gated_scan"), shape, Limit::kCopy, bytes, [=, &on] {
    const auto c = std::make_shared<GatedCase<A>>(timed_case<A>(time, dim));
    const auto host = GatedScanTest::random_states_and_gates(*c);
    const auto in = std::make_shared<GatedScanTest::Operands<A>>(on, *c, host.first, host.second, 0);
    const auto check = [=] { GatedScanTest::expect_correct(*c, host.first, host.second, 0, in->result()); };
    return PreparedOp{[=] { in->call(); }, check};
  });
  add_sweeps<A>(on, cases, time, dim, window);
}

const RegisteredCases kCases([](Backend& on, bool small, OpCases& cases) {
  using A = std::conditional_t<kOnCuda, BFloat16, float>;
  if (small) return add_cases<A>(on, cases, 100, 64, 50);
  if (!kOnCuda) return add_cases<A>(on, cases, 512, 384, 1024);
  for (const std::int64_t dim : {1024, 2048, 4096}) add_cases<A>(on, cases, 4096, dim, 1024);
  for (const std::int64_t window : {256, 512, 2048, 4096}) add_sweeps<A>(on, cases, 4096, 1024, window);
  add_cases<float>(on, cases, 4096, 1024, 1024);
  add_cases<A>(on, cases, 256, 256, 128);
});

}  // namespace
}  // namespace mmrec::kernels::test
