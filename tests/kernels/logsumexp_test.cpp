// Laws of the (max, sum) monoid and of the decay segments built on it, against plain float64 sums.
#include "kernels/logsumexp.h"

#include "tests/support/prelude.h"

namespace mmrec::kernels {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kLargest = std::numeric_limits<double>::max();

double log_sum_exp(const std::vector<double>& x) {
  const double m = *std::max_element(x.begin(), x.end());
  if (std::isinf(m)) return m;
  double sum = 0.0;
  for (double v : x) sum += std::exp(v - m);
  return m + std::log(sum);
}

MaxSum64 of_all(const std::vector<double>& x) {
  MaxSum64 total;
  for (double v : x) total = combine(total, MaxSum64::of(v));
  return total;
}

TEST(MaxSumMonoid, IdentityLeavesEveryElementUnchanged) {
  for (double x : {-kInf, -kLargest, -1e300, -1.0, 0.0, 2.5, 1e300, kLargest, kInf}) {
    for (double sum : {0.5, 1.0, 1e6}) {
      const MaxSum64 a{x, sum};
      for (const MaxSum64& c : {combine(a, MaxSum64::identity()), combine(MaxSum64::identity(), a)}) {
        EXPECT_EQ(c.max, a.max);
        EXPECT_EQ(c.sum, a.sum);
      }
    }
  }
  const MaxSum64 empty = combine(MaxSum64::identity(), MaxSum64::identity());
  EXPECT_EQ(empty.max, -kInf);
  EXPECT_EQ(empty.sum, 0.0);
  EXPECT_EQ(log_value(empty), -kInf);
}

TEST(MaxSumMonoid, CommutesBitForBit) {
  std::mt19937 rng(1);
  std::uniform_real_distribution<double> value(-40.0, 40.0);
  std::uniform_real_distribution<double> sum(0.0, 100.0);
  for (int i = 0; i < 10000; ++i) {
    const MaxSum64 a{value(rng), sum(rng)}, b{value(rng), sum(rng)};
    const MaxSum64 ab = combine(a, b), ba = combine(b, a);
    EXPECT_EQ(ab.max, ba.max);
    EXPECT_EQ(ab.sum, ba.sum);
  }
}

TEST(MaxSumMonoid, IsAssociativeUpToRounding) {
  std::mt19937 rng(2);
  for (double spread : {0.1, 5.0, 80.0, 1e4, 1e30}) {
    std::uniform_real_distribution<double> value(-spread, spread);
    std::vector<double> x(257);
    for (double& v : x) v = value(rng);
    const double expected = log_sum_exp(x);
    // A left fold, a right fold and a fold over a random tree.
    MaxSum64 right;
    for (auto it = x.rbegin(); it != x.rend(); ++it) right = combine(MaxSum64::of(*it), right);
    std::vector<MaxSum64> tree;
    for (double v : x) tree.push_back(MaxSum64::of(v));
    while (tree.size() > 1) {
      const std::size_t i = rng() % (tree.size() - 1);
      tree[i] = combine(tree[i], tree[i + 1]);
      tree.erase(tree.begin() + static_cast<std::ptrdiff_t>(i) + 1);
    }
    const double bound = 1e-13 * std::max(1.0, std::abs(expected));
    EXPECT_NEAR(log_value(of_all(x)), expected, bound) << spread;
    EXPECT_NEAR(log_value(right), expected, bound) << spread;
    EXPECT_NEAR(log_value(tree[0]), expected, bound) << spread;
  }
}

TEST(MaxSumMonoid, ExtremesStayFinite) {
  const MaxSum64 equal = combine(MaxSum64::of(1e300), MaxSum64::of(1e300));
  EXPECT_EQ(equal.sum, 2.0);
  EXPECT_EQ(log_value(equal), 1e300);
  EXPECT_EQ(log_value(combine(MaxSum64::of(1e300), MaxSum64::of(-1e300))), 1e300);
  EXPECT_EQ(log_value(combine(MaxSum64::of(-1e300), MaxSum64::of(-1e300))), -1e300);
  // The difference of two finite numbers may overflow; the result must not.
  EXPECT_EQ(log_value(combine(MaxSum64::of(kLargest), MaxSum64::of(-kLargest))), kLargest);
  EXPECT_EQ(log_value(combine(MaxSum64::of(-kInf), MaxSum64::of(3.0))), 3.0);
  EXPECT_EQ(log_value(combine(MaxSum64::of(-kInf), MaxSum64::of(-kInf))), -kInf);
  EXPECT_EQ(log_value(combine(MaxSum64::of(kInf), MaxSum64::of(3.0))), kInf);
  EXPECT_EQ(log_value(combine(MaxSum64::of(kInf), MaxSum64::of(kInf))), kInf);
}

TEST(MaxSumMonoid, NanIsNeverLost) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const MaxSum64& other : {MaxSum64::identity(), MaxSum64::of(0.0), MaxSum64::of(kInf), MaxSum64::of(-kInf)}) {
    EXPECT_TRUE(std::isnan(log_value(combine(MaxSum64::of(nan), other))));
    EXPECT_TRUE(std::isnan(log_value(combine(other, MaxSum64::of(nan)))));
    EXPECT_TRUE(std::isnan(log_value(combine(combine(other, MaxSum64::of(nan)), MaxSum64::of(1.0)))));
  }
}

TEST(DecaySegments, AreAssociativeAndHaveAnIdentity) {
  std::mt19937 rng(5);
  std::uniform_real_distribution<double> decay(-3.0, 0.2);
  std::normal_distribution<double> input;
  for (int i = 0; i < 1000; ++i) {
    DecaySegment s[3];
    for (DecaySegment& e : s) e = DecaySegment::of(decay(rng), input(rng));
    const DecaySegment left = combine(combine(s[0], s[1]), s[2]), right = combine(s[0], combine(s[1], s[2]));
    EXPECT_NEAR(left.log_decay, right.log_decay, 1e-14);
    EXPECT_NEAR(value(left), value(right), 1e-14 * 30.0);
    EXPECT_DOUBLE_EQ(value(combine(s[0], DecaySegment::identity())), value(s[0]));
    EXPECT_DOUBLE_EQ(value(combine(DecaySegment::identity(), s[0])), value(s[0]));
    // The definition itself: h = a₂ (a₁ h + b₁) + b₂.
    const double h = input(rng);
    const double expected = std::exp(s[1].log_decay) * (std::exp(s[0].log_decay) * h + value(s[0])) + value(s[1]);
    EXPECT_NEAR(value(combine(DecaySegment::of(0.0, h), combine(s[0], s[1]))), expected, 1e-13);
  }
}

TEST(DecaySegments, LongDecaysAndGrowthNeitherOverflowNorLoseWhatFollows) {
  // A past decayed beyond every exponent is gone; what came after is exact.
  EXPECT_EQ(value(combine(DecaySegment::of(-5.0, 3.0), DecaySegment::of(-1e6, 2.0))), 2.0);
  EXPECT_EQ(value(combine(DecaySegment::of(-5.0, 3.0), DecaySegment::of(-kInf, 2.0))), 2.0);
  // Growth beyond fp64 over a zero state stays zero; growth followed by as much decay comes back.
  EXPECT_EQ(value(combine(DecaySegment::of(0.0, 0.0), DecaySegment::of(1e4, 2.0))), 2.0);
  const DecaySegment back =
      combine(combine(DecaySegment::of(0.0, 3.0), DecaySegment::of(1e4, 0.0)), DecaySegment::of(-1e4, 0.5));
  EXPECT_DOUBLE_EQ(value(back), 3.5);
  // Cancellation of signs.
  EXPECT_DOUBLE_EQ(value(combine(DecaySegment::of(0.0, 3.0), DecaySegment::of(0.0, -3.0))), 0.0);
}

}  // namespace
}  // namespace mmrec::kernels
