// Token log-probs and their gradient on the device against float64, at awkward widths, alignments, positions and
// values. Longer than other files, because both directions share references and operands.
#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <type_traits>

#include "kernels/cpu/cpu.h"
#include "kernels/cuda/runtime/cuda.h"
#include "tests/kernels/cuda/cuda_testing.h"
#include "tests/kernels/logprob_testing.h"

namespace mmrec::kernels::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// [n, cols] on the host with NaN after every row, `offset` elements from a 256-byte boundary on the device.
template <class T>
struct Logits {
  std::int64_t n, cols, stride, offset;
  std::vector<T> data;

  Logits(std::int64_t rows, std::int64_t columns, std::int64_t padding = 0, std::int64_t offset_elements = 0)
      : n(rows),
        cols(columns),
        stride(columns + padding),
        offset(offset_elements),
        data(static_cast<std::size_t>(offset + rows * stride), from_float<T>(kNan)) {}
  T* row(std::int64_t r) { return data.data() + offset + r * stride; }
  const T* row(std::int64_t r) const { return data.data() + offset + r * stride; }
  void set(std::int64_t r, std::int64_t v, float x) { row(r)[v] = from_float<T>(x); }
  void fill(std::int64_t r, float x) {
    for (std::int64_t v = 0; v < cols; ++v) set(r, v, x);
  }
  double at(std::int64_t r, std::int64_t v) const { return static_cast<double>(to_float(row(r)[v])); }
  MatrixView<const T, Device> view(const DeviceBuffer<T>& on_device) const {
    return {on_device.data() + offset, n, cols, stride};
  }
  MatrixView<T, Device> view(DeviceBuffer<T>& on_device) const { return {on_device.data() + offset, n, cols, stride}; }
};

template <class T>
Logits<T> random_logits(std::int64_t n, std::int64_t cols, double spread = 4.0, std::int64_t padding = 0,
                        std::int64_t offset = 0) {
  static std::uint64_t stream = 0;
  Logits<T> l(n, cols, padding, offset);
  const auto values = random_normal<T>(static_cast<std::size_t>(n * cols), 0.0, spread, ++stream);
  for (std::int64_t r = 0; r < n; ++r) std::copy_n(values.begin() + r * cols, cols, l.row(r));
  return l;
}

template <class Index>
std::vector<Index> random_targets(std::int64_t n, std::int64_t cols) {
  static std::uint64_t stream = 1000;
  std::mt19937_64 rng(test_seed() + ++stream);
  std::vector<Index> t;
  for (std::int64_t r = 0; r < n; ++r) t.push_back(static_cast<Index>(rng() % static_cast<std::uint64_t>(cols)));
  return t;
}

template <class T, class Index>
std::vector<double> reference(const Logits<T>& logits, const std::vector<Index>& targets) {
  return parallel_map(logits.n, [&](std::int64_t r) {
    return logits.at(r, static_cast<std::int64_t>(targets[static_cast<std::size_t>(r)])) -
           reference_log_sum(logits.row(r), logits.cols);
  });
}

class TokenLogprobsCuda : public CudaTest {
 protected:
  template <class T, class Index>
  std::vector<float> forward(const Logits<T>& logits, const std::vector<Index>& targets) {
    const auto x = to_device(logits.data);
    const auto t = to_device(targets);
    auto out = poisoned<float>(targets.size());
    token_logprobs(cuda(), TokenLogprobs<T, Index, Device>{logits.view(x), t.data(), out.data()});
    return to_host(out);
  }
  /// The gradient in rows `padding` longer than they need to be; `in_place` overwrites the logits.
  template <class T, class Index>
  Logits<T> backward(const Logits<T>& logits, const std::vector<Index>& targets, const std::vector<float>& grad,
                     std::int64_t padding, std::int64_t offset, bool in_place = false) {
    Logits<T> d(logits.n, logits.cols, in_place ? logits.stride - logits.cols : padding,
                in_place ? logits.offset : offset);
    auto x = to_device(logits.data);
    auto y = poisoned<T>(d.data.size());
    const auto t = to_device(targets);
    const auto g = to_device(grad);
    token_logprobs_backward(cuda(), TokenLogprobsBackward<T, Index, Device>{std::as_const(logits).view(x), t.data(),
                                                                            g.data(), d.view(in_place ? x : y)});
    d.data = to_host(in_place ? x : y);
    return d;
  }
};

template <class T, class Index>
struct Types {
  using Value = T;
  using Target = Index;
};
template <class P>
class TokenLogprobsCudaTyped : public TokenLogprobsCuda {};
using AllTypes =
    ::testing::Types<Types<float, std::int32_t>, Types<float, std::int64_t>, Types<Float16, std::int32_t>,
                     Types<Float16, std::int64_t>, Types<BFloat16, std::int32_t>, Types<BFloat16, std::int64_t>>;
TYPED_TEST_SUITE(TokenLogprobsCudaTyped, AllTypes);

constexpr std::int64_t kWidths[] = {1, 2, 7, 15, 16, 17, 63, 257, 2049, 4096, 4097, 8200, 32000, 50257, 128256};

TYPED_TEST(TokenLogprobsCudaTyped, ForwardMatchesFloat64) {
  using T = typename TypeParam::Value;
  using Index = typename TypeParam::Target;
  for (const std::int64_t cols : kWidths) {
    for (const std::int64_t n : {1, 3, 9}) {
      if (small_sizes() && cols > 40000 && n > 1) continue;
      // Rows as they come (aligned where the width is), and rows of which each is aligned otherwise.
      for (const std::int64_t padding : {0, 5}) {
        const auto logits = random_logits<T>(n, cols, 4.0, padding, padding / 5);
        const auto targets = random_targets<Index>(n, cols);
        const auto out = this->forward(logits, targets);
        const std::vector<double> expected = reference(logits, targets);
        for (std::size_t r = 0; r < out.size(); ++r) {
          ASSERT_NEAR(static_cast<double>(out[r]), expected[r], 2e-6 + 1e-7 * std::abs(expected[r]))
              << n << " x " << cols << " + " << padding;
        }
      }
    }
  }
}

TYPED_TEST(TokenLogprobsCudaTyped, BackwardMatchesFloat64) {
  using T = typename TypeParam::Value;
  using Index = typename TypeParam::Target;
  const double rounding = std::is_same_v<T, float> ? 0x1p-23 : (std::is_same_v<T, Float16> ? 0x1p-11 : 0x1p-8);
  struct Layout {
    std::int64_t padding, offset, d_padding, d_offset;
  };
  for (const std::int64_t cols : kWidths) {
    if (small_sizes() && std::is_same_v<Index, std::int64_t> && cols > 10000) continue;
    const std::int64_t n = cols > 5000 ? 2 : 9;
    for (const Layout layout : {Layout{0, 0, 0, 0}, Layout{5, 3, 5, 3}, Layout{5, 1, 2, 0}}) {
      const auto logits = random_logits<T>(n, cols, 4.0, layout.padding, layout.offset);
      const auto targets = random_targets<Index>(n, cols);
      std::vector<float> grad;
      for (std::int64_t r = 0; r < n; ++r) grad.push_back(r % 3 == 0 ? 1.0F : -0.37F * static_cast<float>(r));
      const Logits<T> d = this->backward(logits, targets, grad, layout.d_padding, layout.d_offset);
      const double worst = parallel_max(n, [&](std::int64_t r) {
        const auto k = static_cast<std::size_t>(r);
        const auto g = static_cast<double>(grad[k]);
        const double log_sum = reference_log_sum(logits.row(r), cols);
        double most = 0.0;
        for (std::int64_t v = 0; v < cols; ++v) {
          const double p = std::exp(logits.at(r, v) - log_sum);
          const double expected = g * ((v == static_cast<std::int64_t>(targets[k]) ? 1.0 : 0.0) - p);
          const double bound = std::abs(expected) * (rounding + 1e-6) + 4e-7 * std::abs(g) * p + 0x1p-25;
          const double error = std::abs(d.at(r, v) - expected) / bound;
          most = std::isnan(error) ? INFINITY : std::max(most, error);
        }
        return most;
      });
      ASSERT_LE(worst, 1.0) << n << " x " << cols << " + " << layout.padding;
      for (std::int64_t r = 0; r + 1 < n; ++r) {
        for (std::int64_t v = cols; v < d.stride; ++v) ASSERT_TRUE(std::isnan(to_float(d.row(r)[v])));
      }
      const Logits<T> same = this->backward(logits, targets, grad, 0, 0, /*in_place=*/true);
      if (layout.padding != layout.d_padding) continue;  // other vectors, other sums
      for (std::int64_t r = 0; r < n; ++r) {
        ASSERT_EQ(std::memcmp(same.row(r), d.row(r), static_cast<std::size_t>(cols) * sizeof(T)), 0) << cols;
      }
    }
  }
}

// Rows that leave blocks part empty, and so many that blocks come one after the other; the CPU as a second opinion.
TEST_F(TokenLogprobsCuda, AnyNumberOfRows) {
  Cpu cpu(2);
  for (const std::int64_t n : {1, 2, 31, 33, 1000, 4097, 100003}) {
    if (small_sizes() && n > 4097) continue;
    for (const std::int64_t cols : {2, 257, 5000}) {
      if (n * cols > (small_sizes() ? 300'000 : 30'000'000)) continue;
      const auto logits = random_logits<BFloat16>(n, cols, 4.0, 1);
      const auto targets = random_targets<std::int32_t>(n, cols);
      const std::vector<float> out = forward(logits, targets);
      std::vector<float> by_cpu(targets.size());
      token_logprobs(cpu, TokenLogprobs<BFloat16, std::int32_t, Host>{
                              {logits.row(0), n, cols, logits.stride}, targets.data(), by_cpu.data()});
      const std::vector<double> expected = reference(logits, targets);
      for (std::size_t r = 0; r < out.size(); ++r) {
        const double bound = 2e-6 + 1e-7 * std::abs(expected[r]);
        ASSERT_NEAR(static_cast<double>(out[r]), expected[r], bound) << r << " of " << n << " x " << cols;
        ASSERT_NEAR(out[r], by_cpu[r], 2.0 * bound) << r << " of " << n << " x " << cols;
      }
    }
  }
}

// A reduction whose result is right in one thread, one warp or one block only shows when the largest logit, nearly all
// of the sum or the target lies elsewhere: put each at every position. In the gradient every thread uses what was
// reduced.
TEST_F(TokenLogprobsCuda, TheMaximumTheSumAndTheTargetMayLieAnywhere) {
  for (const std::int64_t cols : {1, 2, 17, 100, 257, 4096 + 33, 40000}) {
    std::vector<std::int64_t> positions;
    const std::int64_t step = cols < 300 ? 1 : (small_sizes() ? 211 : 7);
    for (std::int64_t p = 0; p < cols; p += step) positions.push_back(p);
    positions.push_back(cols - 1);
    constexpr std::size_t kRows = kEmulated ? 32 : 256;
    for (std::size_t i = 0; i < positions.size(); i += kRows) {
      const auto n = static_cast<std::int64_t>(std::min(kRows, positions.size() - i));
      Logits<float> peak(n, cols), alone(n, cols);
      const std::vector<std::int64_t> at(positions.begin() + static_cast<std::ptrdiff_t>(i),
                                         positions.begin() + static_cast<std::ptrdiff_t>(i) + n);
      std::vector<std::int64_t> beside;
      for (const std::int64_t p : at) beside.push_back((p + 1) % cols);
      parallel_for(n, [&](std::int64_t r) {
        const std::int64_t p = at[static_cast<std::size_t>(r)];
        for (std::int64_t v = 0; v < cols; ++v) peak.set(r, v, -30.0F + 0.001F * static_cast<float>(v % 7));
        peak.set(r, p, 40.0F);
        alone.fill(r, -kInf);
        alone.set(r, p, -7.25F);
      });
      const auto on = forward(peak, at), off = forward(peak, beside);
      const auto masked = forward(alone, at), away = forward(alone, beside);
      const Logits<float> d = backward(peak, beside, std::vector<float>(static_cast<std::size_t>(n), 1.0F), 0, 0);
      for (std::int64_t r = 0; r < n; ++r) {
        const auto k = static_cast<std::size_t>(r);
        ASSERT_EQ(on[k], 0.0F) << at[k] << " of " << cols;
        ASSERT_NEAR(static_cast<double>(off[k]), peak.at(r, beside[k]) - 40.0, 1e-5) << at[k] << " of " << cols;
        ASSERT_EQ(masked[k], 0.0F) << at[k] << " of " << cols;
        ASSERT_EQ(away[k], cols > 1 ? -kInf : 0.0F) << at[k] << " of " << cols;
      }
      const std::int64_t wrong = first_failure(n * cols, [&](std::int64_t k) {
        const std::int64_t r = k / cols, v = k % cols;
        const auto row = static_cast<std::size_t>(r);
        return std::abs(d.at(r, v) - (v == beside[row] ? 1.0 : 0.0) + (v == at[row] ? 1.0 : 0.0)) <= 1e-6;
      });
      ASSERT_EQ(wrong, n * cols) << wrong % cols << " beside " << at[static_cast<std::size_t>(wrong / cols)] << " of "
                                 << cols << ": " << d.at(wrong / cols, wrong % cols);
    }
  }
}

TEST_F(TokenLogprobsCuda, ExtremeLogits) {
  for (const std::int64_t cols : {5000, 70000}) {
    const float largest = std::numeric_limits<float>::max();
    const auto single = [&](float others, float one, float expected_at_one, float expected_at_other, float bound) {
      Logits<float> l(2, cols);
      for (std::int64_t r = 0; r < 2; ++r) {
        l.fill(r, others);
        l.set(r, 4321, one);
      }
      const auto out = forward(l, std::vector<std::int64_t>{4321, 7});
      if (std::isnan(expected_at_one)) {
        EXPECT_TRUE(std::isnan(out[0]) && std::isnan(out[1])) << others << " " << one;
      } else {
        EXPECT_TRUE(out[0] == expected_at_one || std::abs(out[0] - expected_at_one) <= bound) << out[0];
        EXPECT_TRUE(out[1] == expected_at_other || std::abs(out[1] - expected_at_other) <= bound) << out[1];
      }
    };
    const float log_n = std::log(static_cast<float>(cols));
    single(1e30F, 1e30F, -log_n, -log_n, 1e30F * 1e-6F);  // equal and large: finite
    single(88.0F, 88.0F, -log_n, -log_n, 2e-5F);
    single(-1e30F, 1e30F, 0.0F, -2e30F, 1e24F);
    single(1e30F, -1e30F, -2e30F, 0.0F, 1e24F);
    single(largest, -largest, -largest, 0.0F, 1e32F);  // the difference does not fit: the least finite number
    single(-largest, largest, 0.0F, -largest, 0.0F);
    single(-largest, -largest, -log_n, -log_n, 1e32F);
    single(-kInf, 5.0F, 0.0F, -kInf, 0.0F);  // all but one masked
    single(0.0F, -kInf, -kInf, -std::log(static_cast<float>(cols - 1)), 1e-5F);
    single(-kInf, -kInf, kNan, kNan, 0.0F);
    single(0.0F, kNan, kNan, kNan, 0.0F);
    single(-kInf, kNan, kNan, kNan, 0.0F);
  }
}

TEST_F(TokenLogprobsCuda, InfinityIsTheWholeDistribution) {
  Logits<float> l(2, 5000);
  for (std::int64_t r = 0; r < 2; ++r) {
    l.fill(r, 1.0F);
    l.set(r, 4321, kInf);
  }
  const auto out = forward(l, std::vector<std::int64_t>{4321, 7});
  EXPECT_TRUE(std::isnan(out[0]));
  EXPECT_EQ(out[1], -kInf);
}

TEST_F(TokenLogprobsCuda, RowsThatHaveNoProbabilitiesGiveNanGradients) {
  Logits<float> l(3, 100);
  for (std::int64_t v = 0; v < 100; ++v) {
    l.set(0, v, -kInf);
    l.set(1, v, v == 70 ? -kInf : 0.0F);
    l.set(2, v, v == 99 ? kNan : 0.0F);
  }
  const Logits<float> d = backward(l, std::vector<std::int32_t>{3, 4, 5}, {1.0F, 1.0F, 1.0F}, 0, 0);
  for (std::int64_t v = 0; v < 100; ++v) {
    EXPECT_TRUE(std::isnan(d.row(0)[v]));
    EXPECT_NEAR(d.row(1)[v], v == 70 ? 0.0F : (v == 4 ? 1.0F : 0.0F) - 1.0F / 99.0F, 1e-7F);
    EXPECT_TRUE(std::isnan(d.row(2)[v]));
  }
}

/// Every row's bits: in a batch that fills the device, with few others, alone.
TYPED_TEST(TokenLogprobsCudaTyped, ARowsBitsDoNotDependOnTheOthers) {
  using T = typename TypeParam::Value;
  using Index = typename TypeParam::Target;
  Cuda& cuda = this->cuda();
  const std::int64_t n = 2 * cuda.processors() + 3;
  const std::int64_t looked_at = few_cases() ? 10 : n;
  for (const std::int64_t cols : {257, 16384 + 24, 40001, 128256}) {
    if (small_sizes() && cols == 128256 && !std::is_same_v<Index, std::int32_t>) continue;
    const auto logits = random_logits<T>(n, cols, 10.0, cols % 2);
    const auto targets = random_targets<Index>(n, cols);
    const std::vector<float> expected = this->forward(logits, targets);
    const auto x = this->to_device(logits.data);
    const auto t = this->to_device(targets);
    for (const std::int64_t rows : {1, 2, 5}) {
      auto out = this->template poisoned<float>(targets.size());
      for (std::int64_t r = 0; r < looked_at; r += rows) {
        const std::int64_t count = std::min(rows, looked_at - r);
        token_logprobs_unchecked(
            cuda, TokenLogprobs<T, Index, Device>{logits.view(x).middle_rows(r, count), t.data() + r, out.data() + r});
      }
      EXPECT_EQ(
          std::memcmp(this->to_host(out).data(), expected.data(), static_cast<std::size_t>(looked_at) * sizeof(float)),
          0)
          << rows << " of " << n << " rows of " << cols;
    }
  }
}

template <class Index>
constexpr Index kBadTargets[] = {Index{-1}, Index{50}, std::numeric_limits<Index>::max(),
                                 std::numeric_limits<Index>::min(),
                                 static_cast<Index>((std::int64_t{1} << 32) - 1)};  // in 64 bits: −1 if cut to 32

TYPED_TEST(TokenLogprobsCudaTyped, RefusesTargetsOutsideTheVocabularyBeforeWriting) {
  using T = typename TypeParam::Value;
  using Index = typename TypeParam::Target;
  const std::int64_t n = 2000;
  const auto logits = random_logits<T>(n, 50);
  const auto x = this->to_device(logits.data);
  for (const Index bad : kBadTargets<Index>) {
    std::vector<Index> targets = random_targets<Index>(n, 50);
    targets[1777] = targets[1998] = bad;
    const auto t = this->to_device(targets);
    const auto grad = this->to_device(std::vector<float>(static_cast<std::size_t>(n), 1.0F));
    auto out = this->to_device(std::vector<float>(static_cast<std::size_t>(n), kPoison));
    auto d = this->template poisoned<T>(logits.data.size());
    try {
      token_logprobs(this->cuda(), TokenLogprobs<T, Index, Device>{logits.view(x), t.data(), out.data()});
      ADD_FAILURE() << "accepted " << bad;
    } catch (const std::invalid_argument& e) {
      const std::string what = e.what();  // names the first row and its value
      EXPECT_NE(what.find("row 1777"), std::string::npos) << what;
      EXPECT_NE(what.find(std::to_string(bad)), std::string::npos) << what;
    }
    for (const float p : this->to_host(out)) ASSERT_EQ(p, kPoison);
    EXPECT_THROW(
        (token_logprobs_backward(this->cuda(), TokenLogprobsBackward<T, Index, Device>{logits.view(x), t.data(),
                                                                                       grad.data(), logits.view(d)})),
        std::invalid_argument);
    for (const T y : this->to_host(d)) ASSERT_TRUE(std::isnan(to_float(y)));

    // Unchecked: NaN for such a row, and for no other.
    token_logprobs_unchecked(this->cuda(), TokenLogprobs<T, Index, Device>{logits.view(x), t.data(), out.data()});
    const auto unchecked = this->to_host(out);
    for (std::size_t r = 0; r < targets.size(); ++r) {
      ASSERT_EQ(std::isnan(unchecked[r]), r == 1777 || r == 1998) << r;
    }
  }
}

TEST_F(TokenLogprobsCuda, EmptyShapes) {
  using View = MatrixView<const float, Device>;
  using Forward = TokenLogprobs<float, int, Device>;
  using Backward = TokenLogprobsBackward<float, int, Device>;
  token_logprobs(cuda(), Forward{View(nullptr, 0, 10), nullptr, nullptr});
  token_logprobs_unchecked(cuda(), Forward{View(nullptr, 0, 10), nullptr, nullptr});
  token_logprobs_backward(cuda(), Backward{View(nullptr, 0, 10), nullptr, nullptr, {nullptr, 0, 10}});
  auto x = poisoned<float>(20);
  const auto t = to_device(std::vector<int>{0, 1});
  EXPECT_THROW(token_logprobs(cuda(), Forward{View(x.data(), 2, 0), t.data(), x.data()}), std::invalid_argument);
}

// More than 2^31 logits side by side: all rows are alike but the last two.
TEST_F(TokenLogprobsCuda, MoreLogitsThan32BitsCount) {
  if (small_sizes()) GTEST_SKIP() << "large sizes";
  const std::int64_t n = 16800;
  const std::int64_t cols = 128256;
  const auto count = static_cast<std::size_t>(n * cols);
  static_assert(std::int64_t{16800} * 128256 > std::int64_t{1} << 31);
  if (device_memory().free < 2 * count + (std::size_t{1} << 30)) GTEST_SKIP() << "too little device memory is free";
  DeviceBuffer<BFloat16> data(count);
  cuda().zero(data.data(), data.size_bytes());
  const std::vector<BFloat16> peak{from_float<BFloat16>(60.0F)};
  cuda().upload(peak.data(), data.data() + (n - 2) * cols + 77, 1);
  cuda().upload(peak.data(), data.data() + n * cols - 1, 1);
  const auto targets = to_device(std::vector<std::int64_t>(static_cast<std::size_t>(n), cols - 1));
  const auto grad = to_device(std::vector<float>(static_cast<std::size_t>(n), 1.0F));
  auto out = poisoned<float>(static_cast<std::size_t>(n));
  const MatrixView<BFloat16, Device> view{data.data(), n, cols};
  token_logprobs(cuda(), TokenLogprobs<BFloat16, std::int64_t, Device>{view, targets.data(), out.data()});
  const std::vector<float> p = to_host(out);
  for (std::size_t r = 0; r + 2 < p.size(); ++r) ASSERT_NEAR(p[r], -std::log(128256.0F), 1e-5F) << r;
  EXPECT_EQ(p[p.size() - 2], -60.0F);
  EXPECT_EQ(p[p.size() - 1], 0.0F);

  token_logprobs_backward(
      cuda(), TokenLogprobsBackward<BFloat16, std::int64_t, Device>{view, targets.data(), grad.data(), view});
  std::vector<BFloat16> row(static_cast<std::size_t>(cols));
  for (const std::int64_t r : {std::int64_t{0}, n - 3, n - 2, n - 1}) {
    cuda().download(data.data() + r * cols, row.data(), row.size());
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

// Rows that begin beyond 2^31 elements.
TEST_F(TokenLogprobsCuda, IndexesIn64Bits) {
  if (small_sizes()) GTEST_SKIP() << "large sizes";
  const std::int64_t cols = 100;
  const std::int64_t stride = (std::int64_t{1} << 31) + 8;
  const DeviceMemory memory = device_memory();
  if (memory.free < (std::size_t{9} << 30)) GTEST_SKIP() << memory.free << " bytes of device memory are free";
  DeviceBuffer<BFloat16> data(static_cast<std::size_t>(stride + cols));
  std::vector<BFloat16> first(cols), second(cols);
  for (std::int64_t v = 0; v < cols; ++v) {
    first[static_cast<std::size_t>(v)] = from_float<BFloat16>(0.0F);
    second[static_cast<std::size_t>(v)] = from_float<BFloat16>(v == 42 ? 30.0F : -30.0F);
  }
  cuda().upload(first.data(), data.data(), first.size());
  cuda().upload(second.data(), data.data() + stride, second.size());
  const auto targets = to_device(std::vector<std::int32_t>{0, 42});
  const auto grad = to_device(std::vector<float>{1.0F, 1.0F});
  auto out = poisoned<float>(2);
  const MatrixView<BFloat16, Device> view{data.data(), 2, cols, stride};
  token_logprobs(cuda(), TokenLogprobs<BFloat16, std::int32_t, Device>{view, targets.data(), out.data()});
  const auto p = to_host(out);
  EXPECT_NEAR(p[0], -std::log(100.0F), 1e-5F);
  EXPECT_EQ(p[1], 0.0F);
  token_logprobs_backward(
      cuda(), TokenLogprobsBackward<BFloat16, std::int32_t, Device>{view, targets.data(), grad.data(), view});
  cuda().download(data.data(), first.data(), first.size());
  cuda().download(data.data() + stride, second.data(), second.size());
  EXPECT_NEAR(to_float(first[0]), 0.99F, 1e-2F);
  EXPECT_NEAR(to_float(first[1]), -0.01F, 1e-3F);
  EXPECT_NEAR(to_float(second[42]), 0.0F, 1e-6F);
}

TEST_F(TokenLogprobsCuda, TheUncheckedOpIsReplayedByAGraph) {
  for (const std::int64_t cols : {300, 128256}) {  // one block a row, several blocks a row
    const auto before = random_logits<BFloat16>(2, cols), after = random_logits<BFloat16>(2, cols);
    const auto targets = random_targets<std::int32_t>(2, cols);
    auto x = to_device(before.data);
    const auto t = to_device(targets);
    auto out = poisoned<float>(2);
    const TokenLogprobs<BFloat16, std::int32_t, Device> op{std::as_const(before).view(x), t.data(), out.data()};
    token_logprobs_unchecked(cuda(), op);
    const Graph graph(cuda(), [&] { token_logprobs_unchecked(cuda(), op); });
    cuda().upload(after.data.data(), x.data(), after.data.size());
    graph.launch(cuda());
    EXPECT_EQ(to_host(out), forward(after, targets)) << cols;
  }
}

}  // namespace
}  // namespace mmrec::kernels::test
