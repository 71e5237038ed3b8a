// h_t = e^log_a_t h_{t-1} + b_t on the CPU. Reads log_a and b once, writes h once where channels are many; the
// arithmetic is in scan.inl, the cut over threads in scan_blocks.h.
#include "kernels/cpu/scan_blocks.h"
#include "kernels/logsumexp.h"

namespace mmrec::kernels {

namespace {

template <class T>
struct DecayScanParts {
  using Segment = DecaySegment;
  static constexpr int kRunPlanes = 1;    // {h}
  static constexpr int kTotalPlanes = 2;  // {h from 0, Σ log_a}

  const DecayScan<T, Host>& op;
  bool streaming;

  static std::int64_t bytes_per_element() { return 2 * sizeof(T); }
  ScanRun rectangle(std::int64_t b, std::int64_t h, std::int64_t t, std::int64_t c) const {
    ScanRun r{};
    r.in[0] = op.log_a.at(b, h, t) + c;
    r.in[1] = op.b.at(b, h, t) + c;
    r.in_stride[0] = op.log_a.time_stride;
    r.in_stride[1] = op.b.time_stride;
    r.out = op.h.at(b, h, t) + c;
    r.out_stride = op.h.time_stride;
    r.streaming = streaming;
    return r;
  }
  void run(const ScanRun& r) const { simd().scan.decay_run[kDTypeIndex<T>](r); }
  void total(const ScanRun& r) const { simd().scan.decay_total[kDTypeIndex<T>](r); }

  Segment load_carry(std::int64_t i) const {
    return op.carry_in == nullptr ? Segment::identity() : Segment::of(0.0, static_cast<double>(op.carry_in[i]));
  }
  void store_carry(std::int64_t i, const Segment& s) const {
    if (op.carry_out != nullptr) op.carry_out[i] = static_cast<float>(value(s));
  }
  static void to_state(const Segment& s, double* state, std::int64_t) { state[0] = value(s); }
  static Segment from_state(const double* state, std::int64_t) { return Segment::of(0.0, state[0]); }
  static void empty_state(double* state, std::int64_t plane) { state[0] = state[plane] = 0.0; }
  static Segment from_total(const double* state, std::int64_t plane) { return Segment::of(state[plane], state[0]); }
};

}  // namespace

template <class T>
void decay_scan(Cpu& cpu, const DecayScan<T, Host>& op) {
  const ScanShape shape = scan_shape(op.log_a);
  const bool in_place = op.h.data == op.b.data || op.h.data == op.log_a.data;
  const std::int64_t bytes = 3 * shape.channels() * shape.time * static_cast<std::int64_t>(sizeof(T));
  run_scan(cpu, shape, DecayScanParts<T>{op, !in_place && worth_streaming(op.h, bytes)});
}

template void decay_scan(Cpu&, const DecayScan<float, Host>&);
template void decay_scan(Cpu&, const DecayScan<Float16, Host>&);
template void decay_scan(Cpu&, const DecayScan<BFloat16, Host>&);

}  // namespace mmrec::kernels
