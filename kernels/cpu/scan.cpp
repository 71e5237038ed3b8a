// The scans over time on the CPU, and how they are spread over threads. The arithmetic is in scan.inl.
//
// A scan has batch x heads x dim independent channels. Where these are many, a tile of channels runs down all of time
// and hands its state straight on, so every operand crosses the memory bus once. Where they are few, time is cut into
// blocks of 128 to 1,024, which are worked off in rounds of up to 64 blocks. First every block's total from an empty
// state, in parallel. The totals before a block, combined in order, are its carry-in. Last, every block once more from
// that carry-in, in parallel, newest data first: it is still cached.
//
// What must stay true: whether and where time is cut follows from the shape alone, never from the number of threads;
// lanes never mix; so bits do not depend on threads. Nothing is allocated: totals and states lie in the backend's
// scratch.
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>
#include <utility>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"
#include "kernels/logsumexp.h"

namespace mmrec::kernels {
namespace {

/// Block length for `time` steps: about an eighth of a short run, 1,024 from 8,192 steps on.
constexpr std::int64_t scan_block_length(std::int64_t time) {
  return std::clamp<std::int64_t>(static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(time) / 8 + 1)),
                                  128, 1024);
}

struct ScanShape {
  std::int64_t batch = 0, heads = 0, time = 0, dim = 0;

  std::int64_t sequences() const { return batch * heads; }
  std::int64_t channels() const { return batch * heads * dim; }
  /// Fewer channels than this cannot occupy several threads with whole cache lines each: cut time instead.
  static constexpr std::int64_t kFewChannels = 256;
  static constexpr std::int64_t kLongTime = 1024;
  bool cut_in_time() const { return channels() < kFewChannels && time >= kLongTime; }
};

/// The operands of a scan, by which all three are alike.
template <class T>
struct Operands {
  static constexpr auto kSize = static_cast<std::int64_t>(sizeof(T));

  SequenceView<const T, Host> in;
  SequenceView<T, Host> out;
  const float* carry_in = nullptr;
  float* carry_out = nullptr;
  SequenceView<const T, Host> second = {};  // decay: b
  SequenceView<float, Host> log_out = {};   // exp product: L

  ScanShape shape() const { return {in.batch, in.heads, in.time, in.dim}; }
  std::int64_t inputs() const { return second.data == nullptr ? 1 : 2; }
  std::int64_t bytes_per_element() const { return inputs() * kSize; }
  /// True where every row of the output begins on a cache line and the run is too large for the caches to keep: then
  /// the output bypasses them.
  bool streams() const {
    constexpr std::int64_t kBeyondCaches = std::int64_t{48} << 20;
    const bool in_place = out.data == in.data || out.data == second.data;
    const std::int64_t moved = (inputs() + 1) * shape().channels() * in.time * kSize;
    const auto aligned = [](std::int64_t stride) { return stride * kSize % 64 == 0; };
    return !in_place && moved > kBeyondCaches && reinterpret_cast<std::uintptr_t>(out.data) % 64 == 0 &&
           aligned(out.batch_stride) && aligned(out.head_stride) && aligned(out.time_stride);
  }
  /// A run whose operands begin there, without extent and state.
  ScanRun rectangle(std::int64_t b, std::int64_t h, std::int64_t t, std::int64_t c) const {
    ScanRun r{};
    r.in[0] = in.at(b, h, t) + c;
    r.in_stride[0] = in.time_stride;
    if (second.data != nullptr) {
      r.in[1] = second.at(b, h, t) + c;
      r.in_stride[1] = second.time_stride;
    }
    r.out = out.at(b, h, t) + c;
    r.out_stride = out.time_stride;
    if (log_out.data != nullptr) {
      r.log_out = log_out.at(b, h, t) + c;
      r.log_out_stride = log_out.time_stride;
    }
    return r;
  }
};

/// The vector kernels of a scan, of each type: `run` or `total` of the table.
using Kernels = ByDType<void(const ScanRun&)> ScanKernels::*;

// A scan's state. Each is a class with
//   Segment                        the monoid of block totals: combine(Segment, Segment), Segment::identity()
//   kRun, kTotal                   the vector kernels
//   load(carry), store(Segment)    a segment of carry_in's number and the number of carry_out
//   to_state(s, state, plane)      state of one channel before a run, ScanRun::state
//   from_state(state, plane)       and after it
//   from_total(state, plane)       total of one channel after it

/// A product of gates as its logarithm: carries and totals are log-sums in fp64, so the cut into blocks costs no
/// digits.
struct ExpProduct {
  struct Segment {
    double log = 0.0;
    static Segment identity() { return {}; }
    friend Segment combine(Segment a, Segment b) { return {a.log + b.log}; }
  };
  static constexpr Kernels kRun = &ScanKernels::exp_product_run, kTotal = &ScanKernels::exp_product_total;

  static Segment load(double carry) { return {carry}; }
  static double store(const Segment& s) { return s.log; }
  static void to_state(const Segment& s, double* state, std::int64_t) { state[0] = s.log; }
  static Segment from_state(const double* state, std::int64_t) { return {state[0]}; }
  static Segment from_total(const double* state, std::int64_t) { return {state[0]}; }
};

/// The (max, sum) monoid in fp64, in planes {reference, sum}. References are fp32 values, which the vector kernels keep
/// finite; the least of them stands for "no terms yet". +inf and NaN travel in the sum.
struct LogSumExp {
  using Segment = MaxSum64;
  static constexpr Kernels kRun = &ScanKernels::logsumexp_run, kTotal = &ScanKernels::logsumexp_total;
  static constexpr double kLeast = -static_cast<double>(std::numeric_limits<float>::max());

  static Segment load(double carry) {
    if (carry == -std::numeric_limits<double>::infinity()) return Segment::identity();
    return std::isfinite(carry) ? Segment::of(carry) : Segment{0.0, carry};
  }
  static double store(const Segment& s) { return log_value(s); }
  static void to_state(const Segment& s, double* state, std::int64_t plane) {
    state[0] = s.max > kLeast ? s.max : kLeast;
    state[plane] = s.sum;
  }
  static Segment from_state(const double* state, std::int64_t plane) {
    return state[plane] == 0.0 ? Segment::identity() : Segment{state[0], state[plane]};
  }
  static Segment from_total(const double* state, std::int64_t plane) { return from_state(state, plane); }
};

/// A run's plane is {h}, a total's {h from 0, Σ log_a}.
struct Decay {
  using Segment = DecaySegment;
  static constexpr Kernels kRun = &ScanKernels::decay_run, kTotal = &ScanKernels::decay_total;

  static Segment load(double carry) { return Segment::of(0.0, carry); }
  static double store(const Segment& s) { return value(s); }
  static void to_state(const Segment& s, double* state, std::int64_t plane) { state[0] = value(s), state[plane] = 0.0; }
  static Segment from_state(const double* state, std::int64_t) { return Segment::of(0.0, state[0]); }
  static Segment from_total(const double* state, std::int64_t plane) { return Segment::of(state[plane], state[0]); }
};

template <class Scan, class T>
class Driver {
 public:
  Driver(Cpu& cpu, const Operands<T>& operands) : cpu_(cpu), operands_(operands), shape_(operands.shape()) {}

  void run() {
    if (shape_.channels() == 0) return;
    if (shape_.time == 0) {
      for (std::int64_t i = 0; i < shape_.channels(); ++i) store(i, load(i));
    } else if (shape_.cut_in_time()) {
      run_blocks();
    } else {
      run_channels();
    }
  }

 private:
  using Segment = typename Scan::Segment;
  static constexpr std::int64_t kTile = kScanTile / 2;  // channels that run down time together: half a page of fp32
  static constexpr std::int64_t kTileStep = 64;         // tiles are cut at multiples of this
  static constexpr std::int64_t kMostBlocks = 64;
  static constexpr std::int64_t kFewestBlocks = 8;
  static constexpr std::int64_t kRoundBytes = std::int64_t{2} << 20;  // inputs of a round, if blocks are small enough
  static constexpr std::size_t kStateBytes = kTile * sizeof(double) * 2;
  static constexpr std::size_t kSegmentsBytes =
      static_cast<std::size_t>(ScanShape::kFewChannels) * (kMostBlocks + 1) * sizeof(Segment);
  static_assert(kStateBytes + kSegmentsBytes <= Cpu::kScratchFloats * sizeof(float));

  Segment load(std::int64_t i) const {
    return operands_.carry_in == nullptr ? Segment::identity() : Scan::load(static_cast<double>(operands_.carry_in[i]));
  }
  void store(std::int64_t i, const Segment& s) const {
    if (operands_.carry_out != nullptr) operands_.carry_out[i] = static_cast<float>(Scan::store(s));
  }
  static void run(Kernels kernels, const ScanRun& r) { (simd().scan.*kernels)[kDTypeOf<T>](r); }

  /// Many channels: tiles run down all of time.
  void run_channels() {
    // Widest tiles first; narrower ones only until the threads are evenly loaded. The width changes no bit.
    const std::int64_t threads = cpu_.threads();
    const std::int64_t most = (shape_.dim + kTileStep - 1) / kTileStep;
    std::int64_t tiles = (shape_.dim + kTile - 1) / kTile;
    while (tiles < most && shape_.sequences() * tiles < 4 * threads && shape_.sequences() * tiles % threads != 0)
      ++tiles;
    const std::int64_t width = ((shape_.dim + tiles - 1) / tiles + kTileStep - 1) / kTileStep * kTileStep;
    tiles = (shape_.dim + width - 1) / width;
    cpu_.pool().parallel_for(shape_.sequences() * tiles, 1, [&](std::int64_t begin, std::int64_t end, int thread) {
      for (std::int64_t task = begin; task < end; ++task) {
        const std::int64_t sequence = task / tiles;
        const std::int64_t c = task % tiles * width;
        run_tile(sequence, c, std::min(width, shape_.dim - c), thread);
      }
    });
  }

  void run_tile(std::int64_t sequence, std::int64_t c, std::int64_t channels, int thread) {
    ScanRun r = rectangle(sequence, 0, c, shape_.time, channels, thread);
    const std::int64_t flat = sequence * shape_.dim + c;
    for (std::int64_t i = 0; i < channels; ++i) Scan::to_state(load(flat + i), r.state + i, r.plane);
    run(Scan::kRun, r);
    for (std::int64_t i = 0; i < channels; ++i) store(flat + i, Scan::from_state(r.state + i, r.plane));
  }

  /// Few channels: blocks of time.
  void run_blocks() {
    const std::int64_t length = scan_block_length(shape_.time);
    const std::int64_t blocks = (shape_.time + length - 1) / length;
    const std::int64_t fitting = kRoundBytes / (shape_.channels() * length * operands_.bytes_per_element());
    const std::int64_t round = std::clamp(fitting, kFewestBlocks, kMostBlocks);
    // Totals of channel i at segments[i * round], carries of all channels behind them.
    auto* segments = reinterpret_cast<Segment*>(reinterpret_cast<std::byte*>(cpu_.scratch(0)) + kStateBytes);
    Segment* carries = segments + shape_.channels() * round;
    for (std::int64_t i = 0; i < shape_.channels(); ++i) new (carries + i) Segment(load(i));

    for (std::int64_t first = 0; first < blocks; first += round) {
      const std::int64_t count = std::min(round, blocks - first);
      cpu_.pool().parallel_for(shape_.sequences() * count, 1, [&](std::int64_t begin, std::int64_t end, int thread) {
        for (std::int64_t task = begin; task < end; ++task) {
          const std::int64_t sequence = task / count, k = task % count;
          const ScanRun r = block(sequence, first + k, length, thread);
          for (std::int64_t i = 0; i < shape_.dim; ++i) Scan::to_state(Segment::identity(), r.state + i, r.plane);
          run(Scan::kTotal, r);
          Segment* out = segments + sequence * shape_.dim * round + k;
          for (std::int64_t i = 0; i < shape_.dim; ++i) {
            new (out + i * round) Segment(Scan::from_total(r.state + i, r.plane));
          }
        }
      });
      cpu_.pool().parallel_for(shape_.channels(), 4, [&](std::int64_t begin, std::int64_t end, int) {
        for (std::int64_t i = begin; i < end; ++i) {
          for (std::int64_t k = 0; k < count; ++k) {
            const Segment total = std::exchange(segments[i * round + k], carries[i]);
            carries[i] = combine(carries[i], total);
          }
        }
      });
      cpu_.pool().parallel_for(shape_.sequences() * count, 1, [&](std::int64_t begin, std::int64_t end, int thread) {
        for (std::int64_t task = end - 1; task >= begin; --task) {
          const std::int64_t sequence = task / count, k = task % count;
          const Segment* in = segments + sequence * shape_.dim * round + k;
          const ScanRun r = block(sequence, first + k, length, thread);
          for (std::int64_t i = 0; i < shape_.dim; ++i) Scan::to_state(in[i * round], r.state + i, r.plane);
          run(Scan::kRun, r);
          if (first + k + 1 < blocks) continue;
          for (std::int64_t i = 0; i < shape_.dim; ++i) {
            store(sequence * shape_.dim + i, Scan::from_state(r.state + i, r.plane));
          }
        }
      });
    }
  }

  ScanRun block(std::int64_t sequence, std::int64_t index, std::int64_t length, int thread) {
    const std::int64_t t = index * length;
    return rectangle(sequence, t, 0, std::min(length, shape_.time - t), shape_.dim, thread);
  }

  ScanRun rectangle(std::int64_t sequence, std::int64_t t, std::int64_t c, std::int64_t times, std::int64_t channels,
                    int thread) {
    ScanRun r = operands_.rectangle(sequence / shape_.heads, sequence % shape_.heads, t, c);
    r.times = times;
    r.channels = channels;
    r.state = reinterpret_cast<double*>(cpu_.scratch(thread));
    r.plane = (channels + 15) / 16 * 16;
    r.streaming = streaming_;
    return r;
  }

  Cpu& cpu_;
  const Operands<T>& operands_;
  const ScanShape shape_;
  const bool streaming_ = operands_.streams();
};

}  // namespace

template <class T>
void exp_product_scan(Cpu& cpu, const ExpProductScan<T, Host>& op) {
  Driver<ExpProduct, T>(cpu, {op.gamma, op.y, op.carry_in, op.carry_out, {}, op.log_y}).run();
}
template <class T>
void logsumexp_scan(Cpu& cpu, const LogSumExpScan<T, Host>& op) {
  Driver<LogSumExp, T>(cpu, {op.x, op.y, op.carry_in, op.carry_out}).run();
}
template <class T>
void decay_scan(Cpu& cpu, const DecayScan<T, Host>& op) {
  Driver<Decay, T>(cpu, {op.log_a, op.h, op.carry_in, op.carry_out, op.b}).run();
}

#define MMREC_INSTANTIATE(T)                                            \
  template void exp_product_scan(Cpu&, const ExpProductScan<T, Host>&); \
  template void logsumexp_scan(Cpu&, const LogSumExpScan<T, Host>&);    \
  template void decay_scan(Cpu&, const DecayScan<T, Host>&);
MMREC_FOR_EACH_TYPE(MMREC_INSTANTIATE)

}  // namespace mmrec::kernels
