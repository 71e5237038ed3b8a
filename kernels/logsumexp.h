// The (max, sum) monoid: a sum of exponentials kept as sum * exp(max), so that no intermediate overflows.
//
// The scans and token log-probs use it for sums of many tiles and for totals of blocks. combine() is associative and
// commutative up to rounding, and identity() is its neutral element. The softmax of a concatenation follows from its
// tiles by this rescaling. Nothing is lost silently: a NaN term makes the result NaN. Host and device code share this
// header. Kernels keep fp32 forms of their own for single elements.
#pragma once

#include <cmath>
#include <limits>

#include "kernels/tensor.h"

namespace mmrec::kernels {

/// sum * exp(max). The identity is (-inf, 0): no terms at all. `sum` may be negative where signed terms are added up.
struct MaxSum64 {
  double max = -std::numeric_limits<double>::infinity();
  double sum = 0.0;

  MMREC_HOST_DEVICE static constexpr MaxSum64 identity() { return {}; }
  /// The single term exp(x).
  MMREC_HOST_DEVICE static constexpr MaxSum64 of(double x) { return {x, 1.0}; }
};

/// exp(from - to) for to >= from, where both may be -inf (then 1, so that empty sums stay empty) or equal to +inf.
MMREC_HOST_DEVICE inline double rescale(double from, double to) { return from == to ? 1.0 : std::exp(from - to); }

/// Terms of a and b together.
MMREC_HOST_DEVICE inline MaxSum64 combine(MaxSum64 a, MaxSum64 b) {
  const double m = a.max > b.max ? a.max : b.max;
  return {m, a.sum * rescale(a.max, m) + b.sum * rescale(b.max, m)};
}

/// log(sum * exp(max)); -inf for the identity, NaN for a negative sum.
MMREC_HOST_DEVICE inline double log_value(MaxSum64 a) {
  return a.sum == 0.0 ? -std::numeric_limits<double>::infinity() : a.max + std::log(a.sum);
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
