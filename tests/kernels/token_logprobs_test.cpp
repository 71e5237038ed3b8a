// Token log-probs and their gradient against float64, at awkward widths, positions and values.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"
#include "tests/kernels/logprob_testing.h"

namespace mmrec::kernels {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// [n, cols] with `padding` NaN elements after every row.
template <class T>
struct Logits {
  std::int64_t n, cols, stride;
  std::vector<T> data;

  Logits(std::int64_t rows, std::int64_t columns, std::int64_t padding = 0)
      : n(rows),
        cols(columns),
        stride(columns + padding),
        data(static_cast<std::size_t>(rows * (columns + padding)), from_float<T>(kNan)) {}
  T* row(std::int64_t r) { return data.data() + r * stride; }
  const T* row(std::int64_t r) const { return data.data() + r * stride; }
  void set(std::int64_t r, std::int64_t v, float x) { row(r)[v] = from_float<T>(x); }
  MatrixView<const T, Host> view() const { return {data.data(), n, cols, stride}; }
  MatrixView<T, Host> write() { return {data.data(), n, cols, stride}; }
};

template <class T>
Logits<T> random_logits(std::int64_t n, std::int64_t cols, unsigned seed, float spread = 4.0F,
                        std::int64_t padding = 0) {
  Logits<T> l(n, cols, padding);
  std::mt19937 rng(seed);
  std::normal_distribution<float> logit(0.0F, spread);
  for (std::int64_t r = 0; r < n; ++r)
    for (std::int64_t v = 0; v < cols; ++v) l.set(r, v, logit(rng));
  return l;
}

template <class Index>
std::vector<Index> random_targets(std::int64_t n, std::int64_t cols, unsigned seed) {
  std::mt19937 rng(seed);
  std::vector<Index> t;
  for (std::int64_t r = 0; r < n; ++r) t.push_back(static_cast<Index>(rng() % static_cast<std::uint64_t>(cols)));
  return t;
}

template <class T, class Index>
std::vector<float> forward(Cpu& cpu, const Logits<T>& logits, const std::vector<Index>& targets) {
  std::vector<float> out(targets.size(), kPoison);
  token_logprobs<T, Index>(cpu, {logits.view(), targets.data(), out.data()});
  return out;
}

template <class T, class Index>
struct Types {
  using Value = T;
  using Target = Index;
};
template <class P>
class TokenLogprobsTyped : public ::testing::Test {};
using AllTypes =
    ::testing::Types<Types<float, std::int32_t>, Types<float, std::int64_t>, Types<Float16, std::int32_t>,
                     Types<Float16, std::int64_t>, Types<BFloat16, std::int32_t>, Types<BFloat16, std::int64_t>>;
TYPED_TEST_SUITE(TokenLogprobsTyped, AllTypes);

constexpr std::int64_t kWidths[] = {1, 2, 15, 16, 17, 63, 64, 65, 257, 4095, 4096, 4097, 32000, 128256};

TYPED_TEST(TokenLogprobsTyped, ForwardMatchesFloat64) {
  using T = typename TypeParam::Value;
  using Index = typename TypeParam::Target;
  Cpu cpu(2);
  unsigned seed = 1;
  for (std::int64_t cols : kWidths) {
    for (std::int64_t n : {1, 3, 9}) {
      const auto logits = random_logits<T>(n, cols, ++seed, 4.0F, 5);
      const auto targets = random_targets<Index>(n, cols, seed);
      const auto out = forward(cpu, logits, targets);
      for (std::int64_t r = 0; r < n; ++r) {
        const auto k = static_cast<std::size_t>(r);
        const double expected =
            static_cast<double>(to_float(logits.row(r)[targets[k]])) - reference_log_sum(logits.row(r), cols);
        EXPECT_NEAR(static_cast<double>(out[k]), expected, 2e-6 + 1e-7 * std::abs(expected)) << n << " x " << cols;
      }
    }
  }
}

TYPED_TEST(TokenLogprobsTyped, BackwardMatchesFloat64) {
  using T = typename TypeParam::Value;
  using Index = typename TypeParam::Target;
  Cpu cpu(2);
  unsigned seed = 1;
  const double rounding = std::is_same_v<T, float> ? 0x1p-23 : (std::is_same_v<T, Float16> ? 0x1p-11 : 0x1p-8);
  for (std::int64_t cols : kWidths) {
    const std::int64_t n = cols > 5000 ? 2 : 9;
    const auto logits = random_logits<T>(n, cols, ++seed, 4.0F, 5);
    const auto targets = random_targets<Index>(n, cols, seed);
    std::vector<float> grad;
    for (std::int64_t r = 0; r < n; ++r) grad.push_back(r % 3 == 0 ? 1.0F : -0.37F * static_cast<float>(r));
    Logits<T> d(n, cols, 3);
    token_logprobs_backward<T, Index>(cpu, {logits.view(), targets.data(), grad.data(), d.write()});
    for (std::int64_t r = 0; r < n; ++r) {
      const auto k = static_cast<std::size_t>(r);
      const double log_sum = reference_log_sum(logits.row(r), cols);
      double worst = 0.0;
      for (std::int64_t v = 0; v < cols; ++v) {
        const double p = std::exp(static_cast<double>(to_float(logits.row(r)[v])) - log_sum);
        const double expected =
            static_cast<double>(grad[k]) * ((v == static_cast<std::int64_t>(targets[k]) ? 1.0 : 0.0) - p);
        const double bound =
            std::abs(expected) * (rounding + 1e-6) + 2e-7 * std::abs(static_cast<double>(grad[k])) * p + 0x1p-25;
        const double error = std::abs(static_cast<double>(to_float(d.row(r)[v])) - expected) / bound;
        worst = error > worst || std::isnan(error) ? error : worst;
      }
      EXPECT_LE(worst, 1.0) << n << " x " << cols;
      for (std::int64_t v = cols; v < d.stride; ++v) EXPECT_TRUE(std::isnan(to_float(d.row(r)[v])));
    }
    // In place.
    Logits<T> same(logits);
    token_logprobs_backward<T, Index>(cpu, {same.view(), targets.data(), grad.data(), same.write()});
    for (std::int64_t r = 0; r < n; ++r) {
      EXPECT_EQ(std::memcmp(same.row(r), d.row(r), static_cast<std::size_t>(cols) * sizeof(T)), 0);
    }
  }
}

// A reduction whose result is right in one lane, one vector or one tile only shows when the largest logit, nearly all
// of the sum or the target lies elsewhere: put each at every position.
TEST(TokenLogprobs, TheMaximumTheSumAndTheTargetMayLieAnywhere) {
  for (int threads : {1, 2}) {
    Cpu cpu(threads);
    for (std::int64_t cols : {1, 2, 17, 100, 257, 2 * 4096 + 33}) {
      std::vector<std::int64_t> positions;
      for (std::int64_t p = 0; p < cols; ++p) {
        const std::int64_t in_tile = p % 4096;
        if (cols < 1000 || in_tile < 66 || in_tile > 4096 - 66 || p > cols - 66) positions.push_back(p);
      }
      for (std::size_t i = 0; i < positions.size(); i += 64) {
        const auto n = static_cast<std::int64_t>(std::min<std::size_t>(64, positions.size() - i));
        Logits<float> peak(n, cols);
        std::vector<std::int64_t> at, beside;
        for (std::int64_t r = 0; r < n; ++r) {
          const std::int64_t p = positions[i + static_cast<std::size_t>(r)];
          for (std::int64_t v = 0; v < cols; ++v) peak.set(r, v, -30.0F + 0.001F * static_cast<float>(v % 7));
          peak.set(r, p, 40.0F);
          at.push_back(p);
          beside.push_back((p + 1) % cols);
        }
        // Target on the peak, and next to it; then one logit at a time, the others masked out.
        const auto on = forward(cpu, peak, at), off = forward(cpu, peak, beside);
        for (std::int64_t r = 0; r < n; ++r) {
          const auto k = static_cast<std::size_t>(r);
          ASSERT_EQ(on[k], 0.0F) << at[k] << " of " << cols;
          const double expected = static_cast<double>(peak.row(r)[beside[k]]) - 40.0;
          ASSERT_NEAR(static_cast<double>(off[k]), expected, 1e-5) << at[k] << " of " << cols;
        }
        for (std::int64_t r = 0; r < n; ++r) {
          for (std::int64_t v = 0; v < cols; ++v) peak.set(r, v, -kInf);
          peak.set(r, at[static_cast<std::size_t>(r)], -3.0F);
        }
        const auto alone = forward(cpu, peak, at);
        for (std::size_t k = 0; k < alone.size(); ++k) ASSERT_EQ(alone[k], 0.0F) << at[k] << " of " << cols;
      }
    }
  }
}

TEST(TokenLogprobs, ExtremeLogits) {
  Cpu cpu(2);
  const std::int64_t cols = 5000;
  const float largest = std::numeric_limits<float>::max();
  const auto single = [&](float others, float one, float expected_at_one, float expected_at_other, float bound) {
    Logits<float> l(2, cols);
    for (std::int64_t r = 0; r < 2; ++r)
      for (std::int64_t v = 0; v < cols; ++v) l.set(r, v, v == 4321 ? one : others);
    const auto out = forward(cpu, l, std::vector<std::int64_t>{4321, 7});
    if (std::isnan(expected_at_one)) {
      EXPECT_TRUE(std::isnan(out[0]) && std::isnan(out[1])) << others << " " << one;
    } else {
      EXPECT_TRUE(out[0] == expected_at_one || std::abs(out[0] - expected_at_one) <= bound) << out[0];
      EXPECT_TRUE(out[1] == expected_at_other || std::abs(out[1] - expected_at_other) <= bound) << out[1];
    }
  };
  const float log_n = std::log(5000.0F);
  single(1e30F, 1e30F, -log_n, -log_n, 1e30F * 1e-6F);  // equal and large: finite
  single(88.0F, 88.0F, -log_n, -log_n, 2e-5F);
  single(-1e30F, 1e30F, 0.0F, -2e30F, 1e24F);
  single(1e30F, -1e30F, -2e30F, 0.0F, 1e24F);
  single(largest, -largest, -largest, 0.0F, 1e32F);  // the difference does not fit: the least finite number
  single(-kInf, 5.0F, 0.0F, -kInf, 0.0F);            // all but one masked
  single(0.0F, -kInf, -kInf, -std::log(4999.0F), 1e-5F);
  single(-kInf, -kInf, kNan, kNan, 0.0F);
  single(0.0F, kNan, kNan, kNan, 0.0F);
  for (float out : forward(
           cpu,
           [&] {
             Logits<float> l(1, 3);
             for (std::int64_t v = 0; v < 3; ++v) l.set(0, v, largest);
             return l;
           }(),
           std::vector<std::int64_t>{1})) {
    EXPECT_TRUE(std::isfinite(out));
  }
}

TEST(TokenLogprobs, RowsThatHaveNoProbabilitiesGiveNanGradients) {
  Cpu cpu(2);
  Logits<float> l(2, 100);
  for (std::int64_t v = 0; v < 100; ++v) {
    l.set(0, v, -kInf);
    l.set(1, v, v == 70 ? -kInf : 0.0F);
  }
  const std::vector<std::int32_t> targets{3, 4};
  const std::vector<float> grad{1.0F, 1.0F};
  Logits<float> d(2, 100);
  token_logprobs_backward<float, std::int32_t>(cpu, {l.view(), targets.data(), grad.data(), d.write()});
  for (std::int64_t v = 0; v < 100; ++v) {
    EXPECT_TRUE(std::isnan(d.row(0)[v]));
    EXPECT_NEAR(d.row(1)[v], v == 70 ? 0.0F : (v == 4 ? 1.0F : 0.0F) - 1.0F / 99.0F, 1e-7F);
  }
}

template <class Index>
void expect_refused(Index bad) {
  Cpu cpu(2);
  const auto logits = random_logits<float>(4, 50, 1);
  std::vector<Index> targets{1, 2, 3, 4};
  targets[2] = bad;
  std::vector<float> out(4, kPoison), grad(4, 1.0F);
  try {
    token_logprobs<float, Index>(cpu, {logits.view(), targets.data(), out.data()});
    ADD_FAILURE() << "accepted " << bad;
  } catch (const std::invalid_argument& e) {
    const std::string what = e.what();  // names the row and the value
    EXPECT_NE(what.find("row 2"), std::string::npos) << what;
    EXPECT_NE(what.find(std::to_string(bad)), std::string::npos) << what;
  }
  for (float x : out) EXPECT_EQ(x, kPoison);
  Logits<float> d(4, 50);
  EXPECT_THROW((token_logprobs_backward<float, Index>(cpu, {logits.view(), targets.data(), grad.data(), d.write()})),
               std::invalid_argument);
  for (float x : d.data) EXPECT_TRUE(std::isnan(x));
}

TEST(TokenLogprobs, RefusesTargetsOutsideTheVocabularyBeforeWriting) {
  expect_refused<std::int32_t>(-1);
  expect_refused<std::int32_t>(50);
  expect_refused<std::int32_t>(std::numeric_limits<std::int32_t>::max());
  expect_refused<std::int32_t>(std::numeric_limits<std::int32_t>::min());
  expect_refused<std::int64_t>(-1);
  expect_refused<std::int64_t>(50);
  expect_refused<std::int64_t>(std::numeric_limits<std::int64_t>::max());
  expect_refused<std::int64_t>(std::numeric_limits<std::int64_t>::min());
  expect_refused<std::int64_t>((std::int64_t{1} << 32) + 1);  // in range if cut to 32 bits
}

TEST(TokenLogprobs, EmptyShapes) {
  Cpu cpu(2);
  token_logprobs<float, int>(cpu, {{nullptr, 0, 10}, nullptr, nullptr});
  token_logprobs_backward<float, int>(cpu, {{nullptr, 0, 10}, nullptr, nullptr, {nullptr, 0, 10}});
  std::vector<float> x(20);
  const std::vector<int> t{0, 1};
  using View = MatrixView<const float, Host>;
  EXPECT_THROW((token_logprobs<float, int>(cpu, {View(x.data(), 2, 0), t.data(), x.data()})), std::invalid_argument);
}

TYPED_TEST(TokenLogprobsTyped, SameBitsForAnyNumberOfThreads) {
  using T = typename TypeParam::Value;
  using Index = typename TypeParam::Target;
  Cpu one(1), two(2), five(5);
  for (std::int64_t n : {1, 7, 30}) {
    for (std::int64_t cols : {257, 40001}) {
      const auto logits = random_logits<T>(n, cols, 5, 10.0F);
      const auto targets = random_targets<Index>(n, cols, 6);
      const std::vector<float> grad(static_cast<std::size_t>(n), 0.7F);
      const auto expected = forward(one, logits, targets);
      Logits<T> d1(n, cols);
      token_logprobs_backward<T, Index>(one, {logits.view(), targets.data(), grad.data(), d1.write()});
      for (Cpu* cpu : {&two, &five}) {
        EXPECT_EQ(forward(*cpu, logits, targets), expected);
        Logits<T> d(n, cols);
        token_logprobs_backward<T, Index>(*cpu, {logits.view(), targets.data(), grad.data(), d.write()});
        EXPECT_EQ(std::memcmp(d.data.data(), d1.data.data(), d.data.size() * sizeof(T)), 0);
      }
    }
  }
}

// Rows that begin beyond 2^31 elements; the memory between them is never touched.
TEST(TokenLogprobs, IndexesIn64Bits) {
  const std::int64_t stride = (std::int64_t{1} << 31) + 7, cols = 100;
  const std::size_t bytes = static_cast<std::size_t>(2 * stride) * sizeof(BFloat16);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no address space for " << bytes << " bytes";
  auto* data = static_cast<BFloat16*>(memory);
  for (std::int64_t v = 0; v < cols; ++v) data[stride + v] = from_float<BFloat16>(v == 42 ? 30.0F : -30.0F);
  const std::vector<std::int32_t> targets{0, 42};
  std::vector<float> out(2, kPoison), grad(2, 1.0F);
  Cpu cpu(2);
  token_logprobs<BFloat16, std::int32_t>(cpu, {{data, 2, cols, stride}, targets.data(), out.data()});
  EXPECT_NEAR(out[0], -std::log(100.0F), 1e-5F);
  EXPECT_EQ(out[1], 0.0F);
  token_logprobs_backward<BFloat16, std::int32_t>(
      cpu, {{data, 2, cols, stride}, targets.data(), grad.data(), {data, 2, cols, stride}});
  EXPECT_NEAR(to_float(data[0]), 0.99F, 1e-2F);
  EXPECT_NEAR(to_float(data[stride + 42]), 0.0F, 1e-6F);
  munmap(memory, bytes);
}

TYPED_TEST(TokenLogprobsTyped, EveryInstructionSet) {
  using T = typename TypeParam::Value;
  for (const SimdKernels* kernels : supported_simd_kernels()) {
    for (std::int64_t cols = 1; cols < 300; cols += cols < 80 ? 1 : 37) {
      const auto logits = random_logits<T>(1, cols, static_cast<unsigned>(cols), 20.0F);
      float max = kNan;
      double sum = std::numeric_limits<double>::quiet_NaN();
      kernels->logprobs.max_sum[kDTypeOf<T>](logits.row(0), cols, &max, &sum);
      const double expected = reference_log_sum(logits.row(0), cols);
      EXPECT_NEAR(static_cast<double>(max) + std::log(sum), expected, 1e-6 * std::max(1.0, std::abs(expected)))
          << kernels->name << " " << cols;
      Logits<T> y(1, cols, 1);
      kernels->logprobs.scaled_exp[kDTypeOf<T>](logits.row(0), cols, max, -0.5F, y.row(0));
      for (std::int64_t v = 0; v < cols; ++v) {
        const double e = -0.5 * std::exp(static_cast<double>(to_float(logits.row(0)[v])) - static_cast<double>(max));
        ASSERT_NEAR(static_cast<double>(to_float(y.row(0)[v])), e, std::abs(e) * 0x1p-8 + 0x1p-25) << kernels->name;
      }
      EXPECT_TRUE(std::isnan(to_float(y.row(0)[cols])));
    }
  }
}

}  // namespace
}  // namespace mmrec::kernels
