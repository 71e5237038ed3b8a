// The table of vector kernels: one per instruction set, picked once per process.
//
// The kernels are written once, in the .inl files, against the `Vec` that each of simd_avx512.cpp, simd_avx2.cpp and
// simd_scalar.cpp defines; each of those includes simd_kernels.inl and exports one table. What must stay true: those
// three files are compiled for their instruction set, so everything in them and in the .inl files has internal linkage
// and, but for simd_scalar.cpp, calls no inline function of another header; otherwise the linker could keep an AVX-512
// copy of a common function for all callers. Tables are constant-initialised for the same reason.
//
// Within one table results never depend on alignment, on how a caller splits rows or columns, or on the number of
// threads; between tables they differ by rounding.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/ops.h"
#include "kernels/tensor.h"

namespace mmrec::kernels {

/// A function for every storage type of operands, or of weights.
template <class F, int kTypes = 3>
struct ByDType {
  F* of[kTypes];
  constexpr F* operator[](DType type) const { return of[static_cast<std::size_t>(type)]; }
};

template <class F>
using ByWeight = ByDType<F, 6>;

/// The largest power of two in a scale, or 1 for a scale of 0. Numbers times it are about as large as the weights, so
/// sums of products stay in range.
MMREC_ALWAYS_INLINE constexpr float power_of(float scale) {
  const float power = __builtin_bit_cast(float, __builtin_bit_cast(std::uint32_t, scale) & 0x7f800000U);
  return power == 0.0F ? 1.0F : power;
}

/// simd_math.inl over arrays: y[i] = f(x[i]); y may alias x.
struct MathKernels {
  void (*exp)(const float* x, float* y, std::int64_t count);
  void (*log)(const float* x, float* y, std::int64_t count);
  void (*sigmoid)(const float* x, float* y, std::int64_t count);
  void (*gelu)(const float* x, float* y, std::int64_t count);
  void (*gelu_tanh)(const float* x, float* y, std::int64_t count);
};

inline constexpr int kDigits = 3;                 // of 8 bits, of x
inline constexpr std::int64_t kDigitCols = 4096;  // so that no sum of digits overflows, nor the sum of two of them
inline constexpr float kMostDigits = 8355000.0F;  // the largest number of three signed digits is 0x7f7f7f = 8355711

/// matvec.inl.
struct MatvecKernels {
  /// y[t * y_stride + o] = x[t] . weight[o] for t < n, o < weight.rows. x[t] points to row t.
  ByWeight<void(const float* const* x, std::int64_t n, const WeightView<Host>& weight, float* y, std::int64_t y_stride)>
      matvec;
  /// Whether some quantised weights are multiplied as integers (matvec_digits.inl). Else products have the bits of
  /// those with the dequantised numbers.
  bool by_digits;
  /// The numbers of the rows, times their scales; to [weight.rows, weight.cols].
  ByWeight<void(const WeightView<Host>& weight, float* to)> widen;
  /// Quantised rows as bf16. Where a row has one scale, its numbers times power_of(scale), which is exact; else the
  /// dequantised numbers, rounded.
  ByWeight<void(const WeightView<Host>& weight, BFloat16* to)> narrow;
  /// Cuts a row of x into kDigits signed digits of 8 bits: x = scale (digit 0 + 2^8 digit 1 + 2^16 digit 2), rounded. A
  /// digit's row lies `stride` behind that of the digit before, filled up with zeros to a multiple of kQuantBlock.
  /// Returns the scale, NaN if an element is not finite. Null where int8 weights are not multiplied by digits.
  double (*cut)(const float* x, std::int64_t count, std::int64_t stride, signed char* digits);
  /// y = activation(product + bias) + scale * residual; bias and residual may be null, residual or product may be y.
  void (*epilogue[4])(const float* product, const float* bias, const float* residual, float scale, float* y,
                      std::int64_t count);
};

/// Over contiguous runs of `count` values.
struct PointwiseKernels {
  double (*sum_squares)(const float* x, std::int64_t count);
  /// y = weight * (scale * x); y may be x.
  void (*scale_by)(const float* x, const float* weight, float scale, float* y, std::int64_t count);
  /// gamma = clamp(sigmoid(a) * sigmoid(c)); c may be null, gamma may be a or c.
  void (*decay_gate)(const float* a, const float* c, float* gamma, std::int64_t count);
  /// y = x + h + 0.1 v + bias; bias may be null, y may be x.
  void (*block_residual)(const float* x, const float* h, const float* v, const float* bias, float* y,
                         std::int64_t count);
  /// sum[i] += x[r * stride + i], r = 0, 1, ... in this order.
  void (*add_rows)(const float* x, std::int64_t stride, std::int64_t rows, double* sum, std::int64_t count);
};

/// One token of the gated recurrence, `channels` channels. All pointers are at the first channel.
struct RecurrenceStep {
  const float* s;     // W_g h_{t-1}
  const float* bias;  // b_g or null
  const float* g;     // W_mh h_{t-1}
  const float* z;
  const float* zm;
  const float* gamma;
  const float* h;  // h_{t-1}
  float* h_next;   // h_t
  float mdi_mix;
  std::int64_t channels;
};

/// Channels that one call of recurrence_scan takes: it holds their state.
inline constexpr std::int64_t kScanChannels = 64;

/// A gate-frozen sweep over `times` tokens and up to kScanChannels channels. Pointers are at the first
/// time and channel, h at the carry: row 0 is read, rows 1..times are replaced.
struct RecurrenceScan {
  const float* s;  // W_g h_{t-1} + b_g of the previous iterate
  const float* g;  // W_mh h_{t-1}
  std::int64_t gate_stride;
  const float* z;
  std::int64_t z_stride;
  const float* zm;
  std::int64_t zm_stride;
  const float* gamma;
  std::int64_t gamma_stride;
  float* h;
  std::int64_t h_stride;
  float mdi_mix;
  std::int64_t times;
  std::int64_t channels;
  float* change;     // [times], raised to the maximum of |h_new - h_old|
  float* magnitude;  // [times], raised to the maximum of |h_new|
};

/// One token of the recurrence that is normed, before its norm. All pointers are at the first channel.
struct NormedStep {
  const float* product;  // W h_{t-1}, or null for zeros
  const float* bias;     // or null
  const float* zm;
  const float* z;
  const float* gamma;
  const float* h;  // h_{t-1}, or null for zeros
  float* p;        // p_t
  std::int64_t channels;
};

struct RecurrenceKernels {
  void (*step)(const RecurrenceStep&);
  void (*scan)(const RecurrenceScan&);
  void (*normed_step)(const NormedStep&);
  /// x = clamp(weight * (scale * x), +-limit); NaN stays.
  void (*norm_within)(const float* weight, float scale, float limit, float* x, std::int64_t count);
};

struct AttentionKernels {
  /// One head of one row: out [d] = softmax(scale * q . slots) . slots, slot j at slots + j * stride, and `zeros` more
  /// slots of zeros. values is scratch [d]; out may be q; count >= 1.
  void (*attend)(const float* q, const float* slots, std::int64_t stride, std::int64_t count, std::int64_t zeros,
                 std::int64_t d, float scale, float* values, float* out);
};

inline constexpr std::int64_t kScanTile = 1024;

/// A rectangle of a scan, times x channels (1 to kScanTile), for scan.inl. Row t of an operand begins at operand + t *
/// stride elements. `state` holds the running state of each channel in planes of `plane` doubles (a multiple of 16, at
/// least channels): it is read first and holds the state after the last time at the end.
struct ScanRun {
  const void* in[2];  // exp product: gamma; log-sum-exp: x; decay: log_a and b
  std::int64_t in_stride[2];
  void* out;  // y or h, of the inputs' type; may alias in[0] or in[1]; not used by the totals
  std::int64_t out_stride;
  float* log_out;  // exp product: log_y or null
  std::int64_t log_out_stride;
  std::int64_t times;
  std::int64_t channels;
  double* state;
  std::int64_t plane;
  bool streaming;  // out is aligned to 64 bytes in every row and will not be read soon
};

/// scan.inl. `run` writes outputs; `total` only moves the state, for the first pass over a block.
/// Planes: exp product {L}; log-sum-exp {reference, sum} with L = reference + log(sum); decay run {h}, decay total
/// {h, sum of log_a}.
struct ScanKernels {
  ByDType<void(const ScanRun&)> exp_product_run;
  ByDType<void(const ScanRun&)> exp_product_total;
  ByDType<void(const ScanRun&)> logsumexp_run;
  ByDType<void(const ScanRun&)> logsumexp_total;
  ByDType<void(const ScanRun&)> decay_run;
  ByDType<void(const ScanRun&)> decay_total;
};

/// Token log-probs.
struct LogprobKernels {
  /// sum * exp(max) = the sum of exp(x[i]). `max` may lie a little below the true maximum, and is finite.
  ByDType<void(const void* x, std::int64_t count, float* max, double* sum)> max_sum;
  /// y[i] = scale * exp(x[i] - max); y may alias x.
  ByDType<void(const void* x, std::int64_t count, float max, float scale, void* y)> scaled_exp;
};

/// Stored numbers as bytes: whether they are finite, and their hash.
struct ByteKernels {
  ByDType<bool(const void* numbers, std::int64_t count)> all_finite;
  std::uint64_t (*hash)(const void* bytes, std::size_t count);
};

struct SimdKernels {
  const char* name;  // "avx512vnni", "avx512", "avx2" or "scalar"
  MathKernels math;
  MatvecKernels matvec;
  PointwiseKernels pointwise;
  RecurrenceKernels recurrence;
  AttentionKernels attention;
  ScanKernels scan;
  LogprobKernels logprobs;
  ByteKernels bytes;
};

extern const SimdKernels kAvx512VnniKernels;  // kAvx512Kernels but for products with int8 and int4 weights
extern const SimdKernels kAvx512Kernels;
extern const SimdKernels kAvx2Kernels;
extern const SimdKernels kScalarKernels;

/// The table that ops use: the fastest that this processor runs, or the one that a test has chosen.
const SimdKernels& simd();
/// For tests, which run ops by every table. Not while an op runs.
void choose_simd(const SimdKernels& table);
/// Every table that this processor runs, fastest first: tests go through all of them.
std::span<const SimdKernels* const> supported_simd_kernels();

}  // namespace mmrec::kernels
