// Vector exp, log, sigmoid and gelu, written once for every instruction set.
//
// The including file has defined, with internal linkage, the vocabulary below. `T` is float, BFloat16 or Float16; loads
// widen exactly, stores narrow with round-to-nearest-even (NaN stays NaN). `count` of a partial access lies in
// [0, kLanes]; lanes not loaded are zero, lanes not stored leave memory untouched, and no byte beyond is read or
// written.
//
//   kLanes                                 fp32 lanes of a Vec
//   Vec, Mask, IVec, DVec                  fp32 lanes, lane predicates, int32 lanes, kLanes doubles in two halves
//   load(const T*)      load_partial(const T*, count)      store(T*, Vec)      store_partial(T*, Vec, count)
//   load_bytes(p)  load_words(p)           kLanes signed bytes or unsigned 16-bit numbers, as IVec
//   load_f8(p)                             kLanes Float8 numbers
//   set1(float)  zero()  a + b  a - b  a * b  a / b  -a  abs(a)
//   fma(a, b, c)                           a * b + c; one rounding where the ISA has FMA (not in the scalar file)
//   min(a, b)  max(a, b)                   b if either is NaN, as x86 does
//   less(a, b)  less_equal(a, b)  equal(a, b)  is_nan(a)  any(mask)  mask | mask
//   select(mask, yes, no)
//   reduce_add(Vec)  reduce_max(Vec)       float, in one fixed order
//   reduce_add4(a, b, c, d, float* out)    reduce_add of each, the same bits
//   kBlockTokens  kBlockOutputs  kWideOutputs   block shape of products that fits the registers (matvec.inl)
//   as_int(Vec)  as_float(IVec)  to_float_lanes(IVec)  iset1(int)  a + b  a - b  shift_left<n>(IVec)
//   shift_right<n>(IVec) (arithmetic)      on IVec
//   scale_pow2(p, n)                       p * 2^n for integer-valued n in [-151, 129], with gradual underflow
//   widen(Vec) -> DVec   narrow(DVec) -> Vec   dset1(double)  dload(const double*)  dstore(double*, DVec)
//   a + b  a - b  a * b  fma(a, b, c)      on DVec; a half holds kLanes / 2 doubles: lanes in order
//   load_wide(const float*)                widen(load(p)), without taking a vector apart
//   stream(T*, Vec)  stream_fence()        store that bypasses the caches, p aligned to the bytes written; then a fence
//                                          before another thread may read
//
// Explicit fma everywhere a fused result is meant; the three files are compiled with -ffp-contract=off, so that the
// same expression has the same bits wherever it is inlined.
namespace mmrec::kernels {
namespace {

/// Lanes of the next Vec of a run with `left` values to go.
inline int lanes_left(std::int64_t left) { return static_cast<int>(left < kLanes ? left : kLanes); }

/// Horner's rule, coefficients from the constant term up.
template <int n>
inline Vec polynomial(Vec x, const float (&c)[n]) {
  Vec p = set1(c[n - 1]);
  for (int i = n - 2; i >= 0; --i) p = fma(p, x, set1(c[i]));
  return p;
}

constexpr float kLog2E = 1.44269504088896341F;
constexpr float kLn2High = 0.693359375F;  // 9 bits of mantissa: n * kLn2High is exact
constexpr float kLn2Low = -2.12194440e-4F;

/// e^r - 1 of r = x - n ln(2), where n is the integer next to x / ln(2).
inline Vec exp_of_rest(Vec x, Vec n) {
  // e^r = 1 + r + r^2 P(r) on |r| <= ln(2) / 2: relative error 3e-9.
  constexpr float kP[] = {0.4999999403953552F, 0.1666651964187622F, 0.04166839271783829F, 0.008368780836462975F,
                          0.0013814467238262296F};
  const Vec r = fma(n, set1(-kLn2Low), fma(n, set1(-kLn2High), x));
  return fma(r * r, polynomial(r, kP), r);
}

/// e^x within 1 ulp or so; -inf gives 0, overflow +inf, underflow is gradual, NaN stays NaN.
inline Vec exp(Vec x) {
  constexpr float kRound = 12582912.0F;         // 1.5 * 2^23: adding and subtracting it rounds to an integer
  x = min(set1(89.0F), max(set1(-104.0F), x));  // x last, so that NaN passes
  const Vec n = fma(x, set1(kLog2E), set1(kRound)) - set1(kRound);
  return scale_pow2(exp_of_rest(x, n) + set1(1.0F), n);
}

/// log(1 + f) + e * log(2) for 1 + f in [sqrt(1/2), sqrt(2)).
inline Vec log_from_parts(Vec f, Vec e) {
  // log(1 + f) = f - f^2 / 2 + f^3 P(f): relative error 8e-10.
  constexpr float kP[] = {0.3333331346511841F,  -0.25000008940696716F, 0.2000211924314499F,
                          -0.1666799634695053F, 0.14219552278518677F,  -0.1240558847784996F,
                          0.11888164281845093F, -0.11675655096769333F, 0.06746640801429749F};
  const Vec f2 = f * f;
  Vec low = fma(f2 * f, polynomial(f, kP), e * set1(kLn2Low));
  low = fma(f2, set1(-0.5F), low);
  return fma(e, set1(kLn2High), f + low);
}

/// Writes the exponent that leaves a mantissa in [sqrt(1/2), sqrt(2)) and returns mantissa - 1. x normal and positive.
inline Vec split_exponent(Vec x, Vec& exponent) {
  const IVec bits = as_int(x);
  const IVec e = shift_right<23>(bits - iset1(0x3f3504f3));
  exponent = to_float_lanes(e);
  return as_float(bits - shift_left<23>(e)) - set1(1.0F);
}

constexpr float kVecInfinity = __builtin_inff();

/// Natural logarithm within 2 ulp; log(0) = -inf, negative and NaN give NaN, subnormals are handled.
inline Vec log(Vec x) {
  const Mask tiny = less(x, set1(1.17549435e-38F));
  Vec e = zero();
  const Vec f = split_exponent(select(tiny, x * set1(8388608.0F), x), e);
  e = e - select(tiny, set1(23.0F), zero());
  Vec y = log_from_parts(f, e);
  y = select(equal(x, set1(kVecInfinity)), x, y);
  y = select(equal(x, zero()), set1(-kVecInfinity), y);
  return select(less(x, zero()) | is_nan(x), set1(__builtin_nanf("")), y);
}

/// 1 / (1 + e^-x).
inline Vec sigmoid(Vec x) { return set1(1.0F) / (set1(1.0F) + exp(-x)); }

/// x Phi(x), exact (erf) form, as max(x, 0) - |x| Q(|x|) with the normal tail Q(t) = e^(-t^2/2) R(1 / (1 + 0.33 t)):
/// no cancellation, so the error stays below 5e-8 next to the rounding of x itself.
inline Vec gelu(Vec x) {
  constexpr float kR[] = {0.1316239982843399F,  0.1322692483663559F,    0.1113194152712822F,
                          0.1207766905426979F,  -0.053969159722328186F, 0.22078391909599304F,
                          -0.2637101411819458F, 0.12134847790002823F,   -0.020442428067326546F};
  const Vec t = min(set1(20.0F), abs(x));  // NaN passes; Q(20) is 0 in fp32
  const Vec u = set1(1.0F) / fma(t, set1(0.33F), set1(1.0F));
  const Vec q = exp(t * t * set1(-0.5F)) * (u * polynomial(u, kR));
  return max(zero(), x) - t * q;
}

/// 0.5 x (1 + tanh(u)), u = sqrt(2 / pi) (x + 0.044715 x^3), as x sigmoid(2 u): no cancellation.
inline Vec gelu_tanh(Vec x) {
  constexpr float kTwoRoots = 1.5957691216057308F;  // 2 sqrt(2 / pi)
  constexpr float kCubic = 0.044715F * kTwoRoots;
  return x * sigmoid(x * fma(x * x, set1(kCubic), set1(kTwoRoots)));
}

/// y[i] = f(x[i]) of a Vec at a time.
template <class From, class To, class F>
inline void map_by(const From* x, To* y, std::int64_t count, const F& f) {
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(y + i, f(load(x + i)));
  const int rest = static_cast<int>(count - i);
  if (rest != 0) store_partial(y + i, f(load_partial(x + i, rest)), rest);
}

template <Vec (*f)(Vec)>
void map(const float* x, float* y, std::int64_t count) {
  map_by(x, y, count, [](Vec v) { return f(v); });
}

constexpr MathKernels kMathKernels = {map<exp>, map<log>, map<sigmoid>, map<gelu>, map<gelu_tanh>};

}  // namespace
}  // namespace mmrec::kernels
