// How a scan over time is spread over threads: what the three scans share.
//
// A scan has batch x heads x dim independent channels. Where these are many, a tile of channels runs down the whole of
// time with its state handed straight on, so that every operand crosses the memory bus once. Where they are few, time
// is cut into blocks of 128 to 1,024 and worked off in rounds of up to 64 blocks: every block's total from an empty
// state (in parallel), an up-sweep and a down-sweep over the totals that leave each block its carry-in (O(N) work,
// O(log N) depth), then every block once more from that carry-in (in parallel, newest data first: it is still in the
// cache).
//
// What must stay true: whether and where time is cut follows from the shape alone, never from the number of threads;
// lanes never mix; so bits do not depend on threads. Nothing is allocated: totals and states lie in the backend's
// scratch.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <new>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"

namespace mmrec::kernels {

template <class T>
inline constexpr std::size_t kDTypeIndex = static_cast<std::size_t>(DType::kF32);
template <>
inline constexpr std::size_t kDTypeIndex<Float16> = static_cast<std::size_t>(DType::kF16);
template <>
inline constexpr std::size_t kDTypeIndex<BFloat16> = static_cast<std::size_t>(DType::kBF16);

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

template <class T>
ScanShape scan_shape(const SequenceView<T, Host>& v) {
  return {v.batch, v.heads, v.time, v.dim};
}

/// True where every row of `v` begins on a cache line and the run is too large for the caches to keep: then its output
/// bypasses them. `bytes` is what the whole scan moves.
template <class T>
bool worth_streaming(const SequenceView<T, Host>& v, std::int64_t bytes) {
  constexpr std::int64_t kBeyondCaches = std::int64_t{48} << 20;
  const auto aligned = [](std::int64_t stride) { return stride * static_cast<std::int64_t>(sizeof(T)) % 64 == 0; };
  return bytes > kBeyondCaches && reinterpret_cast<std::uintptr_t>(v.data) % 64 == 0 && aligned(v.batch_stride) &&
         aligned(v.head_stride) && aligned(v.time_stride);
}

/// The up-sweep and the down-sweep over the totals of 2^k blocks, in place: x[i] becomes `carry` combined with the
/// blocks before i. Returns carry combined with all of them.
template <class Segment>
Segment sweep(Segment* x, std::int64_t leaves, Segment carry) {
  for (std::int64_t d = 1; d < leaves; d *= 2) {
    for (std::int64_t i = 2 * d - 1; i < leaves; i += 2 * d) x[i] = combine(x[i - d], x[i]);
  }
  const Segment all = combine(carry, x[leaves - 1]);
  x[leaves - 1] = carry;
  for (std::int64_t d = leaves / 2; d >= 1; d /= 2) {
    for (std::int64_t i = 2 * d - 1; i < leaves; i += 2 * d) {
      const Segment left = x[i - d];
      x[i - d] = x[i];
      x[i] = combine(x[i], left);
    }
  }
  return all;
}

/// Runs `scan`, a class with
///   Segment                          the monoid of block totals: combine(Segment, Segment), Segment::identity()
///   kRunPlanes, kTotalPlanes         doubles of state per channel (ScanRun::state)
///   bytes_per_element()              read per channel and time
///   rectangle(b, h, t, c)            a ScanRun whose operands begin there, without extent and state
///   run(ScanRun), total(ScanRun)     the vector kernels
///   load_carry(i), store_carry(i, s) carry_in (or the identity) and carry_out (or nothing) of flat channel i
///   to_state(s, state, plane)        state of one channel before a run
///   from_state(state, plane)         and after it
///   empty_state(state, plane)        state of one channel before a total
///   from_total(state, plane)         total of one channel after it
template <class Scan>
class ScanDriver {
 public:
  ScanDriver(Cpu& cpu, const ScanShape& shape, const Scan& scan) : cpu_(cpu), shape_(shape), scan_(scan) {}

  void run() {
    if (shape_.channels() == 0) return;
    if (shape_.time == 0) {
      for (std::int64_t i = 0; i < shape_.channels(); ++i) scan_.store_carry(i, scan_.load_carry(i));
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
  static constexpr std::int64_t kRoundBytes = std::int64_t{2}
                                              << 20;  // inputs of one round, when blocks are small enough
  static constexpr std::size_t kStateBytes = kTile * sizeof(double) * 2;
  static constexpr std::size_t kSegmentsBytes =
      static_cast<std::size_t>(ScanShape::kFewChannels) * (kMostBlocks + 1) * sizeof(Segment);
  static_assert(kStateBytes + kSegmentsBytes <= Cpu::kScratchFloats * sizeof(float));
  static_assert(Scan::kRunPlanes <= 2 && Scan::kTotalPlanes <= 2);

  double* state_of(int thread) { return reinterpret_cast<double*>(cpu_.scratch(thread)); }

  static std::int64_t plane_of(std::int64_t channels) { return (channels + 15) / 16 * 16; }

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
    for (std::int64_t i = 0; i < channels; ++i) scan_.to_state(scan_.load_carry(flat + i), r.state + i, r.plane);
    scan_.run(r);
    for (std::int64_t i = 0; i < channels; ++i) scan_.store_carry(flat + i, scan_.from_state(r.state + i, r.plane));
  }

  /// Few channels: blocks of time.
  void run_blocks() {
    const std::int64_t length = scan_block_length(shape_.time);
    const std::int64_t blocks = (shape_.time + length - 1) / length;
    const std::int64_t fitting = kRoundBytes / (shape_.channels() * length * scan_.bytes_per_element());
    const auto round = static_cast<std::int64_t>(
        std::bit_floor(static_cast<std::uint64_t>(std::clamp<std::int64_t>(fitting, kFewestBlocks, kMostBlocks))));
    // Totals of channel i at segments[i * round], carries of all channels behind them.
    auto* segments = reinterpret_cast<Segment*>(reinterpret_cast<std::byte*>(cpu_.scratch(0)) + kStateBytes);
    Segment* carries = segments + shape_.channels() * round;
    for (std::int64_t i = 0; i < shape_.channels(); ++i) new (carries + i) Segment(scan_.load_carry(i));

    for (std::int64_t first = 0; first < blocks; first += round) {
      const std::int64_t count = std::min(round, blocks - first);
      cpu_.pool().parallel_for(shape_.sequences() * round, 1, [&](std::int64_t begin, std::int64_t end, int thread) {
        for (std::int64_t task = begin; task < end; ++task) {
          const std::int64_t sequence = task / round, k = task % round;
          Segment* out = segments + sequence * shape_.dim * round + k;
          if (k >= count) {  // past the end: the tree is filled up with nothing
            for (std::int64_t i = 0; i < shape_.dim; ++i) new (out + i * round) Segment(Segment::identity());
            continue;
          }
          const ScanRun r = block(sequence, first + k, length, thread);
          for (std::int64_t i = 0; i < shape_.dim; ++i) scan_.empty_state(r.state + i, r.plane);
          scan_.total(r);
          for (std::int64_t i = 0; i < shape_.dim; ++i) {
            new (out + i * round) Segment(scan_.from_total(r.state + i, r.plane));
          }
        }
      });
      cpu_.pool().parallel_for(shape_.channels(), 4, [&](std::int64_t begin, std::int64_t end, int) {
        for (std::int64_t i = begin; i < end; ++i) carries[i] = sweep(segments + i * round, round, carries[i]);
      });
      cpu_.pool().parallel_for(shape_.sequences() * round, 1, [&](std::int64_t begin, std::int64_t end, int thread) {
        for (std::int64_t task = end - 1; task >= begin; --task) {
          const std::int64_t sequence = task / round, k = task % round;
          if (k >= count) continue;
          const Segment* in = segments + sequence * shape_.dim * round + k;
          const ScanRun r = block(sequence, first + k, length, thread);
          for (std::int64_t i = 0; i < shape_.dim; ++i) scan_.to_state(in[i * round], r.state + i, r.plane);
          scan_.run(r);
          if (first + k + 1 < blocks) continue;
          for (std::int64_t i = 0; i < shape_.dim; ++i) {
            scan_.store_carry(sequence * shape_.dim + i, scan_.from_state(r.state + i, r.plane));
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
    ScanRun r = scan_.rectangle(sequence / shape_.heads, sequence % shape_.heads, t, c);
    r.times = times;
    r.channels = channels;
    r.state = state_of(thread);
    r.plane = plane_of(channels);
    return r;
  }

  Cpu& cpu_;
  const ScanShape shape_;
  const Scan& scan_;
};

template <class Scan>
void run_scan(Cpu& cpu, const ScanShape& shape, const Scan& scan) {
  ScanDriver<Scan>(cpu, shape, scan).run();
}

}  // namespace mmrec::kernels
