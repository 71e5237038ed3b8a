// What the tests of the three scans share: operands with awkward strides, poisoned outputs and error measures.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/simd.h"

namespace mmrec::kernels {

inline constexpr std::int64_t kTestTimes[] = {1, 2, 31, 33, 127, 128, 129, 1000, 4097, 100003};
inline constexpr std::int64_t kTestDims[] = {1, 7, 48, 384, 4096};
/// Pairs of the two lists above with at most this many elements are run.
inline constexpr std::int64_t kMostElements = 2'000'000;

/// An owned [batch, heads, time, dim] operand, filled with NaN. `padding` unused elements follow every row; rows of the
/// [B, T, H, d] order have their heads next to each other.
template <class T>
class Sequence {
 public:
  enum class Order { kHeadsFirst, kTimeFirst };

  Sequence(std::int64_t batch, std::int64_t heads, std::int64_t time, std::int64_t dim, std::int64_t padding = 0,
           Order order = Order::kHeadsFirst) {
    view_.batch = batch;
    view_.heads = heads;
    view_.time = time;
    view_.dim = dim;
    const std::int64_t row = dim + padding;
    if (order == Order::kHeadsFirst) {
      view_.time_stride = row;
      view_.head_stride = row * time;
    } else {
      view_.head_stride = row;
      view_.time_stride = row * heads;
    }
    view_.batch_stride = row * time * heads;
    data_.assign(static_cast<std::size_t>(view_.batch_stride * batch),
                 from_float<T>(std::numeric_limits<float>::quiet_NaN()));
    view_.data = data_.data();
  }
  Sequence(const Sequence& other) : data_(other.data_), view_(other.view_) { view_.data = data_.data(); }

  const SequenceView<T, Host>& view() { return view_; }
  SequenceView<const T, Host> read() const {
    SequenceView<const T, Host> v = view_;
    v.data = data_.data();
    return v;
  }
  float get(std::int64_t b, std::int64_t h, std::int64_t t, std::int64_t c) const {
    return to_float(data_[static_cast<std::size_t>(offset(b, h, t, c))]);
  }
  void set(std::int64_t b, std::int64_t h, std::int64_t t, std::int64_t c, float x) {
    data_[static_cast<std::size_t>(offset(b, h, t, c))] = from_float<T>(x);
  }
  /// Fills with draws of `next()`.
  template <class Next>
  Sequence& fill(Next&& next) {
    for (std::int64_t b = 0; b < view_.batch; ++b)
      for (std::int64_t h = 0; h < view_.heads; ++h)
        for (std::int64_t t = 0; t < view_.time; ++t)
          for (std::int64_t c = 0; c < view_.dim; ++c) set(b, h, t, c, next());
    return *this;
  }
  const std::vector<T>& data() const { return data_; }
  bool same_bits(const Sequence& other) const {
    return data_.size() == other.data_.size() &&
           std::memcmp(data_.data(), other.data_.data(), data_.size() * sizeof(T)) == 0;
  }

 private:
  std::int64_t offset(std::int64_t b, std::int64_t h, std::int64_t t, std::int64_t c) const {
    return b * view_.batch_stride + h * view_.head_stride + t * view_.time_stride + c;
  }
  std::vector<T> data_;
  SequenceView<T, Host> view_;
};

/// A view of times [first, first + count).
template <class View>
View middle_times(View v, std::int64_t first, std::int64_t count) {
  v.data += first * v.time_stride;
  v.time = count;
  return v;
}

/// Half a unit in the last place of T relative to a value: what storing a result may add to its error.
template <class T>
inline constexpr double kRounding = 0x1p-24;
template <>
inline constexpr double kRounding<Float16> = 0x1p-11;
template <>
inline constexpr double kRounding<BFloat16> = 0x1p-8;

/// Largest |got - expected| / scale with the position kept for the message.
class WorstError {
 public:
  void add(double got, double expected, double scale, std::int64_t t, std::int64_t c) {
    const double error = std::abs(got - expected) / scale;
    if (got == expected) return;  // also equal infinities
    if (error > worst_ || std::isnan(error)) {
      if (std::isnan(worst_)) return;
      worst_ = error;
      t_ = t;
      c_ = c;
    }
  }
  /// `bound` on every entry; NaN anywhere fails.
  ::testing::AssertionResult below(double bound) const {
    if (worst_ < bound) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << "error " << worst_ << " at time " << t_ << ", channel " << c_ << ", bound "
                                         << bound;
  }
  double worst() const { return worst_; }

 private:
  double worst_ = 0.0;
  std::int64_t t_ = -1, c_ = -1;
};

}  // namespace mmrec::kernels
