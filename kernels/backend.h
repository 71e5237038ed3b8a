// The list of operations a backend implements, each with its equation, shapes, aliasing and determinism.
//
// A backend is a struct (`Cpu`, and `Cuda` beside it) that owns memory, threads or a stream, and library handles; its
// ops are free functions overloaded on that struct, declared in `kernels/<backend>/<backend>.h`. The arguments are the
// structs of this header, so both backends implement one list; a missing op fails to compile where `models/forward.h`
// is instantiated.
//
// Rules that hold for every op unless its comment says otherwise:
//  * All arithmetic and all activations are fp32; weights are widened exactly from their stored type.
//  * An op neither allocates nor frees memory and never waits for the host: scratch belongs to the backend and is sized
//    when the backend is made, so that a step can be captured and replayed.
//  * Outputs do not alias inputs. Where aliasing is allowed the comment says "may alias".
//  * Same inputs, shapes and device: same bits, whatever the number of threads and whatever else shares the batch.
//    Reductions have a fixed order and no atomics.
//  * Shapes are the caller's responsibility (models/ validated them once); ops assert in debug builds only. The ops of
//    the public kernel API (scans and token log-probs) check their arguments and throw std::invalid_argument.
//
// Notation: n rows of tokens ([batch, tokens] flattened unless a struct separates them), D model_dim, V vocab_size,
// M memory slots, σ the logistic function.
#pragma once

#include <cstdint>

#include "kernels/tensor.h"

namespace mmrec::kernels {

/// Element-wise function applied by `linear` before the residual is added. Gelu is the exact (erf) one.
enum class Activation : std::uint8_t { kNone, kGelu, kRelu };

/// Rows of one library matrix product. `linear` gives every whole tile of this many rows to the matrix library in one
/// fixed shape and computes the remaining rows by the matrix-vector kernel, whose result for a row does not depend on
/// how many rows there are. So a row's bits depend only on whether it lies in a whole tile and where in that tile.
inline constexpr std::int64_t kRowTile = 128;

/// y = act(x Wᵀ + bias) + residual_scale * residual.
/// x [n, in], weight [out, in], bias [out] or null, residual [n, out] or null; y [n, out].
/// residual may alias y. `linear(backend, span<const Linear>)` runs independent jobs as one parallel region.
template <class Space>
struct Linear {
  MatrixView<const float, Space> x;
  WeightView<Space> weight;
  const float* bias = nullptr;
  MatrixView<float, Space> y;
  Activation activation = Activation::kNone;
  MatrixView<const float, Space> residual = {};
  float residual_scale = 1.0F;
};

/// The decay gate from the pre-activations of its MLPs:
/// MDI γ = clamp(σ(a) ⊙ σ(c)), DPG (c.data null) γ = clamp(σ(a)), clamped to [1e-6, 1 − 1e-6].
/// a, c, gamma [n, D]; gamma may alias a or c.
template <class Space>
struct DecayGate {
  MatrixView<const float, Space> a;
  MatrixView<const float, Space> c = {};
  MatrixView<float, Space> gamma;
};

/// The operands of the recurrence that do not look at the previous state, [batch, time, D] each:
///   s_t = σ(W_g h_{t-1} + b_g),  g_t = σ(zm_t + W_mh h_{t-1}),  zm_t = W_mz z_t + b_m
///   a_t = γ_t + μ (1 − g_t + γ_t),  b_t = z_t ⊙ (s_t + μ g_t),  h_t = a_t ⊙ h_{t-1} + b_t
/// `h` has one row more than the others: h.at(b, 0, 0) is the carry h_{-1} on entry, row t + 1 receives h_t.
template <class Space>
struct GateInputs {
  SequenceView<const float, Space> z;      // [B, T, D]
  SequenceView<const float, Space> zm;     // [B, T, D]
  SequenceView<const float, Space> gamma;  // [B, T, D]
  SequenceView<float, Space> h;            // [B, T + 1, D]
  float mdi_mix = 0.1F;                    // μ
};

/// The exact recurrence, one token after another. gate_weight [2D, D]: rows 0..D are W_g, rows D..2D the half of
/// mdi.W_g that looks at h. gate_bias [D] is b_g (b_m is inside zm). Bits do not depend on batch, threads or on how the
/// tokens are cut into calls.
template <class Space>
struct GatedRecurrence {
  GateInputs<Space> in;
  WeightView<Space> gate_weight;
  const float* gate_bias = nullptr;
};

/// One gate-frozen sweep: h from row `first` on is replaced by the scan of (a, b) whose gates were computed from the
/// previous iterate. gate [B, T, 2D] holds W_g h_{t-1} + b_g in its first D columns and W_mh h_{t-1} in the last D, for
/// times first..T. Writes change[t] = max over batch and channels of |h_new − h_old| and magnitude[t] = max |h_new| for
/// t in first..T (both [T]). The fixed point is the exact recurrence.
template <class Space>
struct GatedScan {
  GateInputs<Space> in;
  SequenceView<const float, Space> gate;  // [B, T, 2D]
  std::int64_t first = 0;
  float* change = nullptr;     // [T]
  float* magnitude = nullptr;  // [T]
};

/// Multi-head softmax attention over memory slots, key and value alike, scale 1/√(D / heads):
/// out = softmax(q · slotsᵀ / √d) · slots per head. q, out [B, T, D] (out may alias q); slots [B, slots, D], slots
/// >= 1. The order of the slots does not matter beyond rounding; it is fixed: 0, 1, ….
template <class Space>
struct MemoryAttention {
  SequenceView<const float, Space> q;
  SequenceView<const float, Space> slots;
  std::int64_t heads = 1;
  SequenceView<float, Space> out;
};

/// y = x + h + 0.1 v, plus bias [D] where it is not null. [B, T, D] each; y may alias x.
template <class Space>
struct BlockResidual {
  SequenceView<const float, Space> x;
  SequenceView<const float, Space> h;
  SequenceView<const float, Space> v;
  const float* bias = nullptr;
  SequenceView<float, Space> y;
};

/// sum += x over time, in order of time, in fp64. x [B, T, D]; sum [B, D].
template <class Space>
struct SegmentSum {
  SequenceView<const float, Space> x;
  double* sum = nullptr;
};

// ---------------------------------------------------------------------------------------------------------------------
// The public kernels: three scans and token log-probs, usable without a model. T is float, Float16 or BFloat16.
// Scans run over `time` of [batch, heads, time, dim]; every (batch, head, channel) is one sequence. carry_in and
// carry_out are [batch, heads, dim] contiguous fp32 and may be null; they may alias each other. y may alias the input
// of the same type. Blocks of 128 to 1,024 times are scanned in parallel; block totals are combined by an up-sweep and
// a down-sweep: O(N) work. Cutting a run into calls that hand carries on gives the same result within rounding.
// ---------------------------------------------------------------------------------------------------------------------

/// Running product of decay gates through log space: L_t = Σ_{i<=t} log γ_i, y_t = exp(L_t), with
/// log γ = clamp(log(γ + 1e-8), −50, 0). Carries are log-sums (identity 0). `log_y`, if not null, receives L_t.
template <class T, class Space>
struct ExpProductScan {
  SequenceView<const T, Space> gamma;
  SequenceView<T, Space> y;
  SequenceView<float, Space> log_y = {};
  const float* carry_in = nullptr;
  float* carry_out = nullptr;
};

/// Running log-sum-exp: y_t = log Σ_{i<=t} exp(x_i). Carries are log-sums (identity −inf).
template <class T, class Space>
struct LogSumExpScan {
  SequenceView<const T, Space> x;
  SequenceView<T, Space> y;
  const float* carry_in = nullptr;
  float* carry_out = nullptr;
};

/// Decayed recurrence h_t = exp(log_a_t) h_{t-1} + b_t from log-decays of any sign (a > 1 allowed, −inf is a = 0) and
/// signed b. Decays stay relative to the block they cover: never a cumulative log-sum over the whole sequence.
/// Carries are values of h (identity 0). h may alias b.
template <class T, class Space>
struct DecayScan {
  SequenceView<const T, Space> log_a;
  SequenceView<const T, Space> b;
  SequenceView<T, Space> h;
  const float* carry_in = nullptr;
  float* carry_out = nullptr;
};

/// log p = logits[target] − logsumexp(logits). logits [n, V], targets [n] int32 or int64, logprobs [n] fp32.
/// Finite for any finite logits; -inf masks an entry; a row of -inf alone, or with a NaN, gives NaN. A target outside
/// [0, V) throws std::invalid_argument naming row and value before anything is written.
template <class T, class Index, class Space>
struct TokenLogprobs {
  MatrixView<const T, Space> logits;
  const Index* targets = nullptr;
  float* logprobs = nullptr;
};

/// Its backward: d_logits = grad ⊙ (δ(target) − softmax(logits)), [n, V] in T. grad [n] fp32. d_logits may alias
/// logits.
template <class T, class Index, class Space>
struct TokenLogprobsBackward {
  MatrixView<const T, Space> logits;
  const Index* targets = nullptr;
  const float* grad = nullptr;
  MatrixView<T, Space> d_logits;
};

/// Log-probs straight from hidden states [n, D] and the head matrix [V, D], vocabulary tile by vocabulary tile merged
/// by the (max, sum) monoid: logits for the whole vocabulary are never stored. A negative target marks a row to skip
/// (its log-prob is left as it is); a target >= V throws.
template <class Space>
struct HiddenLogprobs {
  MatrixView<const float, Space> hidden;
  WeightView<Space> head;
  const int* targets = nullptr;
  float* logprobs = nullptr;
};

}  // namespace mmrec::kernels
