#include "engine/quantize/rounding.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace mmrec::engine {
namespace {

using kernels::BFloat16;

// The numbers of each type. nearest(x) is the one nearest to x, by integer operations, which become vector code; |x|
// must be below 2^22. `bits` is how a number is stored. The largest weight lies at `largest` for a ratio of 1; scales
// are searched at ratios from `most` down to `least`.

template <int kLowest, int kLargest>
struct Integers {
  static constexpr float largest = kLargest;
  static constexpr float most = 1.0F;  // smaller ones cut off the largest weights, and have finer steps
  static constexpr float least = 0.4F;
  static float nearest(float x) {
    constexpr float kMagic = 0x1.8p23F;  // a sum with it has the rounded x in its low bits
    const int number = std::bit_cast<std::int32_t>(x + kMagic) - std::bit_cast<std::int32_t>(kMagic);
    return static_cast<float>(std::clamp(number, kLowest, kLargest));
  }
};
struct Int8 : Integers<-127, 127> {
  static std::uint8_t bits(float number) { return static_cast<std::uint8_t>(static_cast<std::int8_t>(number)); }
};
struct Int4 : Integers<-8, 7> {
  static std::uint8_t bits(float number) { return static_cast<std::uint8_t>(number + 8.0F); }
};
/// e4m3: steps of 1/8 of a power of two, and of 2^-9 below 2^-6.
struct Fp8 {
  static constexpr float largest = 448.0F;
  static constexpr float most = 2.0F;  // all places between two powers of two, and nothing is cut off
  static constexpr float least = 1.0F;
  static constexpr std::uint32_t kSign = 0x80000000U;
  static constexpr std::uint32_t kLeastNormal = 0x3c800000U;
  static float nearest(float x) {
    constexpr float kMagic = 0x1.8p14F;  // a sum with it is a multiple of 2^-9
    const auto u = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t size = u & ~kSign;
    const std::uint32_t normal =
        std::min((size + 0x7ffffU + ((size >> 20) & 1U)) & 0xfff00000U, std::bit_cast<std::uint32_t>(largest));
    const auto small = std::bit_cast<std::uint32_t>((std::bit_cast<float>(size) + kMagic) - kMagic);
    return std::bit_cast<float>((u & kSign) | (size < kLeastNormal ? small : normal));
  }
  static std::uint8_t bits(float number) { return kernels::from_float<kernels::Float8>(number).bits; }
};

/// f(type{}).
template <class F>
auto with_numbers(QuantizedType type, const F& f) {
  return type == QuantizedType::kInt8 ? f(Int8{}) : type == QuantizedType::kInt4 ? f(Int4{}) : f(Fp8{});
}

/// Sum of f(i) for i < count, in an order that vectors have.
template <class F>
double sum_of(std::size_t count, const F& f) {
  constexpr std::size_t kLanes = 16;
  std::array<float, kLanes> sums{};
  const std::size_t whole = count / kLanes * kLanes;
  for (std::size_t i = 0; i < whole; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) sums[lane] += f(i + lane);
  }
  double sum = 0.0;
  for (std::size_t i = whole; i < count; ++i) sum += static_cast<double>(f(i));
  for (const float part : sums) sum += static_cast<double>(part);
  return sum;
}

template <class Numbers>
double squared_error(std::span<const float> weights, float scale) {
  return sum_of(weights.size(), [weights, scale](std::size_t i) {
    const float difference = weights[i] - Numbers::nearest(weights[i] / scale) * scale;
    return difference * difference;
  });
}

/// The scale with the least squared error among some 40: coarse steps from the largest down, then finer ones around the
/// best of these. Each is rounded to bf16 first. 1 if all weights are 0.
template <class Numbers>
float best_scale(std::span<const float> weights) {
  constexpr int kCoarse = 24;
  constexpr int kFine = 8;  // on both sides
  constexpr float kStep = (Numbers::most - Numbers::least) / kCoarse;
  float largest = 0.0F;
  for (const float w : weights) largest = std::max(largest, std::fabs(w));
  if (largest == 0.0F) return 1.0F;
  float best_ratio = 1.0F;
  float best_scale = 0.0F;
  double least = std::numeric_limits<double>::infinity();
  const auto try_ratio = [&](float ratio) {
    const float exact = std::max(largest / Numbers::largest * ratio, std::numeric_limits<float>::min());
    const float scale = kernels::to_float(kernels::from_float<BFloat16>(exact));
    const double error = squared_error<Numbers>(weights, scale);
    if (best_scale != 0.0F && !(error < least)) return;
    least = error;
    best_ratio = ratio;
    best_scale = scale;
  };
  for (int i = 0; i <= kCoarse; ++i) try_ratio(Numbers::most - static_cast<float>(i) * kStep);
  const float centre = best_ratio;
  for (int i = -kFine; i <= kFine; ++i) try_ratio(centre + static_cast<float>(i) * (kStep / (kFine + 1)));
  return best_scale;
}

template <class Numbers>
class RowsRounder {
 public:
  RowsRounder(const Scheme& scheme, std::span<const float> weights, std::size_t cols, std::byte* numbers)
      : weights_(weights),
        cols_(cols),
        group_(scheme.group == 0 ? cols : static_cast<std::size_t>(scheme.group)),
        packs_(scheme.type == QuantizedType::kInt4),
        row_bytes_(static_cast<std::size_t>(scheme.row_bytes(static_cast<std::int64_t>(cols)))),
        numbers_(numbers),
        scales_(weights.size() / group_) {
    std::memset(numbers, 0, weights.size() / cols * row_bytes_);
  }

  void find_scales(BFloat16* scales) {
    for (std::size_t i = 0; i < scales_.size(); ++i) {
      scales_[i] = best_scale<Numbers>(weights_.subspan(i * group_, group_));
      scales[i] = kernels::from_float<BFloat16>(scales_[i]);
    }
  }

  void round_to_nearest() {
    for (std::size_t i = 0; i < weights_.size(); ++i) put(i, weights_[i]);
  }

  /// Column after column, each for all rows: with d the differences of the columns that are rounded already, the sum of
  /// (R d)² is least where the next weight is rounded as if those errors were part of it.
  void round_by(const ColumnInputs& inputs) {
    const SecondOrder& moments = *inputs.moments;
    const std::size_t rows = weights_.size() / cols_, count = moments.order.size();
    std::vector<float> differences(rows * count);  // [rows, count], in the order of the columns
    for (std::size_t i = count; i-- > 0;) {
      const float* const r = moments.r.data() + i * count;
      for (std::size_t row = 0; row < rows; ++row) {
        float* const d = differences.data() + row * count;
        const double carried =
            sum_of(count - i - 1, [r = r + i + 1, d = d + i + 1](std::size_t k) { return r[k] * d[k]; });
        const std::size_t at = row * cols_ + inputs.first + moments.order[i];
        d[i] = weights_[at] - put(at, weights_[at] + static_cast<float>(carried) / r[i]);
      }
    }
  }

  const Squares& squares() const { return squares_; }

 private:
  /// Number `i` becomes the one nearest to x. Returns its weight.
  float put(std::size_t i, float x) {
    const float scale = scales_[i / group_];
    const float number = Numbers::nearest(x / scale);
    const auto bits = static_cast<std::byte>(Numbers::bits(number));
    std::byte* const row = numbers_ + i / cols_ * row_bytes_;
    const std::size_t col = i % cols_;
    if (packs_) {
      row[col / 2] |= bits << (col % 2 * 4);  // little end first, as words of eight numbers have them
    } else {
      row[col] = bits;
    }
    const double weight = static_cast<double>(weights_[i]);
    const double difference = weight - static_cast<double>(number * scale);
    squares_ += {difference * difference, weight * weight};
    return number * scale;
  }

  std::span<const float> weights_;
  std::size_t cols_, group_;
  bool packs_;
  std::size_t row_bytes_;
  std::byte* numbers_;
  std::vector<float> scales_;
  Squares squares_;
};

}  // namespace

Squares round_rows(const Scheme& scheme, std::span<const float> weights, std::size_t cols,
                   std::span<const ColumnInputs> inputs, std::byte* numbers, BFloat16* scales) {
  return with_numbers(scheme.type, [&]<class Numbers>(Numbers) {
    RowsRounder<Numbers> rows(scheme, weights, cols, numbers);
    rows.find_scales(scales);
    for (const ColumnInputs& of_columns : inputs) rows.round_by(of_columns);
    if (inputs.empty()) rows.round_to_nearest();
    return rows.squares();
  });
}

}  // namespace mmrec::engine
