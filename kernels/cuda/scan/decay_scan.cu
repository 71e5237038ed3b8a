// Decayed recurrence h_t = e^log_a_t h_{t-1} + b_t, every element moved once: log_a, b and h, 12 bytes an element in
// fp32, 6 in 16 bits, plus records of the carries that stay in L2.
//
// A segment is (Σ log_a, h from 0). Its decay stays a sum of logarithms until it is applied, so decays next to 1 keep
// their digits however long the memory is; between chunks decay and carry are fp64. Within a thread's times the
// recurrence runs on values, e^log_a by the hardware: relative error 2^-22 a step at most, which no later chunk
// inherits. The exponential is evaluated in both passes: inputs of 16 bits then take half the registers, and the
// special function unit has time enough.
//
// log_a is bounded by 88, so a decay is finite and a state of zero stays zero under any growth; -inf is a decay of 0.
#include "kernels/cuda/scan/scan.cuh"

namespace mmrec::kernels {
namespace {

constexpr float kMostLogDecay = 88.0F;

template <class T>
struct DecayOp : NumberCarry {
  using Element = T;
  static constexpr int kInputs = 2;
  static constexpr int kTimes = 16;
  static constexpr bool kReadsTwice = true;
  struct Total {
    double decay;
    float value;
  };

  SequenceView<const T, Device> in[2];  // log_a, b
  SequenceView<T, Device> h;

  template <class Use>
  void each_view(const Use& use) {
    use(in[0]), use(in[1]), use(h);
  }

  static __device__ float identity(int) { return 0.0F; }

  template <int kVec>
  class Thread {
   public:
    static constexpr int kKept = 2;
    __device__ void take(int n, const Channels<T, kVec> (&x)[kInputs]) {
      log_a_[n] = x[0];
      log_a_[n].bound(kMostLogDecay);
      b_[n] = x[1];
#pragma unroll
      for (int v = 0; v < kVec; ++v) {
        const float log_a = log_a_[n][v];
        log_decay_[v] += log_a;
        h_[v] = __fmaf_rn(fast_exp(log_a), h_[v], b_[n][v]);
      }
    }
    __device__ void reduce(Pair (&segment)[kVec]) const {
#pragma unroll
      for (int v = 0; v < kVec; ++v) segment[v] = {log_decay_[v], h_[v]};
    }
    /// kFresh: the inputs have been taken anew for this, so nothing that was computed of them before takes registers.
    template <bool kFresh = false>
    __device__ void emit(const DecayOp& op, const ScanPlace& p, const Pair (&state)[kVec]) {
      if (kFresh && p.count == kTimes) {
        write<true, kFresh>(op, p, state);
      } else {
        write<false, kFresh>(op, p, state);
      }
    }

   private:
    /// kWhole: all times exist.
    template <bool kWhole, bool kFresh>
    __device__ void write(const DecayOp& op, const ScanPlace& p, const Pair (&state)[kVec]) {
      float h[kVec];
#pragma unroll
      for (int v = 0; v < kVec; ++v) h[v] = state[v].x;
      T* to = at(op.h, p);
#pragma unroll
      for (int n = 0; n < kTimes; ++n) {
        if (!kWhole && n == p.count) break;
        if (!kFresh) log_a_[n].forget(), b_[n].forget();
#pragma unroll
        for (int v = 0; v < kVec; ++v) h[v] = __fmaf_rn(fast_exp(log_a_[n][v]), h[v], b_[n][v]);
        store_channels(to, h);
        to += op.h.time_stride;
      }
    }

    Channels<T, kVec> log_a_[kTimes], b_[kTimes];
    float log_decay_[kVec] = {}, h_[kVec] = {};
  };

  /// h e^log_decay, in two factors: the state may be large where the decay is small, and the reverse.
  static __device__ float decayed(float h, float log_decay) {
    constexpr float kHalfLog2E = 0.72134752044448170F;
    const float root = ptx::exp2_approx(at_most(log_decay * kHalfLog2E, 127.0F));
    return h * root * root;
  }
  static __device__ Pair combine(Pair first, Pair second) {
    return {first.x + second.x, decayed(first.y, second.x) + second.y};
  }
  static __device__ Pair advance(Pair state, Pair segment) { return {decayed(state.x, segment.x) + segment.y, 0.0F}; }

  static __device__ Total total(Pair segment) {
    return {std::exp(at_most(static_cast<double>(segment.x), 690.0)), segment.y};
  }
  static __device__ Total combine(const Total& first, const Total& second) {
    return {at_most(first.decay * second.decay, 1e300),
            static_cast<float>(fma(second.decay, static_cast<double>(first.value), static_cast<double>(second.value)))};
  }
  static __device__ Carry advance(Carry h, const Total& total) {
    return fma(total.decay, h, static_cast<double>(total.value));
  }
  static __device__ Pair state(Carry h) { return {static_cast<float>(h), 0.0F}; }

  static __device__ uint4 put_total(const Total& total) {
    uint4 record;
    put_double(total.decay, record.y, record.z);
    record.w = __float_as_uint(total.value);
    return record;
  }
  static __device__ Total get_total(const uint4& record) {
    return {get_double(record.y, record.z), __uint_as_float(record.w)};
  }
};

}  // namespace

template <class T>
ScanAlgo decay_scan(Cuda& cuda, const DecayScan<T, Device>& op, std::optional<ScanAlgo> algo) {
  return run_scan(cuda, DecayOp<T>{{op.carry_in, op.carry_out}, {op.log_a, op.b}, op.h}, algo);
}
#define MMREC_INSTANTIATE(T) template ScanAlgo decay_scan(Cuda&, const DecayScan<T, Device>&, std::optional<ScanAlgo>);
MMREC_FOR_EACH_TYPE(MMREC_INSTANTIATE)

}  // namespace mmrec::kernels
