#include "engine/quantize/rounding.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

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
  static std::uint8_t bits(float number) {
    const auto u = std::bit_cast<std::uint32_t>(number);
    const std::uint32_t size = u & ~kSign;
    const std::uint32_t stored = size < kLeastNormal ? static_cast<std::uint32_t>(std::bit_cast<float>(size) * 0x1p9F)
                                                     : (size >> 20) - (120U << 3);
    return static_cast<std::uint8_t>((u & kSign) >> 24 | stored);
  }
};

/// f(type{}).
template <class F>
auto with_numbers(QuantizedType type, const F& f) {
  return type == QuantizedType::kInt8 ? f(Int8{}) : type == QuantizedType::kInt4 ? f(Int4{}) : f(Fp8{});
}

/// Sum of f(weight) over a group, in an order that vectors have.
template <class F>
double sum_of(std::span<const float> weights, const F& f) {
  constexpr std::size_t kLanes = 16;
  std::array<float, kLanes> sums{};
  const std::size_t whole = weights.size() / kLanes * kLanes;
  for (std::size_t i = 0; i < whole; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) sums[lane] += f(weights[i + lane]);
  }
  double sum = 0.0;
  for (std::size_t i = whole; i < weights.size(); ++i) sum += static_cast<double>(f(weights[i]));
  for (const float part : sums) sum += static_cast<double>(part);
  return sum;
}

template <class Numbers>
double squared_error(std::span<const float> weights, float scale) {
  return sum_of(weights, [scale](float w) {
    const float difference = w - Numbers::nearest(w / scale) * scale;
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

}  // namespace

Squares round_row(const Scheme& scheme, std::span<const float> weights, std::byte* numbers, BFloat16* scales) {
  return with_numbers(scheme.type, [&]<class Numbers>(Numbers) {
    const std::size_t group = scheme.group == 0 ? weights.size() : static_cast<std::size_t>(scheme.group);
    if (scheme.type == QuantizedType::kInt4) {
      std::memset(numbers, 0, static_cast<std::size_t>(scheme.row_bytes(static_cast<std::int64_t>(weights.size()))));
    }
    Squares squares;
    for (std::size_t first = 0; first < weights.size(); first += group) {
      const std::span<const float> of_group = weights.subspan(first, group);
      const float scale = best_scale<Numbers>(of_group);
      squares.error += squared_error<Numbers>(of_group, scale);
      squares.weight += sum_of(of_group, [](float w) { return w * w; });
      scales[first / group] = kernels::from_float<BFloat16>(scale);
      for (std::size_t i = first; i < first + group; ++i) {
        const auto bits = static_cast<std::byte>(Numbers::bits(Numbers::nearest(weights[i] / scale)));
        if (scheme.type == QuantizedType::kInt4) {
          numbers[i / 2] |= bits << (i % 2 * 4);  // little end first, as words of eight numbers have them
        } else {
          numbers[i] = bits;
        }
      }
    }
    return squares;
  });
}

}  // namespace mmrec::engine
