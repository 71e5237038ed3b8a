// The (max, sum) monoid: a sum of exponentials kept as sum * exp(max), so that no intermediate overflows.
//
// One operator serves the scans, token log-probs over vocabulary tiles and attention over memory slots. combine() is
// associative and commutative up to rounding; identity() is its neutral element; the softmax of a concatenation follows
// from its tiles by exactly this rescaling. Device code and per-element host code use fp32, sums of many tiles and
// block totals fp64. Nothing here is lost silently: a NaN term makes the result NaN. Host and device code share this
// header.
#pragma once

#include <cmath>
#include <limits>

#include "kernels/tensor.h"

namespace mmrec::kernels {

/// sum * exp(max). The identity is (-inf, 0): no terms at all. `sum` may be negative where signed terms are added up.
template <class Real>
struct BasicMaxSum {
  Real max = -std::numeric_limits<Real>::infinity();
  Real sum = Real{0};

  MMREC_HOST_DEVICE static constexpr BasicMaxSum identity() { return {}; }
  /// The single term exp(x).
  MMREC_HOST_DEVICE static constexpr BasicMaxSum of(Real x) { return {x, Real{1}}; }
};

using MaxSum = BasicMaxSum<float>;
using MaxSum64 = BasicMaxSum<double>;

/// exp(from - to) for to >= from, where both may be -inf (then 1, so that empty sums stay empty) or equal to +inf.
template <class Real>
MMREC_HOST_DEVICE inline Real rescale(Real from, Real to) {
  return from == to ? Real{1} : std::exp(from - to);
}

/// Terms of a and b together.
template <class Real>
MMREC_HOST_DEVICE inline BasicMaxSum<Real> combine(BasicMaxSum<Real> a, BasicMaxSum<Real> b) {
  const Real m = a.max > b.max ? a.max : b.max;
  return {m, a.sum * rescale(a.max, m) + b.sum * rescale(b.max, m)};
}

/// log(sum * exp(max)); -inf for the identity, NaN for a negative sum.
template <class Real>
MMREC_HOST_DEVICE inline Real log_value(BasicMaxSum<Real> a) {
  return a.sum == Real{0} ? -std::numeric_limits<Real>::infinity() : a.max + std::log(a.sum);
}

/// logit − log_value(all logits), in fp32: finite wherever the logits are, as the difference of two finite numbers that
/// does not fit becomes the least finite one. NaN if no logit is above -inf, or one is NaN.
MMREC_HOST_DEVICE inline float log_probability(float logit, MaxSum64 all) {
  constexpr double kLeast = -static_cast<double>(std::numeric_limits<float>::max());
  const double p = static_cast<double>(logit) - log_value(all);
  return static_cast<float>(p < kLeast && std::isfinite(p) ? kLeast : p);
}

/// A segment of the decayed recurrence h = a h + b: its decay Σ log a, relative to this segment alone, and its value
/// from h = 0 in max-and-mantissa form (a signed sum). The identity leaves any state as it is.
struct DecaySegment {
  double log_decay = 0.0;
  MaxSum64 value = MaxSum64::identity();

  MMREC_HOST_DEVICE static constexpr DecaySegment identity() { return {}; }
  /// A segment with the decay and the value from h = 0 that it has; of(0, h) is how a carry enters. A value of zero has
  /// no scale of its own: were its max 0, growth (log_decay > 0) over nothing would drown what comes after.
  MMREC_HOST_DEVICE static constexpr DecaySegment of(double log_decay, double h) {
    if (h == 0.0) return {log_decay, MaxSum64::identity()};  // as one expression it crashes nvcc 13.0
    return {log_decay, MaxSum64{0.0, h}};
  }
};

/// `first`, then `second`: (ℓ₁, B₁) ∘ (ℓ₂, B₂) = (ℓ₁ + ℓ₂, e^ℓ₂ B₁ + B₂). Associative, not commutative. log_decay may
/// be large of either sign or -inf (a forgotten past).
MMREC_HOST_DEVICE inline DecaySegment combine(DecaySegment first, DecaySegment second) {
  first.value.max += second.log_decay;
  return {first.log_decay + second.log_decay, combine(first.value, second.value)};
}

/// The state after a segment that began at h = 0.
MMREC_HOST_DEVICE inline double value(DecaySegment s) {
  return s.value.sum == 0.0 ? 0.0 : s.value.sum * std::exp(s.value.max);
}

}  // namespace mmrec::kernels
