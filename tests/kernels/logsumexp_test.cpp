// Laws of the (max, sum) monoid and of the decay segments built on it, against plain float64 sums.
#include "kernels/logsumexp.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace mmrec::kernels {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();

double log_sum_exp(const std::vector<double>& x) {
  const double m = *std::max_element(x.begin(), x.end());
  if (std::isinf(m)) return m;
  double sum = 0.0;
  for (double v : x) sum += std::exp(v - m);
  return m + std::log(sum);
}

template <class Real>
BasicMaxSum<Real> of_all(const std::vector<double>& x) {
  BasicMaxSum<Real> total;
  for (double v : x) total = combine(total, BasicMaxSum<Real>::of(static_cast<Real>(v)));
  return total;
}

TEST(MaxSumMonoid, IdentityLeavesEveryElementUnchanged) {
  for (float x : {-kInf, -kLargest, -1e30F, -1.0F, 0.0F, 2.5F, 1e30F, kLargest, kInf}) {
    for (float sum : {0.5F, 1.0F, 1e6F}) {
      const MaxSum a{x, sum};
      for (const MaxSum& c : {combine(a, MaxSum::identity()), combine(MaxSum::identity(), a)}) {
        EXPECT_EQ(c.max, a.max);
        EXPECT_EQ(c.sum, a.sum);
      }
    }
  }
  const MaxSum empty = combine(MaxSum::identity(), MaxSum::identity());
  EXPECT_EQ(empty.max, -kInf);
  EXPECT_EQ(empty.sum, 0.0F);
  EXPECT_EQ(log_value(empty), -kInf);
}

TEST(MaxSumMonoid, CommutesBitForBit) {
  std::mt19937 rng(1);
  std::uniform_real_distribution<float> value(-40.0F, 40.0F);
  std::uniform_real_distribution<float> sum(0.0F, 100.0F);
  for (int i = 0; i < 10000; ++i) {
    const MaxSum a{value(rng), sum(rng)}, b{value(rng), sum(rng)};
    const MaxSum ab = combine(a, b), ba = combine(b, a);
    EXPECT_EQ(ab.max, ba.max);
    EXPECT_EQ(ab.sum, ba.sum);
  }
}

template <class Real>
void expect_any_bracketing_agrees(Real bound) {
  std::mt19937 rng(2);
  for (double spread : {0.1, 5.0, 80.0, 1e4, 1e30}) {
    std::uniform_real_distribution<double> value(-spread, spread);
    std::vector<double> x(257);
    for (double& v : x) v = static_cast<float>(value(rng));
    const double expected = log_sum_exp(x);
    // A left fold, a right fold and a fold over a random tree.
    BasicMaxSum<Real> right;
    for (auto it = x.rbegin(); it != x.rend(); ++it) {
      right = combine(BasicMaxSum<Real>::of(static_cast<Real>(*it)), right);
    }
    std::vector<BasicMaxSum<Real>> tree;
    for (double v : x) tree.push_back(BasicMaxSum<Real>::of(static_cast<Real>(v)));
    while (tree.size() > 1) {
      const std::size_t i = rng() % (tree.size() - 1);
      tree[i] = combine(tree[i], tree[i + 1]);
      tree.erase(tree.begin() + static_cast<std::ptrdiff_t>(i) + 1);
    }
    const double scale = std::max(1.0, std::abs(expected));
    EXPECT_NEAR(log_value(of_all<Real>(x)), expected, bound * scale) << spread;
    EXPECT_NEAR(log_value(right), expected, bound * scale) << spread;
    EXPECT_NEAR(log_value(tree[0]), expected, bound * scale) << spread;
  }
}

TEST(MaxSumMonoid, IsAssociativeUpToRounding) {
  expect_any_bracketing_agrees<float>(2e-6F);
  expect_any_bracketing_agrees<double>(1e-13);
}

TEST(MaxSumMonoid, ExtremesStayFinite) {
  const MaxSum equal = combine(MaxSum::of(1e30F), MaxSum::of(1e30F));
  EXPECT_EQ(equal.sum, 2.0F);
  EXPECT_EQ(log_value(equal), 1e30F);
  EXPECT_EQ(log_value(combine(MaxSum::of(1e30F), MaxSum::of(-1e30F))), 1e30F);
  EXPECT_EQ(log_value(combine(MaxSum::of(-1e30F), MaxSum::of(-1e30F))), -1e30F);
  // The difference of two finite numbers may overflow; the result must not.
  EXPECT_EQ(log_value(combine(MaxSum::of(kLargest), MaxSum::of(-kLargest))), kLargest);
  EXPECT_EQ(log_value(combine(MaxSum::of(-kInf), MaxSum::of(3.0F))), 3.0F);
  EXPECT_EQ(log_value(combine(MaxSum::of(-kInf), MaxSum::of(-kInf))), -kInf);
  EXPECT_EQ(log_value(combine(MaxSum::of(kInf), MaxSum::of(3.0F))), kInf);
  EXPECT_EQ(log_value(combine(MaxSum::of(kInf), MaxSum::of(kInf))), kInf);
}

TEST(MaxSumMonoid, NanIsNeverLost) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const MaxSum& other : {MaxSum::identity(), MaxSum::of(0.0F), MaxSum::of(kInf), MaxSum::of(-kInf)}) {
    EXPECT_TRUE(std::isnan(log_value(combine(MaxSum::of(nan), other))));
    EXPECT_TRUE(std::isnan(log_value(combine(other, MaxSum::of(nan)))));
    EXPECT_TRUE(std::isnan(log_value(combine(combine(other, MaxSum::of(nan)), MaxSum::of(1.0F)))));
  }
}

TEST(MaxSumMonoid, SoftmaxOfAConcatenationFollowsFromItsTiles) {
  std::mt19937 rng(3);
  std::normal_distribution<float> logit(0.0F, 5.0F);
  std::vector<double> x(1000);
  for (double& v : x) v = logit(rng);
  const double whole = log_sum_exp(x);
  for (std::size_t cut : {std::size_t{1}, std::size_t{7}, std::size_t{500}, std::size_t{999}}) {
    const std::vector<double> head(x.begin(), x.begin() + static_cast<std::ptrdiff_t>(cut));
    const std::vector<double> tail(x.begin() + static_cast<std::ptrdiff_t>(cut), x.end());
    EXPECT_NEAR(log_value(combine(of_all<float>(head), of_all<float>(tail))), whole, 1e-5);
  }
}

TEST(MaxSum, OfTwoTermsAgreesWithFloat64) {
  std::mt19937 rng(4);
  std::uniform_real_distribution<float> value(-60.0F, 60.0F);
  for (int i = 0; i < 10000; ++i) {
    const float a = value(rng), b = value(rng);
    const double expected = log_sum_exp({a, b});
    EXPECT_NEAR(log_value(combine(MaxSum::of(a), MaxSum::of(b))), expected, 1e-6 * std::max(1.0, std::abs(expected)));
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
  const double inf = std::numeric_limits<double>::infinity();
  EXPECT_EQ(value(combine(DecaySegment::of(-5.0, 3.0), DecaySegment::of(-inf, 2.0))), 2.0);
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
