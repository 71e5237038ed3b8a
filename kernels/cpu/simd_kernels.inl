// All vector kernels, assembled into one table: included last by each instruction set's file, after its `Vec`. Here are
// the short ones; products and scans have files of their own. simd.h says what each does.
#define XXH_INLINE_ALL  // everything is internal then, as simd.h asks
#include <xxhash.h>

/// A function for every storage type, in the order of DType.
#define MMREC_BY_DTYPE(f) \
  { f<float>, f<Float16>, f<BFloat16> }
#define MMREC_BY_WEIGHT(f)                                                                            \
  {                                                                                                   \
    f<Plain<float>>, f<Plain<Float16>>, f<Plain<BFloat16>>, f<Quantized<Float8>>, f<Quantized<Int8>>, \
        f<Quantized<Int4>>                                                                            \
  }

#include "kernels/cpu/simd_math.inl"
#include "kernels/cpu/weight_rows.inl"
// Above: the vocabulary. Below: the sections of the table.
#include "kernels/cpu/matvec.inl"
#include "kernels/cpu/scan.inl"

namespace mmrec::kernels {
namespace {

// --- Element-wise kernels over contiguous fp32 values, and the reductions of rmsnorm and segment_sum.

/// In order of the lanes.
inline double reduce_add(DVec sum) {
  double lanes[kLanes];
  dstore(lanes, sum);
  double total = 0.0;
  for (const double lane : lanes) total += lane;
  return total;
}

/// Sum of x^2 in kLanes fp64 chains, added in order of their lanes.
double sum_squares(const float* x, std::int64_t count) {
  DVec sum = dset1(0.0);
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const DVec v = widen(load_partial(x + i, lanes_left(count - i)));
    sum = fma(v, v, sum);
  }
  return reduce_add(sum);
}

void scale_by(const float* x, const float* weight, float scale, float* y, std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const int lanes = lanes_left(count - i);
    store_partial(y + i, load_partial(weight + i, lanes) * (set1(scale) * load_partial(x + i, lanes)), lanes);
  }
}

void decay_gate_run(const float* a, const float* c, float* gamma, std::int64_t count) {
  constexpr float kLeast = 1e-6F;
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const int lanes = lanes_left(count - i);
    Vec g = sigmoid(load_partial(a + i, lanes));
    if (c != nullptr) g = g * sigmoid(load_partial(c + i, lanes));
    g = min(set1(1.0F - kLeast), max(set1(kLeast), g));  // g last, so that NaN passes
    store_partial(gamma + i, g, lanes);
  }
}

void block_residual_run(const float* x, const float* h, const float* v, const float* bias, float* y,
                        std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const int lanes = lanes_left(count - i);
    Vec sum = fma(set1(0.1F), load_partial(v + i, lanes), load_partial(x + i, lanes) + load_partial(h + i, lanes));
    if (bias != nullptr) sum = sum + load_partial(bias + i, lanes);
    store_partial(y + i, sum, lanes);
  }
}

void add_rows(const float* x, std::int64_t stride, std::int64_t rows, double* sum, std::int64_t count) {
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    DVec total = dload(sum + i);
    for (std::int64_t r = 0; r < rows; ++r) total = total + widen(load(x + r * stride + i));
    dstore(sum + i, total);
  }
  for (; i < count; ++i) {
    for (std::int64_t r = 0; r < rows; ++r) sum[i] += static_cast<double>(x[r * stride + i]);
  }
}

// --- Recurrences. The exact loop and the gate-frozen scan share one step, so both round alike: where the scan's gates
// are those of the exact loop, its states are the same bits.

/// h_t from h_{t-1} and the gates' pre-activations: s = W_g h_{t-1} + b_g, g = zm + W_mh h_{t-1}.
inline Vec gated_step(Vec s, Vec g, Vec z, Vec gamma, Vec h, Vec mix) {
  s = sigmoid(s);
  g = sigmoid(g);
  const Vec a = fma(mix, (set1(1.0F) - g) + gamma, gamma);
  const Vec b = z * fma(mix, g, s);
  return fma(a, h, b);
}

void recurrence_step(const RecurrenceStep& r) {
  const Vec mix = set1(r.mdi_mix);
  for (std::int64_t i = 0; i < r.channels; i += kLanes) {
    const int lanes = lanes_left(r.channels - i);
    Vec s = load_partial(r.s + i, lanes);
    if (r.bias != nullptr) s = s + load_partial(r.bias + i, lanes);
    const Vec g = load_partial(r.zm + i, lanes) + load_partial(r.g + i, lanes);
    const Vec h = gated_step(s, g, load_partial(r.z + i, lanes), load_partial(r.gamma + i, lanes),
                             load_partial(r.h + i, lanes), mix);
    store_partial(r.h_next + i, h, lanes);
  }
}

/// A gate-frozen sweep over kScanChannels channels or fewer, in order of time. change and magnitude are raised to this
/// run's maxima; a NaN counts as infinity, so that no comparison can lose it.
void recurrence_scan(const RecurrenceScan& r) {
  constexpr int kVecs = static_cast<int>(kScanChannels) / kLanes;
  const Vec mix = set1(r.mdi_mix);
  const Vec infinity = set1(kVecInfinity);
  const int vecs = static_cast<int>((r.channels + kLanes - 1) / kLanes);
  Vec state[kVecs];
  for (int v = 0; v < vecs; ++v)
    state[v] = load_partial(r.h + std::int64_t{v} * kLanes, lanes_left(r.channels - std::int64_t{v} * kLanes));
  for (std::int64_t t = 0; t < r.times; ++t) {
    const float* z = r.z + t * r.z_stride;
    const float* zm = r.zm + t * r.zm_stride;
    const float* gamma = r.gamma + t * r.gamma_stride;
    const float* s = r.s + t * r.gate_stride;
    const float* g = r.g + t * r.gate_stride;
    float* h = r.h + (t + 1) * r.h_stride;
    Vec change = zero();
    Vec magnitude = zero();
    for (int v = 0; v < vecs; ++v) {
      const std::int64_t i = std::int64_t{v} * kLanes;
      const int lanes = lanes_left(r.channels - i);
      const Vec next = gated_step(load_partial(s + i, lanes), load_partial(zm + i, lanes) + load_partial(g + i, lanes),
                                  load_partial(z + i, lanes), load_partial(gamma + i, lanes), state[v], mix);
      const Vec difference = abs(next - load_partial(h + i, lanes));
      change = max(change, select(is_nan(difference), infinity, difference));
      magnitude = max(magnitude, select(is_nan(next), infinity, abs(next)));
      store_partial(h + i, next, lanes);
      state[v] = next;
    }
    const float c = reduce_max(change);
    const float m = reduce_max(magnitude);
    if (c > r.change[t]) r.change[t] = c;
    if (m > r.magnitude[t]) r.magnitude[t] = m;
  }
}

void normed_step(const NormedStep& r) {
  for (std::int64_t i = 0; i < r.channels; i += kLanes) {
    const int lanes = lanes_left(r.channels - i);
    Vec m = load_partial(r.zm + i, lanes);
    if (r.bias != nullptr) m = m + load_partial(r.bias + i, lanes);
    if (r.product != nullptr) m = m + load_partial(r.product + i, lanes);
    m = sigmoid(m);
    Vec p = m * load_partial(r.z + i, lanes);
    if (r.h != nullptr) {
      const Vec keep = (set1(1.0F) - m) + load_partial(r.gamma + i, lanes);
      p = fma(keep, load_partial(r.h + i, lanes), p);
    }
    store_partial(r.p + i, p, lanes);
  }
}

void norm_within(const float* weight, float scale, float limit, float* x, std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const int lanes = lanes_left(count - i);
    const Vec y = load_partial(weight + i, lanes) * (set1(scale) * load_partial(x + i, lanes));
    store_partial(x + i, min(set1(limit), max(set1(-limit), y)), lanes);  // y last, so that NaN passes
  }
}

// --- Softmax attention of one head of one row over memory slots, tile by tile: the (max, sum) monoid of logsumexp.h
// with the weighted values carried along, rescaled by exp(m_old - m_new) where a tile raises the maximum.

void attend(const float* q, const float* slots, std::int64_t stride, std::int64_t count, std::int64_t zeros,
            std::int64_t d, float scale, float* values, float* out) {
  constexpr std::int64_t kTile = 32;
  static_assert(kTile % kLanes == 0);
  float maximum = -kVecInfinity;
  float sum = 0.0F;
  for (std::int64_t first = 0; first < count; first += kTile) {
    const std::int64_t tile = count - first < kTile ? count - first : kTile;
    const float* rows = slots + first * stride;
    float weight[kTile];
    float top = maximum;
    for (std::int64_t j = 0; j < kTile; ++j) {
      if (j >= tile) {
        weight[j] = -kVecInfinity;
        continue;
      }
      Vec dot = zero();
      for (std::int64_t i = 0; i < d; i += kLanes) {
        const int lanes = lanes_left(d - i);
        dot = fma(load_partial(q + i, lanes), load_partial(rows + j * stride + i, lanes), dot);
      }
      weight[j] = scale * reduce_add(dot);
      if (weight[j] > top) top = weight[j];
    }
    float kept[kLanes];  // exp(maximum - top): what the earlier tiles shrink by
    store(kept, exp(set1(maximum) - set1(top)));
    Vec tile_sum = zero();
    for (std::int64_t j = 0; j < kTile; j += kLanes) {
      const Vec w = exp(load(weight + j) - set1(top));
      store(weight + j, w);
      tile_sum = tile_sum + w;
    }
    const Vec keep = set1(first == 0 ? 0.0F : kept[0]);
    sum = (first == 0 ? 0.0F : kept[0] * sum) + reduce_add(tile_sum);
    maximum = top;
    for (std::int64_t i = 0; i < d; i += kLanes) {
      const int lanes = lanes_left(d - i);
      Vec value = first == 0 ? zero() : keep * load_partial(values + i, lanes);
      for (std::int64_t j = 0; j < tile; ++j) {
        value = fma(set1(weight[j]), load_partial(rows + j * stride + i, lanes), value);
      }
      store_partial(values + i, value, lanes);
    }
  }
  if (zeros > 0) {
    const float top = maximum < 0.0F ? 0.0F : maximum;
    float kept[kLanes];
    float each[kLanes];
    store(kept, exp(set1(maximum) - set1(top)));
    store(each, exp(set1(-top)));
    sum = sum + static_cast<float>(zeros) * each[0] / kept[0];  // in units of exp(maximum), as the values are
  }
  for (std::int64_t i = 0; i < d; i += kLanes) {
    const int lanes = lanes_left(d - i);
    store_partial(out + i, load_partial(values + i, lanes) / set1(sum), lanes);
  }
}

// --- Token log-probs. Each lane keeps its own reference and sum. A reference follows the lane's maximum only when that
// has grown by more than kGrowth, checked once per group of vectors, so the common case is one subtraction, one exp and
// one addition per logit. Bytes moved: each logit once. Lanes are merged at the end in one fixed order, in fp64.

constexpr int kGroup = 4;        // vectors looked at together, each with a sum of its own
constexpr float kGrowth = 8.0F;  // e^8 times the terms of a lane stays far inside fp32

template <class T>
void max_sum(const void* input, std::int64_t count, float* max_out, double* sum_out) {
  const T* x = static_cast<const T*>(input);
  Vec m = set1(-kLargest);  // finite, so that -inf - m is -inf and not NaN
  Vec sum[kGroup] = {zero(), zero(), zero(), zero()};
  const auto raise = [&](Vec top) {
    const Mask grown = less(m + set1(kGrowth), top);
    if (!any(grown)) return;
    const Vec higher = select(grown, min(set1(kLargest), top), m);
    const Vec scale = exp(m - higher);
    for (Vec& s : sum) s = s * scale;
    m = higher;
  };
  std::int64_t i = 0;
  constexpr std::int64_t kStep = std::int64_t{kGroup} * kLanes;
  for (; i + kStep <= count; i += kStep) {
    Vec v[kGroup];
    for (int g = 0; g < kGroup; ++g) v[g] = load(x + i + g * kLanes);
    __builtin_prefetch(x + i + 16 * kStep);
    raise(max(max(v[0], v[1]), max(v[2], v[3])));
    for (int g = 0; g < kGroup; ++g) sum[g] = sum[g] + exp(v[g] - m);
  }
  for (; i < count; i += kLanes) {
    const std::int64_t rest = count - i;
    Vec v = set1(-kVecInfinity);
    if (rest >= kLanes) {
      v = load(x + i);
    } else {  // lanes beyond the end hold no term
      float lane[kLanes];
      store(lane, v);
      store_partial(lane, load_partial(x + i, static_cast<int>(rest)), static_cast<int>(rest));
      v = load(lane);
    }
    raise(v);
    sum[0] = sum[0] + exp(v - m);
  }
  const float top = reduce_max(m);
  const Vec scale = exp(m - set1(top));
  *max_out = top;
  *sum_out = reduce_add(widen((sum[0] + sum[1]) * scale) + widen((sum[2] + sum[3]) * scale));
}

template <class T>
void scaled_exp(const void* input, std::int64_t count, float max, float scale, void* output) {
  const T* x = static_cast<const T*>(input);
  T* y = static_cast<T*>(output);
  map_by(x, y, count, [m = set1(max), s = set1(scale)](Vec v) { return s * exp(v - m); });
}

// --- Stored numbers as bytes. Loops that a compiler vectorises.

template <class Bits, Bits kExponent>
bool all_finite(const void* from, std::int64_t count) {
  constexpr std::int64_t kStride = 1024;
  const auto* const bytes = static_cast<const unsigned char*>(from);
  for (std::int64_t begin = 0; begin < count; begin += kStride) {
    const std::int64_t end = count - begin < kStride ? count : begin + kStride;
    Bits any = 0;
    for (std::int64_t i = begin; i < end; ++i) {
      Bits bits;
      __builtin_memcpy(&bits, bytes + i * static_cast<std::int64_t>(sizeof bits), sizeof bits);
      any = static_cast<Bits>(any | ((bits & kExponent) == kExponent));
    }
    if (any != 0) return false;
  }
  return true;
}

std::uint64_t hash_bytes(const void* bytes, std::size_t count) { return XXH3_64bits(bytes, count); }

constexpr SimdKernels make_kernels(const char* name) {
  return {.name = name,
          .math = kMathKernels,
          .matvec = kMatvecKernels,
          .pointwise = {sum_squares, scale_by, decay_gate_run, block_residual_run, add_rows},
          .recurrence = {recurrence_step, recurrence_scan, normed_step, norm_within},
          .attention = {attend},
          .scan = kScanKernels,
          .logprobs = {MMREC_BY_DTYPE(max_sum), MMREC_BY_DTYPE(scaled_exp)},
          .bytes = {{all_finite<std::uint32_t, 0x7f800000U>, all_finite<std::uint16_t, 0x7c00U>,
                     all_finite<std::uint16_t, 0x7f80U>},
                    hash_bytes}};
}

}  // namespace
}  // namespace mmrec::kernels
