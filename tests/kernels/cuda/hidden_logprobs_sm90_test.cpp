// Log-probs from hidden states on the tensor cores of sm_90a, against fp64.
#include <algorithm>

#include "kernels/cuda/logprobs/algo.h"
#include "tests/kernels/cuda/cuda_testing.h"
#include "tests/kernels/logprob_testing.h"

namespace mmrec::kernels {
namespace {

using test::random_normal;

class HiddenLogprobsSm90 : public test::CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (!IsSkipped() && cuda().compute_capability() != 90)
      GTEST_SKIP() << "the device is not of compute capability 9.0";
  }

  struct Problem {
    std::int64_t rows, vocab, dim;
    double deviation = 1.0;         // of the logits
    std::int64_t checked_rows = 0;  // 0: all
  };

  /// The largest |got − want| / (1 + |want|) over rows; infinite where a skipped row was touched or one was not
  /// written.
  template <class A>
  double error(const Problem& p) {
    const std::int64_t stride = p.dim + 8;
    const auto hidden = random_normal<A>(static_cast<std::size_t>(p.rows * stride), 0.0, 1.0, 1);
    const auto head = random_normal<A>(static_cast<std::size_t>(p.vocab * p.dim), 0.0,
                                       p.deviation / std::sqrt(static_cast<double>(p.dim)), 2);
    std::mt19937_64 draw(test::test_seed());
    std::vector<int> targets(static_cast<std::size_t>(p.rows));
    for (int& t : targets) t = static_cast<int>(draw() % static_cast<std::uint64_t>(p.vocab));
    for (std::size_t r = 5; r < targets.size(); r += 7) targets[r] = -1;
    targets[0] = static_cast<int>(p.vocab) - 1;

    const auto hidden_device = to_device(hidden);
    const auto head_device = to_device(head);
    const auto targets_device = to_device(targets);
    auto logprobs = poisoned<float>(static_cast<std::size_t>(p.rows));
    const HiddenLogprobs<Device, A> op = {
        .hidden = MatrixView<const A, Device>(hidden_device.data(), p.rows, p.dim, stride),
        .head = {head_device.data(), std::is_same_v<A, BFloat16> ? DType::kBF16 : DType::kF16, p.vocab, p.dim},
        .targets = targets_device.data(),
        .logprobs = logprobs.data()};
    EXPECT_EQ(choose_hidden_logprobs(cuda(), op), HiddenLogprobsAlgo::kInRegisters);
    hidden_logprobs(cuda(), op, HiddenLogprobsAlgo::kInRegisters);
    const auto got = to_host(logprobs);

    double worst = 0.0;
    const std::int64_t step = p.checked_rows == 0 ? 1 : std::max<std::int64_t>(p.rows / p.checked_rows, 1);
    std::vector<std::int64_t> rows;
    for (std::int64_t r = 0; r < p.rows; r += step) {
      if (targets[static_cast<std::size_t>(r)] >= 0) {
        rows.push_back(r);
      } else if (!std::isnan(got[static_cast<std::size_t>(r)])) {
        worst = INFINITY;
      }
    }
    const std::vector<double> want = reference_hidden_logprobs(hidden, stride, head, p.dim, targets, rows);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const double e = std::abs(static_cast<double>(got[static_cast<std::size_t>(rows[i])]) - want[i]);
      worst = std::isnan(e) ? INFINITY : std::max(worst, e / (1.0 + std::abs(want[i])));
    }
    return worst;
  }
};

constexpr double kBound = 5e-6;

TEST_F(HiddenLogprobsSm90, AwkwardVocabularies) {
  EXPECT_LT(error<BFloat16>({.rows = 33, .vocab = 1, .dim = 64}), kBound);
  EXPECT_LT(error<BFloat16>({.rows = 31, .vocab = 2, .dim = 72}), kBound);
  EXPECT_LT(error<BFloat16>({.rows = 2, .vocab = 257, .dim = 136}), kBound);
  EXPECT_LT(error<Float16>({.rows = 128, .vocab = 511, .dim = 8}), kBound);
}

TEST_F(HiddenLogprobsSm90, AwkwardRows) {
  EXPECT_LT(error<BFloat16>({.rows = 1, .vocab = 1000, .dim = 64}), kBound);
  EXPECT_LT(error<BFloat16>({.rows = 129, .vocab = 300, .dim = 64}), kBound);
  EXPECT_LT(error<Float16>({.rows = 257, .vocab = 700, .dim = 200}), kBound);
  EXPECT_LT(error<BFloat16>({.rows = 333, .vocab = 2304, .dim = 128}), kBound);  // several tiles a block
}

TEST_F(HiddenLogprobsSm90, LargeLogits) {
  // The logits' own rounding is what the bound allows for: sums of 64 products of up to thousands, in fp32.
  EXPECT_LT(error<BFloat16>({.rows = 64, .vocab = 600, .dim = 64, .deviation = 1000.0}), 2e-5);
}

TEST_F(HiddenLogprobsSm90, NotANumber) {
  constexpr std::int64_t kRows = 3, kVocab = 300, kDim = 64;
  auto hidden = random_normal<BFloat16>(kRows * kDim);
  hidden[kDim + 5] = from_float<BFloat16>(NAN);  // row 1
  const auto hidden_device = to_device(hidden);
  const auto head = to_device(random_normal<BFloat16>(kVocab * kDim, 0.0, 0.1));
  const auto targets = to_device(std::vector<int>(kRows, 7));
  auto logprobs = poisoned<float>(kRows);
  hidden_logprobs(
      cuda(),
      HiddenLogprobs<Device, BFloat16>{.hidden = MatrixView<const BFloat16, Device>(hidden_device.data(), kRows, kDim),
                                       .head = {head.data(), DType::kBF16, kVocab, kDim},
                                       .targets = targets.data(),
                                       .logprobs = logprobs.data()},
      HiddenLogprobsAlgo::kInRegisters);
  const auto got = to_host(logprobs);
  EXPECT_TRUE(std::isfinite(got[0]));
  EXPECT_TRUE(std::isnan(got[1]));
  EXPECT_TRUE(std::isfinite(got[2]));
}

TEST_F(HiddenLogprobsSm90, LargeSizes) {
  if (test::small_sizes()) GTEST_SKIP() << "large sizes";
  EXPECT_LT(error<BFloat16>({.rows = 4096, .vocab = 32000, .dim = 2048, .checked_rows = 12}), kBound);
  EXPECT_LT(error<Float16>({.rows = 1000, .vocab = 128256, .dim = 1024, .checked_rows = 6}), kBound);
  // More partial results than the scratch holds.
  EXPECT_LT(error<BFloat16>({.rows = 40000, .vocab = 128256, .dim = 64, .checked_rows = 40}), kBound);
}

}  // namespace
}  // namespace mmrec::kernels
