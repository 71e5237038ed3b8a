// Ops over runs that only mmrec-jax calls, by every algo, against float64: attention to a bank and writing to it, any
// number of rows written; and the recurrence that is normed at every token, with and without states. Long,
// because two families of ops share the runs.

#include "tests/ops/op_test.h"
#if defined(MMREC_TEST_CUDA)
#include "kernels/cuda/attention/algo.h"
#include "kernels/cuda/recurrence/algo.h"
#endif

namespace mmrec::kernels::test {
namespace {

#if !defined(MMREC_TEST_CUDA)
enum class BankAlgo : std::uint8_t { kAuto };
enum class NormedAlgo : std::uint8_t { kAuto, kGang, kCluster };  // the CPU has one for all
void bank_attention(Cpu& cpu, const BankAttention<Host>& op, BankAlgo /*algo*/) { bank_attention(cpu, op); }
std::size_t bank_scratch_bytes(const Cpu&, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::size_t) {
  return 0;
}
void normed_recurrence(Cpu& cpu, const NormedRecurrence<Host>& op, NormedAlgo /*algo*/) { normed_recurrence(cpu, op); }
bool normed_cluster_supported(const Cpu&, const NormedRecurrence<Host>&) { return false; }
#endif

/// Lengths of runs that are packed one after another, with unused rows in front of each.
struct RunShapes {
  std::vector<std::int32_t> rows;
  std::int32_t gap = 0;

  std::int64_t total() const {
    std::int64_t sum = 0;
    for (const std::int32_t n : rows) sum += n + gap;
    return sum;
  }
  std::int64_t longest() const { return rows.empty() ? 0 : *std::max_element(rows.begin(), rows.end()); }
  std::vector<BankRun> list() const {
    std::vector<BankRun> runs;
    std::int32_t first = 0;
    for (const std::int32_t n : rows) {
      runs.push_back({.first = first + gap, .rows = n});
      first += n + gap;
    }
    return runs;
  }
};

/// The runs of a call, on the host and in the backend's memory, with a bank for each.
struct Banks {
  std::vector<BankRun> runs;
  Matrix<float> bank;  // [runs * slots, dim]
  Buffer<BankRun> list;
  std::int64_t longest;

  Banks(Backend& on, const RunShapes& shapes, std::int64_t slots, std::int64_t dim, std::int32_t used, double deviation)
      : runs(shapes.list()),
        bank(random_matrix<float>(on, std::ssize(runs) * slots, dim, kPacked, 2, deviation)),
        longest(shapes.longest()) {
    for (std::size_t r = 0; r < runs.size(); ++r) {
      runs[r].bank = bank.view().row(static_cast<std::int64_t>(r) * slots);
      runs[r].used = used;
    }
    list = upload(on, runs);
  }
  BankRuns<Space> view() const { return {list.data(), runs.data(), std::ssize(runs), longest}; }
};

class BankTest : public OpTest {
 protected:
  struct Case {
    RunShapes shapes;
    std::int64_t dim, slots;
    std::int32_t used;
    std::int64_t layer = 0;
    double deviation = 2.0;
  };
  // Scores of ten carry the rounding of their operands into an exponent.
  template <class A>
  static constexpr double kBound = std::is_same_v<A, float>     ? 1e-5
                                   : std::is_same_v<A, Float16> ? 8e-3
                                                                : 6e-2;

  template <class A>
  void check(const Case& c, BankAlgo algo = BankAlgo::kAuto) {
    SCOPED_TRACE(testing::Message() << "algo " << static_cast<int>(algo) << ", width " << c.dim << ", " << c.slots
                                    << " slots, " << c.used << " used, layer " << c.layer);
    const float scale = !kOnCuda ? 0.7F : 1.0F / std::sqrt(static_cast<float>(c.dim));
    Matrix<A> q = random_matrix<A>(on(), c.shapes.total(), c.dim, kAlignedGaps, 1, c.deviation);
    const Banks banks(on(), c.shapes, c.slots, c.dim, c.used, c.deviation);
    const std::vector<double> wide_q = widened(q.values()), wide_bank = widened(banks.bank.values());
    std::vector<double> want(wide_q.size(), NAN);  // a gap is left alone
    for (std::size_t r = 0; r < banks.runs.size(); ++r) {
      const BankRun& run = banks.runs[r];
      const std::int64_t used = run.used_before(c.layer, c.slots);
      for (std::int64_t t = run.first; t < run.first + run.rows; ++t) {
        const std::vector<double> row =
            attend(wide_q.data() + t * c.dim, wide_bank.data() + static_cast<std::int64_t>(r) * c.slots * c.dim, c.dim,
                   used, c.slots - used, c.dim, static_cast<double>(scale));
        std::copy(row.begin(), row.end(), want.begin() + t * c.dim);
      }
    }
    on_every(
        [&](Backend& on) {
          Matrix<A> out(on, c.shapes.total(), c.dim, kAlignedGaps);
          const std::size_t scratch_bytes =
              bank_scratch_bytes(on, 3, std::max<std::int64_t>(c.shapes.longest(), 16), c.slots, c.dim, sizeof(A));
          Buffer<std::byte> scratch = unwritten<std::byte>(on, scratch_bytes);
          bank_attention(on,
                         BankAttention<Space, A>{.q = q.view(),
                                                 .out = out.view(),
                                                 .scale = scale,
                                                 .runs = banks.view(),
                                                 .slots = c.slots,
                                                 .layer = c.layer,
                                                 .scratch = scratch.data(),
                                                 .scratch_bytes = scratch_bytes},
                         algo);
          return out.download();
        },
        [&](const std::vector<A>& got) {
          const double bound = kBound<A> * (c.deviation < 1.0 ? 1.1 : 2.0);
          for (std::size_t i = 0; i < got.size(); ++i) {
            if (std::isnan(want[i])) {
              ASSERT_TRUE(std::isnan(to_float(got[i]))) << "gap, row " << i / static_cast<std::size_t>(c.dim);
            } else {
              ASSERT_NEAR(to_float(got[i]), want[i], bound) << "row " << i / static_cast<std::size_t>(c.dim);
            }
          }
        });
  }
};

#if defined(MMREC_TEST_CUDA)

TEST_F(BankTest, AttentionMatchesFloat64) {
  const auto check_all = [&]<class A>(A, const RunShapes& shapes, std::int64_t dim, std::int64_t slots) {
    const auto all = static_cast<std::int32_t>(slots);
    for (const BankAlgo algo : {BankAlgo::kSplit, BankAlgo::kProducts, BankAlgo::kAuto}) {
      for (const std::int32_t used : {0, 1, all - 1, all}) check<A>({shapes, dim, slots, used}, algo);
      check<A>({shapes, dim, slots, 2, 1}, algo);
    }
  };
  check_all(float{}, {{1, 4}, 1}, 7, 9);
  check_all(float{}, {{17, 1, 0, 3}}, 48, 33);
  check_all(BFloat16{}, {{1, 20, 2}}, 64, 40);
  check_all(Float16{}, {{3, 16}}, 40, 17);
  check<BFloat16>({{std::vector<std::int32_t>(9, 16)}, 32, 20, 5});  // more than go together
  check<float>({{{1, 2}}, 1028, 20, 18}, BankAlgo::kSplit);          // more channels than threads hold in one group
  check<BFloat16>({{{1}}, 2056, 12, 12}, BankAlgo::kSplit);
  check<Float16>({{{2}}, 4104, 5, 5}, BankAlgo::kSplit);  // more than they hold at all
  if (small_sizes()) return;
  check_all(float{}, {{1, 100, 33}}, 1024, 512);
  check_all(BFloat16{}, {{300, 1, 512}}, 1024, 512);
  check_all(Float16{}, {std::vector<std::int32_t>(70, 1)}, 768, 512);
}

#else

TEST_F(BankTest, AttentionMatchesFloat64ForEveryFillOfTheBank) {
  for (const std::int64_t dim : {1, 7, 48, 100}) {
    for (const std::int32_t used : {0, 1, 3, 31, 33, 36, 37}) {
      for (const double deviation : {0.1, 1.7}) {
        for (const std::int64_t layer : {0, 2}) {
          check<float>({{{1, 5, 0, 2}, 1}, dim, 37, used, layer, deviation});
        }
      }
    }
  }
}

#endif

TEST_F(BankTest, LargeNegativeScoresLeaveNothing) {
  on_every([](Backend& on) {
    Matrix<float> q(on, std::vector<float>(8, 100.0F), 1, 8), bank(on, std::vector<float>(32, -100.0F), 4, 8);
    Matrix<float> out(on, 1, 8);
    const std::vector<BankRun> run = {{.bank = bank.data(), .rows = 1, .used = 3}};
    const Buffer<BankRun> list = upload(on, run);
    Buffer<std::byte> scratch = unwritten<std::byte>(on, bank_scratch_bytes(on, 3, 16, 4, 8, sizeof(float)));
    bank_attention(on, BankAttention<Space>{.q = q.view(),
                                            .out = out.view(),
                                            .runs = {list.data(), run.data(), 1, 1},
                                            .slots = 4,
                                            .scratch = scratch.data(),
                                            .scratch_bytes = scratch.size()});
    for (const float x : out.download()) EXPECT_EQ(x, 0.0F);
  });
}

TEST_F(BankTest, WritingFillsFreeRowsThenTheFirst) {
  on_every([](Backend& on) {
    static constexpr std::int64_t kSlots = 8, kDim = 5;
    for (const std::int32_t used : {0, 3, 6, 8}) {
      for (const RunShapes& shapes :
           {RunShapes{{0, 1}, 2}, RunShapes{{1, 1}, 2}, RunShapes{{2, 1}, 2}, RunShapes{{5, 0, 1, 8}, 2}}) {
        for (const std::int64_t layer : {0, 1, 3}) {
          Matrix<float> h = random_matrix<float>(on, shapes.total(), kDim, kAlignedGaps, 3);
          const Banks banks(on, shapes, kSlots, kDim, used, 1.0);
          std::vector<float> expected = banks.bank.values();
          for (std::size_t r = 0; r < banks.runs.size(); ++r) {
            const BankRun& run = banks.runs[r];
            const std::int64_t n = std::min(kSlots, used + layer * run.rows);
            for (std::int64_t i = 0; i < run.rows; ++i) {
              const std::int64_t slot =
                  static_cast<std::int64_t>(r) * kSlots + (n + i < kSlots ? n + i : n + i - kSlots);
              std::copy_n(h.values().begin() + (run.first + i) * kDim, kDim, expected.begin() + slot * kDim);
            }
          }
          bank_write(on, {.h = h.view(), .runs = banks.view(), .slots = kSlots, .layer = layer});
          EXPECT_EQ(banks.bank.download(), expected) << used << " used, layer " << layer;
        }
      }
    }
  });
}

// ---- normed_recurrence ----------------------------------------------------------------------------------------------

class NormedRecurrenceTest : public OpTest {
 protected:
  // A CPU is compared from the first token on; a GPU of a token, given the one before: roundings grow from token to
  // token.
  template <class A>
  static constexpr double kBound = std::is_same_v<A, float>     ? 1e-5
                                   : std::is_same_v<A, Float16> ? 3e-3
                                                                : 2e-2;

  /// A call's operands.
  template <class A>
  struct Problem {
    RunShapes shapes;
    std::int64_t dim;
    bool carries;
    Matrix<A> z;
    Weights weight;
    Matrix<float> zm, gamma, bias, norm, state, h;
    Matrix<A> h_rounded;
    std::vector<BankRun> runs;
    Buffer<BankRun> list;

    Problem(Backend& on, const RunShapes& of, std::int64_t width, bool with_states, WeightFormat format = kDTypeOf<A>,
            double norm_size = 1.0)
        : shapes(of),
          dim(width),
          carries(with_states),
          z(random_matrix<A>(on, shapes.total(), dim, kAlignedGaps, 1, 1.2)),
          weight(on, dim, dim, format, 2, 0.5 / std::sqrt(static_cast<double>(dim))),
          zm(random_matrix<float>(on, shapes.total(), dim, kPacked, 3)),
          gamma(uniform_matrix<float>(on, shapes.total(), dim, kPacked, 4, 0.05, 0.85)),
          bias(random_matrix<float>(on, 1, dim, kPacked, 5)),
          norm(uniform_matrix<float>(on, 1, dim, kPacked, 6, 0.5 * norm_size, 1.5 * norm_size)),
          state(random_matrix<float>(on, std::ssize(shapes.rows), dim, kPacked, 7)),
          h(on, shapes.total(), dim, kAlignedGaps),
          h_rounded(on, shapes.total(), dim),
          runs(shapes.list()) {}

    NormedRecurrence<Space, A> op(Backend& on, std::int64_t layer) {
      for (std::size_t r = 0; carries && r < runs.size(); ++r) {
        runs[r].state = state.view().row(static_cast<std::int64_t>(r)) - layer * dim;
      }
      list = upload(on, runs);
      NormedRecurrence<Space, A> op{.z = z.view(),
                                    .zm = zm.view(),
                                    .gamma = gamma.view(),
                                    .h = h.view(),
                                    .h_rounded = {},
                                    .gate_weight = weight.view(),
                                    .gate_bias = bias.data(),
                                    .norm = norm.data(),
                                    .runs = {list.data(), runs.data(), std::ssize(runs), shapes.longest()},
                                    .carries = carries,
                                    .layer = layer};
      if constexpr (std::is_same_v<A, float>) {
        op.h_rounded = h.view();
      } else {
        op.h_rounded = h_rounded.view();
      }
      return op;
    }

    /// h [total, dim], NaN in gaps, and the states behind the runs. Each token goes on from the one before, on a GPU
    /// from that one's row of `seen`.
    std::vector<double> reference(const std::vector<float>& seen, std::vector<double>& state_after) const {
      std::vector<double> want(seen.size(), NAN);
      state_after = widened(state.values());
      const auto d = static_cast<std::size_t>(dim);
      for (std::size_t r = 0; r < runs.size(); ++r) {
        std::vector<double> before(d, 0.0);
        if (carries) std::copy_n(state_after.begin() + static_cast<std::ptrdiff_t>(r * d), d, before.begin());
        for (std::int64_t t = runs[r].first; t < runs[r].first + runs[r].rows; ++t) {
          std::vector<double> p(d);
          double squares = 0.0;
          for (std::size_t c = 0; c < d; ++c) {
            const auto at = static_cast<std::int64_t>(c);
            double gate = zm(t, at) + bias(0, at);
            for (std::size_t k = 0; k < d; ++k) {  // the product sees h rounded
              gate += weight.row(at)[k] * static_cast<double>(to_float(from_float<A>(static_cast<float>(before[k]))));
            }
            const double m = sigmoid(gate);
            p[c] = (1.0 - m + gamma(t, at)) * before[c] + m * z(t, at);
            squares += p[c] * p[c];
          }
          const double root = std::sqrt(squares / static_cast<double>(dim) + 1e-6);
          for (std::size_t c = 0; c < d; ++c) {
            before[c] = std::clamp(norm(0, static_cast<std::int64_t>(c)) * p[c] / root, -100.0, 100.0);
          }
          std::copy(before.begin(), before.end(), want.begin() + t * dim);
          if (kOnCuda && t + 1 < runs[r].first + runs[r].rows) std::copy_n(seen.begin() + t * dim, d, before.begin());
        }
        if (carries && runs[r].rows > 0) {
          std::copy(before.begin(), before.end(), state_after.begin() + static_cast<std::ptrdiff_t>(r * d));
        }
      }
      return want;
    }
  };

  template <class A>
  void check(NormedAlgo algo, const RunShapes& shapes, std::int64_t dim, bool carries,
             WeightFormat format = kDTypeOf<A>, double norm_size = 1.0, double bound = kBound<A>) {
    SCOPED_TRACE(testing::Message() << "algo " << static_cast<int>(algo) << ", " << shapes.rows.size()
                                    << " runs of up to " << shapes.longest() << ", width " << dim << ", "
                                    << name_of(format) << (carries ? ", states" : ""));
    Problem<A> problem(on(), shapes, dim, carries, format, norm_size);
    std::vector<double> want, state;
    on_every([&](Backend& on) {
      for (Matrix<float>* of : {&problem.h, &problem.state}) of->reset();
      normed_recurrence(on, problem.op(on, 3), algo);
      const std::vector<float> h = problem.h.download();
      const std::vector<A> rounded = problem.h_rounded.download();
      if (want.empty()) want = problem.reference(h, state);
      for (std::size_t i = 0; i < h.size(); ++i) {
        if (std::isnan(want[i])) continue;
        const double size = kOnCuda || norm_size > 1.0 ? 1.0 + std::abs(want[i]) : 1.0;
        ASSERT_LE(std::abs(static_cast<double>(h[i]) - want[i]), bound * size) << "entry " << i;
        if constexpr (sizeof(A) == 2) {
          ASSERT_EQ(rounded[i].bits, from_float<A>(h[i]).bits) << i;
        }
      }
      const std::vector<float> behind = problem.state.download();  // untouched where a run does not go on
      EXPECT_LE(kOnCuda || norm_size > 1.0 ? largest_error(behind, state) : max_error(behind, state), bound);
    });
  }

  template <class A>
  void check_both(NormedAlgo algo, const RunShapes& shapes, std::int64_t dim) {
    for (const bool carries : {false, true}) check<A>(algo, shapes, dim, carries);
  }
};

TEST_F(NormedRecurrenceTest, TheStateStaysWithinItsLimit) {
  for (const double size : {4.0, 30.0, 300.0}) {
    if (kOnCuda && size > 30.0) continue;
    check<float>(NormedAlgo::kGang, {{4, 2}}, 64, true, DType::kF32, size);
#if defined(MMREC_TEST_CUDA)
    Problem<Float16> problem(on(), {{2}}, 256, false);
    if (!normed_cluster_supported(on(), problem.op(on(), 0))) continue;
    // Gates feel each other's roundings more.
    check<Float16>(NormedAlgo::kCluster, {{5, 3}}, 256, true, DType::kF16, size, 1e-2);
#else
    check<float>(NormedAlgo::kGang, {{4, 2}}, 37, true, DType::kF32, size);
#endif
  }
}

TEST_F(NormedRecurrenceTest, NanStaysInItsRun) {
  on_every([](Backend& on) {
    Problem<std::conditional_t<kOnCuda, BFloat16, float>> problem(on, {{4, 4}}, 256, false);
    const auto op = problem.op(on, 0);
    on.upload(&kNan, problem.zm.view().row(1) + 5, 1);
    for (const NormedAlgo algo : {NormedAlgo::kGang, NormedAlgo::kCluster}) {
      if (algo == NormedAlgo::kCluster && !normed_cluster_supported(on, op)) continue;
      normed_recurrence(on, op, algo);
      const std::vector<float> h = problem.h.download();
      for (std::size_t i = 0; i < h.size(); ++i) EXPECT_EQ(std::isnan(h[i]), i / 256 >= 1 && i / 256 < 4) << i;
    }
  });
}

#if !defined(MMREC_TEST_CUDA)

TEST_F(NormedRecurrenceTest, MatchesFloat64) {
  for (const RunShapes& shapes : {RunShapes{{1}}, RunShapes{{5}}, RunShapes{{1, 1, 1}}, RunShapes{{3, 9, 0, 1, 4}, 1},
                                  RunShapes{std::vector<std::int32_t>(60, 3)}}) {
    for (const std::int64_t dim : {1, 7, 48, 64, 200}) {
      for (const WeightFormat format : kHostFormats) {
        for (const bool carries : {false, true}) check<float>(NormedAlgo::kAuto, shapes, dim, carries, format);
      }
    }
  }
}

TEST_F(NormedRecurrenceTest, NeighboursLayersAndCutsChangeNoBit) {
  on_every([](Backend& on) {
    const RunShapes shapes{{7, 40, 1, 13, 2}};
    Problem<float> together(on, shapes, 300, true), alone(on, shapes, 300, true);
    normed_recurrence(on, together.op(on, 0));
    auto op = alone.op(on, 2);
    for (const BankRun& whole : alone.runs) {  // a run alone, in two calls
      BankRun run = whole;
      for (std::int32_t done = 0; done < whole.rows;) {
        run.rows = done == 0 ? (whole.rows + 1) / 2 : whole.rows - done;
        op.runs = {&run, &run, 1, run.rows};
        normed_recurrence(on, op);
        done += run.rows;
        run.first += run.rows;
      }
    }
    EXPECT_TRUE(same_bits(alone.h.download(), together.h.download()));
    EXPECT_TRUE(same_bits(alone.state.download(), together.state.download()));
  });
}

#else

TEST_F(NormedRecurrenceTest, GangsTakeAnyWidth) {
  for (const std::int64_t dim : {1, 7, 48, 100, 200}) {
    check_both<float>(NormedAlgo::kGang, {{3, 5}, 1}, dim);
    check_both<BFloat16>(NormedAlgo::kGang, {{4}}, dim);
    check_both<Float16>(NormedAlgo::kGang, {{2, 0, 3}}, dim);
  }
  if (small_sizes()) return;
  check_both<float>(NormedAlgo::kGang, {{100, 7}}, 1024);
  check_both<float>(NormedAlgo::kGang, {{9}}, 3000);
  check_both<BFloat16>(NormedAlgo::kGang, {{9, 9}}, 4096);
}

TEST_F(NormedRecurrenceTest, GangsTakeManyRuns) {
  RunShapes shapes;
  for (std::int32_t i = 0; i < 21; ++i) shapes.rows.push_back(5 - i / 5);
  check_both<float>(NormedAlgo::kGang, shapes, 64);
  check_both<BFloat16>(NormedAlgo::kGang, shapes, 64);
}

TEST_F(NormedRecurrenceTest, FirstTokensAreNormedRowByRow) {
  for (const std::int64_t dim : {1, 48, 700, 1100}) {
    check<float>(NormedAlgo::kRows, {{1, 0, 1, 1}, 1}, dim, false);
    check<BFloat16>(NormedAlgo::kRows, {{1, 1}}, dim, false);
  }
}

TEST_F(NormedRecurrenceTest, ClustersHoldTheGates) {
  Problem<BFloat16> problem(on(), {{2}}, 256, false);
  if (!normed_cluster_supported(on(), problem.op(on(), 0))) GTEST_SKIP() << "no cluster of 16 blocks here";
  EXPECT_EQ(choose_normed(on(), problem.op(on(), 0)), NormedAlgo::kCluster);
  constexpr NormedAlgo kAlgo = NormedAlgo::kCluster;
  check_both<BFloat16>(kAlgo, {{4}}, 256);
  check_both<Float16>(kAlgo, {{3, 5, 0, 1}, 1}, 512);
  check<BFloat16>(kAlgo, {{1, 1, 4, 2, 3, 3, 1, 1, 2}}, 256, true);
  for (const std::int64_t dim : {768, 1024}) check<BFloat16>(kAlgo, {{3, 2}}, dim, true);
  if (small_sizes()) return;
  for (const std::int64_t dim : {256, 512, 768, 1024}) {
    check_both<BFloat16>(kAlgo, {{200}}, dim);
    check_both<Float16>(kAlgo, {{65, 64, 50, 50, 9, 7, 3, 1, 300, 299, 20}}, dim);
  }
  check<BFloat16>(kAlgo, {std::vector<std::int32_t>(70, 12)}, 1024, false);
}

#endif

}  // namespace
}  // namespace mmrec::kernels::test
