// The list of operations a backend implements, each with its equation, shapes, aliasing and determinism.
//
// A backend is a struct (`Cpu`, and `Cuda` beside it) that owns memory, threads or a stream, and library handles; its
// ops are free functions overloaded on that struct, declared in `kernels/<backend>/<backend>.h`. The arguments are the
// structs of this header, so both backends implement one list; a missing op fails to compile where
// `models/runtime/forward.h` is instantiated.
//
// Rules that hold for every op unless its comment says otherwise:
//  * All arithmetic is fp32 or wider; weights are widened exactly from their stored type. State, residual stream and
//    decays are fp32. What enters a matrix product is of the activation type A: fp32, or on a backend that multiplies
//    in 16 bits BFloat16 or Float16, rounded to nearest even where it is written, so that every path of a backend
//    multiplies the same rounded operands. The CPU has A = float alone.
//  * An op neither allocates nor frees memory and never waits for the host: scratch belongs to the backend or is the
//    caller's, so that a step can be captured and replayed. gated_sweeps alone may wait, to learn what converged.
//  * Outputs do not alias inputs. Where aliasing is allowed the comment says "may alias".
//  * Same inputs, shapes and device: same bits, whatever the number of threads and whatever else shares the batch.
//    Reductions have a fixed order and no atomics.
//  * Shapes and addresses are the caller's responsibility (models/ validated them once, engine/kernels/kernels.cpp
//  those of the
//    public kernels); ops assert in debug builds only. std::invalid_argument is thrown for what only the op can tell: a
//    target outside of the vocabulary, sizes beyond what a backend counts.
//
// Notation: n rows of tokens ([batch, tokens] flattened unless a struct separates them), D model_dim, V vocab_size,
// M memory slots, σ the logistic function.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/tensor.h"
#include "mmrec/sampler_options.h"

namespace mmrec::kernels {

/// Element-wise function applied by `linear` before the residual is added. Gelu is the exact (erf) one, GeluTanh its
/// approximation x σ(2 √(2/π) (x + 0.044715 x³)), which some models were trained with.
enum class Activation : std::uint8_t { kNone, kGelu, kRelu, kGeluTanh };

/// What keeps rmsnorm finite where the row is 0: y = weight ⊙ x / (√mean + 1e-6), or weight ⊙ x / √(mean + 1e-6), of
/// the mean of the row's squares.
enum class NormEpsilon : std::uint8_t { kBesideRoot, kInsideRoot };

/// Rows of one library matrix product. `linear` gives every whole tile of this many rows to the matrix library in one
/// fixed shape and computes the remaining rows by the matrix-vector kernel, whose result for a row does not depend on
/// how many rows there are. So a row's bits depend only on whether it lies in a whole tile and where in that tile.
inline constexpr std::int64_t kRowTile = 128;

/// y = act(x Wᵀ + bias) + residual_scale * residual.
/// ragged: no rows are a whole tile, however many there are. For rows that stand together by chance; no meaning on a
/// backend without tiles.
/// x [n, in], weight [out, in], bias [out] or null, residual [n, out] or null; y [n, out]. Y is A or float.
/// residual may alias y. `linear(backend, span<const Linear>)` runs independent jobs as one parallel region.
template <class Space, class A = float, class Y = A>
struct Linear {
  MatrixView<const A, Space> x = {};
  WeightView<Space> weight = {};
  const float* bias = nullptr;
  MatrixView<Y, Space> y = {};
  Activation activation = Activation::kNone;
  MatrixView<const Y, Space> residual = {};
  float residual_scale = 1.0F;
  bool ragged = false;
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
/// `h` has one row more than the others: h.at(b, 0, 0) is the carry h_{-1} on entry, row t + 1 receives h_t. The
/// products W h look at `h_rounded`: h rounded to A, which ops that write h write with it; for A = float the same
/// memory as h.
template <class Space, class A = float>
struct GateInputs {
  SequenceView<const A, Space> z;          // [B, T, D]
  SequenceView<const A, Space> zm;         // [B, T, D]
  SequenceView<const float, Space> gamma;  // [B, T, D]
  SequenceView<float, Space> h;            // [B, T + 1, D]
  SequenceView<A, Space> h_rounded;        // [B, T + 1, D]
  float mdi_mix = 0.1F;                    // μ

  /// Times [first, first + count) of sequence b.
  constexpr GateInputs slice(std::int64_t b, std::int64_t first, std::int64_t count) const {
    return {.z = z.slice(b, first, count),
            .zm = zm.slice(b, first, count),
            .gamma = gamma.slice(b, first, count),
            .h = h.slice(b, first, count + 1),
            .h_rounded = h_rounded.slice(b, first, count + 1),
            .mdi_mix = mdi_mix};
  }
};

/// The exact recurrence, one token after another. gate_weight [2D, D]: rows 0..D are W_g, rows D..2D the half of
/// mdi.W_g that looks at h. gate_bias [D] is b_g (b_m is inside zm). Bits do not depend on batch, threads or on how the
/// tokens are cut into calls.
template <class Space, class A = float>
struct GatedRecurrence {
  GateInputs<Space, A> in;
  WeightView<Space> gate_weight;
  const float* gate_bias = nullptr;
};

/// gated_recurrence of several inputs that share the gates, of any lengths: to the bit what each gets alone. Optional:
/// a backend that has it reads the gates once per time for many sequences instead of once per token.
template <class Space, class A = float>
struct GatedRecurrences {
  std::span<const GateInputs<Space, A>> in;
  WeightView<Space> gate_weight;
  const float* gate_bias = nullptr;
};

/// One gate-frozen sweep: h from row `first` on is replaced by the scan of (a, b) whose gates were computed from the
/// previous iterate. gate [B, T, 2D] holds W_g h_{t-1} + b_g in its first D columns and W_mh h_{t-1} in the last D, for
/// times first..T. Writes change[t] = max over batch and channels of |h_new − h_old| and magnitude[t] = max |h_new| for
/// t in first..T (both [T]). The fixed point is the exact recurrence.
template <class Space, class A = float>
struct GatedScan {
  GateInputs<Space, A> in;
  SequenceView<const float, Space> gate;  // [B, T, 2D]
  std::int64_t first = 0;
  float* change = nullptr;     // [T]
  float* magnitude = nullptr;  // [T]
};

/// GatedScan with its product inside: the gates of times first..T are h_rounded gate_weightᵀ, plus gate_bias in the
/// first half, of h_rounded as it is on entry, and never reach memory. Rows of h_rounded are read while other parts of
/// the sweep have new ones, so these go to h_rounded_next, [B, T + 1, D] in other memory, whose rows first (a copy) to
/// T are complete on return: the next sweep reads it and writes the other of the two. Rows that froze in the meantime
/// are in either of them; rounding all of h again makes one whole. change and magnitude are raised to the maxima: they
/// are 0 on entry for the maxima themselves.
template <class Space, class A = float>
struct GatedSweep {
  GateInputs<Space, A> in;
  SequenceView<A, Space> h_rounded_next;
  WeightView<Space> gate_weight;
  const float* gate_bias = nullptr;
  std::int64_t first = 0;
  float* change = nullptr;     // [T]
  float* magnitude = nullptr;  // [T]
};

/// What gated_sweeps has cost.
struct SweepCounts {
  std::int64_t token_sweeps = 0;  // sum over tokens of the products each took part in
  std::int64_t windows = 0;       // windows swept
  std::int64_t fallbacks = 0;     // of these, windows finished by exact steps
};

/// The recurrence by gate-frozen sweeps, one sequence at a time, so that its bits do not depend on its neighbours: a
/// window's gates come from the previous iterate by one product, then the scan replaces the iterate, until at every
/// time the largest change is at most `tolerance` times the largest |h| of that time. A prefix within the bound is
/// frozen and takes no part in later sweeps; what has not converged after max_sweeps, NaN included, is finished by
/// gated_recurrence.
/// gate [rows, 2D], rows >= 1 the longest window, and change [2 * rows] are scratch.
template <class Space, class A = float>
struct GatedSweeps {
  GateInputs<Space, A> in;
  WeightView<Space> gate_weight;
  const float* gate_bias = nullptr;
  float tolerance = 1e-5F;
  int max_sweeps = 64;
  MatrixView<float, Space> gate;
  float* change = nullptr;
};

/// Multi-head softmax attention over memory slots, key and value alike, scale 1/√(D / heads):
/// out = softmax(q · slotsᵀ / √d) · slots per head. q, out [B, T, D] (out may alias q); slots [B, slots, D], slots
/// >= 1. The order of the slots does not matter beyond rounding; it is fixed: 0, 1, ….
template <class Space, class A = float>
struct MemoryAttention {
  SequenceView<const A, Space> q;
  SequenceView<const float, Space> slots;
  std::int64_t heads = 1;
  SequenceView<A, Space> out;
};

/// y = x + h + 0.1 v, plus bias where it is not null: [D] for all sequences, or with bias_stride D a row per sequence.
/// x, h, v, y [B, T, D]; y may alias x.
template <class Space, class A = float>
struct BlockResidual {
  SequenceView<const float, Space> x;
  SequenceView<const float, Space> h;
  SequenceView<const A, Space> v;
  const float* bias = nullptr;
  std::int64_t bias_stride = 0;
  SequenceView<float, Space> y;
};

/// sum += x over time, in order of time, in fp64. x [B, T, D]; sum [B, D].
template <class Space>
struct SegmentSum {
  SequenceView<const float, Space> x;
  MatrixView<double, Space> sum;
};

// ---------------------------------------------------------------------------------------------------------------------
// Optional ops: rows of one token each that are normed where they are computed. A backend that has them saves launches;
// elsewhere models/mmrec/block.h composes them of the ops above. Squares are summed in fp64, in an order of their own.
// ---------------------------------------------------------------------------------------------------------------------

/// The state of n sequences at their next tokens' recurrence: rounded = h, rounded to A. [n, D] each; null data: none.
template <class Space, class A>
struct RoundState {
  RowsView<const float, Space> h = {};
  MatrixView<A, Space> rounded = {};
};

/// x = embed(tokens), u = rmsnorm(x; norm); and the state's rounding. tokens [n]; x, u [n, D]; table of type A.
template <class Space, class A>
struct EmbedNorm {
  WeightView<Space> table;
  const int* tokens = nullptr;
  MatrixView<float, Space> x;
  const float* norm = nullptr;
  MatrixView<A, Space> u;
  RoundState<Space, A> next;
};

/// The recurrence by a token, from its products, and the residual stream behind it: with gates [n, 2D] = ĥ gate_weightᵀ
/// of the rounded state, s = σ(gates + gate_bias), g = σ(zm + gates'), γ as decay_gate has it of decay and
/// context_decay,
///   h = a ⊙ h + b,  x = x + h + 0.1 v + c,  u = rmsnorm(x; norm)
/// h and its rounding are written; c is `c_bias` where its row is null, and 0 where that is null too; with stride 0 one
/// row serves all. context_decay is null for DPG.
template <class Space, class A>
struct AdvanceNorm {
  MatrixView<const A, Space> z, v, zm;
  MatrixView<const float, Space> gates;
  const float* gate_bias = nullptr;
  MatrixView<const float, Space> decay;
  MatrixView<const float, Space> context_decay = {};
  float mdi_mix = 0.1F;
  RowsView<float, Space> h;
  MatrixView<A, Space> h_rounded;
  MatrixView<float, Space> x;
  RowsView<const float, Space> c = {};
  const float* c_bias = nullptr;
  const float* norm = nullptr;
  MatrixView<A, Space> u;
};

/// sum += x in fp64, u = rmsnorm(x; norm); and the state's rounding. x, u, sum [n, D].
template <class Space, class A>
struct SumNorm {
  MatrixView<const float, Space> x;
  RowsView<double, Space> sum;
  const float* norm = nullptr;
  MatrixView<A, Space> u;
  RoundState<Space, A> next;
};

/// How the next token of one sequence is chosen: by the chain of `options`. The repetition penalty is that of `recent`,
/// in memory of Space: a ring of as many tokens as its window, of which recent_count have been written so far; null:
/// none. Candidates are the finite logits of ids below vocab_limit, ordered by logit, falling, then id. Temperature 0
/// takes the first. Else filters, each on what the one before it has left: the top_k first, the fewest that hold a
/// share top_p of the probability, those with at least min_p times the first one's. What is left shares [0, 1) in the
/// order of ids, and the number of (seed, sequence, step) in kernels/philox.h draws from it.
struct SampleRule {
  SamplerOptions options;
  std::uint64_t sequence = 0, step = 0;
  int* recent = nullptr;
  std::uint64_t recent_count = 0;
};

/// Widest repetition window that sample_tokens takes.
inline constexpr int kMostSampleWindow = 1024;
/// Widest row that sample_tokens takes.
inline constexpr std::int64_t kMostSampleWords = std::int64_t{1} << 18;

/// tokens[b] drawn from logits [B, V] by rules[b], whose step then goes up by one, so that a recorded draw that is
/// replayed draws anew; and the token is recent. -1 for a row that has a NaN or +inf, or no candidate. A row's token
/// does not depend on how many rows there are. tokens, rules [B]; copy, if not null, receives the tokens too, 0 for -1:
/// a step may follow before anyone has looked. Throws std::invalid_argument for V outside [1, kMostSampleWords].
template <class Space>
struct SampleTokens {
  MatrixView<const float, Space> logits;
  SampleRule* rules = nullptr;
  int* tokens = nullptr;
  int* copy = nullptr;
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
/// (its log-prob is left as it is); a target >= V throws. ragged as in Linear.
template <class Space, class A = float>
struct HiddenLogprobs {
  MatrixView<const A, Space> hidden;
  WeightView<Space> head;
  const int* targets = nullptr;
  float* logprobs = nullptr;
  bool ragged = false;
};

}  // namespace mmrec::kernels
