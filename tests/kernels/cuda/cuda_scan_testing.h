// What the tests of the CUDA scans share: operands with any strides on the host and on the device, error measures, and
// the check that an op has left the backend's flags zero.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
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

/// Pairs of time and channels that the scans are run at: the awkward ones, small ones on the emulation.
inline std::vector<std::pair<std::int64_t, std::int64_t>> scan_sizes() {
  const std::int64_t most = small_sizes() ? 1'000'000 : std::int64_t{1} << 60;
  std::vector<std::pair<std::int64_t, std::int64_t>> sizes;
  for (const std::int64_t time : {1, 2, 31, 33, 1000, 4097, 100003}) {
    for (const std::int64_t dim : {1, 7, 48, 4096}) {
      if (time * dim <= most && time * dim <= (std::int64_t{1} << 27)) sizes.emplace_back(time, dim);
    }
  }
  if (!small_sizes()) sizes.emplace_back(100003, 1024);
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
  template <class Next>
  ScanOperand& fill(Next&& next) {
    for (std::int64_t c = 0; c < layout_.channels(); ++c) {
      for (std::int64_t t = 0; t < layout_.time; ++t) at(c, t) = from_float<T>(static_cast<float>(next(t, c)));
    }
    return *this;
  }
  /// The view on device memory that holds `data`.
  SequenceView<T, Device> on(DeviceBuffer<T>& device) const {
    SequenceView<T, Device> view = view_;
    view.data = device.data() + layout_.offset;
    return view;
  }

  std::vector<T> data;

 private:
  std::size_t index(std::int64_t channel, std::int64_t time) const {
    const std::int64_t sequence = channel / layout_.dim;
    return static_cast<std::size_t>(layout_.offset + sequence / layout_.heads * view_.batch_stride +
                                    sequence % layout_.heads * view_.head_stride + time * view_.time_stride +
                                    channel % layout_.dim);
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
  ::testing::AssertionResult below(double bound) const {
    if (worst_ < bound) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << "error " << worst_ << " at time " << time_ << ", channel " << channel_
                                         << ", bound " << bound;
  }

 private:
  double worst_ = 0.0;
  std::int64_t time_ = -1, channel_ = -1;
};

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

class CudaScanTest : public CudaTest {
 protected:
  void TearDown() override {
    if (!IsSkipped()) {
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
