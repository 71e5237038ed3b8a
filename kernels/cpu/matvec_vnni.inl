// Products of token rows with int8 weights of one scale a row, by integer dot products (AVX-512 VNNI).
//
// x is rounded once to integers of 24 bits, the largest of up to kCols inputs to kMostDigits, and cut into three signed
// digits of 8 bits. Sums of digits by weights are exact, so bits depend on row t and weight row o alone, as those of
// matvec.inl. The instruction multiplies unsigned by signed bytes, so weights are taken as q + 128, and sums begin at
// -128 times the digits'. Of 64 weights it takes four instructions, where widening them takes sixteen.
namespace mmrec::kernels {
namespace {

#define MMREC_VNNI __attribute__((target("avx512vnni")))

constexpr std::int64_t kCols = 4096;       // so that no sum of digits overflows, nor the sum of two of them
constexpr float kMostDigits = 8355000.0F;  // the largest number of three signed digits is 0x7f7f7f = 8355711

/// Up to kCols elements of a row of x.
struct Digits {
  alignas(64) signed char digit[kDigits][kCols];  // the least first; zeros up to a multiple of kQuantBlock
  Ints begin[kDigits];                            // of sums
  double scale;                                   // NaN if an element is not finite
};

double cut(const float* x, std::int64_t count, std::int64_t stride, signed char* to) {
  Vec most = zero(), wrong = zero();
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const Vec a = load_partial(x + i, lanes_left(count - i));
    most = max(most, abs(a));
    wrong = fma(a, zero(), wrong);
  }
  const float largest = reduce_max(most);
  const float scale = largest > 1e-30F ? kMostDigits / largest : kMostDigits / 1e-30F;
  const __m512i offset = _mm512_set1_epi32(0x808080);  // makes digits unsigned
  for (std::int64_t i = 0; i < count || i % kQuantBlock != 0; i += kLanes) {
    const Vec a = i < count ? load_partial(x + i, lanes_left(count - i)) : zero();
    __m512i digits = _mm512_cvtps_epi32((a * set1(scale)).v);
    digits = _mm512_xor_si512(_mm512_add_epi32(digits, offset), offset);
    for (int d = 0; d < kDigits; ++d) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + d * stride + i), _mm512_cvtepi32_epi8(digits));
      digits = _mm512_srli_epi32(digits, 8);
    }
  }
  return (1.0 + static_cast<double>(reduce_add(wrong))) / static_cast<double>(scale);
}

MMREC_VNNI void cut(const float* x, std::int64_t count, Digits& to) {
  to.scale = cut(x, count, kCols, to.digit[0]);
  for (int d = 0; d < kDigits; ++d) {
    __m512i sum = _mm512_setzero_si512();
    for (std::int64_t i = 0; i < count; i += kQuantBlock) {
      sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(-128), _mm512_load_si512(to.digit[d] + i));
    }
    to.begin[d] = -(Ints)sum;
  }
}

/// kTokens x kOutputs products of `count` inputs, from the numbers of the first row on, which are `row_bytes` apart:
/// sums[t * kOutputs + o] without scales.
template <int kTokens, int kOutputs>
MMREC_VNNI inline void dot_digits(const Digits* x, const unsigned char* const (&rows)[kOutputs], std::int64_t count,
                                  std::int64_t ahead, float* sums) {
  constexpr int kSums = kTokens * kOutputs;
  Ints sum[kDigits * kSums];  // [t][digit][o]; not __m512i, which may alias and would not stay in registers
#pragma GCC unroll 32
  for (int i = 0; i < kDigits * kSums; ++i) sum[i] = x[i / (kDigits * kOutputs)].begin[i / kOutputs % kDigits];
  for (std::int64_t k = 0; k < count; k += kQuantBlock) {
#pragma GCC unroll 16
    for (int o = 0; o < kOutputs; ++o) __builtin_prefetch(rows[0] + k * kOutputs + ahead + o * kLine);
    __m512i w[kOutputs];
#pragma GCC unroll 16
    for (int o = 0; o < kOutputs; ++o) w[o] = _mm512_xor_si512(_mm512_loadu_si512(rows[o] + k), _mm512_set1_epi8(-128));
#pragma GCC unroll 16
    for (int d = 0; d < kTokens * kDigits; ++d) {
      const __m512i a = _mm512_load_si512(x[d / kDigits].digit[d % kDigits] + k);
#pragma GCC unroll 16
      for (int o = 0; o < kOutputs; ++o) {
        sum[d * kOutputs + o] = (Ints)_mm512_dpbusd_epi32((__m512i)sum[d * kOutputs + o], w[o], a);
      }
    }
  }
  Vec total[kSums];
#pragma GCC unroll 32
  for (int i = 0; i < kSums; ++i) {
    const int of = i / kOutputs * kDigits * kOutputs + i % kOutputs;
    const __m512i low = (__m512i)(sum[of] + (sum[of + kOutputs] << 8));
    total[i] =
        fma(Vec{_mm512_cvtepi32_ps((__m512i)sum[of + 2 * kOutputs])}, set1(65536.0F), Vec{_mm512_cvtepi32_ps(low)});
  }
#pragma GCC unroll 16
  for (int i = 0; i < kSums; i += 4) reduce_add4(total[i], total[i + 1], total[i + 2], total[i + 3], sums + i);
}

/// Outputs from o on of kTokens tokens, of inputs begin..end; added to y unless they are the first. Outputs beyond the
/// last repeat it and are dropped.
template <int kTokens, int kOutputs>
MMREC_VNNI void multiply_digits(const Digits* x, const WeightView<Host>& w, std::int64_t o, std::int64_t begin,
                                std::int64_t end, float* y, std::int64_t y_stride) {
  const std::int64_t bytes = row_bytes(w.format, w.cols), block = kOutputs * bytes;
  const std::int64_t outputs = w.rows - o < kOutputs ? w.rows - o : kOutputs;
  const unsigned char* rows[kOutputs];
  for (int i = 0; i < kOutputs; ++i) {
    rows[i] = static_cast<const unsigned char*>(w.data) + (o + (i < outputs ? i : outputs - 1)) * bytes + begin;
  }
  float sums[kTokens * kOutputs];
  dot_digits<kTokens, kOutputs>(x, rows, end - begin, (kAheadBytes + block - 1) / block * block, sums);
  double scales[kOutputs];
  for (int i = 0; i < kOutputs; ++i) {
    float scale;
    __builtin_memcpy(&scale, rows[i] - begin + number_bytes(w.format, w.cols), sizeof scale);
    scales[i] = static_cast<double>(scale);
  }
  for (int t = 0; t < kTokens; ++t) {
    float of_token[kOutputs];
    for (int i = 0; i < kOutputs; ++i) {
      of_token[i] = static_cast<float>(static_cast<double>(sums[t * kOutputs + i]) * x[t].scale * scales[i]);
    }
    float* const to = y + t * y_stride + o;
    if (outputs == kOutputs && begin == 0) {
      __builtin_memcpy(to, of_token, sizeof of_token);
    } else {
      for (int i = 0; i < outputs; ++i) to[i] = begin == 0 ? of_token[i] : to[i] + of_token[i];
    }
  }
}

MMREC_VNNI void matvec_digits(const float* const* x, std::int64_t n, const WeightView<Host>& w, float* y,
                              std::int64_t y_stride) {
  if (w.format.group != 0 || w.cols == 0) return matvec<Quantized<Int8>>(x, n, w, y, y_stride);
  constexpr std::int64_t kTogether = 8;  // tokens that meet a block of weights while it is in L1
  Digits digits[kTogether];
  for (std::int64_t begin = 0; begin < w.cols; begin += kCols) {
    const std::int64_t end = w.cols - begin < kCols ? w.cols : begin + kCols;
    for (std::int64_t first = 0; first < n; first += kTogether) {
      const std::int64_t count = n - first < kTogether ? n - first : kTogether;
      for (std::int64_t t = 0; t < count; ++t) cut(x[first + t] + begin, end - begin, digits[t]);
      float* const to = y + first * y_stride;
      for (std::int64_t o = 0; count == 1 && o < w.rows; o += kWideOutputs) {
        multiply_digits<1, kWideOutputs>(digits, w, o, begin, end, to, y_stride);
      }
      for (std::int64_t o = 0; count != 1 && o < w.rows; o += kBlockOutputs) {
        std::int64_t t = 0;
        for (; t + 2 <= count; t += 2) {
          multiply_digits<2, kBlockOutputs>(digits + t, w, o, begin, end, to + t * y_stride, y_stride);
        }
        if (t < count) multiply_digits<1, kBlockOutputs>(digits + t, w, o, begin, end, to + t * y_stride, y_stride);
      }
    }
  }
}

#undef MMREC_VNNI

}  // namespace
}  // namespace mmrec::kernels
