// What the tests of the CUDA scans share: operands with any strides on the host and on the device, error measures, and
// the check that an op has left the backend's flags zero.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "tests/kernels/cuda/cuda_testing.h"

namespace mmrec::kernels::test {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// Half a unit in the last place of T relative to a value: what storing a result may add to its error.
template <class T>
inline constexpr double kHalfUnit = 0x1p-24;
template <>
inline constexpr double kHalfUnit<Float16> = 0x1p-11;
template <>
inline constexpr double kHalfUnit<BFloat16> = 0x1p-8;

/// Pairs of time and channels that the scans are run at: the awkward ones, small ones on the emulation. The largest is
/// for one type of each width, because what a scan does depends on the width alone.
template <class T>
std::vector<std::pair<std::int64_t, std::int64_t>> scan_sizes() {
  const std::int64_t most = small_sizes() ? 1'000'000 : std::int64_t{1} << 60;
  std::vector<std::pair<std::int64_t, std::int64_t>> sizes;
  for (const std::int64_t time : {1, 2, 31, 33, 1000, 4097, 100003}) {
    for (const std::int64_t dim : {1, 7, 48, 4096}) {
      if (time * dim <= most && time * dim <= (std::int64_t{1} << 27)) sizes.emplace_back(time, dim);
    }
  }
  if (!small_sizes() && !std::is_same_v<T, Float16>) sizes.emplace_back(100003, 1024);
  return sizes;
}

struct ScanLayout {
  std::int64_t batch = 1, heads = 1, time = 0, dim = 0;
  std::int64_t padding = 0;   // unused elements after every row
  std::int64_t offset = 0;    // unused elements before the first: 1 leaves nothing aligned
  bool heads_inside = false;  // [B, T, H, d] instead of [B, H, T, d]
  std::int64_t channels() const { return batch * heads * dim; }
};

/// A host copy of an operand of a scan, filled with NaN, and its image on the device.
template <class T>
class ScanOperand {
 public:
  explicit ScanOperand(const ScanLayout& layout) : layout_(layout) {
    const std::int64_t row = layout.dim + layout.padding;
    view_.batch = layout.batch, view_.heads = layout.heads, view_.time = layout.time, view_.dim = layout.dim;
    view_.time_stride = layout.heads_inside ? row * layout.heads : row;
    view_.head_stride = layout.heads_inside ? row : row * layout.time;
    view_.batch_stride = row * layout.time * layout.heads;
    data.assign(static_cast<std::size_t>(layout.offset + view_.batch_stride * layout.batch), from_float<T>(kNan));
  }

  const ScanLayout& layout() const { return layout_; }
  /// `channel` counts batch, head and dim.
  T& at(std::int64_t channel, std::int64_t time) { return data[index(channel, time)]; }
  double value(std::int64_t channel, std::int64_t time) const {
    return static_cast<double>(to_float(data[index(channel, time)]));
  }
  /// Every element by next(time, channel, draws), whose draws follow from (seed, time, channel) alone.
  template <class Next>
  ScanOperand& fill(std::uint64_t seed, const Next& next) {
    const std::int64_t channels = layout_.channels();
    parallel_for(channels / std::max<std::int64_t>(layout_.dim, 1) * layout_.time, [&](std::int64_t row) {
      const std::int64_t t = row % layout_.time, first = row / layout_.time * layout_.dim;
      T* to = data.data() + first_index(first) + static_cast<std::size_t>(t * view_.time_stride);
      for (std::int64_t c = first; c < first + layout_.dim; ++c) {
        Draws draws(seed, static_cast<std::uint64_t>(t * channels + c));
        *to++ = from_float<T>(static_cast<float>(next(t, c, draws)));
      }
    });
    return *this;
  }
  template <class Next>
  ScanOperand& fill(const Next& next) {
    return fill(0, [&](std::int64_t t, std::int64_t c, Draws&) { return next(t, c); });
  }
  /// Where a channel's first time lies in `data`; the next lies `time_stride` after it.
  std::size_t first_index(std::int64_t channel) const {
    const std::int64_t sequence = channel / layout_.dim;
    return static_cast<std::size_t>(layout_.offset + sequence / layout_.heads * view_.batch_stride +
                                    sequence % layout_.heads * view_.head_stride + channel % layout_.dim);
  }
  std::size_t time_stride() const { return static_cast<std::size_t>(view_.time_stride); }
  /// The view on device memory that holds `data`.
  SequenceView<T, Device> on(DeviceBuffer<T>& device) const {
    SequenceView<T, Device> view = view_;
    view.data = device.data() + layout_.offset;
    return view;
  }

  std::vector<T> data;

 private:
  std::size_t index(std::int64_t channel, std::int64_t time) const {
    return first_index(channel) + static_cast<std::size_t>(time) * time_stride();
  }

  ScanLayout layout_;
  SequenceView<T, Device> view_;
};

/// Times [first, first + count) of a view.
template <class View>
View times(View view, std::int64_t first, std::int64_t count) {
  view.data += first * view.time_stride;
  view.time = count;
  return view;
}

/// Largest error relative to a scale, and where.
class WorstScanError {
 public:
  void add(double got, double expected, double scale, std::int64_t time, std::int64_t channel) {
    if (got == expected || (std::isnan(got) && std::isnan(expected))) return;
    const double error = std::abs(got - expected) / scale;
    if (error <= worst_) return;
    worst_ = std::isnan(error) ? std::numeric_limits<double>::infinity() : error;
    time_ = time, channel_ = channel;
  }
  void add(const WorstScanError& other) {
    if (other.worst_ > worst_) *this = other;
  }
  ::testing::AssertionResult below(double bound) const {
    if (worst_ < bound) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << "error " << worst_ << " at time " << time_ << ", channel " << channel_
                                         << ", bound " << bound;
  }

 private:
  double worst_ = 0.0;
  std::int64_t time_ = -1, channel_ = -1;
};

/// Walks every channel of operands of one layout through all times, as float64 references do, and returns what
/// `Error`s, one of some channels, add up to. start(channel) is a state, step(state, i, time, channel, error) looks at
/// element i of the operands' data and finish(state, channel, error) follows the last time. Channels that lie side by
/// side walk side by side, so that memory is read in its order.
template <class Error, class T, class Start, class Step, class Finish>
Error walk_channels(const ScanOperand<T>& operand, const Start& start, const Step& step, const Finish& finish) {
  const std::int64_t channels = operand.layout().channels();
  const std::int64_t most = std::clamp<std::int64_t>(channels / (2 * host_processors()), 1, 64);
  const auto errors = parallel_map((channels + most - 1) / most, [&](std::int64_t part) {
    Error error;
    std::vector<decltype(start(part))> states;
    std::vector<std::size_t> at;
    const std::int64_t first = part * most, last = std::min(first + most, channels);
    for (std::int64_t c = first; c < last; ++c) {
      states.push_back(start(c));
      at.push_back(operand.first_index(c));
    }
    for (std::int64_t t = 0; t < operand.layout().time; ++t) {
      for (std::size_t k = 0; k < at.size(); ++k) {
        step(states[k], at[k], t, first + static_cast<std::int64_t>(k), error);
        at[k] += operand.time_stride();
      }
    }
    for (std::size_t k = 0; k < at.size(); ++k) finish(states[k], first + static_cast<std::int64_t>(k), error);
    return error;
  });
  Error all;
  for (const Error& error : errors) all.add(error);
  return all;
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

class CudaScanTest : public CudaTest {
 protected:
  void TearDown() override {
    if (has_device()) {
      EXPECT_TRUE(flags_are_zero());
    }
  }
  bool flags_are_zero() {
    std::vector<std::uint32_t> flags(Cuda::kFlagWords);
    cuda().download(cuda().flags(), flags.data(), flags.size());
    return std::all_of(flags.begin(), flags.end(), [](std::uint32_t f) { return f == 0; });
  }
};

}  // namespace mmrec::kernels::test
