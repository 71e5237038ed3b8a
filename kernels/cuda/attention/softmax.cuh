// Softmax attention over slots as a running sum: scores are taken in as they come, what was summed before is rescaled
// to the largest of them, and two sums are merged (the monoid of kernels/logsumexp.h, with values beside the sum).
//
// Exponents are base 2: scores come multiplied by log₂e. Nothing taken in is (kNothing, 0), which merges to what it is
// merged with; a NaN score makes the sum NaN.
#pragma once

#include <cmath>

#include "kernels/cuda/isa/ptx.cuh"

namespace mmrec::kernels {

inline constexpr float kNothing = -INFINITY;

/// What a query is multiplied by, so that scores are exponents base 2: log₂e / √channels.
inline float attention_scale(std::int64_t channels) {
  return static_cast<float>(1.4426950408889634 / std::sqrt(static_cast<double>(channels)));
}

/// 2^(from - to) for to >= from: 0 for the empty sum.
__device__ inline float weight_of(float from, float to) {
  return ptx::exp2_approx(from - (to == kNothing ? 0.0F : to));
}

/// The softmax of some slots: Σ 2^(score - max) and the same sum of kValues channels of their values.
template <int kValues>
struct Softmax {
  float max = kNothing;
  float sum = 0.0F;
  float values[kValues] = {};

  /// Rescales to the maximum of `most` and what there is. Returns the factor.
  __device__ float raise(float most) {
    most = fmaxf(most, max);
    const float kept = weight_of(max, most);
    max = most;
    sum *= kept;
#pragma unroll
    for (float& value : values) value *= kept;
    return kept;
  }
  /// Takes scores in: they become the weights of their slots' values, which are the caller's to add. Returns what
  /// values elsewhere must be multiplied by first.
  template <int kScores>
  __device__ float take(float (&scores)[kScores]) {
    float most = kNothing;
#pragma unroll
    for (const float score : scores) most = fmaxf(most, score);
    const float kept = raise(most);
#pragma unroll
    for (float& score : scores) {
      score = weight_of(score, max);
      sum += score;
    }
    return kept;
  }
};

/// total = total, then part.
template <int kValues>
__device__ inline void merge(Softmax<kValues>& total, const Softmax<kValues>& part) {
  const float most = fmaxf(total.max, part.max);
  const float before = weight_of(total.max, most);
  const float after = weight_of(part.max, most);
  total.max = most;
  total.sum = __fmaf_rn(total.sum, before, part.sum * after);
#pragma unroll
  for (int i = 0; i < kValues; ++i) total.values[i] = __fmaf_rn(total.values[i], before, part.values[i] * after);
}

}  // namespace mmrec::kernels
