// Log-probs from hidden states and the head on the device against float64, in the form that any device takes and in the
// one that this device takes.
#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>
#include <type_traits>

#include "kernels/cpu/cpu.h"
#include "kernels/cuda/logprobs/algo.h"
#include "kernels/cuda/runtime/cuda.h"
#include "tests/kernels/cuda/cuda_testing.h"
#include "tests/kernels/logprob_testing.h"

namespace mmrec::kernels::test {
namespace {

/// Operands, on the host and on the device. Logits are of a size of 3.
template <class A>
struct Problem {
  std::int64_t n, dim, vocab, stride;
  std::vector<A> hidden, head;
  std::vector<int> targets;

  Problem(std::int64_t rows, std::int64_t d, std::int64_t v, std::int64_t padding = 0)
      : n(rows), dim(d), vocab(v), stride(d + padding) {
    static std::uint64_t stream = 5000;
    hidden = random_normal<A>(static_cast<std::size_t>(n * stride), 0.0, 1.0, ++stream);
    head = random_normal<A>(static_cast<std::size_t>(vocab * dim), 0.0, 3.0 / std::sqrt(static_cast<double>(dim)),
                            ++stream);
    std::mt19937_64 rng(test_seed() + ++stream);
    for (std::int64_t r = 0; r < n; ++r) targets.push_back(static_cast<int>(rng() % static_cast<std::uint64_t>(v)));
  }
  std::vector<double> expected(const std::vector<std::int64_t>& rows) const {
    return reference_hidden_logprobs(hidden, stride, head, dim, targets, rows);
  }
};

class HiddenLogprobsCuda : public CudaTest {
 protected:
  template <class A>
  std::vector<float> run(HiddenLogprobsAlgo way, const Problem<A>& problem) {
    const auto hidden = to_device(problem.hidden);
    const auto head = to_device(problem.head);
    const auto targets = to_device(problem.targets);
    auto out = to_device(std::vector<float>(problem.targets.size(), kPoison));
    // NaN in the buffers that products leave logits in: nothing may be read of them that no product wrote.
    const std::vector<std::uint8_t> ones(Cuda::kScratchBytes, 0xff);
    cuda().upload(ones.data(), static_cast<std::uint8_t*>(cuda().scratch()), ones.size());
    hidden_logprobs(cuda(),
                    HiddenLogprobs<Device, A>{.hidden = {hidden.data(), problem.n, problem.dim, problem.stride},
                                              .head = {head.data(), kDTypeOf<A>, problem.vocab, problem.dim},
                                              .targets = targets.data(),
                                              .logprobs = out.data()},
                    way);
    return to_host(out);
  }
};

template <class A>
class HiddenLogprobsCudaTyped : public HiddenLogprobsCuda {
 protected:
  static constexpr HiddenLogprobsAlgo kWays[] = {HiddenLogprobsAlgo::kByTiles, HiddenLogprobsAlgo::kAuto};
};
using Activations = ::testing::Types<float, Float16, BFloat16>;
TYPED_TEST_SUITE(HiddenLogprobsCudaTyped, Activations);

TYPED_TEST(HiddenLogprobsCudaTyped, MatchesFloat64) {
  struct Shape {
    std::int64_t n, dim, vocab, padding;
  };
  std::vector<Shape> shapes = {{1, 48, 2, 0},     {3, 8, 257, 8},    {8, 64, 1025, 0},   {9, 64, 1023, 0},
                               {31, 7, 4097, 3},  {33, 1, 300, 0},   {200, 72, 5000, 8}, {1, 16, 32000, 0},
                               {1030, 16, 33, 0}, {12, 24, 8200, 0}, {2, 8, 40003, 0}};
  if (!small_sizes()) {
    for (const Shape large : {Shape{1000, 1024, 32000, 0}, Shape{2100, 256, 4099, 8}, Shape{8, 2048, 128256, 0},
                              Shape{100, 512, 128256, 0}}) {
      shapes.push_back(large);
    }
  }
  for (const Shape s : shapes) {
    Problem<TypeParam> problem(s.n, s.dim, s.vocab, s.padding);
    // Where a row's reference costs much, only some rows are looked at, first and last among them.
    const std::int64_t step =
        std::max<std::int64_t>(1, s.n * s.vocab * s.dim / (small_sizes() ? 8'000'000 : 400'000'000));
    std::vector<std::int64_t> rows;
    for (std::int64_t r = 0; r < s.n - 1; r += step) rows.push_back(r);
    rows.push_back(s.n - 1);
    const std::vector<double> expected = problem.expected(rows);
    for (const HiddenLogprobsAlgo way : this->kWays) {
      const std::vector<float> out = this->run(way, problem);
      for (std::size_t i = 0; i < rows.size(); ++i) {
        ASSERT_NEAR(static_cast<double>(out[static_cast<std::size_t>(rows[i])]), expected[i],
                    2e-5 + 1e-6 * std::abs(expected[i]))
            << rows[i] << " of " << s.n << " x " << s.dim << " x " << s.vocab;
      }
    }
  }
}

TEST_F(HiddenLogprobsCuda, AgreesWithTheCpu) {
  const Problem<float> problem(small_sizes() ? 150 : 3000, 64, 4500);
  std::vector<float> expected(problem.targets.size(), kPoison);
  Cpu cpu(2);
  hidden_logprobs(cpu, HiddenLogprobs<Host>{.hidden = {problem.hidden.data(), problem.n, problem.dim},
                                            .head = {problem.head.data(), DType::kF32, problem.vocab, problem.dim},
                                            .targets = problem.targets.data(),
                                            .logprobs = expected.data()});
  const std::vector<float> out = run<float>(HiddenLogprobsAlgo::kAuto, problem);
  for (std::size_t r = 0; r < out.size(); ++r) ASSERT_NEAR(out[r], expected[r], 2e-5F) << r;
}

// The target, the largest logit and nearly all of the sum may lie in any part and tile, at any place in it.
TYPED_TEST(HiddenLogprobsCudaTyped, TheTargetMayLieAnywhere) {
  constexpr std::int64_t kDim = 8, kVocab = 9000;
  std::vector<std::int64_t> peaks{0, 1023, 4096, 8192, 8999};
  if (!small_sizes()) peaks.insert(peaks.end(), {1, 3, 127, 128, 255, 256, 1024, 2047, 4095, 4097, 5000, 8191, 8998});
  for (const std::int64_t n : {4, 40}) {
    Problem<TypeParam> problem(n, kDim, kVocab);
    // The first channel alone counts: logit v of every row is head[v][0].
    std::fill(problem.hidden.begin(), problem.hidden.end(), from_float<TypeParam>(0.0F));
    for (std::int64_t r = 0; r < n; ++r) {
      problem.hidden[static_cast<std::size_t>(r * kDim)] = from_float<TypeParam>(1.0F);
    }
    for (const std::int64_t peak : peaks) {
      std::fill(problem.head.begin(), problem.head.end(), from_float<TypeParam>(-40.0F));
      problem.head[static_cast<std::size_t>(peak * kDim)] = from_float<TypeParam>(40.0F);
      for (std::int64_t r = 0; r < n; ++r) {
        problem.targets[static_cast<std::size_t>(r)] = static_cast<int>(r % 2 == 0 ? peak : (peak + r) % kVocab);
      }
      for (const HiddenLogprobsAlgo way : this->kWays) {
        const auto out = this->run(way, problem);
        for (std::size_t r = 0; r < out.size(); ++r) ASSERT_EQ(out[r], r % 2 == 0 ? 0.0F : -80.0F) << peak << " " << r;
      }
    }
  }
}

TYPED_TEST(HiddenLogprobsCudaTyped, RowsWithoutATargetAreLeftAlone) {
  for (const std::int64_t n : {5, 77}) {
    Problem<TypeParam> problem(n, 16, 2100);
    for (const HiddenLogprobsAlgo way : this->kWays) {
      const std::vector<float> all = this->run(way, problem);
      Problem<TypeParam> some = problem;
      for (std::size_t r = 0; r < some.targets.size(); r += 3) some.targets[r] = -1 - static_cast<int>(r);
      const std::vector<float> out = this->run(way, some);
      for (std::size_t r = 0; r < out.size(); ++r) {
        ASSERT_EQ(out[r], r % 3 == 0 ? kPoison : all[r]) << r << " of " << n;
      }
    }
  }
}

TYPED_TEST(HiddenLogprobsCudaTyped, ATargetBeyondTheVocabularyGivesNan) {
  for (const std::int64_t n : {5, 77}) {
    Problem<TypeParam> problem(n, 16, 2100);
    problem.targets[2] = 2100;
    problem.targets[4] = std::numeric_limits<int>::max();
    const auto out = this->run(HiddenLogprobsAlgo::kByTiles, problem);
    for (std::size_t r = 0; r < out.size(); ++r) ASSERT_EQ(std::isnan(out[r]), r == 2 || r == 4) << r;
  }
}

// More rows than the results of one pass have room for.
TEST_F(HiddenLogprobsCuda, RowsAreTakenInPasses) {
  if (small_sizes()) GTEST_SKIP() << "large sizes";
  Problem<BFloat16> problem(5000, 8, 1'000'003);
  const std::vector<std::int64_t> looked_at{0, 1023, 1024, 3071, 4095, 4096, 4097, 4999};
  const std::vector<double> expected = problem.expected(looked_at);
  std::vector<int> targets(problem.targets.size(), -1);
  for (const std::int64_t r : looked_at)
    targets[static_cast<std::size_t>(r)] = problem.targets[static_cast<std::size_t>(r)];
  problem.targets = targets;
  auto out = run<BFloat16>(HiddenLogprobsAlgo::kByTiles, problem);
  for (std::size_t i = 0; i < looked_at.size(); ++i) {
    float& got = out[static_cast<std::size_t>(looked_at[i])];
    ASSERT_NEAR(static_cast<double>(got), expected[i], 2e-5) << looked_at[i];
    got = kPoison;
  }
  EXPECT_EQ(out, std::vector<float>(out.size(), kPoison)) << "rows without a target";
}

TYPED_TEST(HiddenLogprobsCudaTyped, IsReplayedByAGraph) {
  Problem<TypeParam> before(70, 16, 9000);
  const Problem<TypeParam> after(70, 16, 9000);
  const auto head = this->to_device(after.head);
  auto hidden = this->to_device(before.hidden);
  const auto targets = this->to_device(after.targets);
  for (const HiddenLogprobsAlgo way : this->kWays) {
    auto out = this->template poisoned<float>(70);
    const HiddenLogprobs<Device, TypeParam> op{.hidden = {hidden.data(), 70, 16},
                                               .head = {head.data(), kDTypeOf<TypeParam>, 9000, 16},
                                               .targets = targets.data(),
                                               .logprobs = out.data()};
    hidden_logprobs(this->cuda(), op, way);
    const Graph graph(this->cuda(), [&] { hidden_logprobs(this->cuda(), op, way); });
    this->cuda().upload(after.hidden.data(), hidden.data(), after.hidden.size());
    graph.launch(this->cuda());
    EXPECT_EQ(this->to_host(out), this->run(way, after));
    this->cuda().upload(before.hidden.data(), hidden.data(), before.hidden.size());
  }
}

TEST_F(HiddenLogprobsCuda, EmptyShapes) {
  using Job = HiddenLogprobs<Device, BFloat16>;
  auto memory = poisoned<float>(200);
  const auto* x = reinterpret_cast<const BFloat16*>(memory.data());
  const MatrixView<const BFloat16, Device> hidden(x, 2, 10);
  const WeightView<Device> head{x, DType::kBF16, 4, 10};
  hidden_logprobs(cuda(), Job{{nullptr, 0, 10}, head, nullptr, nullptr});
  hidden_logprobs(cuda(), Job{hidden, {nullptr, DType::kBF16, 0, 10}, nullptr, nullptr});
}

}  // namespace
}  // namespace mmrec::kernels::test
