// Log-probs from hidden states against float64 products and sums.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/cpu/cpu.h"
#include "tests/kernels/logprob_testing.h"

namespace mmrec::kernels {
namespace {

struct Case {
  std::int64_t n, dim, vocab, stride;
  DType dtype;
  std::vector<float> hidden;     // [n, dim], padded rows
  std::vector<float> wide_head;  // [vocab, dim], the stored values
  std::vector<std::uint16_t> head16;
  std::vector<int> targets;

  MatrixView<const float, Host> hidden_view() const { return {hidden.data(), n, dim, stride}; }
  WeightView<Host> head() const {
    if (dtype == DType::kF32) return {wide_head.data(), dtype, vocab, dim};
    return {head16.data(), dtype, vocab, dim};
  }
  double logit(std::int64_t r, std::int64_t v) const {
    double sum = 0.0;
    for (std::int64_t i = 0; i < dim; ++i) {
      sum += static_cast<double>(hidden[static_cast<std::size_t>(r * stride + i)]) *
             static_cast<double>(wide_head[static_cast<std::size_t>(v * dim + i)]);
    }
    return sum;
  }
  double expected(std::int64_t r) const {
    std::vector<double> row;
    for (std::int64_t v = 0; v < vocab; ++v) row.push_back(logit(r, v));
    const double max = *std::max_element(row.begin(), row.end());
    double sum = 0.0;
    for (double x : row) sum += std::exp(x - max);
    return row[static_cast<std::size_t>(targets[static_cast<std::size_t>(r)])] - max - std::log(sum);
  }
};

Case random_case(std::int64_t n, std::int64_t dim, std::int64_t vocab, DType dtype, unsigned seed) {
  Case c{n, dim, vocab, dim + 3, dtype, {}, {}, {}, {}};
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  c.hidden.assign(static_cast<std::size_t>(n * c.stride), std::numeric_limits<float>::quiet_NaN());
  for (std::int64_t r = 0; r < n; ++r)
    for (std::int64_t i = 0; i < dim; ++i) c.hidden[static_cast<std::size_t>(r * c.stride + i)] = normal(rng);
  const float scale = 3.0F / std::sqrt(static_cast<float>(dim));
  for (std::int64_t i = 0; i < vocab * dim; ++i) {
    const float x = scale * normal(rng);
    if (dtype == DType::kF32) {
      c.wide_head.push_back(x);
    } else if (dtype == DType::kF16) {
      c.head16.push_back(from_float<Float16>(x).bits);
      c.wide_head.push_back(to_float(Float16{c.head16.back()}));
    } else {
      c.head16.push_back(from_float<BFloat16>(x).bits);
      c.wide_head.push_back(to_float(BFloat16{c.head16.back()}));
    }
  }
  for (std::int64_t r = 0; r < n; ++r) c.targets.push_back(static_cast<int>(rng() % static_cast<std::uint64_t>(vocab)));
  return c;
}

std::vector<float> run(Cpu& cpu, const Case& c) {
  std::vector<float> out(c.targets.size(), kPoison);
  hidden_logprobs(cpu, {c.hidden_view(), c.head(), c.targets.data(), out.data()});
  return out;
}

void expect_correct(Cpu& cpu, const Case& c, std::int64_t every = 1) {
  const auto out = run(cpu, c);
  for (std::int64_t r = 0; r < c.n; r += every) {
    const double expected = c.expected(r);
    ASSERT_NEAR(static_cast<double>(out[static_cast<std::size_t>(r)]), expected, 5e-6 + 3e-7 * std::abs(expected))
        << "row " << r << " of " << c.n << ", D " << c.dim << ", V " << c.vocab;
  }
}

TEST(HiddenLogprobs, MatchesFloat64) {
  Cpu cpu(2);
  unsigned seed = 1;
  for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (std::int64_t vocab : {1, 2, 95, 96, 97, 257, 1536, 1537, 4001}) {
      for (std::int64_t n : {1, 7, 130}) expect_correct(cpu, random_case(n, 40, vocab, dtype, ++seed), 3);
    }
    expect_correct(cpu, random_case(500, 33, 300, dtype, ++seed), 7);  // several chunks of tokens
    expect_correct(cpu, random_case(3, 1, 300, dtype, ++seed));
    expect_correct(cpu, random_case(5, 1030, 200, dtype, ++seed));
  }
  expect_correct(cpu, random_case(30, 64, 32000, DType::kBF16, 77), 10);
  expect_correct(cpu, random_case(2, 16, 128256, DType::kBF16, 78));  // stripes of more than the least length
}

// One token's score lies at each place in turn: in every column of a panel, on panel and stripe edges, in every row of
// a block of tokens.
TEST(HiddenLogprobs, TheMaximumAndTheTargetMayLieAnywhere) {
  Cpu cpu(2);
  const std::int64_t vocab = 3200;
  std::vector<std::int64_t> positions;
  for (std::int64_t v = 0; v < vocab; ++v) {
    if (v < 200 || (v % 96 + 2) % 96 < 4 || (v + 3) % 1536 < 6 || v >= vocab - 3) positions.push_back(v);
  }
  const auto n = static_cast<std::int64_t>(positions.size());
  // Row r looks for its position: the head rows are points on a curve, the query the direction of one of them.
  Case c{n, 3, vocab, 3, DType::kF32, {}, {}, {}, {}};
  const auto point = [&](std::int64_t v, float* p) {
    const double angle = 6.283185307179586 * static_cast<double>(v) / static_cast<double>(vocab);
    p[0] = static_cast<float>(std::cos(angle));
    p[1] = static_cast<float>(std::sin(angle));
    p[2] = 1.0F;
  };
  c.wide_head.resize(static_cast<std::size_t>(vocab * 3));
  c.hidden.resize(static_cast<std::size_t>(n * 3));
  for (std::int64_t v = 0; v < vocab; ++v) point(v, &c.wide_head[static_cast<std::size_t>(3 * v)]);
  for (std::int64_t r = 0; r < n; ++r) {
    float* q = &c.hidden[static_cast<std::size_t>(3 * r)];
    point(positions[static_cast<std::size_t>(r)], q);
    for (int i = 0; i < 3; ++i) q[i] *= 1e7F;  // the neighbour is 19 below
    c.targets.push_back(static_cast<int>(positions[static_cast<std::size_t>(r)]));
  }
  const auto out = run(cpu, c);
  for (std::size_t r = 0; r < out.size(); ++r) EXPECT_NEAR(out[r], 0.0F, 3.0F) << "position " << positions[r];
  // With the target moved half way round, its logit is 2e7 lower: an error of place would show at once.
  for (int& t : c.targets) t = static_cast<int>((t + vocab / 2) % vocab);
  const auto far = run(cpu, c);
  for (std::size_t r = 0; r < far.size(); ++r) EXPECT_NEAR(far[r], -2e7F, 10.0F) << "position " << positions[r];
}

TEST(HiddenLogprobs, BitsDependOnNeitherThreadsNorOtherRows) {
  Cpu one(1), two(2), five(5);
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (std::int64_t n : {1, 5, 127, 700}) {
      const Case c = random_case(n, 70, 2000, dtype, 9);
      const auto expected = run(one, c);
      EXPECT_EQ(run(two, c), expected);
      EXPECT_EQ(run(five, c), expected);
      // A row outside whole tiles alone, a whole tile alone.
      const std::int64_t whole = n / kRowTile * kRowTile;
      const auto expect_part = [&](std::int64_t first, std::int64_t rows) {
        std::vector<float> part(static_cast<std::size_t>(rows), kPoison);
        hidden_logprobs(two,
                        {c.hidden_view().middle_rows(first, rows), c.head(), c.targets.data() + first, part.data()});
        for (std::int64_t r = 0; r < rows; ++r) {
          EXPECT_EQ(part[static_cast<std::size_t>(r)], expected[static_cast<std::size_t>(first + r)]) << first + r;
        }
      };
      for (std::int64_t r : {whole, (whole + n) / 2, n - 1}) expect_part(r, 1);
      // Ragged rows are each alone.
      std::vector<float> ragged(static_cast<std::size_t>(n), kPoison);
      hidden_logprobs(two, {c.hidden_view(), c.head(), c.targets.data(), ragged.data(), true});
      for (std::int64_t r : {std::int64_t{0}, n / 2, n - 1}) {
        float alone = kPoison;
        hidden_logprobs(one, {c.hidden_view().middle_rows(r, 1), c.head(), c.targets.data() + r, &alone});
        EXPECT_EQ(ragged[static_cast<std::size_t>(r)], alone) << r;
      }
      for (std::int64_t r = 0; r < whole; r += kRowTile) expect_part(r, kRowTile);
    }
  }
}

TEST(HiddenLogprobs, NegativeTargetsAreSkipped) {
  Cpu cpu(2);
  Case c = random_case(300, 20, 500, DType::kF32, 3);
  const auto all = run(cpu, c);
  for (std::size_t r = 0; r < c.targets.size(); r += 3)
    c.targets[r] = r % 2 == 0 ? -1 : std::numeric_limits<int>::min();
  const auto some = run(cpu, c);
  for (std::size_t r = 0; r < c.targets.size(); ++r) EXPECT_EQ(some[r], r % 3 == 0 ? kPoison : all[r]);
}

TEST(HiddenLogprobs, RefusesTargetsBeforeWriting) {
  Cpu cpu(2);
  for (int bad : {500, 501, std::numeric_limits<int>::max()}) {
    Case c = random_case(300, 20, 500, DType::kF32, 3);
    c.targets[250] = bad;
    std::vector<float> out(300, kPoison);
    try {
      hidden_logprobs(cpu, {c.hidden_view(), c.head(), c.targets.data(), out.data()});
      ADD_FAILURE() << "accepted " << bad;
    } catch (const std::invalid_argument& e) {
      EXPECT_NE(std::string(e.what()).find("row 250"), std::string::npos) << e.what();
    }
    for (float x : out) EXPECT_EQ(x, kPoison);
  }
  const Case c = random_case(3, 20, 50, DType::kF32, 3);
  hidden_logprobs(cpu, {{nullptr, 0, 20}, c.head(), nullptr, nullptr});
}

}  // namespace
}  // namespace mmrec::kernels
