// The vector kernels for AVX-512 (F, BW, DQ, VL): 16 fp32 lanes. See simd.h for what must stay true of this file.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC bug 105593: its intrinsics start from `x = x`
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <immintrin.h>

#define MMREC_LANES 16
#include "kernels/cpu/simd_vec.inl"

namespace mmrec::kernels {
namespace {

constexpr int kBlockTokens = 6, kBlockOutputs = 4, kWideOutputs = 8;  // 24 sums, 4 weights, 1 activation of 32

struct Mask {
  __mmask16 m;
};

inline __mmask16 first_lanes(int count) { return static_cast<__mmask16>((1U << static_cast<unsigned>(count)) - 1U); }

inline Vec widen_bf16(__m256i bits) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
inline __m256i narrow_bf16(Vec a) { return _mm512_cvtepi32_epi16((__m512i)bf16_bits(a).v); }

inline Vec load(const BFloat16* p) { return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline Vec load(const Float16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
inline Vec load_partial(const float* p, int count) { return {_mm512_maskz_loadu_ps(first_lanes(count), p)}; }
inline Vec load_partial(const BFloat16* p, int count) {
  return widen_bf16(_mm256_maskz_loadu_epi16(first_lanes(count), p));
}
inline Vec load_partial(const Float16* p, int count) {
  return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(count), p))};
}
inline IVec load_bytes(const unsigned char* p) {
  return {(Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline Vec load_f8(const unsigned char* p) {  // as fp16 the number is 2^-8 of what it is
  const __m256i bits = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 7);
  const Vec small = {_mm512_cvtph_ps(_mm256_and_si256(bits, _mm256_set1_epi16(static_cast<short>(0xbf80))))};
  return small * set1(256.0F);
}
inline IVec load_words(const unsigned char* p) {
  return {(Ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void store(BFloat16* p, Vec a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_bf16(a)); }
inline void store(Float16* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
inline void store_partial(float* p, Vec a, int count) { _mm512_mask_storeu_ps(p, first_lanes(count), a.v); }
inline void store_partial(BFloat16* p, Vec a, int count) {
  _mm256_mask_storeu_epi16(p, first_lanes(count), narrow_bf16(a));
}
inline void store_partial(Float16* p, Vec a, int count) {
  _mm256_mask_storeu_epi16(p, first_lanes(count), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}

inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }

/// Lane i of the result is the lane of `table` that the low 4 bits of index lane i name.
inline Vec lookup(Vec table, IVec index) { return {_mm512_permutexvar_ps((__m512i)index.v, table.v)}; }

inline Mask less(Vec a, Vec b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
inline Mask less_equal(Vec a, Vec b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ)}; }
inline Mask equal(Vec a, Vec b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
inline Mask is_nan(Vec a) { return {_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q)}; }
inline Mask operator|(Mask a, Mask b) { return {_kor_mask16(a.m, b.m)}; }
inline bool any(Mask a) { return a.m != 0; }
inline Vec select(Mask mask, Vec yes, Vec no) { return {_mm512_mask_blend_ps(mask.m, no.v, yes.v)}; }

// 16 -> 8 -> 4 -> 2 -> 1, upper half onto lower half each time.
inline float reduce_add(Vec a) {
  const __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  c = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
inline void reduce_add4(Vec a, Vec b, Vec c, Vec d, float* out) {
  const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a.v, b.v, 0x44), _mm512_shuffle_f32x4(a.v, b.v, 0xee));
  const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c.v, d.v, 0x44), _mm512_shuffle_f32x4(c.v, d.v, 0xee));
  __m512 s = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));  // a | b | c | d
  s = _mm512_add_ps(s, _mm512_permute_ps(s, 0x4e));
  s = _mm512_add_ps(s, _mm512_permute_ps(s, 0xb1));
  _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, s)));  // slow if straight to memory
}
inline float reduce_max(Vec a) {
  const __m256 b = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  c = _mm_max_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps(c, c, 1)));
}

inline Vec scale_pow2(Vec p, Vec n) { return {_mm512_scalef_ps(p.v, n.v)}; }

inline DVec widen(Vec a) {
  return {_mm512_cvtps_pd(_mm512_castps512_ps256(a.v)), _mm512_cvtps_pd(_mm512_extractf32x8_ps(a.v, 1))};
}
inline Vec narrow(DVec a) {
  return {_mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(a.low)), _mm512_cvtpd_ps(a.high), 1)};
}
inline DVec load_wide(const float* p) {
  return {_mm512_cvtps_pd(_mm256_loadu_ps(p)), _mm512_cvtps_pd(_mm256_loadu_ps(p + 8))};
}
inline DVec fma(DVec a, DVec b, DVec c) {
  return {_mm512_fmadd_pd(a.low, b.low, c.low), _mm512_fmadd_pd(a.high, b.high, c.high)};
}

inline void stream(float* p, Vec a) { _mm512_stream_ps(p, a.v); }
inline void stream(BFloat16* p, Vec a) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), narrow_bf16(a)); }
inline void stream(Float16* p, Vec a) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
inline void stream_fence() { _mm_sfence(); }

}  // namespace
}  // namespace mmrec::kernels

#include "kernels/cpu/simd_kernels.inl"

namespace mmrec::kernels {
namespace {
#define MMREC_DIGITS __attribute__((target("avx512vnni")))
inline Ints to_nearest(Vec a) { return (Ints)_mm512_cvtps_epi32(a.v); }
}  // namespace
}  // namespace mmrec::kernels

#include "kernels/cpu/matvec_digits.inl"

namespace mmrec::kernels {
namespace {

double cut(const float* x, std::int64_t count, std::int64_t stride, signed char* to) {
  const __m512i offset = _mm512_set1_epi32(0x808080);  // makes digits unsigned
  return round_row(x, count, [&](std::int64_t i, Ints integers) {
    __m512i digits = _mm512_xor_si512(_mm512_add_epi32((__m512i)integers, offset), offset);
    for (int d = 0; d < kDigits; ++d) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + d * stride + i), _mm512_cvtepi32_epi8(digits));
      digits = _mm512_srli_epi32(digits, 8);
    }
  });
}

/// Three digits of 8 bits for int8 weights, by AVX-512 VNNI: of 64 weights it takes four instructions, where widening
/// them takes sixteen. It multiplies unsigned by signed bytes, so weights are taken as q + 128, and sums begin at -128
/// times the digits'.
struct Int8Digits {
  using Weights = Quantized<Int8>;
  using Row = Weights::Row;
  static constexpr int kCount = kDigits, kWideOutputs = kernels::kWideOutputs;
  static constexpr int kBlockTokens = 2, kBlockOutputs = kernels::kBlockOutputs;
  static constexpr std::int64_t kStep = 64;  // weights of one instruction

  MMREC_DIGITS void take(const float* x, std::int64_t count) {
    scale = cut(x, count, kDigitCols, digit[0]);
    for (int d = 0; d < kDigits; ++d) {
      first_sum[0][d] = Ints{};
      for (std::int64_t i = 0; i < count; i += kQuantBlock) {
        const Ints sum = -add_dot(Ints{}, (Ints)_mm512_set1_epi8(-128), load(digit[d] + i));
        first_sum[1 + i / kQuantBlock][d] = sum;
        first_sum[0][d] += sum;
      }
    }
  }
  /// The sum of a digit's products with -128: block 0 is all of them, others are counted from 1.
  Ints first(int d, std::int64_t block) const { return first_sum[block][d]; }
  static Ints load(const signed char* p) { return (Ints)_mm512_load_si512(p); }
  static Ints load_weights(const unsigned char* p) {
    return (Ints)_mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(-128));
  }
  MMREC_DIGITS static Ints add_dot(Ints sum, Ints weights, Ints digits) {
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)digits);
  }
  /// The sum of the digits' sums, which lie `stride` apart.
  static Vec whole(const Ints* sum, std::int64_t stride) {
    const Ints low = sum[0] + (sum[stride] << 8);
    return fma(to_float_lanes({sum[2 * stride]}), set1(65536.0F), to_float_lanes({low}));
  }
  template <bool kGrouped, int kTokens, int kOutputs>
  MMREC_DIGITS static void dot(const Int8Digits* x, const Row (&rows)[kOutputs], std::int64_t begin, std::int64_t end,
                               std::int64_t ahead, std::int64_t group, Vec* total) {
    dot_int8<Int8Digits, kGrouped, kTokens, kOutputs>(x, rows, begin, end, ahead, group, total);
  }

  alignas(64) signed char digit[kDigits][kDigitCols];  // the least first
  Ints first_sum[1 + kDigitCols / kQuantBlock][kDigits];
  double scale;
};

/// The same digits for int4 weights, q + 8, two blocks at a time: of 128 weights seventeen instructions, where widening
/// them takes twenty-six. The sum of a block is an integer, and is multiplied by its scale.
struct Int4Digits {
  using Weights = Quantized<Int4>;
  using Row = Weights::Row;
  static constexpr int kWideOutputs = kernels::kWideOutputs, kBlockTokens = 4, kBlockOutputs = kernels::kBlockOutputs;
  static constexpr std::int64_t kPair = 2 * kQuantBlock;

  MMREC_DIGITS void take(const float* x, std::int64_t count) {
    alignas(64) signed char plain[kDigits][kDigitCols];
    scale = cut(x, count, kDigitCols, plain[0]);
    for (std::int64_t at = 0; at < count; at += kPair) {
      Pair& to = pairs[at / kPair];
      for (int d = 0; d < kDigits; ++d) {
        for (std::int64_t block = 0; block < 2; ++block) {
          const bool exists = at + block * kQuantBlock < count;
          const auto part = [&](int i) {  // of 16 elements
            const auto* const p = reinterpret_cast<const __m128i*>(plain[d] + at + block * kQuantBlock) + i;
            return exists ? _mm_load_si128(p) : _mm_setzero_si128();
          };
          // In the order of nibbles: word l of the weights has elements l, 16 + l, 32 + l and 48 + l.
          for (int half = 0; half < 2; ++half) {
            auto* const words = reinterpret_cast<__m128i*>(to.digit[d][half] + block * kQuantBlock / 2);
            _mm_store_si128(words, _mm_unpacklo_epi8(part(half), part(half + 2)));
            _mm_store_si128(words + 1, _mm_unpackhi_epi8(part(half), part(half + 2)));
          }
        }
      }
      to.offset = Ints{};
      const Ints eight = (Ints)_mm512_set1_epi8(8);
      to.offset = to.sum_of(eight, eight);
    }
  }
  template <bool kGrouped, int kTokens, int kOutputs>
  MMREC_DIGITS static void dot(const Int4Digits* x, const Row (&rows)[kOutputs], std::int64_t begin, std::int64_t end,
                               std::int64_t ahead, std::int64_t group, Vec* total) {
    const __m512i mask = _mm512_set1_epi8(15);
    constexpr int kBytes = kBlockBytes<Int4>;
    const std::int64_t bytes_ahead = kOutputs * (kBytes + scale_bytes(group));
    Vec sum[kTokens * kOutputs] = {};
    for (std::int64_t k = begin; k < end; k += kPair) {
      const bool is_half = end - k <= kQuantBlock;
      const std::int64_t first_scale = k / group, second_scale = is_half ? first_scale : (k + kQuantBlock) / group;
      fetch_weights<kOutputs*(2 * (kBytes + kMostScaleBytes))>(rows[0].numbers + k / kQuantBlock * bytes_ahead + ahead);
#pragma GCC unroll 16
      for (int o = 0; o < kOutputs; ++o) {
        const __m512i both =
            _mm512_maskz_loadu_epi32(static_cast<__mmask16>(is_half ? 0x00ff : 0xffff), rows[o].numbers + k / 2);
        const auto low = (Ints)_mm512_and_si512(both, mask);
        const auto high = (Ints)_mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
        Vec by = set1(1.0F);
        if (kGrouped) {
          by = {_mm512_mask_broadcastss_ps(set1(rows[o].scales[first_scale]).v, 0xff00,
                                           _mm_load_ss(rows[o].scales + second_scale))};
        }
#pragma GCC unroll 16
        for (int t = 0; t < kTokens; ++t) {
          const Vec whole = to_float_lanes({x[t].pairs[(k - begin) / kPair].sum_of(low, high)});
          sum[t * kOutputs + o] = fma(whole, by, sum[t * kOutputs + o]);
        }
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < kTokens * kOutputs; ++i) total[i] = sum[i];
  }

  /// Of two blocks; the second may not be there.
  struct Pair {
    alignas(64) signed char digit[kDigits][2][64];  // of low nibbles and of high ones
    Ints offset;                                    // the sums of products with 8

    /// The lanes' sums of products with low and high nibbles less 8. They are below 2^31, so is every step.
    MMREC_DIGITS Ints sum_of(Ints low, Ints high) const {
      Ints sum = {};
      for (int d = kDigits - 1; d >= 0; --d) {
        sum = Int8Digits::add_dot(sum << 8, low, Int8Digits::load(digit[d][0]));
        sum = Int8Digits::add_dot(sum, high, Int8Digits::load(digit[d][1]));
      }
      return sum - offset;
    }
  };
  Pair pairs[kDigitCols / kPair];
  double scale;
};

}  // namespace
constinit const SimdKernels kAvx512Kernels = make_kernels("avx512");
constinit const SimdKernels kAvx512VnniKernels = [] {
  SimdKernels kernels = make_kernels("avx512vnni");
  kernels.matvec.matvec.of[static_cast<std::size_t>(DType::kI8)] = matvec_digits<Int8Digits>;
  kernels.matvec.matvec.of[static_cast<std::size_t>(DType::kI4)] = matvec_digits<Int4Digits>;
  kernels.matvec.by_digits = true;
  kernels.matvec.cut = cut;
  return kernels;
}();
}  // namespace mmrec::kernels
