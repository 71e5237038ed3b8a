// Running product of decay gates through log space on the CPU: L_t = Σ log γ_i, y_t = e^L_t. Carries and block totals
// are log-sums in fp64, so the cut into blocks costs no digits. The arithmetic is in scan.inl, the cut in
// scan_blocks.h.
#include "kernels/cpu/scan_blocks.h"

namespace mmrec::kernels {

namespace {

/// A product of gates as its logarithm.
struct LogProduct {
  double log = 0.0;
  static LogProduct identity() { return {}; }
};
LogProduct combine(LogProduct a, LogProduct b) { return {a.log + b.log}; }

template <class T>
struct ExpProductParts {
  using Segment = LogProduct;
  static constexpr int kRunPlanes = 1;
  static constexpr int kTotalPlanes = 1;

  const ExpProductScan<T, Host>& op;
  bool streaming;

  static std::int64_t bytes_per_element() { return sizeof(T); }
  ScanRun rectangle(std::int64_t b, std::int64_t h, std::int64_t t, std::int64_t c) const {
    ScanRun r{};
    r.in[0] = op.gamma.at(b, h, t) + c;
    r.in_stride[0] = op.gamma.time_stride;
    r.out = op.y.at(b, h, t) + c;
    r.out_stride = op.y.time_stride;
    if (op.log_y.data != nullptr) {
      r.log_out = op.log_y.at(b, h, t) + c;
      r.log_out_stride = op.log_y.time_stride;
    }
    r.streaming = streaming;
    return r;
  }
  void run(const ScanRun& r) const { simd().scan.exp_product_run[kDTypeIndex<T>](r); }
  void total(const ScanRun& r) const { simd().scan.exp_product_total[kDTypeIndex<T>](r); }

  Segment load_carry(std::int64_t i) const {
    return op.carry_in == nullptr ? Segment::identity() : Segment{static_cast<double>(op.carry_in[i])};
  }
  void store_carry(std::int64_t i, const Segment& s) const {
    if (op.carry_out != nullptr) op.carry_out[i] = static_cast<float>(s.log);
  }
  static void to_state(const Segment& s, double* state, std::int64_t) { state[0] = s.log; }
  static Segment from_state(const double* state, std::int64_t) { return {state[0]}; }
  static void empty_state(double* state, std::int64_t) { state[0] = 0.0; }
  static Segment from_total(const double* state, std::int64_t) { return {state[0]}; }
};

}  // namespace

template <class T>
void exp_product_scan(Cpu& cpu, const ExpProductScan<T, Host>& op) {
  const ScanShape shape = scan_shape(op.gamma);
  const bool in_place = static_cast<const void*>(op.y.data) == op.gamma.data;
  const std::int64_t bytes = 2 * shape.channels() * shape.time * static_cast<std::int64_t>(sizeof(T));
  run_scan(cpu, shape, ExpProductParts<T>{op, !in_place && worth_streaming(op.y, bytes)});
}

template void exp_product_scan(Cpu&, const ExpProductScan<float, Host>&);
template void exp_product_scan(Cpu&, const ExpProductScan<Float16, Host>&);
template void exp_product_scan(Cpu&, const ExpProductScan<BFloat16, Host>&);

}  // namespace mmrec::kernels
