// The vector kernels for AVX2 with FMA and F16C: 8 fp32 lanes. See simd.h for what must stay true of this file.
#include <immintrin.h>

#define MMREC_LANES 8
#include "kernels/cpu/simd_vec.inl"

namespace mmrec::kernels {
namespace {

constexpr int kBlockTokens = 4, kBlockOutputs = 3, kWideOutputs = 8;  // 12 sums, 3 weights, 1 activation of 16

struct Mask {
  __m256 m;
};

inline __m256i first_lanes(int count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

inline Vec widen_bf16(__m128i bits) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
}
inline __m128i narrow_bf16(Vec a) {
  const auto bits = (__m256i)bf16_bits(a).v;
  return _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
}

/// The first `count` 16-bit values at p, zeros after them.
inline __m128i load_halves(const void* p, int count) {
  if (count == 8) return _mm_loadu_si128(static_cast<const __m128i*>(p));
  alignas(16) std::uint16_t lanes[8] = {};
  for (int i = 0; i < count; ++i) lanes[i] = static_cast<const std::uint16_t*>(p)[i];
  return _mm_load_si128(reinterpret_cast<const __m128i*>(lanes));
}
inline void store_halves(void* p, __m128i a, int count) {
  if (count == 8) return _mm_storeu_si128(static_cast<__m128i*>(p), a);
  alignas(16) std::uint16_t lanes[8];
  _mm_store_si128(reinterpret_cast<__m128i*>(lanes), a);
  for (int i = 0; i < count; ++i) static_cast<std::uint16_t*>(p)[i] = lanes[i];
}

inline Vec load(const BFloat16* p) { return widen_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline Vec load(const Float16* p) { return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }
inline Vec load_partial(const float* p, int count) { return {_mm256_maskload_ps(p, first_lanes(count))}; }
inline Vec load_partial(const BFloat16* p, int count) { return widen_bf16(load_halves(p, count)); }
inline Vec load_partial(const Float16* p, int count) { return {_mm256_cvtph_ps(load_halves(p, count))}; }
inline IVec load_bytes(const unsigned char* p) {
  return {(Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))};
}
inline Vec load_f8(const unsigned char* p) {  // as fp16 the number is 2^-8 of what it is
  const __m128i bits = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))), 7);
  const Vec small = {_mm256_cvtph_ps(_mm_and_si128(bits, _mm_set1_epi16(static_cast<short>(0xbf80))))};
  return small * set1(256.0F);
}
inline IVec load_words(const unsigned char* p) {
  return {(Ints)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline void store(BFloat16* p, Vec a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow_bf16(a)); }
inline void store(Float16* p, Vec a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
inline void store_partial(float* p, Vec a, int count) {
  if (count == kLanes) return store(p, a);  // masked stores are slow on some processors
  _mm256_maskstore_ps(p, first_lanes(count), a.v);
}
inline void store_partial(BFloat16* p, Vec a, int count) { store_halves(p, narrow_bf16(a), count); }
inline void store_partial(Float16* p, Vec a, int count) {
  store_halves(p, _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT), count);
}

inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }

inline Mask less(Vec a, Vec b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)}; }
inline Mask less_equal(Vec a, Vec b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_LE_OQ)}; }
inline Mask equal(Vec a, Vec b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_EQ_OQ)}; }
inline Mask is_nan(Vec a) { return {_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q)}; }
inline Mask operator|(Mask a, Mask b) { return {_mm256_or_ps(a.m, b.m)}; }
inline bool any(Mask a) { return _mm256_movemask_ps(a.m) != 0; }
inline Vec select(Mask mask, Vec yes, Vec no) { return {_mm256_blendv_ps(no.v, yes.v, mask.m)}; }

// 8 -> 4 -> 2 -> 1, upper half onto lower half each time.
inline float reduce_add(Vec a) {
  __m128 c = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  c = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
inline void reduce_add4(Vec a, Vec b, Vec c, Vec d, float* out) {
  const __m256 ab = _mm256_add_ps(_mm256_permute2f128_ps(a.v, b.v, 0x20), _mm256_permute2f128_ps(a.v, b.v, 0x31));
  const __m256 cd = _mm256_add_ps(_mm256_permute2f128_ps(c.v, d.v, 0x20), _mm256_permute2f128_ps(c.v, d.v, 0x31));
  // Quarters a | b and c | d, to the sums of elements {0, 2} and {1, 3}, interleaved.
  const __m256 s = _mm256_add_ps(_mm256_unpacklo_ps(ab, cd), _mm256_unpackhi_ps(ab, cd));
  const __m256 t = _mm256_add_ps(s, _mm256_permute_ps(s, 0x4e));  // a c . . | b d . .
  _mm_storeu_ps(out, _mm_unpacklo_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1)));
}
inline float reduce_max(Vec a) {
  __m128 c = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  c = _mm_max_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps(c, c, 1)));
}

inline Vec scale_pow2(Vec p, Vec n) { return scale_in_steps(p, {(Ints)_mm256_cvtps_epi32(n.v)}); }

inline DVec widen(Vec a) {
  return {_mm256_cvtps_pd(_mm256_castps256_ps128(a.v)), _mm256_cvtps_pd(_mm256_extractf128_ps(a.v, 1))};
}
inline Vec narrow(DVec a) { return {_mm256_set_m128(_mm256_cvtpd_ps(a.high), _mm256_cvtpd_ps(a.low))}; }
inline DVec load_wide(const float* p) {
  return {_mm256_cvtps_pd(_mm_loadu_ps(p)), _mm256_cvtps_pd(_mm_loadu_ps(p + 4))};
}
inline DVec fma(DVec a, DVec b, DVec c) {
  return {_mm256_fmadd_pd(a.low, b.low, c.low), _mm256_fmadd_pd(a.high, b.high, c.high)};
}

inline void stream(float* p, Vec a) { _mm256_stream_ps(p, a.v); }
inline void stream(BFloat16* p, Vec a) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), narrow_bf16(a)); }
inline void stream(Float16* p, Vec a) {
  _mm_stream_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
inline void stream_fence() { _mm_sfence(); }

}  // namespace
}  // namespace mmrec::kernels

#include "kernels/cpu/simd_kernels.inl"

namespace mmrec::kernels {
namespace {
#define MMREC_DIGITS
inline Ints to_nearest(Vec a) { return (Ints)_mm256_cvtps_epi32(a.v); }
}  // namespace
}  // namespace mmrec::kernels

#include "kernels/cpu/matvec_digits.inl"

namespace mmrec::kernels {
namespace {

/// Two digits of 12 bits for int8 weights, which are widened to 16: of 16 weights five instructions, where widening
/// them to fp32 takes ten.
struct Int8Digits {
  using Weights = Quantized<Int8>;
  using Row = Weights::Row;
  static constexpr int kCount = 2, kWideOutputs = 4, kBlockTokens = 2, kBlockOutputs = 2;
  static constexpr std::int64_t kStep = 16;  // weights of one instruction

  void take(const float* x, std::int64_t count) {
    scale = round_row(x, count, [&](std::int64_t i, Ints integers) {
      const Ints high = (integers + 2048) >> 12;
      const Ints parts[kCount] = {integers - (high << 12), high};
      for (int d = 0; d < kCount; ++d) {
        const auto part = (__m256i)parts[d];
        _mm_store_si128(reinterpret_cast<__m128i*>(digit[d] + i),
                        _mm_packs_epi32(_mm256_castsi256_si128(part), _mm256_extracti128_si256(part, 1)));
      }
    });
  }
  static Ints first(int /*digit*/, std::int64_t /*block*/) { return Ints{}; }
  static Ints load(const std::int16_t* p) { return (Ints)_mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }
  static Ints load_weights(const unsigned char* p) {
    return (Ints)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static Ints add_dot(Ints sum, Ints weights, Ints digits) {
    return sum + (Ints)_mm256_madd_epi16((__m256i)weights, (__m256i)digits);
  }
  /// The sum of the digits' sums, which lie `stride` apart.
  static Vec whole(const Ints* sum, std::int64_t stride) {
    return fma(to_float_lanes({sum[stride]}), set1(4096.0F), to_float_lanes({sum[0]}));
  }
  template <bool kGrouped, int kTokens, int kOutputs>
  static void dot(const Int8Digits* x, const Row (&rows)[kOutputs], std::int64_t begin, std::int64_t end,
                  std::int64_t ahead, std::int64_t group, Vec* total) {
    dot_int8<Int8Digits, kGrouped, kTokens, kOutputs>(x, rows, begin, end, ahead, group, total);
  }

  alignas(32) std::int16_t digit[kCount][kDigitCols];  // the least first
  double scale;
};

/// Three digits of 8 bits for int4 weights, q + 8: of 64 weights twenty instructions, where widening them to fp32 takes
/// forty. The sum of a block of weights is an integer, and is multiplied by its scale.
struct Int4Digits {
  using Weights = Quantized<Int4>;
  using Row = Weights::Row;
  static constexpr int kWideOutputs = 4, kBlockTokens = 4, kBlockOutputs = 2;

  void take(const float* x, std::int64_t count) {
    Ints block[kQuantBlock / kLanes];
    scale = round_row(x, count, [&](std::int64_t i, Ints integers) {
      block[i % kQuantBlock / kLanes] = integers;
      if ((i + kLanes) % kQuantBlock == 0) take_block(block, i / kQuantBlock);
    });
  }
  /// A block's digits, in the order of its nibbles: word j of the weights has elements j, 16 + j, 32 + j and 48 + j.
  void take_block(const Ints* x, std::int64_t at) {
    for (int d = 0; d < kDigits; ++d) {
      for (int half = 0; half < 2; ++half) {
        Ints words[2];
        for (int i = 0; i < 2; ++i) {
          const auto byte = [&](int v) { return (((x[v] + 0x808080) ^ 0x808080) >> (8 * d)) & 255; };
          words[i] = byte(2 * half + i) | byte(4 + 2 * half + i) << 8;
        }
        const __m256i packed = _mm256_packus_epi32((__m256i)words[0], (__m256i)words[1]);
        _mm256_store_si256(reinterpret_cast<__m256i*>(digit[at][d][half]), _mm256_permute4x64_epi64(packed, 0xd8));
      }
    }
    const __m256i eight = _mm256_set1_epi8(8);
    offset[at] = sum_of(eight, eight, at);
  }
  /// The lanes' sums of a block's products; `low` and `high` are its low and its high nibbles.
  Ints sum_of(__m256i low, __m256i high, std::int64_t at) const {
    const auto pairs = [&](int d) __attribute__((always_inline)) {
      return _mm256_add_epi16(_mm256_maddubs_epi16(low, load(digit[at][d][0])),
                              _mm256_maddubs_epi16(high, load(digit[at][d][1])));
    };
    const __m256i one = _mm256_set1_epi16(1), byte = _mm256_set1_epi16(256);
    const Ints least = (Ints)_mm256_madd_epi16(pairs(0), one) + (Ints)_mm256_madd_epi16(pairs(1), byte);
    return least + ((Ints)_mm256_madd_epi16(pairs(2), byte) << 8);
  }
  static __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  template <bool kGrouped, int kTokens, int kOutputs>
  static void dot(const Int4Digits* x, const Row (&rows)[kOutputs], std::int64_t begin, std::int64_t end,
                  std::int64_t ahead, std::int64_t group, Vec* total) {
    constexpr int kBytes = kBlockBytes<Int4>;
    const std::int64_t bytes_ahead = kOutputs * (kBytes + scale_bytes(group));
    Vec sum[kTokens * kOutputs] = {};
    std::int64_t scale = begin / group, next_scale = (scale + 1) * group;
    for (std::int64_t k = begin; k < end; k += kQuantBlock) {
      if (k == next_scale) ++scale, next_scale += group;
      const std::int64_t at = k / kQuantBlock * kBytes;
      fetch_weights<kOutputs*(kBytes + kMostScaleBytes)>(rows[0].numbers + k / kQuantBlock * bytes_ahead + ahead);
#pragma GCC unroll 16
      for (int o = 0; o < kOutputs; ++o) {
        const __m256i both = load(rows[o].numbers + at), mask = _mm256_set1_epi8(15);
        const __m256i low = _mm256_and_si256(both, mask), high = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
#pragma GCC unroll 16
        for (int t = 0; t < kTokens; ++t) {
          const std::int64_t block = (k - begin) / kQuantBlock;
          const IVec whole = {x[t].sum_of(low, high, block) - x[t].offset[block]};
          const Vec by = kGrouped ? set1(rows[o].scales[scale]) : set1(1.0F);
          sum[t * kOutputs + o] = fma(to_float_lanes(whole), by, sum[t * kOutputs + o]);
        }
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < kTokens * kOutputs; ++i) total[i] = sum[i];
  }

  alignas(32) signed char digit[kDigitCols / kQuantBlock][kDigits][2][32];
  Ints offset[kDigitCols / kQuantBlock];
  double scale;
};

}  // namespace
constinit const SimdKernels kAvx2Kernels = [] {
  SimdKernels kernels = make_kernels("avx2");
  kernels.matvec.by_digits = true;
  kernels.matvec.matvec.of[static_cast<std::size_t>(DType::kI8)] = matvec_digits<Int8Digits>;
  kernels.matvec.matvec.of[static_cast<std::size_t>(DType::kI4)] = matvec_digits<Int4Digits>;
  return kernels;
}();
}  // namespace mmrec::kernels
