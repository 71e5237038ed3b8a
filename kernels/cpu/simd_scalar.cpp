// The vector kernels without intrinsics: 4 fp32 lanes as GCC and Clang vector types, which become SSE2 on baseline
// x86-64. It is the reference for what the other two files must do, and runs anywhere.
#define MMREC_LANES 4
#include "kernels/cpu/simd_vec.inl"

namespace mmrec::kernels {
namespace {

constexpr int kBlockTokens = 4, kBlockOutputs = 2, kWideOutputs = 8;

struct Mask {
  Ints m;
};

/// Local copies of tensor.h's conversions, so that this file emits no common inline function.
inline float widen_one(float x) { return x; }
inline float widen_one(BFloat16 x) {
  return __builtin_bit_cast(float, static_cast<std::uint32_t>(static_cast<std::uint32_t>(x.bits) << 16));
}
inline float widen_one(Float16 x) {
  // Exponent and mantissa moved into place are x * 2^-112, exactly, subnormals included; infinity and NaN apart.
  const std::uint32_t magnitude = static_cast<std::uint32_t>(x.bits & 0x7fffU) << 13;
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000U) << 16;
  if (magnitude >= 0x0f800000U) return __builtin_bit_cast(float, sign | 0x70000000U | magnitude);
  const float scaled = __builtin_bit_cast(float, magnitude) * 0x1p112F;
  return __builtin_bit_cast(float, sign | __builtin_bit_cast(std::uint32_t, scaled));
}
inline void narrow_one(float x, float* p) { *p = x; }
inline void narrow_one(float x, BFloat16* p) {
  const auto u = __builtin_bit_cast(std::uint32_t, x);
  const bool nan = (u & 0x7fffffffU) > 0x7f800000U;
  p->bits = static_cast<std::uint16_t>((nan ? u | 0x400000U : u + 0x7fffU + ((u >> 16) & 1U)) >> 16);
}
inline void narrow_one(float x, Float16* p) {
  const auto u = __builtin_bit_cast(std::uint32_t, x);
  const std::uint32_t sign = (u >> 16) & 0x8000U;
  const std::uint32_t magnitude = u & 0x7fffffffU;
  std::uint32_t bits = 0;
  if (magnitude > 0x7f800000U) {
    bits = 0x7e00U;
  } else if (magnitude >= 0x477ff000U) {
    bits = 0x7c00U;
  } else if (magnitude >= 0x38800000U) {
    bits = (magnitude - 0x38000000U + 0xfffU + ((magnitude >> 13) & 1U)) >> 13;
  } else {  // subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits
    const float shifted = __builtin_bit_cast(float, magnitude) + 0.5F;
    bits = __builtin_bit_cast(std::uint32_t, shifted) - 0x3f000000U;
  }
  p->bits = static_cast<std::uint16_t>(sign | bits);
}

template <class T>
inline Vec load(const T* p) {
  return {Floats{widen_one(p[0]), widen_one(p[1]), widen_one(p[2]), widen_one(p[3])}};
}
inline Vec load(const float* p) {
  Floats v;
  __builtin_memcpy(&v, p, sizeof v);
  return {v};
}
template <class T>
inline Vec load_partial(const T* p, int count) {
  if (count == kLanes) return load(p);
  Vec a = {Floats{}};
  for (int i = 0; i < kLanes; ++i) {
    if (i < count) a.v[i] = widen_one(p[i]);
  }
  return a;
}
inline IVec load_bytes(const unsigned char* p) {
  signed char lanes[kLanes];
  __builtin_memcpy(lanes, p, sizeof lanes);
  return {Ints{lanes[0], lanes[1], lanes[2], lanes[3]}};
}
inline Vec load_f8(const unsigned char* p) {  // moved into place the number is 2^-120 of what it is
  const Ints bits = load_bytes(p).v;
  const Vec small = {(Floats)(((bits & 0x7f) << 20) | (bits & static_cast<int>(0x80000000U)))};
  return {small.v * 0x1p120F};
}
inline IVec load_words(const unsigned char* p) {
  std::uint16_t lanes[kLanes];
  __builtin_memcpy(lanes, p, sizeof lanes);
  return {Ints{lanes[0], lanes[1], lanes[2], lanes[3]}};
}
template <class T>
inline void store(T* p, Vec a) {
  for (int i = 0; i < kLanes; ++i) narrow_one(a.v[i], p + i);
}
inline void store(float* p, Vec a) { __builtin_memcpy(p, &a.v, sizeof a.v); }
template <class T>
inline void store_partial(T* p, Vec a, int count) {
  if (count == kLanes) return store(p, a);
  for (int i = 0; i < count; ++i) narrow_one(a.v[i], p + i);
}

inline Vec set1(float x) { return {Floats{x, x, x, x}}; }
inline Vec abs(Vec a) { return {(Floats)((Ints)a.v & 0x7fffffff)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
inline Vec min(Vec a, Vec b) { return {a.v < b.v ? a.v : b.v}; }
inline Vec max(Vec a, Vec b) { return {a.v > b.v ? a.v : b.v}; }

inline Mask less(Vec a, Vec b) { return {a.v < b.v}; }
inline Mask less_equal(Vec a, Vec b) { return {a.v <= b.v}; }
inline Mask equal(Vec a, Vec b) { return {a.v == b.v}; }
inline Mask is_nan(Vec a) { return {a.v != a.v}; }  // NOLINT(misc-redundant-expression)
inline Mask operator|(Mask a, Mask b) { return {a.m | b.m}; }
inline bool any(Mask a) { return (a.m[0] | a.m[1] | a.m[2] | a.m[3]) != 0; }
inline Vec select(Mask mask, Vec yes, Vec no) { return {mask.m ? yes.v : no.v}; }

inline float reduce_add(Vec a) { return (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]); }
inline void reduce_add4(Vec a, Vec b, Vec c, Vec d, float* out) {
  out[0] = reduce_add(a);
  out[1] = reduce_add(b);
  out[2] = reduce_add(c);
  out[3] = reduce_add(d);
}
inline float reduce_max(Vec a) {
  const float even = a.v[0] > a.v[2] ? a.v[0] : a.v[2];
  const float odd = a.v[1] > a.v[3] ? a.v[1] : a.v[3];
  return even > odd ? even : odd;
}

/// n + 1.5 * 2^23 carries n in its low bits; a NaN gives some integer, and p is NaN then.
inline Vec scale_pow2(Vec p, Vec n) { return scale_in_steps(p, as_int(n + set1(12582912.0F)) - iset1(0x4b400000)); }

inline DVec widen(Vec a) { return {Doubles{a.v[0], a.v[1]}, Doubles{a.v[2], a.v[3]}}; }
inline Vec narrow(DVec a) {
  return {Floats{static_cast<float>(a.low[0]), static_cast<float>(a.low[1]), static_cast<float>(a.high[0]),
                 static_cast<float>(a.high[1])}};
}
inline DVec load_wide(const float* p) { return widen(load(p)); }
inline DVec dset1(double x) { return {Doubles{x, x}, Doubles{x, x}}; }
inline DVec fma(DVec a, DVec b, DVec c) { return {a.low * b.low + c.low, a.high * b.high + c.high}; }

template <class T>
inline void stream(T* p, Vec a) {
  store(p, a);
}
inline void stream_fence() {}

}  // namespace
}  // namespace mmrec::kernels

#include "kernels/cpu/simd_kernels.inl"

namespace mmrec::kernels {
constinit const SimdKernels kScalarKernels = make_kernels("scalar");
}  // namespace mmrec::kernels
