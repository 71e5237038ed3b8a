// Ops that work row by row, against float64: norms, the residual stream, the decay gate, embedding, segment sums. Long,
// because each of the small ops has its cases here.
#include "tests/ops/op_test.h"

namespace mmrec::kernels::test {
namespace {

// ---- rmsnorm --------------------------------------------------------------------------------------------------------

class RmsnormTest : public OpTest {
 protected:
  /// x is normal, with this deviation.
  void check(std::int64_t rows, std::int64_t dim, Layout layout, double deviation = 3.0,
             NormEpsilon epsilon = NormEpsilon::kBesideRoot) {
    Matrix<float> x = random_matrix<float>(on(), rows, dim, layout, 1, deviation);
    const std::vector<float> weight = random_uniform<float>(static_cast<std::size_t>(dim), 0.5, 1.5, 2);
    const Buffer<float> on_backend = upload(on(), weight);
    const std::vector<double> want = normed(x.values(), weight, epsilon == NormEpsilon::kInsideRoot);
    for_activations([&]<class A>(A) {
      on_every(
          [&](Backend& on) {
            Matrix<A> y(on, rows, dim, layout);
            rmsnorm(on, x.read(), on_backend.data(), y.view(), epsilon);
            return y.download();
          },
          [&](const std::vector<A>& got) {
            EXPECT_TRUE(is_normed(got, want))
                << rows << " x " << dim << ", pad " << layout.pad << ", deviation " << deviation;
          });
    });
  }
};

TEST_F(RmsnormTest, MatchesFloat64InAnyLayout) {
  for (const std::int64_t dim : {1, 7, 31, 48, 384, 1000, 2048, 4096, 8191, 8192, 9001, 16384}) {
    for (const std::int64_t rows : {1, 3, 130}) {
      if (too_large(rows * dim)) continue;
      for (const Layout layout : kLayouts) check(rows, dim, layout);
    }
  }
}

TEST_F(RmsnormTest, EpsilonCountsWhereTheRowIsSmallAndLargeSquaresDoNotOverflow) {
  for (const double scale : {0.0, 1e-30, 1e-20, 1e-7, 1e-6, 1e-3, 1e18, 1e30}) {
    for (const NormEpsilon epsilon : {NormEpsilon::kBesideRoot, NormEpsilon::kInsideRoot}) {
      check(1, 48, kPacked, scale, epsilon);
    }
  }
}

TEST_F(RmsnormTest, InPlaceAndAloneGiveTheSameBits) {
  on_every([](Backend& on) {
    for (const std::int64_t dim : {100, 9001}) {
      const std::int64_t rows = dim == 100 && !kOnCuda ? 301 : 9;
      const Buffer<float> weight = upload(on, random_normal<float>(static_cast<std::size_t>(dim), 1.0, 0.1, 4));
      Matrix<float> x = random_matrix<float>(on, rows, dim, kPacked, 5), y(on, rows, dim), alone(on, rows, dim);
      rmsnorm(on, x.read(), weight.data(), y.view());
      for (std::int64_t r = 0; r < rows; ++r) {
        rmsnorm(on, x.read().middle_rows(r, 1), weight.data(), alone.view().middle_rows(r, 1));
      }
      EXPECT_TRUE(same_bits(alone.download(), y.download())) << dim;
      rmsnorm(on, x.read(), weight.data(), x.view());
      EXPECT_TRUE(same_bits(x.download(), y.download())) << dim;
    }
  });
}

TEST_F(RmsnormTest, NanStaysInItsRow) {
  on_every([](Backend& on) {
    std::vector<float> values = random_normal<float>(3 * 64, 0.0, 1.0, 6);
    values[64 + 17] = NAN;
    Matrix<float> x(on, values, 3, 64);
    const Buffer<float> weight = upload(on, std::vector<float>(64, 1.0F));
    for_activations([&]<class A>(A) {
      Matrix<A> y(on, 3, 64);
      rmsnorm(on, x.read(), weight.data(), y.view());
      const std::vector<A> got = y.download();
      for (std::size_t i = 0; i < got.size(); ++i) EXPECT_EQ(std::isnan(to_float(got[i])), i / 64 == 1) << i;
    });
  });
}

// ---- block_residual: y = x + h + 0.1 v + bias -----------------------------------------------------------------------

enum class Bias : std::uint8_t { kNone, kShared, kPerSequence };

class BlockResidualTest : public OpTest {
 protected:
  template <class A>
  void check(std::int64_t time, std::int64_t dim, Layout layout) {
    constexpr std::int64_t kBatch = 3;
    // h has the carry as its row 0; v is a part of wider rows.
    Matrix<float> h = uniform_matrix<float>(on(), kBatch * (time + 1), dim, kPacked, 2);
    Matrix<A> v = uniform_matrix<A>(on(), kBatch * time, dim, layout, 3);
    Matrix<float> bias = uniform_matrix<float>(on(), kBatch, dim, kPacked, 4);
    Matrix<float> x = uniform_matrix<float>(on(), kBatch * time, dim, layout, 1);
    for (const Bias kind : {Bias::kNone, Bias::kShared, Bias::kPerSequence}) {
      std::vector<double> expected;
      for (std::int64_t r = 0; r < kBatch * time; ++r) {
        const std::int64_t b = r / time;
        const std::int64_t bias_row = kind == Bias::kPerSequence ? b : 0;
        for (std::int64_t c = 0; c < dim; ++c) {
          expected.push_back(x(r, c) + h(r + b + 1, c) + 0.1 * v(r, c) +
                             (kind == Bias::kNone ? 0.0 : bias(bias_row, c)));
        }
      }
      on_every(
          [&](Backend& on) {
            x.reset();
            Matrix<float> y(on, kBatch * time, dim, layout);
            BlockResidual<Space, A> op{.x = x.sequences(kBatch, 0, time),
                                       .h = h.sequences(kBatch, 1, time),
                                       .v = v.sequences(kBatch, 0, time),
                                       .bias = kind == Bias::kNone ? nullptr : bias.data(),
                                       .bias_stride = kind == Bias::kPerSequence ? dim : 0,
                                       .y = y.sequences(kBatch, 0, time)};
            block_residual(on, op);
            std::vector<float> got = y.download();
#if defined(MMREC_TEST_CUDA)
            // With the norm: the bits of the two ops.
            Matrix<float> norm = random_matrix<float>(on, 1, dim, kPacked, 5);
            Matrix<A> normed_apart(on, kBatch * time, dim, layout), u(on, kBatch * time, dim, layout);
            rmsnorm(on, y.read(), norm.data(), normed_apart.view());
            Matrix<float> again(on, kBatch * time, dim, layout);
            op.y = again.sequences(kBatch, 0, time);
            block_residual_norm(on, op, norm.data(), u.view());
            EXPECT_TRUE(same_bits(again.download(), got));
            EXPECT_TRUE(same_bits(u.download(), normed_apart.download()));
#endif
            op.y = x.sequences(kBatch, 0, time);
            block_residual(on, op);
            EXPECT_TRUE(same_bits(x.download(), got)) << "in place";
            return got;
          },
          [&](const std::vector<float>& got) { EXPECT_LT(max_error(got, expected), 4e-7) << time << " x " << dim; });
    }
  }
};

TEST_F(BlockResidualTest, MatchesFloat64WithTheStateOneRowLongerAndEveryBias) {
  for (const std::int64_t dim : {1, 7, 48, 384, 1000, 4096}) {
    for (const std::int64_t time : {1, 3, 65}) {
      if (too_large(time * dim, 8000) || (kOnCuda && dim == 384)) continue;
      for (const Layout layout : kLayouts) {
        for_activations([&]<class A>(A) { check<A>(time, dim, layout); });
      }
    }
  }
}

// ---- decay_gate -----------------------------------------------------------------------------------------------------

class DecayGateTest : public OpTest {
 protected:
  static double clamped(double x) { return std::isnan(x) ? x : std::clamp(x, 1e-6, 1.0 - 1e-6); }
  void check(std::int64_t rows, std::int64_t dim, Layout layout, bool two, int alias) {
    Matrix<float> a = uniform_matrix<float>(on(), rows, dim, layout, 1, -25.0, 25.0);
    Matrix<float> c = uniform_matrix<float>(on(), rows, dim, kPacked, 2, -25.0, 25.0);
    Matrix<float> fresh(on(), rows, dim, layout);
    Matrix<float>& gamma = alias == 0 ? fresh : alias == 1 ? a : c;
    DecayGate<Space> op{.a = a.view(), .gamma = gamma.view()};
    if (two) op.c = c.view();
    std::vector<double> want;
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t i = 0; i < dim; ++i) {
        want.push_back(clamped(sigmoid(a(r, i)) * (two ? sigmoid(c(r, i)) : 1.0)));
      }
    }
    on_every(
        [&](Backend& on) {
          gamma.reset();
          decay_gate(on, op);
          return gamma.download();
        },
        [&](const std::vector<float>& got) {
          // A GPU's eˣ carries the rounding of x log₂e, so small gates lose a little.
          const auto allowed = [&](std::size_t i) {
            return kOnCuda ? want[i] * (4e-7 - 2e-7 * std::log(want[i])) : 2e-7;
          };
          EXPECT_TRUE(all_round_to(got, want, allowed)) << rows << " x " << dim << ", alias " << alias;
        });
  }
};

TEST_F(DecayGateTest, MatchesFloat64AndMayAlias) {
  for (const std::int64_t dim : {1, 7, 31, 48, 384, 1000, 4096}) {
    for (const std::int64_t rows : {1, 5, 130}) {
      if (too_large(rows * dim, 20000) || (kOnCuda && (dim == 31 || dim == 384))) continue;
      for (const Layout layout : kLayouts) {
        for (const int alias : {0, 1, 2}) {
          check(rows, dim, layout, true, alias);
          if (alias != 2) check(rows, dim, layout, false, alias);
        }
      }
    }
  }
}

TEST_F(DecayGateTest, ClampsAtTheEndsAndLetsNanPass) {
  const std::vector<float> values = {INFINITY, -INFINITY, NAN,  200.0F, -200.0F, 88.5F, -88.5F,
                                     3e38F,    -3e38F,    0.0F, -13.0F, -14.0F,  15.0F, 100.0F};
  const auto count = static_cast<std::int64_t>(values.size());
  on_every([&](Backend& on) {
    Matrix<float> a(on, values, 1, count), c(on, std::vector<float>(values.size(), 200.0F), 1, count);
    for (const bool two : {false, true}) {
      Matrix<float> gamma(on, 1, count);
      DecayGate<Space> op{.a = a.view(), .gamma = gamma.view()};
      if (two) op.c = c.view();
      decay_gate(on, op);
      const std::vector<float> got = gamma.download();
      for (std::size_t i = 0; i < values.size(); ++i) {
        const double tolerance = kOnCuda ? 1e-7 : values[i] == -13.0F ? 1e-11 : 0.0;  // a clamped value is exact
        const auto want = static_cast<float>(clamped(sigmoid(static_cast<double>(values[i]))));
        EXPECT_TRUE(rounds_to(got[i], static_cast<double>(want), tolerance)) << values[i];
      }
    }
  });
}

// ---- embed ----------------------------------------------------------------------------------------------------------

class EmbedTest : public OpTest {};

TEST_F(EmbedTest, WidensTheTokensRowsExactly) {
  for_weights([&]<class A>(A, WeightFormat format) {
    constexpr std::int64_t kVocab = 37;
    for (const std::int64_t dim : {1, 7, 31, 48, 1024, 4099}) {
      const Weights table(on(), kVocab, dim, format, 1);
      for (const std::int64_t n : {1, 3, 130}) {
        if (too_large(n * dim)) continue;
        std::vector<int> tokens = random_ids(n, kVocab, 2);
        tokens.back() = kVocab - 1;
        const Buffer<int> on_backend = upload(on(), tokens);
        std::vector<float> expected;
        for (const int token : tokens) {
          for (std::int64_t c = 0; c < dim; ++c) expected.push_back(static_cast<float>(table(token, c)));
        }
        on_every([&](Backend& on) {
          for (const Layout layout : kLayouts) {
            Matrix<float> x(on, n, dim, layout);
            embed(on, table.view(), on_backend.data(), x.view());
            EXPECT_TRUE(same_bits(x.download(), expected)) << n << " x " << dim << ", offset " << layout.offset;
          }
        });
      }
    }
  });
}

TEST_F(EmbedTest, NoTokensWriteNothing) {
  const Weights table(on(), 3, 8, DType::kF32, 3);
  Matrix<float> x(on(), 1, 8);
  embed(on(), table.view(), nullptr, x.view().middle_rows(0, 0));
  EXPECT_TRUE(same_bits(x.download(), x.values()));
}

// ---- copy_rows, fill_zero -------------------------------------------------------------------------------------------

class CopyTest : public OpTest {};

TEST_F(CopyTest, RoundsToNearestEven) {
  for_activations([&]<class A>(A) {
    for (const std::int64_t cols : {1, 7, 48, 1000, 4096}) {
      for (const std::int64_t rows : {1, 3, 130}) {
        if (too_large(rows * cols, 20000)) continue;
        for (const Layout from_layout : kLayouts) {
          Matrix<float> from = random_matrix<float>(on(), rows, cols, from_layout, 1, 100.0);
          std::vector<A> expected;
          for (const float value : from.values()) expected.push_back(from_float<A>(value));
          on_every([&](Backend& on) {
            for (const Layout to_layout : kLayouts) {
              Matrix<A> to(on, rows, cols, to_layout);
              copy_rows(on, from.read(), to.view());
              EXPECT_TRUE(same_bits(to.download(), expected)) << rows << " x " << cols;
            }
          });
        }
      }
    }
  });
}

TEST_F(CopyTest, SpecialValues) {
  // Ties, the largest value that does not overflow, what overflows, subnormal results, infinities.
  const std::vector<float> values = {1.00390625F, 1.01171875F, 65519.9F, 65520.0F, 3.4e38F,   -3.4e38F,
                                     5.9e-8F,     2.98e-8F,    -6.1e-5F, INFINITY, -INFINITY, -0.0F,
                                     1.00048828F, 1.00146484F, 1.0e-40F, 0.0F};
  const auto count = static_cast<std::int64_t>(values.size());
  Matrix<float> from(on(), values, 1, count);
  for_activations([&]<class A>(A) {
    Matrix<A> to(on(), 1, count);
    copy_rows(on(), from.read(), to.view());
    std::vector<A> expected;
    for (const float value : values) expected.push_back(from_float<A>(value));
    EXPECT_TRUE(same_bits(to.download(), expected));
  });
}

TEST_F(CopyTest, FillZero) {
  on_every([](Backend& on) {
    for (const std::int64_t cols : {1, 7, 48, 1000}) {
      for (const Layout layout : kLayouts) {
        Matrix<float> to(on, 5, cols, layout);
        fill_zero(on, to.view());
        EXPECT_TRUE(same_bits(to.download(), std::vector<float>(static_cast<std::size_t>(5 * cols), 0.0F)));
      }
    }
  });
}

// ---- segment_sum, segment_close -------------------------------------------------------------------------------------

// The CPU adds in the order of time: its sums are exactly those of float64.
class SegmentTest : public OpTest {
 protected:
  static void check(Backend& on, std::int64_t batch, std::int64_t time, std::int64_t dim, Layout layout,
                    const std::vector<std::int64_t>& cuts) {
    Matrix<float> x = random_matrix<float>(on, batch * time, dim, layout, 1, 5.0);
    std::vector<double> expected(static_cast<std::size_t>(batch * dim), 0.0);
    std::vector<double> bound(expected.size(), kOnCuda ? 1e-30 : 0.0);
    for (std::int64_t r = 0; r < batch * time; ++r) {
      for (std::int64_t c = 0; c < dim; ++c) {
        const auto i = static_cast<std::size_t>(r / time * dim + c);
        expected[i] += x(r, c);
        bound[i] += kOnCuda ? 1e-14 * std::abs(x(r, c)) : 0.0;
      }
    }
    for (const std::int64_t cut : cuts) {
      SCOPED_TRACE(testing::Message() << batch << " x " << time << " x " << dim << ", cut " << cut);
      const auto run = [&] {
        Buffer<double> sum = upload(on, std::vector<double>(expected.size(), 0.0));
        for (std::int64_t t = 0; t < time; t += cut) {
          segment_sum(on, {.x = x.sequences(batch, t, std::min(cut, time - t)), .sum = {sum.data(), batch, dim}});
        }
        return sum;
      };
      Buffer<double> sum = run();
      const std::vector<double> sums = download(on, sum);
      for (std::size_t i = 0; i < sums.size(); ++i) ASSERT_LE(std::abs(sums[i] - expected[i]), bound[i]);
      ASSERT_EQ(download(on, run()), sums);
      Matrix<float> slot(on, batch, dim, {.pad = 5, .offset = 2});
      segment_close(on, {sum.data(), batch, dim}, time, slot.view());
      const std::vector<float> got = slot.download();
      for (std::size_t i = 0; i < expected.size(); ++i) {
        ASSERT_EQ(got[i], static_cast<float>(sums[i] / static_cast<double>(time)));
      }
      ASSERT_EQ(download(on, sum), std::vector<double>(expected.size(), 0.0));
    }
  }
};

TEST_F(SegmentTest, IsTheSumHoweverItIsCut) {
  on_every([](Backend& on) {
    for (const std::int64_t dim : {1, 7, 31, 33, 48, 100, 384}) {
      if (kOnCuda && dim == 384) continue;
      if (few_cases() && dim != 33) {
        check(on, 3, 257, dim, kPacked, {17, 129});
      } else {
        check(on, 3, 257, dim, kPacked, {1, 7, 16, 17, 64, 128, 129, 257});
      }
    }
    check(on, 2, 300, 64, kAlignedGaps, {40, 300});
    check(on, 2, 300, 64, kUnaligned, {40, 300});
    if (!gpu_sizes()) return;
    check(on, 1, 4097, 1024, kPacked, {1, 256, 4097});
    check(on, 1, 5000, 8, kPacked, {5000});
    check(on, 2, 1000, 4096, kAlignedGaps, {256, 1000});
    check(on, 70000, 17, 3, kPacked, {17});
  });
}

// ---- cases: the rows of a prefilled chunk beside its products and its recurrence ----

void row_cases(Backend& on, bool small, OpCases& cases) {
  using A = std::conditional_t<kOnCuda, BFloat16, float>;
  const std::int64_t n = small ? 64 : kOnCuda ? 4096 : 1024;
  for (const std::int64_t dim : small ? std::vector<std::int64_t>{256} : std::vector<std::int64_t>{1024, 4096}) {
    struct Rows {
      Matrix<float> x, c, weight, y;
      Matrix<A> half;
      Buffer<double> sum;
      Rows(Backend& b, std::int64_t rows, std::int64_t cols)
          : x(uniform_matrix<float>(b, rows, cols, kPacked, 1)),
            c(uniform_matrix<float>(b, rows, cols, kPacked, 2)),
            weight(uniform_matrix<float>(b, 1, cols, kPacked, 3, 0.5, 1.5)),
            y(b, rows, cols),
            half(uniform_matrix<A>(b, rows, cols, kPacked, 4)),
            sum(upload(b, std::vector<double>(static_cast<std::size_t>(cols), 0.0))) {}
    };
    const auto add = [&](const std::string& op, Limit limit, double bytes, auto call, auto check) {
      add_case(cases, op, join(n, " x ", dim), limit, bytes * static_cast<double>(n * dim), [=, &on] {
        const auto rows = std::make_shared<Rows>(on, n, dim);
        return PreparedOp{[=] { call(*rows); }, [=] { check(*rows); }};
      });
    };
    const auto each = [=](const auto& f) {
      std::vector<double> want(static_cast<std::size_t>(n * dim));
      parallel_for(n * dim, [&](std::int64_t i) { want[static_cast<std::size_t>(i)] = f(i / dim, i % dim); });
      return want;
    };
    add(
        typed<A>("rmsnorm"), Limit::kCopy, 4.0 + sizeof(A),
        [&on](Rows& r) { rmsnorm(on, r.x.read(), r.weight.data(), r.half.view()); },
        [](Rows& r) { EXPECT_TRUE(is_normed(r.half.download(), normed(r.x.values(), r.weight.values()))); });
    add(
        typed<A>("block_residual"), Limit::kCopy, 12.0 + sizeof(A),
        [=, &on](Rows& r) {
          block_residual(on, BlockResidual<Space, A>{.x = r.x.sequences(1, 0, n),
                                                     .h = r.c.sequences(1, 0, n),
                                                     .v = r.half.sequences(1, 0, n),
                                                     .bias = r.weight.data(),
                                                     .y = r.y.sequences(1, 0, n)});
        },
        [=](Rows& r) {
          const auto want = each([&](std::int64_t row, std::int64_t c) {
            return r.x(row, c) + r.c(row, c) + 0.1 * r.half(row, c) + r.weight(0, c);
          });
          EXPECT_LT(max_error(r.y.download(), want), 1e-6);
        });
    add(
        "decay_gate", Limit::kCopy, 12.0,
        [&on](Rows& r) { decay_gate(on, {.a = r.x.view(), .c = r.c.view(), .gamma = r.y.view()}); },
        [=](Rows& r) {
          const auto want =
              each([&](std::int64_t row, std::int64_t c) { return sigmoid(r.x(row, c)) * sigmoid(r.c(row, c)); });
          EXPECT_TRUE(all_round_to(r.y.download(), want, [](std::size_t) { return 4e-7; }));
        });
    add(
        "segment_sum", Limit::kRead, 4.0,
        [=, &on](Rows& r) {
          segment_sum(on, {.x = r.x.sequences(1, 0, n), .sum = {r.sum.data(), 1, dim}});
        },
        [=, &on](Rows& r) {
          const std::vector<double> got = download(on, r.sum);
          for (std::int64_t c = 0; c < dim; ++c) {
            double want = 0.0;
            for (std::int64_t row = 0; row < n; ++row) want += r.x(row, c);
            ASSERT_NEAR(got[static_cast<std::size_t>(c)], want, 1e-14 * static_cast<double>(n)) << c;
          }
        });
  }
}
const RegisteredCases kCases(row_cases);

}  // namespace
}  // namespace mmrec::kernels::test
