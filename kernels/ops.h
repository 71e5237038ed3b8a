// Every op of both backends: its equation, shapes, aliasing and determinism. Long, because it is the one list.
//
// A backend is a class (`Cpu` or `Cuda`) that owns memory, threads or a stream, and library handles. Its ops are free
// functions overloaded on that class. An op that a backend lacks fails to compile where models/runtime/forward.h is
// instantiated. Optional ops are those that callers replace by others where a backend lacks them.
//
// Rules for every op unless its comment says otherwise:
//  * All arithmetic is fp32 or wider. Weights are widened exactly from their stored type. State, residual stream and
//    decays are fp32. Operands of matrix products have the activation type A: fp32, or BFloat16 or Float16 on a backend
//    that multiplies in 16 bits. They are rounded to nearest even where they are written, so every path of a backend
//    multiplies the same rounded operands. The CPU has A = float alone.
//  * An op never allocates, frees or waits for the host. Scratch belongs to the backend or to the caller, so a step can
//    be captured and replayed. Only gated_sweeps and packed_sweeps may wait, to learn what converged.
//  * Outputs do not alias inputs. Where aliasing is allowed the comment says "may alias".
//  * Same inputs, shapes and device: same bits, for any number of threads and any neighbours in the batch. Reductions
//    have a fixed order and no atomics.
//  * The caller is responsible for shapes and addresses: models/ and engine/kernels/kernels.cpp have validated them.
//    Ops assert in debug builds only. They throw std::invalid_argument where only the op can find the fault: a target
//    outside of the vocabulary, or sizes beyond what a backend counts.
//
// Notation: n rows of tokens ([batch, tokens] flattened unless a struct separates them), D model_dim, V vocab_size,
// M memory slots, σ the logistic function.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "kernels/tensor.h"
#include "mmrec/sampler_options.h"

namespace mmrec::kernels {

class Cpu;
class Cuda;
// Where an op of a device has several algorithms, the algo.h of its room in kernels/cuda lists them and chooses. Tests
// and benches pass one to force it. The op throws std::invalid_argument if that algorithm does not take its operands.
enum class LinearAlgo : std::uint8_t;
enum class AttentionAlgo : std::uint8_t;
enum class BankAlgo : std::uint8_t;
enum class HiddenLogprobsAlgo : std::uint8_t;
enum class NormedAlgo : std::uint8_t;
enum class SweepAlgo : std::uint8_t;
enum class ScanAlgo : std::uint8_t;

/// x[r] = table[tokens[r]], widened. tokens [n] in [0, table.rows).
void embed(Cpu& cpu, const WeightView<Host>& table, const int* tokens, MatrixView<float, Host> x);
void embed(Cuda& cuda, const WeightView<Device>& table, const int* tokens, MatrixView<float, Device> x);

/// Where rmsnorm adds 1e-6, which keeps a row of zeros finite: y = weight ⊙ x / (√mean + 1e-6), or
/// y = weight ⊙ x / √(mean + 1e-6). mean is that of the row's squares.
enum class NormEpsilon : std::uint8_t { kBesideRoot, kInsideRoot };

/// y = rmsnorm(x) per row, rounded to y's type; y may alias x if that is float. weight [D].
void rmsnorm(Cpu& cpu, MatrixView<const float, Host> x, const float* weight, MatrixView<float, Host> y,
             NormEpsilon epsilon = NormEpsilon::kBesideRoot);
template <class A>
void rmsnorm(Cuda& cuda, MatrixView<const float, Device> x, const float* weight, MatrixView<A, Device> y,
             NormEpsilon epsilon = NormEpsilon::kBesideRoot);

/// to = from, row by row, rounded to the type of `to`; equal shapes.
void copy_rows(Cpu& cpu, MatrixView<const float, Host> from, MatrixView<float, Host> to);
template <class A>
void copy_rows(Cuda& cuda, MatrixView<const float, Device> from, MatrixView<A, Device> to);
void fill_zero(Cpu& cpu, MatrixView<float, Host> to);
void fill_zero(Cuda& cuda, MatrixView<float, Device> to);

/// Element-wise function that `linear` applies before it adds the residual. Gelu is the exact (erf) one. GeluTanh is
/// its approximation x σ(2 √(2/π) (x + 0.044715 x³)), which some models were trained with.
enum class Activation : std::uint8_t { kNone, kGelu, kRelu, kGeluTanh };

/// Rows of one library matrix product. `linear` gives every whole tile of this many rows to the matrix library in one
/// fixed shape. The matrix-vector kernel computes the other rows, each independent of how many there are. So a row's
/// bits depend only on whether it lies in a whole tile, and where in that tile.
inline constexpr std::int64_t kRowTile = 128;

/// On a device: rows of x, or sequences, that one reading of the weights serves, the columns of a tensor core's tile;
/// and most rows of the middle class of `linear`.
inline constexpr int kTileColumns = 8;
inline constexpr std::int64_t kFewRows = 128;

/// Rows on their way through a norm: y ⊙ weight rounded to A [n, D], and of every part of y's channels the sum of
/// squares, [n, scaled_parts(D, part)], 16-byte aligned. Products of such rows are divided by their roots
/// (Linear::x_squares), so no kernel stands between the product that makes y and the next one. D is a multiple of 64. A
/// part has kFewScaledPart channels where rows are few (Linear::few_rows), else kScaledPart.
inline constexpr int kScaledPart = 64, kFewScaledPart = 8;
constexpr std::int64_t scaled_parts(std::int64_t dim, int part) { return (dim / part + 3) / 4 * 4; }
template <class Space, class A>
struct ScaledRows {
  const float* weight = nullptr;
  MatrixView<A, Space> y = {};
  float* squares = nullptr;  // null: nothing is wanted
  int part = kScaledPart;
};

/// y = act(x Wᵀ + bias) + residual_scale * residual.
/// x [n, in], weight [out, in], bias [out] or null, residual [n, out] or null; y [n, out]. Y is A or float. residual
/// may alias y. force_row_kernel: no rows form a whole tile, however many there are. Callers set it for rows that stand
/// together by chance. It has no meaning on a backend without tiles, but that a Cuda that is batch-invariant has a
/// class of arithmetic for jobs with it, the steps', and one for jobs without it. `linear(backend, span<const Linear>)`
/// runs independent jobs as one parallel region. y_rows, where linear_takes_rows() allows it: row r of y lies at
/// y_rows[r], 16-byte aligned, in memory of Space; y has the shape alone. Where passes_norms() allows it: x_squares, of
/// an x that is scaled, so that y = act(rmsnorm(x') Wᵀ + bias) + …; and `scaled`, what an fp32 y with a
/// residual and without an activation leaves.
template <class Space, class A = float, class Y = A>
struct Linear {
  MatrixView<const A, Space> x = {};
  WeightView<Space> weight = {};
  const float* bias = nullptr;
  MatrixView<Y, Space> y = {};
  Activation activation = Activation::kNone;
  MatrixView<const Y, Space> residual = {};
  float residual_scale = 1.0F;
  bool force_row_kernel = false;
  Y* const* y_rows = nullptr;
  const float* x_squares = nullptr;
  ScaledRows<Space, A> scaled = {};
  /// On a device: up to so many rows are few, and go by the row kernel. With 0 one row goes as some do.
  std::int64_t few_rows = kTileColumns;
};
void linear(Cpu& cpu, std::span<const Linear<Host>> jobs);
/// On a device there are three classes of row numbers: up to Linear::few_rows, up to kFewRows, more. A row's result
/// does not depend on how many rows of its class there are. (Those by a quantised matrix up to kFewCompactRows are one
/// more class; a Cuda that is batch-invariant has no such classes.) More rows of fp32 are multiplied by parts where the
/// weight has them.
template <class A, class Y>
void linear(Cuda& cuda, std::span<const Linear<Device, A, Y>> jobs, LinearAlgo algo = {});
/// The parts (kParts) of fp32 numbers x, row by row and one part after another: parts [kParts, x.rows, x.cols].
void split(Cuda& cuda, MatrixView<const float, Device> x, BFloat16* parts);
/// Whether a device takes a job's y_rows: fp32 results of many rows of 16 bits, without a residual.
template <class A>
bool linear_takes_rows(const Cuda& cuda, const Linear<Device, A, float>& job);
/// Whether products of so many rows by all of these weights pass norms on: of fp32 and bf16.
template <class A>
bool passes_norms(const Cuda& cuda, std::int64_t rows, std::span<const WeightView<Device>> weights);
template <class A, class Y>
void linear(Cuda& cuda, const Linear<Device, A, Y>& job, LinearAlgo algo = {}) {
  linear(cuda, std::span<const Linear<Device, A, Y>>(&job, 1), algo);
}

/// The decay gate from the pre-activations of its MLPs:
/// MDI γ = clamp(σ(a) ⊙ σ(c)), DPG (c.data null) γ = clamp(σ(a)), clamped to [1e-6, 1 − 1e-6].
/// a, c, gamma [n, D]; gamma may alias a or c.
template <class Space>
struct DecayGate {
  MatrixView<const float, Space> a;
  MatrixView<const float, Space> c = {};
  MatrixView<float, Space> gamma;
};
void decay_gate(Cpu& cpu, const DecayGate<Host>& op);
void decay_gate(Cuda& cuda, const DecayGate<Device>& op);

/// The operands of the recurrence that do not depend on the previous state, [batch, time, D] each:
///   s_t = σ(W_g h_{t-1} + b_g),  g_t = σ(zm_t + W_mh h_{t-1}),  zm_t = W_mz z_t + b_m
///   a_t = γ_t + μ (1 − g_t + γ_t),  b_t = z_t ⊙ (s_t + μ g_t),  h_t = a_t ⊙ h_{t-1} + b_t
/// `h` has one row more than the others: h.at(b, 0, 0) is the carry h_{-1} on entry, row t + 1 receives h_t. The
/// products W h read `h_rounded`, which is h rounded to A. Ops that write h write it too. For A = float it is the same
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
/// mdi.W_g that multiplies h. gate_bias [D] is b_g (b_m is inside zm). Bits do not depend on batch, threads or on how
/// the tokens are cut into calls.
template <class Space, class A = float>
struct GatedRecurrence {
  GateInputs<Space, A> in;
  WeightView<Space> gate_weight;
  const float* gate_bias = nullptr;
};
void gated_recurrence(Cpu& cpu, const GatedRecurrence<Host>& op);
template <class A>
void gated_recurrence(Cuda& cuda, const GatedRecurrence<Device, A>& op);

/// gated_recurrence of several inputs of any lengths that share the gates. Each gets the bits that it gets alone.
/// Optional: a backend that has it reads the gates once per time for many sequences instead of once per token.
template <class Space, class A = float>
struct GatedRecurrences {
  std::span<const GateInputs<Space, A>> in;
  WeightView<Space> gate_weight;
  const float* gate_bias = nullptr;
};
void gated_recurrences(Cpu& cpu, const GatedRecurrences<Host>& op);

/// One gate-frozen sweep: the scan of (a, b) replaces h from row `first` on. Its gates were computed from the previous
/// iterate. gate [B, T, 2D] holds W_g h_{t-1} + b_g in its first D columns and W_mh h_{t-1} in the last D, for times
/// first..T. Writes change[t] = max over batch and channels of |h_new − h_old| and magnitude[t] = max |h_new| for t in
/// first..T (both [T]). The fixed point is the exact recurrence.
template <class Space, class A = float>
struct GatedScan {
  GateInputs<Space, A> in;
  SequenceView<const float, Space> gate;  // [B, T, 2D]
  std::int64_t first = 0;
  float* change = nullptr;     // [T]
  float* magnitude = nullptr;  // [T]
};
void gated_scan(Cpu& cpu, const GatedScan<Host>& op);

/// GatedScan with its product inside. The gates of times first..T are h_rounded gate_weightᵀ, plus gate_bias in the
/// first half, with h_rounded as it is on entry. They never reach memory. While a part of the sweep reads rows of
/// h_rounded, other parts have new ones, so new rows go to h_rounded_next, [B, T + 1, D] in other memory. Its rows
/// first (a copy) to T are complete on return; the next sweep reads it and writes the other of the two. Rows that froze
/// meanwhile are in either of them; rounding all of h again makes one whole. change and magnitude are raised to the
/// maxima: they must be 0 on entry to receive the maxima themselves.
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

/// The cost of gated_sweeps.
struct SweepCounts {
  std::int64_t token_sweeps = 0;  // sum over tokens of the products each took part in
  std::int64_t windows = 0;       // windows swept
  std::int64_t fallbacks = 0;     // of these, windows finished by exact steps
};

/// The recurrence by gate-frozen sweeps, one sequence at a time, so that its bits do not depend on its neighbours. One
/// product computes a window's gates from the previous iterate, then the scan replaces the iterate. This repeats until
/// at every time the largest change is at most `tolerance` times the largest |h| of that time. A prefix within the
/// bound is frozen and takes no part in later sweeps. gated_recurrence finishes what has not converged after
/// max_sweeps, NaN included. gate [rows, 2D], rows >= 1 the longest window, and change [2 * rows] are scratch.
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
SweepCounts gated_sweeps(Cpu& cpu, const GatedSweeps<Host>& op);
template <class A>
SweepCounts gated_sweeps(Cuda& cuda, const GatedSweeps<Device, A>& op, std::optional<SweepAlgo> algo = {});

/// Multi-head softmax attention over memory slots, which are keys and values alike: out = softmax(q · slotsᵀ / √d) ·
/// slots per head, d = D / heads without the head's `padding`, channels of zeros. q, out [B, T, D] (out may alias q);
/// slots [B, slots, D], slots >= 1. The order of the slots matters by rounding only; it is fixed: 0, 1, ….
template <class Space, class A = float>
struct MemoryAttention {
  SequenceView<const A, Space> q;
  SequenceView<const float, Space> slots;
  std::int64_t heads = 1;
  SequenceView<A, Space> out;
  std::int64_t padding = 0;
};
void memory_attention(Cpu& cpu, const MemoryAttention<Host>& op);
template <class A>
void memory_attention(Cuda& cuda, const MemoryAttention<Device, A>& op, AttentionAlgo algo = {});

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
void block_residual(Cpu& cpu, const BlockResidual<Host>& op);
template <class A>
void block_residual(Cuda& cuda, const BlockResidual<Device, A>& op);
/// The same, and u = rmsnorm of y's rows, [B T, D]: the bits of the two ops. Optional.
template <class A>
void block_residual_norm(Cuda& cuda, const BlockResidual<Device, A>& op, const float* weight, MatrixView<A, Device> u);

/// sum += x over time, in order of time, in fp64. x [B, T, D]; sum [B, D].
template <class Space>
struct SegmentSum {
  SequenceView<const float, Space> x;
  MatrixView<double, Space> sum;
};
void segment_sum(Cpu& cpu, const SegmentSum<Host>& op);
void segment_sum(Cuda& cuda, const SegmentSum<Device>& op);
/// slot[b] = sum[b] / segment for every sequence, then sum = 0. sum, slot [B, D].
void segment_close(Cpu& cpu, MatrixView<double, Host> sum, std::int64_t segment, MatrixView<float, Host> slot);
void segment_close(Cuda& cuda, MatrixView<double, Device> sum, std::int64_t segment, MatrixView<float, Device> slot);

// ---------------------------------------------------------------------------------------------------------------------
// Optional ops: rows of one token each, normed where they are computed. They save launches. Elsewhere
// models/mmrec/block.h composes them of the ops above. Squares are summed in fp64, in an order of their own. D is
// a multiple of 4, views are aligned to 4 channels. A row without a state or sum, which is null in its list,
// counts as zeros and is not written: it fills up the rows of a recorded step.
// ---------------------------------------------------------------------------------------------------------------------

/// The state of n sequences at their next tokens' recurrence: rounded = h, rounded to A. [n, D] each; null data: none.
template <class Space, class A>
struct RoundState {
  RowsView<const float, Space> h = {};
  MatrixView<A, Space> rounded = {};
};

/// x = embed(tokens), u = rmsnorm(x; norm), and the state's rounding. tokens [n]; x, u [n, D]; table of type A. Row r
/// has token token_of[r], or token r where that list is null.
template <class Space, class A>
struct EmbedNorm {
  WeightView<Space> table;
  const int* tokens = nullptr;
  const std::int32_t* token_of = nullptr;  // [n], in memory of Space
  MatrixView<float, Space> x;
  const float* norm = nullptr;
  MatrixView<A, Space> u;
  RoundState<Space, A> next;
};
template <class A>
void embed_norm(Cuda& cuda, const EmbedNorm<Device, A>& op);

/// One token of the recurrence, from its products, and the residual stream behind it. With gates [n, 2D] =
/// ĥ gate_weightᵀ of the rounded state, s = σ(gates + gate_bias), g = σ(zm + gates'), and γ as decay_gate computes it
/// from decay and context_decay (null for DPG):
///   h = a ⊙ h + b,  x = x + h + 0.1 v + c,  u = rmsnorm(x; norm)
/// Writes h and its rounding. Where c's row is null, c is `c_bias`, and 0 where that is null too; with stride 0 one row
/// serves all.
template <class Space, class A>
struct AdvanceNorm {
  MatrixView<const A, Space> z, v, zm;
  MatrixView<const float, Space> gates = {};
  const float* gate_bias = nullptr;
  MatrixView<const float, Space> decay = {};
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
template <class A>
void advance_norm(Cuda& cuda, const AdvanceNorm<Device, A>& op);

/// AdvanceNorm and the products before it, where passes_norms() holds for their weights: gates = h gate_weightᵀ of the
/// rounded state h, and decay and context_decay (none for DPG) of hidden rows, with their biases. u is u's scaled rows,
/// with `squares`. And what SumNorm does for the layer before and the next one: sum += x as it comes in, and the
/// rounding of the next state, to other memory than h's.
template <class Space, class A>
struct GatedAdvance {
  AdvanceNorm<Space, A> advance;  // without gates, decay, context_decay
  MatrixView<const A, Space> h;   // [n, D]
  WeightView<Space> gate_weight;  // [2D, D]
  struct Decay {
    MatrixView<const A, Space> hidden = {};  // [n, G]
    WeightView<Space> weight = {};           // [D, G]
    const float* bias = nullptr;
  };
  Decay decay, context_decay = {};
  float* squares = nullptr;
  int part = kScaledPart;
  RowsView<double, Space> sum = {};  // without rows: none
  RowsView<float, Space> closed = {};
  std::int64_t segment = 0;
  RoundState<Space, A> next = {};
};
template <class A>
void gated_advance(Cuda& cuda, const GatedAdvance<Device, A>& op);

/// sum += x in fp64, u = rmsnorm(x; norm), and the state's rounding. x, u, sum [n, D]. Rows of `closed`, if it has any:
/// where one is not null, then closed = sum / segment and sum = 0.
template <class Space, class A>
struct SumNorm {
  MatrixView<const float, Space> x;
  RowsView<double, Space> sum;
  RowsView<float, Space> closed = {};
  std::int64_t segment = 0;
  const float* norm = nullptr;
  MatrixView<A, Space> u;
  RoundState<Space, A> next;
};
template <class A>
void sum_norm(Cuda& cuda, const SumNorm<Device, A>& op);

/// How the next token of one sequence is chosen: by the chain of `options`. The repetition penalty applies to `recent`,
/// in memory of Space: a ring with a token for each place of its window, of which recent_count have been written so far
/// (null: no penalty). Candidates are the finite logits of ids below vocab_limit, ordered by logit, falling, then id.
/// Temperature 0 takes the first. Otherwise the filters of mmrec/sampler_options.h act in turn. The rest share [0, 1)
/// in the order of ids, and the number of (seed, sequence, step) in kernels/philox.h draws from it.
struct SampleRule {
  SamplerOptions options;
  std::uint64_t sequence = 0, step = 0;
  int* recent = nullptr;
  std::uint64_t recent_count = 0;
  const float* logits = nullptr;  // on a multiple of 16 bytes: read where SampleTokens has none
};
/// Instead of a token: of a row that has a NaN or +inf, and of one that has no candidate.
inline constexpr int kFaultyRow = -1, kNoCandidate = -2;

/// Widest repetition window that sample_tokens takes.
inline constexpr int kMostSampleWindow = 1024;
/// Widest row that sample_tokens takes.
inline constexpr std::int64_t kMostSampleWords = std::int64_t{1} << 18;

/// tokens[b] drawn from logits [B, V], or the rows that the rules name if their data is null, by rules[b]. Then the
/// rule's step goes up by one, so that a recorded draw draws anew when it is replayed, and the token is recent. A row's
/// token does not depend on how many rows there are. Without a token, kFaultyRow or kNoCandidate. tokens, rules [B].
/// copy, if not null, receives the tokens too, 0 for none, so that a step may follow before the host looks. Throws
/// std::invalid_argument for V outside [1, kMostSampleWords].
template <class Space>
struct SampleTokens {
  MatrixView<const float, Space> logits;
  SampleRule* rules = nullptr;
  int* tokens = nullptr;
  int* copy = nullptr;
};
/// By `blocks` for a row: 1, or on a device of compute capability 9.0 also 2, 4 or 8; 0: choose_sample_blocks says.
void sample_tokens(Cuda& cuda, const SampleTokens<Device>& op, int blocks = 0);

// ---------------------------------------------------------------------------------------------------------------------
// Optional ops over packed runs. The rows of one chunk hold runs of several sequences, one after another. A single row
// between two runs is a gap; it belongs to neither. If there is none, the second run begins with the state 0. The
// sequences' states lie anywhere: lists in memory of Space give their addresses. models/mmrec/swept_runs.h and
// paths/packed.h make these lists.
// ---------------------------------------------------------------------------------------------------------------------

/// Which rows the runs have. In memory of Space, except for the spans.
template <class Space>
struct PackedRuns {
  const std::int32_t* of_row = nullptr;                      // [rows]: number of the row's run, -1 in a gap
  const std::int32_t* end = nullptr;                         // [runs]: the row after a run's last
  std::int32_t* settled = nullptr;                           // [runs]: the runs' first rows on entry; scratch
  std::uint32_t* moving = nullptr;                           // [runs]: zeros, on entry and on return
  std::span<const std::int32_t> first_on_host, end_on_host;  // [runs], rising
};

/// gated_sweeps of packed runs, in [1, T]. A window is swept until all runs have settled in it, each by its own bound.
/// Settled rows no longer move, so other runs change a result only by the order of sums over its times.
/// h.at(0, 0, t + 1) of a gap t is the carry of the run that begins at t + 1; the first run's is h.at(0, 0, 0), as in
/// GateInputs. Many short runs cost as much as one long one. An odd D must have gaps.
template <class Space, class A = float>
struct PackedSweeps {
  GatedSweeps<Space, A> sweeps;
  PackedRuns<Space> runs;
};
/// Windows of up to 31 * kGatedSweepStep rows.
template <class A>
SweepCounts packed_sweeps(Cuda& cuda, const PackedSweeps<Device, A>& op, std::optional<SweepAlgo> algo = {});

/// A row to copy: from is null for zeros, rounded for none.
template <class A>
struct RowCopy {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  A* rounded = nullptr;
};
/// to = from, fp32 rows of `cols`, `from_offset` and `to_offset` bytes behind what the list says; and rounded to A. No
/// offset is added to null.
template <class Space, class A>
struct CopyListed {
  const RowCopy<A>* rows = nullptr;  // [count]
  std::int64_t count = 0;
  std::int64_t cols = 0;
  std::int64_t from_offset = 0, to_offset = 0;
};
template <class A>
void copy_listed(Cuda& cuda, const CopyListed<Device, A>& op);

/// x = x + h + 0.1 v + c, u = rmsnorm(x; norm), over the rows of packed runs: x, h, v, u [T, D]. c is the row `offset`
/// bytes behind the run's context; in gaps, and where the context is null, it is `bias`.
template <class Space, class A>
struct PackedResidualNorm {
  MatrixView<float, Space> x;
  MatrixView<const float, Space> h;
  MatrixView<const A, Space> v;
  const std::int32_t* of_row = nullptr;       // [T], see PackedRuns
  const std::byte* const* context = nullptr;  // [runs]
  std::int64_t offset = 0;
  const float* bias = nullptr;
  const float* norm = nullptr;
  MatrixView<A, Space> u;
};
template <class A>
void packed_residual_norm(Cuda& cuda, const PackedResidualNorm<Device, A>& op);

/// A run that attends: rows [first, first + rows) to the first `count` of the slots at `slots`, [count, D].
struct AttendingRun {
  const float* slots = nullptr;
  std::int32_t count = 0;
  std::int32_t first = 0;
  std::int32_t rows = 0;
};
/// memory_attention of packed runs: q, out [T, D]; out may alias q. Rows of no run are left alone. Slots lie `offset`
/// floats behind what the list says. most_rows and most_slots are the largest of the list.
template <class Space, class A>
struct PackedAttention {
  MatrixView<const A, Space> q;
  MatrixView<A, Space> out;
  std::int64_t heads = 1;
  const AttendingRun* runs = nullptr;  // [count], in memory of Space
  std::int64_t count = 0;
  std::int64_t offset = 0;
  std::int64_t most_rows = 0, most_slots = 0;
  std::int64_t padding = 0;
};
template <class A>
void packed_attention(Cuda& cuda, const PackedAttention<Device, A>& op);

/// What rows of one token each attend to, from the query on: x += W_o attend(h W_qᵀ + b_q + ½ q; slots) + b_o, and x's
/// scaled rows. h, q, x [n, D]. Row r has the slots of run r, which lie `offset` floats behind what the list says, or
/// without a list slots [n, slots, D]. Null rows have runs without slots, which attend to nothing.
template <class Space, class A>
struct AttendNorm {
  MatrixView<const A, Space> h, q;
  WeightView<Space> query_weight;  // [D, D]
  const float* query_bias = nullptr;
  const AttendingRun* runs = nullptr;  // [n], in memory of Space
  std::int64_t offset = 0;
  SequenceView<const float, Space> slots = {};
  std::int64_t most_slots = 0;  // of any row, ever
  std::int64_t heads = 1;
  std::int64_t padding = 0;      // of a head's channels, see MemoryAttention
  WeightView<Space> out_weight;  // [D, D]
  const float* out_bias = nullptr;
  MatrixView<float, Space> x;
  ScaledRows<Space, A> scaled = {};
};
void attend_norm(Cuda& cuda, const AttendNorm<Device, BFloat16>& op);
/// Whether a device has one kernel for it that is faster than the ops it is made of.
bool takes_attend_norm(const Cuda& cuda, const AttendNorm<Device, BFloat16>& op);

/// A run whose outputs are summed: rows [first, first + rows), and where the sum and the memory's ring of its sequence
/// lie. closes: the slot of the ring that the segment ending with the run fills, or -1.
struct SummedRun {
  double* sum = nullptr;
  float* memory = nullptr;
  std::int32_t first = 0;
  std::int32_t rows = 0;
  std::int32_t closes = -1;
};
/// sum += x over a run's rows, in fp64, in an order that depends on their number alone. Where the run closes a segment,
/// then slot = sum / segment and sum = 0. Sums lie layer * D doubles behind what the list says, slots layer *
/// memory_slots * D floats. x [T, D]. most_rows is the largest of the list.
template <class Space>
struct PackedSegmentSum {
  MatrixView<const float, Space> x;
  const SummedRun* runs = nullptr;  // [count], in memory of Space
  std::int64_t count = 0;
  std::int64_t most_rows = 0;
  std::int64_t layer = 0;
  std::int64_t memory_slots = 1;
  std::int64_t segment = 1;
};
void packed_segment_sum(Cuda& cuda, const PackedSegmentSum<Device>& op);

// ---------------------------------------------------------------------------------------------------------------------
// Ops of models that norm the recurrence's state and have a bank of past states as memory (models/mmrec_jax). The rows
// of a call belong to several runs, one sequence each, one after another. A list in memory of Space says where the
// runs' rows, states and banks are.
// ---------------------------------------------------------------------------------------------------------------------

/// A run of one sequence: rows [first, first + rows) of a call.
struct BankRun {
  float* state = nullptr;  // h before the run and behind it, [D] a layer; null: the run begins at 0 and leaves nothing
  float* bank = nullptr;   // [S, D], 16-byte aligned; null: the run has none
  std::int32_t first = 0;
  std::int32_t rows = 0;
  std::int32_t used = 0;  // rows of the bank that are written when the call begins

  /// Rows that are written when layer `layer` of the call begins; every layer before it has written its own.
  MMREC_HOST_DEVICE constexpr std::int64_t used_before(std::int64_t layer, std::int64_t slots) const {
    const std::int64_t n = used + layer * rows;
    return n < slots ? n : slots;
  }
};

/// The runs of a call, in any order. Devices take neighbours of the list together, so runs of like length should be
/// neighbours.
template <class Space>
struct BankRuns {
  const BankRun* list = nullptr;     // [count], in memory of Space
  const BankRun* on_host = nullptr;  // the same; list itself for Host
  std::int64_t count = 0;
  std::int64_t most_rows = 0;  // of a run
};

/// The recurrence whose state is normed at every token, run by run, from h_{-1} = 0 or the run's state:
///   m_t = σ(zm_t + W h_{t-1} + b),  p_t = (1 − m_t + γ_t) ⊙ h_{t-1} + m_t ⊙ z_t
///   h_t = clamp(norm ⊙ p_t / √(mean(p_t²) + 1e-6), ±100)
/// z, zm, gamma, h [n, D]; gate_weight W [D, D], gate_bias b [D]. W multiplies h_rounded: h rounded to A, the same
/// memory as h for A = float. A run's state lies layer * D floats behind what the list says. Where runs have no state
/// (all or none have one) nothing is multiplied at their first tokens. γ is not read where no run has a second token.
/// Squares are summed in fp64, or on a device, where tokens follow each other, in fp32 by a fixed order: there |p|² / D
/// must stay below 3e38. A run's bits do not depend on the others, nor,
/// where they have states, on how tokens are cut into calls.
template <class Space, class A = float>
struct NormedRecurrence {
  MatrixView<const A, Space> z;
  MatrixView<const float, Space> zm;
  MatrixView<const float, Space> gamma;  // may be empty where every h_{t-1} is 0
  MatrixView<float, Space> h;
  MatrixView<A, Space> h_rounded;
  WeightView<Space> gate_weight;
  const float* gate_bias = nullptr;
  const float* norm = nullptr;
  BankRuns<Space> runs;
  bool carries = false;  // runs have states
  std::int64_t layer = 0;
};
void normed_recurrence(Cpu& cpu, const NormedRecurrence<Host>& op);
template <class A>
void normed_recurrence(Cuda& cuda, const NormedRecurrence<Device, A>& op, NormedAlgo algo = {});

/// Softmax attention of one head to all S rows of a run's bank, which are keys and values alike:
///   out = softmax(scale q · Bankᵀ) · Bank
/// over S = `slots` rows. Unwritten rows count with score 0 and value 0. q, out [n, D]; out may alias q. scratch,
/// `scratch_bytes` long and 16-byte aligned, is for devices; bank_scratch_bytes() says how much is of use.
template <class Space, class A = float>
struct BankAttention {
  MatrixView<const A, Space> q;
  MatrixView<A, Space> out;
  float scale = 1.0F;
  BankRuns<Space> runs;
  std::int64_t slots = 0;
  std::int64_t layer = 0;
  std::byte* scratch = nullptr;
  std::size_t scratch_bytes = 0;
};
void bank_attention(Cpu& cpu, const BankAttention<Host>& op);
template <class A>
void bank_attention(Cuda& cuda, const BankAttention<Device, A>& op, BankAlgo algo = {});

/// Puts a run's h, [n, D], into its bank. With n rows written, row i goes to row n + i while that is below S, the
/// others to rows 0, 1, …. Requires: no run has more than S rows.
template <class Space>
struct BankWrite {
  MatrixView<const float, Space> h;
  BankRuns<Space> runs;
  std::int64_t slots = 0;
  std::int64_t layer = 0;
};
void bank_write(Cpu& cpu, const BankWrite<Host>& op);
void bank_write(Cuda& cuda, const BankWrite<Device>& op);

/// Makes a list of runs whose slots lie evenly spaced, in memory of Space. Run i is `first` with i times its rows added
/// to its first row; its state and bank lie i * apart bytes further. For backends whose lists are not the host's.
template <class Space>
struct SpacedRuns {
  BankRun first;
  std::int64_t apart = 0;
  std::int64_t count = 0;
  BankRun* list = nullptr;
};
void space_runs(Cuda& cuda, const SpacedRuns<Device>& op);

// ---------------------------------------------------------------------------------------------------------------------
// The public kernels: three scans and token log-probs, usable without a model. T is float, Float16 or BFloat16.
// Scans run over `time` of [batch, heads, time, dim]; every (batch, head, channel) is one sequence. carry_in and
// carry_out are [batch, heads, dim] contiguous fp32 and may be null; they may alias each other. y may alias the input
// of the same type. Blocks of 128 to 1,024 times are scanned in parallel, and their totals combined: O(N) work. On a
// device a scan returns the algorithm that it took. A run that is cut into calls with carries gives the same result
// within rounding.
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
template <class T>
void exp_product_scan(Cpu& cpu, const ExpProductScan<T, Host>& op);
template <class T>
ScanAlgo exp_product_scan(Cuda& cuda, const ExpProductScan<T, Device>& op, std::optional<ScanAlgo> algo = {});

/// Running log-sum-exp: y_t = log Σ_{i<=t} exp(x_i). Carries are log-sums (identity −inf).
template <class T, class Space>
struct LogSumExpScan {
  SequenceView<const T, Space> x;
  SequenceView<T, Space> y;
  const float* carry_in = nullptr;
  float* carry_out = nullptr;
};
template <class T>
void logsumexp_scan(Cpu& cpu, const LogSumExpScan<T, Host>& op);
template <class T>
ScanAlgo logsumexp_scan(Cuda& cuda, const LogSumExpScan<T, Device>& op, std::optional<ScanAlgo> algo = {});

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
template <class T>
void decay_scan(Cpu& cpu, const DecayScan<T, Host>& op);
template <class T>
ScanAlgo decay_scan(Cuda& cuda, const DecayScan<T, Device>& op, std::optional<ScanAlgo> algo = {});

/// log p = logits[target] − logsumexp(logits). logits [n, V], targets [n] int32 or int64, logprobs [n] fp32.
/// Finite for any finite logits; -inf masks an entry; a row of -inf alone, or with a NaN, gives NaN. A target outside
/// [0, V) throws std::invalid_argument naming row and value before anything is written.
template <class T, class Index, class Space>
struct TokenLogprobs {
  MatrixView<const T, Space> logits;
  const Index* targets = nullptr;
  float* logprobs = nullptr;
};
template <class T, class Index>
void token_logprobs(Cpu& cpu, const TokenLogprobs<T, Index, Host>& op);
template <class T, class Index>
void token_logprobs(Cuda& cuda, const TokenLogprobs<T, Index, Device>& op);
/// The same without the check of the targets, which waits for the device. A target outside [0, V) gives NaN.
template <class T, class Index>
void token_logprobs_unchecked(Cuda& cuda, const TokenLogprobs<T, Index, Device>& op);

/// Its backward: d_logits = grad ⊙ (δ(target) − softmax(logits)), [n, V] in T. grad [n] fp32. d_logits may alias
/// logits.
template <class T, class Index, class Space>
struct TokenLogprobsBackward {
  MatrixView<const T, Space> logits;
  const Index* targets = nullptr;
  const float* grad = nullptr;
  MatrixView<T, Space> d_logits;
};
template <class T, class Index>
void token_logprobs_backward(Cpu& cpu, const TokenLogprobsBackward<T, Index, Host>& op);
template <class T, class Index>
void token_logprobs_backward(Cuda& cuda, const TokenLogprobsBackward<T, Index, Device>& op);

/// Log-probs straight from hidden states [n, D] and the head matrix [V, D], vocabulary tile by vocabulary tile merged
/// by the (max, sum) monoid: logits for the whole vocabulary are never stored. A negative target marks a row to skip
/// (its log-prob is left as it is); a target >= V throws, on a device it gives NaN.
/// force_row_kernel as in Linear.
template <class Space, class A = float>
struct HiddenLogprobs {
  MatrixView<const A, Space> hidden;
  WeightView<Space> head;
  const int* targets = nullptr;
  float* logprobs = nullptr;
  bool force_row_kernel = false;
};
void hidden_logprobs(Cpu& cpu, const HiddenLogprobs<Host>& op);
template <class A>
void hidden_logprobs(Cuda& cuda, const HiddenLogprobs<Device, A>& op, HiddenLogprobsAlgo algo = {});

}  // namespace mmrec::kernels
