// Token log-probs and their gradient against float64, at awkward widths, alignments, positions and values. Longer than
// other files, because both directions share references and operands.
#include <sys/mman.h>

#include "kernels/cpu/cpu.h"
#include "tests/ops/op_test.h"

namespace mmrec::kernels::test {
namespace {

constexpr float kPoison = 12345.5F;  // a value that no op writes
constexpr float kLargest = std::numeric_limits<float>::max();

#if !defined(MMREC_TEST_CUDA)
template <class T, class Index>
void token_logprobs_unchecked(Cpu& cpu, const TokenLogprobs<T, Index, Host>& op) {
  token_logprobs(cpu, op);
}
#endif

template <class T>
Matrix<T> random_logits(Backend& on, std::int64_t n, std::int64_t cols, Layout layout = kPacked, double spread = 4.0) {
  return random_matrix<T>(on, n, cols, layout, static_cast<std::uint64_t>(n + 3 * cols), spread);
}
template <class Index>
std::vector<Index> random_targets(std::int64_t n, std::int64_t cols) {
  const std::vector<int> ids = random_ids(n, cols, 1000 + static_cast<std::uint64_t>(n + cols));
  return {ids.begin(), ids.end()};
}

/// logsumexp of a row in float64: plain two passes.
template <class T>
double log_sum(const Matrix<T>& logits, std::int64_t r, std::int64_t cols) {
  double max = -INFINITY, sum = 0.0;
  for (std::int64_t v = 0; v < cols; ++v) max = std::fmax(max, logits(r, v));
  for (std::int64_t v = 0; v < cols; ++v) sum += std::exp(logits(r, v) - max);
  return max + std::log(sum);
}
template <class T, class Index>
std::vector<double> reference(const Matrix<T>& logits, const std::vector<Index>& targets, std::int64_t cols) {
  return parallel_map(std::ssize(targets), [&](std::int64_t r) {
    return logits(r, static_cast<std::int64_t>(targets[static_cast<std::size_t>(r)])) - log_sum(logits, r, cols);
  });
}
double allowed(double expected) { return 2e-6 + 1e-7 * std::abs(expected); }

class TokenLogprobsTest : public OpTest {
 public:
  /// The op, the op without its check of the targets where a backend has it, and the gradient.
  template <class T>
  static void add_cases(Backend& on, OpCases& cases, std::int64_t n, std::int64_t cols) {
    struct Operands {
      Matrix<T> logits, d;
      std::vector<int> targets;
      std::vector<float> grad;
      Buffer<int> t;
      Buffer<float> g, out;
      Operands(Backend& on, std::int64_t n, std::int64_t cols, bool with_d)
          : logits(random_logits<T>(on, n, cols)),
            d(on, with_d ? n : 0, cols),
            targets(random_targets<int>(n, cols)),
            grad(some_gradients(n)),
            t(upload(on, targets)),
            g(upload(on, grad)),
            out(unwritten<float>(on, targets.size())) {}
      TokenLogprobs<T, int, Space> op() { return {logits.read(), t.data(), out.data()}; }
    };
    const std::string shape = join("(", n, ", ", cols, ")"), waits = kOnCuda ? "waits for the host" : "";
    const double bytes = bytes_of<T>(n * cols);
    const auto add = [&](const char* op, const std::string& note, auto run) {
      add_case(cases, typed<T>(op), shape, Limit::kRead, bytes, [=, &on] {
        const auto in = std::make_shared<Operands>(on, n, cols, false);
        const auto check = [=, &on] {
          expect_logprobs(download(on, in->out), reference(in->logits, in->targets, cols), cols);
        };
        return PreparedOp{[=, &on] { run(on, in->op()); }, check, note};
      });
    };
    add("token_logprobs", "", [](Backend& to, const auto& op) { token_logprobs_unchecked(to, op); });
    if (kOnCuda) add("token_logprobs checked", waits, [](Backend& to, const auto& op) { token_logprobs(to, op); });
    // A CPU reads logits twice: the row's sum comes first.
    const double moved = (kOnCuda ? 2.0 : 3.0) * bytes;
    add_case(cases, typed<T>("token_logprobs_backward"), shape, Limit::kCopy, moved, [=, &on] {
      const auto in = std::make_shared<Operands>(on, n, cols, true);
      const TokenLogprobsBackward<T, int, Space> op{in->logits.read(), in->t.data(), in->g.data(), in->d.view()};
      const auto check = [=] {
        const auto sums = parallel_map(n, [&](std::int64_t r) { return log_sum(in->logits, r, cols); });
        const auto p = [&](std::int64_t r, std::int64_t v) {
          return std::exp(in->logits(r, v) - sums[static_cast<std::size_t>(r)]);
        };
        expect_gradient(in->d.download(), p, in->targets, in->grad, cols);
      };
      return PreparedOp{[=, &on] { token_logprobs_backward(on, op); }, check, waits};
    });
  }

 protected:
  template <class T, class Index>
  static std::vector<float> forward(Backend& on, Matrix<T>& logits, const std::vector<Index>& targets) {
    const Buffer<Index> t = upload(on, targets);
    Buffer<float> out = upload(on, std::vector<float>(targets.size(), kPoison));
    token_logprobs(on, TokenLogprobs<T, Index, Space>{logits.read(), t.data(), out.data()});
    return download(on, out);
  }
  template <class T, class Index>
  static void backward(Backend& on, Matrix<T>& logits, const std::vector<Index>& targets,
                       const std::vector<float>& grad, Matrix<T>& d) {
    const Buffer<Index> t = upload(on, targets);
    const Buffer<float> g = upload(on, grad);
    token_logprobs_backward(on, TokenLogprobsBackward<T, Index, Space>{logits.read(), t.data(), g.data(), d.view()});
  }

  static void expect_logprobs(const std::vector<float>& got, const std::vector<double>& want, std::int64_t cols) {
    EXPECT_TRUE(all_round_to(got, want, [&](std::size_t r) { return allowed(want[r]); }))
        << got.size() << " x " << cols;
  }
  static std::vector<float> some_gradients(std::int64_t n) {
    std::vector<float> grad;
    for (std::int64_t r = 0; r < n; ++r) grad.push_back(r % 3 == 0 ? 1.0F : -0.37F * static_cast<float>(r));
    return grad;
  }
  /// p(row, column): the probability under the logits.
  template <class T, class P, class Index>
  static void expect_gradient(const std::vector<T>& got, const P& p, const std::vector<Index>& targets,
                              const std::vector<float>& grad, std::int64_t cols) {
    const double rounding = std::is_same_v<T, float> ? 0x1p-23 : kHalfUnit<T>;
    const double worst = parallel_max(std::ssize(got), [&](std::int64_t i) {
      const std::int64_t r = i / cols, v = i % cols;
      const auto k = static_cast<std::size_t>(r);
      const auto g = static_cast<double>(grad[k]);
      const double expected = g * ((v == static_cast<std::int64_t>(targets[k]) ? 1.0 : 0.0) - p(r, v));
      const double bound =
          std::abs(expected) * (rounding + 1e-6) + (kOnCuda ? 4e-7 : 2e-7) * std::abs(g) * p(r, v) + 0x1p-25;
      return std::abs(static_cast<double>(to_float(got[static_cast<std::size_t>(i)])) - expected) / bound;
    });
    ASSERT_LE(worst, 1.0) << targets.size() << " x " << cols;
  }

  template <class T, class Index>
  void check_forward(std::int64_t n, std::int64_t cols, Layout layout, double spread = 4.0) {
    SCOPED_TRACE(layout.pad);
    Matrix<T> logits = random_logits<T>(on(), n, cols, layout, spread);
    const std::vector<Index> targets = random_targets<Index>(n, cols);
    const std::vector<double> want = reference(logits, targets, cols);
    on_every([&](Backend& on) { return forward(on, logits, targets); },
             [&](const std::vector<float>& got) { expect_logprobs(got, want, cols); });
  }
  template <class T, class Index>
  void check_backward(std::int64_t n, std::int64_t cols, Layout layout, Layout d_layout) {
    SCOPED_TRACE(layout.pad);
    Matrix<T> logits = random_logits<T>(on(), n, cols, layout);
    const std::vector<Index> targets = random_targets<Index>(n, cols);
    const std::vector<float> grad = some_gradients(n);
    std::vector<double> p;
    for (std::int64_t r = 0; r < n; ++r) {
      const double sum = log_sum(logits, r, cols);
      for (std::int64_t v = 0; v < cols; ++v) p.push_back(std::exp(logits(r, v) - sum));
    }
    on_every(
        [&](Backend& on) {
          Matrix<T> d(on, n, cols, d_layout), in_place(on, logits.values(), n, cols, layout);
          backward(on, logits, targets, grad, d);
          std::vector<T> got = d.download();
          backward(on, in_place, targets, grad, in_place);
          // On a GPU other layouts are other vectors, other sums.
          const bool alike = !kOnCuda || layout.pad == d_layout.pad;
          EXPECT_TRUE(!alike || same_bits(in_place.download(), got)) << cols;
          return got;
        },
        [&](const std::vector<T>& got) {
          const auto at = [&](std::int64_t r, std::int64_t v) { return p[static_cast<std::size_t>(r * cols + v)]; };
          expect_gradient(got, at, targets, grad, cols);
        });
  }

  static constexpr std::int64_t kWidths[] = {1,   2,    7,    15,   16,   17,   63,    64,    65,
                                             257, 2049, 4095, 4096, 4097, 8200, 32000, 50257, 128256};
};

template <class T, class Index>
struct Types {
  using Value = T;
  using Target = Index;
};
struct TypesName {
  template <class P>
  static std::string GetName(int) {
    return std::string(name_of(kDTypeOf<typename P::Value>)) + (sizeof(typename P::Target) == 4 ? "_int32" : "_int64");
  }
};
template <class P>
class TokenLogprobsTypedTest : public TokenLogprobsTest {};
using AllTypes =
    ::testing::Types<Types<float, std::int32_t>, Types<float, std::int64_t>, Types<Float16, std::int32_t>,
                     Types<Float16, std::int64_t>, Types<BFloat16, std::int32_t>, Types<BFloat16, std::int64_t>>;
TYPED_TEST_SUITE(TokenLogprobsTypedTest, AllTypes, TypesName);

// Rows as they come (aligned where the width is), and rows of which each is aligned otherwise. A target's type changes
// none of a CPU's sums.
TYPED_TEST(TokenLogprobsTypedTest, ForwardMatchesFloat64) {
  using T = typename TypeParam::Value;
  using Index = typename TypeParam::Target;
  for (const std::int64_t cols : this->kWidths) {
    for (const std::int64_t n : {1, 3, 9}) {
      if (small_sizes() && cols > 40000 && n > 1) continue;
      if (!kOnCuda && sizeof(Index) == 8 && cols > 5000) continue;
      if (kOnCuda || cols < 10'000) this->template check_forward<T, Index>(n, cols, kPacked);
      this->template check_forward<T, Index>(n, cols, {.pad = 5, .offset = 1});
    }
  }
  if (kOnCuda || sizeof(Index) == 8) return;
  for (std::int64_t cols = 1; cols < 300; cols += cols < 80 ? 1 : 37) {  // on either side of every vector
    this->template check_forward<T, Index>(1, cols, kPacked, 20.0);
    this->template check_backward<T, Index>(1, cols, kPacked, {.pad = 1});
  }
  this->template check_forward<T, Index>(30, 40001, kPacked);
}

TYPED_TEST(TokenLogprobsTypedTest, BackwardMatchesFloat64AndMayOverwriteTheLogits) {
  using T = typename TypeParam::Value;
  using Index = typename TypeParam::Target;
  for (const std::int64_t cols : this->kWidths) {
    if (!gpu_sizes() && sizeof(Index) == 8 && cols > 5000) continue;
    const std::int64_t n = cols > 5000 ? 2 : 9;
    this->template check_backward<T, Index>(n, cols, kPacked, kPacked);
    this->template check_backward<T, Index>(n, cols, {.pad = 5, .offset = 3}, {.pad = 5, .offset = 3});
    this->template check_backward<T, Index>(n, cols, {.pad = 5, .offset = 1}, {.pad = 2});
  }
}

/// Every row's bits: in a batch that fills a device, with few others, alone.
TYPED_TEST(TokenLogprobsTypedTest, ARowsBitsDoNotDependOnTheOthers) {
  using T = typename TypeParam::Value;
  using Index = typename TypeParam::Target;
  Backend& on = this->on();
#if defined(MMREC_TEST_CUDA)
  const std::int64_t n = 2 * on.processors() + 3;
#else
  const std::int64_t n = 11;
#endif
  const std::int64_t looked_at = few_cases() ? 10 : n;
  for (const std::int64_t cols : {257, 16384 + 24, 40001, 128256}) {
    if (small_sizes() && cols == 128256 && !std::is_same_v<Index, std::int32_t>) continue;
    Matrix<T> logits = random_logits<T>(on, n, cols, {.pad = cols % 2}, 10.0);
    const std::vector<Index> targets = random_targets<Index>(n, cols);
    std::vector<float> expected = this->forward(on, logits, targets);
    const Buffer<Index> t = upload(on, targets);
    expected.resize(static_cast<std::size_t>(looked_at));
    for (const std::int64_t rows : {1, 2, 5}) {
      Buffer<float> out = unwritten<float>(on, targets.size());
      for (std::int64_t r = 0; r < looked_at; r += rows) {
        const std::int64_t count = std::min(rows, looked_at - r);
        token_logprobs_unchecked(
            on, TokenLogprobs<T, Index, Space>{logits.read().middle_rows(r, count), t.data() + r, out.data() + r});
      }
      EXPECT_TRUE(same_bits(download(on, out.data(), expected.size()), expected)) << rows << " rows of " << cols;
    }
  }
}

template <class Index>
constexpr Index kBadTargets[] = {Index{-1},
                                 Index{50},
                                 std::numeric_limits<Index>::max(),
                                 std::numeric_limits<Index>::min(),
                                 static_cast<Index>((std::int64_t{1} << 32) - 1),  // in 64 bits: −1 if cut to 32
                                 static_cast<Index>((std::int64_t{1} << 32) + (sizeof(Index) == 8 ? 1 : 60))};

TYPED_TEST(TokenLogprobsTypedTest, RefusesTargetsOutsideTheVocabularyBeforeWriting) {
  using T = typename TypeParam::Value;
  using Index = typename TypeParam::Target;
  const std::int64_t n = 2000;
  Backend& on = this->on();
  Matrix<T> logits = random_logits<T>(on, n, 50);
  for (const Index bad : kBadTargets<Index>) {
    std::vector<Index> targets = random_targets<Index>(n, 50);
    targets[1777] = targets[1998] = bad;
    const Buffer<Index> t = upload(on, targets);
    Buffer<float> out = upload(on, std::vector<float>(static_cast<std::size_t>(n), kPoison));
    const TokenLogprobs<T, Index, Space> op{logits.read(), t.data(), out.data()};
    expect_says(refusal([&] { token_logprobs(on, op); }),
                {"row 1777", std::to_string(bad)});  // the first, and its value
    for (const float p : download(on, out)) ASSERT_EQ(p, kPoison);
    Matrix<T> d(on, n, 50);
    EXPECT_THROW(this->backward(on, logits, targets, std::vector<float>(static_cast<std::size_t>(n), 1.0F), d),
                 std::invalid_argument);
    EXPECT_TRUE(same_bits(d.download(), d.values()));
#if defined(MMREC_TEST_CUDA)
    // Unchecked: NaN for such a row, and for no other.
    token_logprobs_unchecked(on, op);
    const auto unchecked = download(on, out);
    for (std::size_t r = 0; r < targets.size(); ++r) ASSERT_EQ(std::isnan(unchecked[r]), r == 1777 || r == 1998) << r;
#endif
  }
}

// Rows that leave blocks part empty, and so many that blocks come one after the other.
TEST_F(TokenLogprobsTest, AnyNumberOfRows) {
  for (const std::int64_t n : {1, 2, 31, 33, 1000, 4097, 100003}) {
    if (small_sizes() && n > 4097) continue;
    for (const std::int64_t cols : {2, 257, 5000}) {
      if (n * cols > (small_sizes() || !kOnCuda ? 300'000 : 30'000'000)) continue;
      Matrix<BFloat16> logits = random_logits<BFloat16>(on(), n, cols, {.pad = 1});
      const auto targets = random_targets<std::int32_t>(n, cols);
      const std::vector<float> out = forward(on(), logits, targets);
      const std::vector<double> want = reference(logits, targets, cols);
      ASSERT_TRUE(all_round_to(out, want, [&](std::size_t r) { return allowed(want[r]); })) << n << " x " << cols;
    }
  }
}

// A reduction whose result is right in one thread, vector, warp, tile or block only shows when the largest logit,
// nearly all of the sum or the target lies elsewhere: put each at every position. In the gradient every thread uses
// what was reduced.
TEST_F(TokenLogprobsTest, TheMaximumTheSumAndTheTargetMayLieAnywhere) {
  on_every([](Backend& on) {
    for (const std::int64_t cols : {1, 2, 17, 100, 257, 4096 + 33, 2 * 4096 + 33, 40000}) {
      if (cols == (kOnCuda ? 2 * 4096 + 33 : 4096 + 33) || (!kOnCuda && cols == 40000)) continue;
      std::vector<std::int64_t> positions;
      const std::int64_t step = cols < 300 ? 1 : (kOnCuda && !small_sizes() ? 7 : 211);
      for (std::int64_t p = 0; p < cols; ++p) {
        const std::int64_t in_tile = p % 4096;  // of a CPU's
        const bool edge = !kOnCuda && (in_tile < 66 || in_tile > 4096 - 66 || p > cols - 66);
        if (p % step == 0 || p == cols - 1 || edge) positions.push_back(p);
      }
      const std::size_t rows = kEmulated ? 32 : kOnCuda ? 256 : 64;
      for (std::size_t i = 0; i < positions.size(); i += rows) {
        const auto n = static_cast<std::int64_t>(std::min(rows, positions.size() - i));
        const std::vector<std::int64_t> at(positions.begin() + static_cast<std::ptrdiff_t>(i),
                                           positions.begin() + static_cast<std::ptrdiff_t>(i) + n);
        std::vector<std::int64_t> beside;
        for (const std::int64_t p : at) beside.push_back((p + 1) % cols);
        std::vector<float> peaks(static_cast<std::size_t>(n * cols)), others(peaks.size(), -kInfinity);
        for (std::size_t k = 0; k < peaks.size(); ++k) {
          const auto v = static_cast<std::int64_t>(k) % cols;
          const bool here = v == at[k / static_cast<std::size_t>(cols)];
          peaks[k] = here ? 40.0F : -30.0F + 0.001F * static_cast<float>(v % 7);
          if (here) others[k] = -7.25F;
        }
        Matrix<float> peak(on, peaks, n, cols), alone(on, others, n, cols), d(on, n, cols);
        const auto there = forward(on, peak, at), off = forward(on, peak, beside);
        const auto masked = forward(on, alone, at), away = forward(on, alone, beside);
        backward(on, peak, beside, std::vector<float>(static_cast<std::size_t>(n), 1.0F), d);
        const std::vector<float> gradient = d.download();
        for (std::int64_t r = 0; r < n; ++r) {
          const auto k = static_cast<std::size_t>(r);
          ASSERT_EQ(there[k], 0.0F) << at[k] << " of " << cols;
          ASSERT_NEAR(static_cast<double>(off[k]), peak(r, beside[k]) - 40.0, 1e-5) << at[k] << " of " << cols;
          ASSERT_EQ(masked[k], 0.0F) << at[k] << " of " << cols;
          ASSERT_EQ(away[k], cols > 1 ? -kInfinity : 0.0F) << at[k] << " of " << cols;
        }
        const std::int64_t wrong = first_failure(n * cols, [&](std::int64_t k) {
          const auto row = static_cast<std::size_t>(k / cols);
          const std::int64_t v = k % cols;
          return std::abs(static_cast<double>(gradient[static_cast<std::size_t>(k)]) - (v == beside[row] ? 1.0 : 0.0) +
                          (v == at[row] ? 1.0 : 0.0)) <= 1e-6;
        });
        ASSERT_EQ(wrong, n * cols) << wrong % cols << " beside " << at[static_cast<std::size_t>(wrong / cols)] << " of "
                                   << cols;
      }
    }
  });
}

TEST_F(TokenLogprobsTest, ExtremeLogits) {
  on_every([](Backend& on) {
    for (const std::int64_t cols : {5000, 70000}) {
      const float log_n = std::log(static_cast<float>(cols)), log_rest = std::log(static_cast<float>(cols - 1));
      struct Single {
        float others, one, at_one, at_other, bound;
      };
      for (const Single& s : {Single{1e30F, 1e30F, -log_n, -log_n, 1e30F * 1e-6F},  // equal and large: finite
                              {88.0F, 88.0F, -log_n, -log_n, 2e-5F},
                              {-1e30F, 1e30F, 0.0F, -2e30F, 1e24F},
                              {1e30F, -1e30F, -2e30F, 0.0F, 1e24F},
                              {kLargest, -kLargest, -kLargest, 0.0F, 1e32F},  // does not fit: the least finite number
                              {-kLargest, kLargest, 0.0F, -kLargest, 0.0F},
                              {-kLargest, -kLargest, -log_n, -log_n, 1e32F},
                              {kLargest, kLargest, -log_n, -log_n, 1e32F},
                              {-kInfinity, 5.0F, 0.0F, -kInfinity, 0.0F},  // all but one masked
                              {0.0F, -kInfinity, -kInfinity, -log_rest, 1e-5F},
                              {-kInfinity, -kInfinity, kNan, kNan, 0.0F},
                              {0.0F, kNan, kNan, kNan, 0.0F},
                              {-kInfinity, kNan, kNan, kNan, 0.0F}}) {
        std::vector<float> values(static_cast<std::size_t>(2 * cols), s.others);
        values[4321] = values[static_cast<std::size_t>(cols + 4321)] = s.one;
        Matrix<float> logits(on, values, 2, cols);
        const auto out = forward(on, logits, std::vector<std::int64_t>{4321, 7});
        for (const auto& [got, want] : {std::pair{out[0], s.at_one}, std::pair{out[1], s.at_other}}) {
          EXPECT_TRUE(rounds_to(got, static_cast<double>(want), static_cast<double>(s.bound)))
              << got << " for " << want << ": " << s.one << " among " << s.others;
        }
      }
    }
  });
}

TEST_F(TokenLogprobsTest, RowsThatHaveNoProbabilitiesGiveNanGradients) {
  on_every([](Backend& on) {
    std::vector<float> values(300, 0.0F);
    std::fill_n(values.begin(), 100, -kInfinity);
    values[170] = -kInfinity;
    values[299] = kNan;
    Matrix<float> logits(on, values, 3, 100), d(on, 3, 100);
    backward(on, logits, std::vector<std::int32_t>{3, 4, 5}, {1.0F, 1.0F, 1.0F}, d);
    const std::vector<float> got = d.download();
    for (std::size_t v = 0; v < 100; ++v) {
      EXPECT_TRUE(std::isnan(got[v]));
      EXPECT_NEAR(got[100 + v], v == 70 ? 0.0F : (v == 4 ? 1.0F : 0.0F) - 1.0F / 99.0F, 1e-7F);
      EXPECT_TRUE(std::isnan(got[200 + v]));
    }
  });
}

TEST_F(TokenLogprobsTest, EmptyShapes) {
  using View = MatrixView<const float, Space>;
  using Forward = TokenLogprobs<float, int, Space>;
  token_logprobs(on(), Forward{View(nullptr, 0, 10), nullptr, nullptr});
  token_logprobs_unchecked(on(), Forward{View(nullptr, 0, 10), nullptr, nullptr});
  token_logprobs_backward(
      on(), TokenLogprobsBackward<float, int, Space>{View(nullptr, 0, 10), nullptr, nullptr, {nullptr, 0, 10}});
  Buffer<float> x = unwritten<float>(on(), 20);
  const Buffer<int> t = upload(on(), std::vector<int>{0, 1});
  EXPECT_THROW(token_logprobs(on(), Forward{View(x.data(), 2, 0), t.data(), x.data()}), std::invalid_argument);
}

// Rows that begin beyond 2^31 elements; on a CPU the memory between them is never touched.
TEST_F(TokenLogprobsTest, IndexesIn64Bits) {
  constexpr std::int64_t kCols = 100, kStride = (std::int64_t{1} << 31) + (kOnCuda ? 8 : 7);
#if defined(MMREC_TEST_CUDA)
  if (small_sizes()) GTEST_SKIP() << "large sizes";
  const DeviceMemory memory = device_memory();
  if (memory.free < (std::size_t{9} << 30)) GTEST_SKIP() << memory.free << " bytes of device memory are free";
  DeviceBuffer<BFloat16> buffer(static_cast<std::size_t>(kStride + kCols));
  BFloat16* const data = buffer.data();
#else
  constexpr std::size_t kBytes = static_cast<std::size_t>(2 * kStride) * sizeof(BFloat16);
  void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no address space for " << kBytes << " bytes";
  auto* const data = static_cast<BFloat16*>(memory);
#endif
  std::vector<BFloat16> first(kCols, from_float<BFloat16>(0.0F)), second(kCols, from_float<BFloat16>(-30.0F));
  second[42] = from_float<BFloat16>(30.0F);
  on().upload(first.data(), data, first.size());
  on().upload(second.data(), data + kStride, second.size());
  const Buffer<std::int32_t> targets = upload(on(), std::vector<std::int32_t>{0, 42});
  const Buffer<float> grad = upload(on(), std::vector<float>{1.0F, 1.0F});
  Buffer<float> out = unwritten<float>(on(), 2);
  const MatrixView<BFloat16, Space> view{data, 2, kCols, kStride};
  token_logprobs(on(), TokenLogprobs<BFloat16, std::int32_t, Space>{view, targets.data(), out.data()});
  const auto p = download(on(), out);
  EXPECT_NEAR(p[0], -std::log(100.0F), 1e-5F);
  EXPECT_EQ(p[1], 0.0F);
  token_logprobs_backward(
      on(), TokenLogprobsBackward<BFloat16, std::int32_t, Space>{view, targets.data(), grad.data(), view});
  first = download(on(), data, first.size());
  second = download(on(), data + kStride, second.size());
  EXPECT_NEAR(to_float(first[0]), 0.99F, 1e-2F);
  EXPECT_NEAR(to_float(first[1]), -0.01F, 1e-3F);
  EXPECT_NEAR(to_float(second[42]), 0.0F, 1e-6F);
#if !defined(MMREC_TEST_CUDA)
  munmap(memory, kBytes);
#endif
}

#if defined(MMREC_TEST_CUDA)

TEST_F(TokenLogprobsTest, InfinityIsTheWholeDistribution) {
  std::vector<float> values(std::size_t{2} * 5000, 1.0F);
  values[4321] = values[5000 + 4321] = kInfinity;
  Matrix<float> logits(on(), values, 2, 5000);
  const auto out = forward(on(), logits, std::vector<std::int64_t>{4321, 7});
  EXPECT_TRUE(std::isnan(out[0]));
  EXPECT_EQ(out[1], -kInfinity);
}

// More than 2^31 logits side by side: all rows are alike but the last two.
TEST_F(TokenLogprobsTest, MoreLogitsThan32BitsCount) {
  if (small_sizes()) GTEST_SKIP() << "large sizes";
  const std::int64_t n = 16800;
  const std::int64_t cols = 128256;
  const auto count = static_cast<std::size_t>(n * cols);
  static_assert(std::int64_t{16800} * 128256 > std::int64_t{1} << 31);
  if (device_memory().free < 2 * count + (std::size_t{1} << 30)) GTEST_SKIP() << "too little device memory is free";
  DeviceBuffer<BFloat16> data(count);
  on().zero(data.data(), data.size_bytes());
  const std::vector<BFloat16> peak{from_float<BFloat16>(60.0F)};
  on().upload(peak.data(), data.data() + (n - 2) * cols + 77, 1);
  on().upload(peak.data(), data.data() + n * cols - 1, 1);
  const auto targets = upload(on(), std::vector<std::int64_t>(static_cast<std::size_t>(n), cols - 1));
  const auto grad = upload(on(), std::vector<float>(static_cast<std::size_t>(n), 1.0F));
  auto out = unwritten<float>(on(), static_cast<std::size_t>(n));
  const MatrixView<BFloat16, Device> view{data.data(), n, cols};
  token_logprobs(on(), TokenLogprobs<BFloat16, std::int64_t, Device>{view, targets.data(), out.data()});
  const std::vector<float> p = download(on(), out);
  for (std::size_t r = 0; r + 2 < p.size(); ++r) ASSERT_NEAR(p[r], -std::log(128256.0F), 1e-5F) << r;
  EXPECT_EQ(p[p.size() - 2], -60.0F);
  EXPECT_EQ(p[p.size() - 1], 0.0F);

  token_logprobs_backward(
      on(), TokenLogprobsBackward<BFloat16, std::int64_t, Device>{view, targets.data(), grad.data(), view});
  for (const std::int64_t r : {std::int64_t{0}, n - 3, n - 2, n - 1}) {
    const auto row = download(on(), data.data() + r * cols, static_cast<std::size_t>(cols));
    for (std::int64_t v = 0; v < cols; ++v) {
      const double softmax = r < n - 2                           ? 1.0 / static_cast<double>(cols)
                             : v == (r == n - 2 ? 77 : cols - 1) ? 1.0
                                                                 : 0.0;
      const double expected = (v == cols - 1 ? 1.0 : 0.0) - softmax;
      ASSERT_NEAR(to_float(row[static_cast<std::size_t>(v)]), expected, 4e-3 * std::abs(expected) + 1e-20)
          << v << " of row " << r;
    }
  }
}

TEST_F(TokenLogprobsTest, TheUncheckedOpIsReplayedByAGraph) {
  for (const std::int64_t cols : {300, 128256}) {  // one block a row, several blocks a row
    auto x = random_logits<BFloat16>(on(), 2, cols), after = random_logits<BFloat16>(on(), 2, cols, kPacked, 5.0);
    const auto targets = random_targets<std::int32_t>(2, cols);
    const auto t = upload(on(), targets);
    auto out = unwritten<float>(on(), 2);
    const TokenLogprobs<BFloat16, std::int32_t, Device> op{x.read(), t.data(), out.data()};
    token_logprobs_unchecked(on(), op);
    const Graph graph(on(), [&] { token_logprobs_unchecked(on(), op); });
    on().upload(after.values().data(), x.data(), after.values().size());
    graph.launch(on());
    EXPECT_EQ(download(on(), out), forward(on(), after, targets)) << cols;
  }
}

#endif

const RegisteredCases kCases([](Backend& on, bool small, OpCases& cases) {
  using Test = TokenLogprobsTest;
  if (small) {
    Test::add_cases<float>(on, cases, 3, 500);
    return Test::add_cases<BFloat16>(on, cases, 5, 4099);
  }
  Test::add_cases<BFloat16>(on, cases, 4096, 32000);
  Test::add_cases<BFloat16>(on, cases, kOnCuda ? 4096 : 1024, 128256);
  if (kOnCuda) {
    Test::add_cases<BFloat16>(on, cases, 16384, 50304);
    Test::add_cases<BFloat16>(on, cases, 64, 32000);
  } else {
    Test::add_cases<Float16>(on, cases, 1024, 50304);
  }
  Test::add_cases<float>(on, cases, kOnCuda ? 4096 : 1024, 32000);
  if (!kOnCuda) Test::add_cases<float>(on, cases, 64, 32000);
  Test::add_cases<float>(on, cases, 1, 128256);
});

}  // namespace
}  // namespace mmrec::kernels::test
