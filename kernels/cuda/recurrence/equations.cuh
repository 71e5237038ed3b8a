// The equations of a block for one channel of one token (docs/numerics.md), each written once for every kernel that has
// it: the decay γ, the recurrence's step, the residual stream behind it and rmsnorm's factor.
//
// What stands here decides bits that sweeps, steps and exact recurrence must share: which operations are fused, and in
// which order sums are formed, is part of the equation.
#pragma once

#include "kernels/cuda/element.cuh"

namespace mmrec::kernels {

/// γ = σ(a) σ(c) of what the decay networks put out, or σ(a) where there is one; kept to [1e-6, 1 − 1e-6], NaN stays.
__device__ inline float decay_of(float a, bool has_context, float c) {
  constexpr float kLeast = 1e-6F;
  constexpr float kMost = 1.0F - 1e-6F;
  float gamma = sigmoid(a);
  if (has_context) gamma *= sigmoid(c);
  return gamma < kLeast ? kLeast : gamma > kMost ? kMost : gamma;
}

/// A token's step of the state, h ↦ a h + b.
struct Step {
  float a = 1.0F;
  float b = 0.0F;

  __device__ float operator()(float h) const { return __fmaf_rn(a, h, b); }
};
/// `second` after `first`.
__device__ inline Step compose(Step first, Step second) { return {first.a * second.a, second(first.b)}; }

/// a = γ + μ (1 − g + γ), b = z (s + μ g) with s = σ(state_gate), g = σ(mdi_gate): both gates before their logistic
/// function.
__device__ inline Step gated_step(float state_gate, float mdi_gate, float z, float gamma, float mix) {
  const float s = sigmoid(state_gate);
  const float g = sigmoid(mdi_gate);
  return {__fmaf_rn(mix, (1.0F - g) + gamma, gamma), z * __fmaf_rn(mix, g, s)};
}

/// p = (1 − m + γ) h + m z with m = σ(gate): the recurrence that is normed, before its norm; and that norm's bounds, by
/// which NaN passes.
__device__ inline float normed_step(float gate, float z, float gamma, float h) {
  const float m = sigmoid(gate);
  return __fmaf_rn((1.0F - m) + gamma, h, m * z);
}
inline constexpr float kNormedLimit = 100.0F;
__device__ inline float within_limit(float x) {
  return x < -kNormedLimit ? -kNormedLimit : x > kNormedLimit ? kNormedLimit : x;
}

/// x + h + 0.1 v, to which the memory's c is added.
__device__ inline float residual_sum(float x, float h, float v) { return __fmaf_rn(0.1F, v, x + h); }

/// What an rmsnorm adds to the mean of squares and to its root: one of them is 1e-6, the other 0.
struct NormBias {
  double inside = 0.0;
  float beside = 1e-6F;
};
MMREC_HOST_DEVICE constexpr NormBias inside_root() { return {1e-6, 0.0F}; }

/// rmsnorm's factor 1 / (√mean + 1e-6), of a mean of squares, or with the bias inside the root. Where the sum of
/// squares is fp64 and x finite, it is right for every x: the root is fp32, which the mean may overflow.
__device__ inline float norm_factor(double mean, NormBias bias = {}) {
  const bool large = mean > 1e38;
  const float root = sqrtf(static_cast<float>(large ? mean * 0x1p-128 : mean + bias.inside)) * (large ? 0x1p64F : 1.0F);
  return 1.0F / (root + bias.beside);
}
/// The same of an fp32 mean by one instruction for the root, where a chain of dependent instructions waits for it. A
/// sum of squares that overflows gives 0, so ‖x‖₂ must stay below 1.8e19; docs/numerics.md says where that holds.
__device__ inline float norm_factor_fast(float mean) {
  // 1 / (r + 1e-6) for r = √mean, of 1 / r; the least keeps 1 / r finite.
  const float reciprocal = rsqrtf(fmaxf(mean, 1e-30F));
  return __fdividef(reciprocal, __fmaf_rn(1e-6F, reciprocal, 1.0F));
}

}  // namespace mmrec::kernels
