// Running product of decay gates through log space: L_t = Σ log γ_i, y_t = e^L_t, log γ = clamp(log(γ + 1e-8), -50, 0).
// Every element is moved once: γ and y, 8 bytes an element in fp32, 4 in 16 bits; 4 more where L is asked for.
//
// Logarithms are taken once and kept; where all gates of a thread are 3/4 or more, by half of the instructions. Sums
// are fp32 within a thread's times, pairs of fp32 (value and what its rounding left out) over the rows of a tile, fp64
// between chunks. y is as exact as e^L with L rounded to fp32.
#include "kernels/cuda/scan/scan.cuh"

namespace mmrec::kernels {
namespace {

constexpr float kEpsilon = 1e-8F;
constexpr float kThreeQuarters = 0.75F;

/// (log(1 + f) - f) / f^2 = -1/2 + f P(f) on [-1/4, 1/2], such that log(1 + f) has a relative error of 4e-8.
__device__ inline float log_series(float f) {
  constexpr float kP[] = {0.33333471417427063F, -0.24996361136436462F, 0.19982320070266724F, -0.16788822412490845F,
                          0.14904437959194183F, -0.12114088982343674F, 0.05559667944908142F};
  float p = kP[6];
#pragma unroll
  for (int i = 5; i >= 0; --i) p = __fmaf_rn(p, f, kP[i]);
  return __fmaf_rn(f, p, -0.5F);
}
/// (γ + 1e-8) - 1 for γ next to 1, without losing a digit; from 1 on that of 1.
__device__ inline float past_one(float gamma) { return (at_most(gamma, 1.0F) - 1.0F) + kEpsilon; }

/// clamp(log(γ + 1e-8), -50, 0), relative error below 2^-22: 1 + f is (γ + 1e-8) 2^-e in [3/4, 3/2). γ = 1 and above
/// give 0 exactly; γ < -1e-8 has no logarithm: NaN.
__device__ inline float log_gate(float gamma) {
  constexpr float kLn2High = 0.693359375F;  // 9 bits of mantissa: e * kLn2High is exact
  constexpr float kLn2Low = -2.12194440e-4F;
  const float x = at_most(gamma, 1.0F) + kEpsilon;
  const int exponent = (__float_as_int(x) - __float_as_int(kThreeQuarters)) >> 23;
  const float mantissa = __int_as_float(__float_as_int(x) - exponent * (1 << 23));
  const float f = exponent == 0 ? past_one(gamma) : mantissa - 1.0F;
  const auto e = static_cast<float>(exponent);
  const float low = __fmaf_rn(f * f, log_series(f), e * kLn2Low);
  const float log = __fmaf_rn(e, kLn2High, f + low);
  const float clamped = log < -50.0F ? -50.0F : at_most(log, 0.0F);
  return x > 0.0F ? clamped : x == 0.0F ? -50.0F : __int_as_float(0x7fc00000);
}
/// The same bits for γ >= 3/4, where e is 0.
__device__ inline float log_gate_near_one(float gamma) {
  const float f = past_one(gamma);
  const float low = __fmaf_rn(f * f, log_series(f), 0.0F);
  return at_most(f + low, 0.0F);
}

template <class T>
struct ExpProductOp : NumberCarry {
  using Element = T;
  static constexpr int kInputs = 1;
  static constexpr int kTimes = 32;
  static constexpr bool kReadsTwice = false;
  struct Total {
    double log;
  };

  SequenceView<const T, Device> in[1];  // gamma
  SequenceView<T, Device> y;
  SequenceView<float, Device> log_y;  // or null

  template <class Use>
  void each_view(const Use& use) {
    use(in[0]), use(y);
    if (log_y.data != nullptr) use(log_y);
  }

  static __device__ float identity(int) { return 1.0F; }

  template <int kVec>
  class Thread {
   public:
    static constexpr int kKept = kVec;
    __device__ void take(int n, const Channels<T, kVec> (&x)[kInputs]) { gamma_[n] = x[0]; }
    __device__ void reduce(Pair (&segment)[kVec]) {
      bool near_one = true;
#pragma unroll
      for (int n = 0; n < kTimes; ++n) {
#pragma unroll
        for (int v = 0; v < kVec; ++v) near_one = near_one && gamma_[n][v] >= kThreeQuarters;
      }
      if (near_one) {
        take_logs(log_gate_near_one);
      } else {
        take_logs(log_gate);
      }
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        segment[v] = {log_[0][v], 0.0F};
#pragma unroll
        for (int n = 1; n < kTimes; ++n) segment[v].x += log_[n][v];
      }
    }
    __device__ void emit(const ExpProductOp& op, const ScanPlace& p, const Pair (&state)[kVec]) const {
      float sum[kVec] = {};  // of this thread's times: small beside the state, so its digits are kept apart
      T* y = at(op.y, p);
      float* log_y = op.log_y.data == nullptr ? nullptr : at(op.log_y, p);
#pragma unroll
      for (int n = 0; n < kTimes; ++n) {
        if (n == p.count) break;
        float log[kVec];
        float product[kVec];
#pragma unroll
        for (int v = 0; v < kVec; ++v) {
          sum[v] += log_[n][v];
          log[v] = state[v].x + (state[v].y + sum[v]);
          product[v] = fast_exp(log[v]);
        }
        store_channels(y, product);
        y += op.y.time_stride;
        if (log_y != nullptr) {
          store_channels(log_y, log);
          log_y += op.log_y.time_stride;
        }
      }
    }

   private:
    template <class Log>
    __device__ void take_logs(Log log) {
#pragma unroll
      for (int n = 0; n < kTimes; ++n) {
#pragma unroll
        for (int v = 0; v < kVec; ++v) log_[n][v] = log(gamma_[n][v]);
      }
    }

    Channels<T, kVec> gamma_[kTimes];
    float log_[kTimes][kVec];
  };

  /// The sum of two pairs; what is left out of an infinite sum is nothing.
  static __device__ Pair combine(Pair a, Pair b) {
    const float sum = a.x + b.x;
    const float part = sum - a.x;
    const float rest = (a.x - (sum - part)) + (b.x - part);
    return {sum, (rest == rest ? rest : 0.0F) + (a.y + b.y)};
  }
  static __device__ Pair advance(Pair state, Pair segment) { return combine(state, segment); }

  static __device__ Total total(Pair segment) {
    return {static_cast<double>(segment.x) + static_cast<double>(segment.y)};
  }
  static __device__ Total combine(const Total& first, const Total& second) { return {first.log + second.log}; }
  static __device__ Carry advance(Carry log, const Total& total) { return log + total.log; }
  static __device__ Pair state(Carry log) {
    const auto high = static_cast<float>(log);
    const auto low = static_cast<float>(log - static_cast<double>(high));
    return {high, low == low ? low : 0.0F};
  }
  static __device__ uint4 put_total(const Total& total) { return put_carry(total.log); }
  static __device__ Total get_total(const uint4& record) { return {get_carry(record)}; }
};

}  // namespace

template <class T>
ScanAlgo exp_product_scan(Cuda& cuda, const ExpProductScan<T, Device>& op, std::optional<ScanAlgo> algo) {
  return run_scan(cuda, ExpProductOp<T>{{op.carry_in, op.carry_out}, {op.gamma}, op.y, op.log_y}, algo);
}
#define MMREC_INSTANTIATE(T) \
  template ScanAlgo exp_product_scan(Cuda&, const ExpProductScan<T, Device>&, std::optional<ScanAlgo>);
MMREC_FOR_EACH_TYPE(MMREC_INSTANTIATE)

}  // namespace mmrec::kernels
