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

template <class T>
[[gnu::always_inline]] inline Vec load(const T* p) {
  return {Floats{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])}};
}
template <class T>
inline Vec load_partial(const T* p, int count) {
  if (count == kLanes) return load(p);
  Vec a = {Floats{}};
  for (int i = 0; i < kLanes; ++i) {
    if (i < count) a.v[i] = to_float(p[i]);
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
  for (int i = 0; i < kLanes; ++i) p[i] = from_float<T>(a.v[i]);
}
template <class T>
inline void store_partial(T* p, Vec a, int count) {
  if (count == kLanes) return store(p, a);
  for (int i = 0; i < count; ++i) p[i] = from_float<T>(a.v[i]);
}

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
