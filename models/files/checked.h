// Sizes read from a file, in arithmetic that cannot wrap around.
#pragma once

#include <concepts>
#include <cstdint>
#include <utility>

namespace mmrec::models {

/// An unsigned 64-bit size that remembers an overflow: once a sum or product does not fit, every result computed from
/// it is overflowed too. Test `overflowed()` once at the end, then use `value()`. A negative number is an overflow.
class CheckedSize {
 public:
  // Implicit, so that sizes mix freely with plain ones.
  template <std::integral T>
  constexpr CheckedSize(T value)  // NOLINT(google-explicit-constructor)
      : value_(static_cast<std::uint64_t>(value)), overflowed_(std::cmp_less(value, 0)) {}

  friend constexpr CheckedSize operator+(CheckedSize a, CheckedSize b) {
    CheckedSize sum(0);
    sum.overflowed_ = __builtin_add_overflow(a.value_, b.value_, &sum.value_) || a.overflowed_ || b.overflowed_;
    return sum;
  }
  friend constexpr CheckedSize operator*(CheckedSize a, CheckedSize b) {
    CheckedSize product(0);
    product.overflowed_ = __builtin_mul_overflow(a.value_, b.value_, &product.value_) || a.overflowed_ || b.overflowed_;
    return product;
  }
  constexpr CheckedSize& operator+=(CheckedSize other) { return *this = *this + other; }
  constexpr CheckedSize& operator*=(CheckedSize other) { return *this = *this * other; }

  constexpr bool overflowed() const { return overflowed_; }
  /// Requires: !overflowed().
  constexpr std::uint64_t value() const { return value_; }
  /// True if it did not overflow and is at most `limit`.
  constexpr bool at_most(std::uint64_t limit) const { return !overflowed_ && value_ <= limit; }

 private:
  std::uint64_t value_;
  bool overflowed_;
};

/// Product of extents; an overflow stays an overflow even if a later extent is 0.
template <class Range>
constexpr CheckedSize checked_product(const Range& extents) {
  CheckedSize product(1);
  for (const auto extent : extents) product *= extent;
  return product;
}

}  // namespace mmrec::models
