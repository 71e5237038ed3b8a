// Running log-sum-exp y_t = log Σ e^x_i, every element moved once: x and y, 8 bytes an element in fp32, 4 in 16 bits.
//
// A segment is (m, s) for s e^m, the (max, sum) monoid of kernels/logsumexp.h in fp32; m is held finite, so that no
// difference of references is NaN, and +inf and NaN travel in the sum. A thread takes its exponentials once, relative
// to the largest of its times, and keeps them in place of x: y = R + log(S e^{M-R} + e^{m-R} Σ e), R the larger
// of the state's reference M and its own m. Where the first of these sums is small beside R, so that its logarithm
// would cancel R (x climbs by more than 4 within these times and above all that came before, or there are no terms
// yet), the thread reads its x again and goes step by step.
//
// Between chunks the sum is fp64 and its reference follows the maximum only when that has grown by more than 8: a slow
// climb does not multiply the sum by thousands of rounded factors.
#include "kernels/cuda/scan/scan.cuh"

namespace mmrec::kernels {
namespace {

constexpr float kLargest = 3.40282347e38F;
constexpr float kSlack = 8.0F;
constexpr float kLeastSum = 0.01F;

/// x as a reference: finite.
__device__ inline float reference(float x) { return fminf(kLargest, fmaxf(-kLargest, x)); }

/// log of a sum of at least 2^-10: absolute error 2^-22 beside the rounding of the result.
__device__ inline float log_sum(float sum) {
  constexpr float kLn2 = 0.69314718F;
  const int exponent = (__float_as_int(sum) - __float_as_int(0.75F)) >> 23;
  const float mantissa = __int_as_float(__float_as_int(sum) - exponent * (1 << 23));  // in [3/4, 3/2)
  const float log = __fmaf_rn(static_cast<float>(exponent), kLn2, ptx::log2_approx(mantissa) * kLn2);
  return sum <= kLargest ? log : sum;  // +inf, NaN
}

template <class T>
struct LogSumExpOp {
  using Element = T;
  static constexpr int kInputs = 1;
  static constexpr int kTimes = 32;
  static constexpr bool kReadsTwice = false;
  using Total = Pair;
  struct Carry {
    double sum;
    float max;
  };

  SequenceView<const T, Device> in[1];  // x
  SequenceView<T, Device> y;
  const float* carry_in;
  float* carry_out;

  template <class Use>
  void each_view(const Use& use) {
    use(in[0]), use(y);
  }

  static __device__ float identity(int) { return __int_as_float(static_cast<int>(0xff800000U)); }  // -inf

  template <int kVec>
  class Thread {
   public:
    static constexpr int kKept = kVec;
    __device__ void take(int n, const Channels<T, kVec> (&x)[kInputs]) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) term_[n][v] = x[0][v];
    }
    __device__ void reduce(Pair (&segment)[kVec]) {
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        float max = term_[0][v];
#pragma unroll
        for (int n = 1; n < kTimes; ++n) max = fmaxf(max, term_[n][v]);
        max_[v] = reference(max);
        float sum = 0.0F;
#pragma unroll
        for (int n = 0; n < kTimes; ++n) {
          term_[n][v] = fast_exp(term_[n][v] - max_[v]);
          sum += term_[n][v];
        }
        segment[v] = {max_[v], sum};
      }
    }
    __device__ void emit(const LogSumExpOp& op, const ScanPlace& p, const Pair (&state)[kVec]) const {
      float before[kVec];
      float scale[kVec];
      float max[kVec];
      bool exact = true;
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        max[v] = fmaxf(state[v].x, max_[v]);
        before[v] = state[v].y * fast_exp(state[v].x - max[v]);
        scale[v] = fast_exp(max_[v] - max[v]);
        exact = exact && !(before[v] + scale[v] * term_[0][v] < kLeastSum);
      }
      if (!exact) return emit_stepwise(op, p, state);
      float sum[kVec] = {};
      T* to = at(op.y, p);
#pragma unroll
      for (int n = 0; n < kTimes; ++n) {
        if (n == p.count) break;
        float y[kVec];
#pragma unroll
        for (int v = 0; v < kVec; ++v) {
          sum[v] += term_[n][v];
          y[v] = max[v] + log_sum(__fmaf_rn(scale[v], sum[v], before[v]));
        }
        store_channels(to, y);
        to += op.y.time_stride;
      }
    }

   private:
    static __device__ void emit_stepwise(const LogSumExpOp& op, const ScanPlace& p, const Pair (&state)[kVec]) {
      Pair now[kVec];
#pragma unroll
      for (int v = 0; v < kVec; ++v) now[v] = state[v];
      const T* from = at(op.in[0], p);
      T* to = at(op.y, p);
#pragma unroll 1
      for (int n = 0; n < p.count; ++n) {
        Channels<T, kVec> x;
        x.load(from);
        float y[kVec];
#pragma unroll
        for (int v = 0; v < kVec; ++v) {
          const float max = reference(x[v]);
          now[v] = combine(now[v], {max, fast_exp(x[v] - max)});
          y[v] = now[v].x + logf(now[v].y);
        }
        store_channels(to, y);
        from += op.in[0].time_stride;
        to += op.y.time_stride;
      }
    }

    float term_[kTimes][kVec];
    float max_[kVec];
  };

  static __device__ Pair combine(Pair a, Pair b) {
    const float max = fmaxf(a.x, b.x);
    return {max, a.y * fast_exp(a.x - max) + b.y * fast_exp(b.x - max)};
  }
  static __device__ Pair advance(Pair state, Pair segment) { return combine(state, segment); }

  static __device__ Total total(Pair segment) { return segment; }
  /// e^x for x at most kSlack, to the relative accuracy of fp32 although x may be the difference of large numbers.
  static __device__ double scale(double x) {
    const double bounded = x < -200.0 ? -200.0 : x;
    const auto high = static_cast<float>(bounded);
    return static_cast<double>(expf(high)) * (1.0 + (bounded - static_cast<double>(high)));
  }
  static __device__ Carry advance(const Carry& carry, Total total) {
    const double rise = static_cast<double>(total.x) - static_cast<double>(carry.max);
    if (total.x > carry.max + kSlack) return {carry.sum * scale(-rise) + static_cast<double>(total.y), total.x};
    return {carry.sum + static_cast<double>(total.y) * scale(rise), carry.max};
  }
  static __device__ Pair state(const Carry& carry) { return {carry.max, static_cast<float>(carry.sum)}; }
  __device__ Carry load(std::int64_t i) const {
    if (carry_in == nullptr || i < 0) return {0.0, -kLargest};
    const float y = __ldcg(carry_in + i);
    const float max = reference(y);
    return {y == max ? 1.0 : exp(static_cast<double>(y) - static_cast<double>(max)), max};
  }
  __device__ void store(std::int64_t i, const Carry& carry) const {
    if (carry_out != nullptr && i >= 0) {
      carry_out[i] = static_cast<float>(static_cast<double>(carry.max) + log(carry.sum));
    }
  }

  static __device__ uint4 put_total(Total total) {
    return make_uint4(0, __float_as_uint(total.x), __float_as_uint(total.y), 0);
  }
  static __device__ Total get_total(const uint4& record) {
    return {__uint_as_float(record.y), __uint_as_float(record.z)};
  }
  static __device__ uint4 put_carry(const Carry& carry) {
    uint4 record = {};
    put_double(carry.sum, record.y, record.z);
    record.w = __float_as_uint(carry.max);
    return record;
  }
  static __device__ Carry get_carry(const uint4& record) {
    return {get_double(record.y, record.z), __uint_as_float(record.w)};
  }
};

}  // namespace

template <class T>
ScanAlgo logsumexp_scan(Cuda& cuda, const LogSumExpScan<T, Device>& op, std::optional<ScanAlgo> algo) {
  return run_scan(cuda, LogSumExpOp<T>{{op.x}, op.y, op.carry_in, op.carry_out}, algo);
}
#define MMREC_INSTANTIATE(T) \
  template ScanAlgo logsumexp_scan(Cuda&, const LogSumExpScan<T, Device>&, std::optional<ScanAlgo>);
MMREC_FOR_EACH_TYPE(MMREC_INSTANTIATE)

}  // namespace mmrec::kernels
