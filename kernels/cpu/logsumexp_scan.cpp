// Running log-sum-exp on the CPU: y_t = log Σ exp(x_i). A channel's state is the (max, sum) monoid in fp64; block
// totals are combined by that monoid's own operator. The arithmetic is in scan.inl, the cut over threads in
// scan_blocks.h.
#include <limits>

#include "kernels/cpu/scan_blocks.h"
#include "kernels/logsumexp.h"

namespace mmrec::kernels {

namespace {

template <class T>
struct LogSumExpParts {
  using Segment = MaxSum64;
  static constexpr int kRunPlanes = 2;  // {reference, sum}
  static constexpr int kTotalPlanes = 2;

  const LogSumExpScan<T, Host>& op;
  bool streaming;

  static std::int64_t bytes_per_element() { return sizeof(T); }
  ScanRun rectangle(std::int64_t b, std::int64_t h, std::int64_t t, std::int64_t c) const {
    ScanRun r{};
    r.in[0] = op.x.at(b, h, t) + c;
    r.in_stride[0] = op.x.time_stride;
    r.out = op.y.at(b, h, t) + c;
    r.out_stride = op.y.time_stride;
    r.streaming = streaming;
    return r;
  }
  void run(const ScanRun& r) const { simd().scan.logsumexp_run[kDTypeIndex<T>](r); }
  void total(const ScanRun& r) const { simd().scan.logsumexp_total[kDTypeIndex<T>](r); }

  Segment load_carry(std::int64_t i) const {
    if (op.carry_in == nullptr) return Segment::identity();
    const auto carry = static_cast<double>(op.carry_in[i]);
    if (carry == -std::numeric_limits<double>::infinity()) return Segment::identity();
    // A reference is finite: +inf and NaN travel in the sum.
    return std::isfinite(carry) ? Segment::of(carry) : Segment{0.0, carry};
  }
  void store_carry(std::int64_t i, const Segment& s) const {
    if (op.carry_out != nullptr) op.carry_out[i] = static_cast<float>(log_value(s));
  }
  // References are fp32 values, held finite by the vector kernels; the least of them stands for "no terms yet".
  static constexpr double kLeast = -static_cast<double>(std::numeric_limits<float>::max());
  static void to_state(const Segment& s, double* state, std::int64_t plane) {
    state[0] = s.max > kLeast ? s.max : kLeast;
    state[plane] = s.sum;
  }
  static Segment from_state(const double* state, std::int64_t plane) {
    return state[plane] == 0.0 ? Segment::identity() : Segment{state[0], state[plane]};
  }
  static void empty_state(double* state, std::int64_t plane) { to_state(Segment::identity(), state, plane); }
  static Segment from_total(const double* state, std::int64_t plane) { return from_state(state, plane); }
};

}  // namespace

template <class T>
void logsumexp_scan(Cpu& cpu, const LogSumExpScan<T, Host>& op) {
  const ScanShape shape = scan_shape(op.x);
  const bool in_place = static_cast<const void*>(op.y.data) == op.x.data;
  const std::int64_t bytes = 2 * shape.channels() * shape.time * static_cast<std::int64_t>(sizeof(T));
  run_scan(cpu, shape, LogSumExpParts<T>{op, !in_place && worth_streaming(op.y, bytes)});
}

template void logsumexp_scan(Cpu&, const LogSumExpScan<float, Host>&);
template void logsumexp_scan(Cpu&, const LogSumExpScan<Float16, Host>&);
template void logsumexp_scan(Cpu&, const LogSumExpScan<BFloat16, Host>&);

}  // namespace mmrec::kernels
