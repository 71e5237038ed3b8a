// Vectors of MMREC_LANES fp32 numbers: the part of the vocabulary (simd_math.inl) that compilers' vector types express
// alike for every instruction set. Each instruction set's file includes this first and adds the rest.
#include "kernels/cpu/simd.h"

namespace mmrec::kernels {
namespace {

constexpr int kLanes = MMREC_LANES;

using Floats __attribute__((vector_size(4 * kLanes))) = float;
using Ints __attribute__((vector_size(4 * kLanes))) = std::int32_t;
using UInts __attribute__((vector_size(4 * kLanes))) = std::uint32_t;
using Doubles __attribute__((vector_size(4 * kLanes))) = double;
using DoublesAnywhere __attribute__((vector_size(4 * kLanes), aligned(8), may_alias)) = double;

struct Vec {
  Floats v;
};
struct IVec {
  Ints v;
};
struct DVec {
  Doubles low, high;
};

inline Vec zero() { return {Floats{}}; }
inline Vec set1(float x) { return {x - Floats{}}; }  // a difference keeps -0
inline Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
inline Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
inline Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
inline Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }
inline Vec operator-(Vec a) { return {-a.v}; }
inline Vec abs(Vec a) { return {(Floats)((Ints)a.v & 0x7fffffff)}; }

inline Vec load(const float* p) {
  Vec a = zero();
  __builtin_memcpy(&a.v, p, sizeof a.v);
  return a;
}
inline void store(float* p, Vec a) { __builtin_memcpy(p, &a.v, sizeof a.v); }
/// The bf16 number nearest to each lane, in the lane's low half.
inline IVec bf16_bits(Vec a) {
  const auto u = (UInts)a.v;
  const UInts rounded = u + 0x7fff + ((u >> 16) & 1);
  return {(Ints)((a.v != a.v ? u | 0x400000 : rounded) >> 16)};  // NOLINT(misc-redundant-expression): a NaN stays one
}

inline IVec as_int(Vec a) { return {(Ints)a.v}; }
inline Vec as_float(IVec a) { return {(Floats)a.v}; }
inline Vec to_float_lanes(IVec a) { return {__builtin_convertvector(a.v, Floats)}; }
inline IVec iset1(int x) { return {Ints{} + x}; }
// Unsigned lanes, which may wrap around: a NaN's bits do.
inline IVec operator+(IVec a, IVec b) { return {(Ints)((UInts)a.v + (UInts)b.v)}; }
inline IVec operator-(IVec a, IVec b) { return {(Ints)((UInts)a.v - (UInts)b.v)}; }
template <int n>
inline IVec shift_left(IVec a) {
  return {(Ints)((UInts)a.v << n)};
}
template <int n>
inline IVec shift_right(IVec a) {
  return {a.v >> n};
}

/// p * 2^n of scale_pow2(), in two steps, as 2^n itself may leave the range of normal numbers.
inline Vec scale_in_steps(Vec p, IVec n) {
  const IVec half = shift_right<1>(n);
  const IVec bias = iset1(127);
  return p * as_float(shift_left<23>(half + bias)) * as_float(shift_left<23>(n - half + bias));
}

inline DVec dset1(double x) { return {x - Doubles{}, x - Doubles{}}; }
inline DVec dload(const double* p) {
  return {*reinterpret_cast<const DoublesAnywhere*>(p), *reinterpret_cast<const DoublesAnywhere*>(p + kLanes / 2)};
}
inline void dstore(double* p, DVec a) {
  *reinterpret_cast<DoublesAnywhere*>(p) = a.low;
  *reinterpret_cast<DoublesAnywhere*>(p + kLanes / 2) = a.high;
}
inline DVec operator+(DVec a, DVec b) { return {a.low + b.low, a.high + b.high}; }
inline DVec operator-(DVec a, DVec b) { return {a.low - b.low, a.high - b.high}; }
inline DVec operator*(DVec a, DVec b) { return {a.low * b.low, a.high * b.high}; }

}  // namespace
}  // namespace mmrec::kernels
