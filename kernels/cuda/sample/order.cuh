// The order of candidates for a draw, and their weights, as integers: sums do not depend on the order of additions, so
// blocks and threads may share a row in any way.
//
// Weights are in units of 2⁻⁴⁴ of the largest; lighter candidates are never drawn. They have the precision of fp32: a
// host that sums in fp64 draws the same token unless a boundary between tokens lies within some 10⁻⁷ of the number
// drawn.
#pragma once

#include <cstdint>
#include <limits>

#include "kernels/cuda/isa/ptx.cuh"
#include "kernels/ops.h"

namespace mmrec::kernels::sampling {

using Atomic64 = unsigned long long;  // 64 bits as atomics know them

inline constexpr float kLargestFinite = std::numeric_limits<float>::max();
inline constexpr float kUnits = 0x1p44F;  // of the largest weight

/// Falls as x rises; −0 and +0 are one.
__device__ inline std::uint32_t falling_bits(float x) {
  const std::uint32_t bits = __float_as_uint(x + 0.0F);
  return bits ^ (static_cast<std::uint32_t>(~(static_cast<std::int32_t>(bits) >> 31)) & 0x7fffffffU);
}
__device__ inline float from_falling_bits(std::uint32_t bits) {
  return __uint_as_float(bits ^ (static_cast<std::uint32_t>(~(static_cast<std::int32_t>(bits) >> 31)) & 0x7fffffffU));
}
/// Falling bits of -inf, which is no candidate: beyond those of any number.
inline constexpr std::uint32_t kNone = 0xff800000U;
/// Instead of the first candidate's of a row with a fault: before those of any number.
inline constexpr std::uint32_t kFault = 0;

/// A candidate: falling bits, then the id. Smaller ones come first.
inline constexpr int kIdBits = 18;
static_assert((std::int64_t{1} << kIdBits) == kMostSampleWords);
inline constexpr Atomic64 kIdMask = (Atomic64{1} << kIdBits) - 1;
inline constexpr Atomic64 kNobody = ~Atomic64{0};  // after all candidates
__device__ inline Atomic64 key_of(std::uint32_t falling, int id) {
  return Atomic64{falling} << kIdBits | static_cast<Atomic64>(id);
}
__device__ inline std::uint32_t falling_of(Atomic64 key) { return static_cast<std::uint32_t>(key >> kIdBits); }
__device__ inline int id_of(Atomic64 key) { return static_cast<int>(key & kIdMask); }

/// Weights e^((x − top) / temperature), for scale = weight_scale(temperature).
__device__ inline float weight_scale(float temperature) { return 2.0F * 1.4426950408889634F / temperature; }
/// log2 of a logit's share of the largest weight. Halves, so that the difference of any two logits is finite.
__device__ inline float octaves_of(float x, float top, float scale) {
  const float half = 0.5F * x - 0.5F * top;
  return half == 0.0F ? 0.0F : half * scale;
}
__device__ inline Atomic64 weight_of(float octaves) {
  return static_cast<Atomic64>(ptx::exp2_approx(octaves) * kUnits);
}

/// Of weights that sum to `total`: what the first candidates must hold for a share top_p of it.
__device__ inline Atomic64 amount_of_share(float top_p, Atomic64 total) {
  const double wanted = ceil(static_cast<double>(top_p) * static_cast<double>(total));
  return min(max(static_cast<Atomic64>(wanted), Atomic64{1}), total);
}
/// What the weights up to the drawn token must reach, for a number drawn from [0, 1).
__device__ inline Atomic64 amount_drawn(double drawn, Atomic64 total) {
  return min(static_cast<Atomic64>(drawn * static_cast<double>(total)) + 1, total);
}
/// Filters that ask for a least weight e^((x − top) / temperature): whether there are any, and the weight's logarithm.
__device__ inline bool has_least_weight(const SamplerOptions& options) { return options.min_p > 0.0F; }
__device__ inline double log_of_least_weight(const SamplerOptions& options) {
  return log(static_cast<double>(options.min_p));
}
/// Falling bits of the last logit whose weight, in fp64 rounded to nearest, is not below that.
__device__ inline std::uint32_t last_of_weight(float top, float temperature, double log_least) {
  const double least = static_cast<double>(top) + static_cast<double>(temperature) * (log_least - 0x1p-54);
  const auto rounded = static_cast<float>(least);
  const std::uint32_t falling = falling_bits(rounded);
  return static_cast<double>(rounded) < least ? falling - 1 : falling;  // the next larger number
}

// --- Candidates compared with each other: every one with all, by some neighbouring lanes each.

/// Of `count` candidates, 256 at most, where `threads` take part, 256 or 512.
struct Comparison {
  std::uint32_t padded;  // candidates: a power of 2
  std::uint32_t lanes;   // for each, 1 to 8
  std::uint32_t mine;    // the thread's candidate

  __device__ static Comparison of(std::uint32_t count, std::uint32_t threads) {
    const std::uint32_t padded = 1U << (32 - __clz(static_cast<int>(max(count, threads / 8) - 1)));
    const std::uint32_t lanes = threads / padded;
    return {padded, lanes, threadIdx.x / lanes};
  }
  /// One of a candidate's lanes.
  __device__ bool speaks() const { return threadIdx.x % lanes == 0; }

  /// Calls look(i) for this lane's share of the others.
  template <class Look>
  __device__ void each(Look look) const {
    constexpr std::uint32_t kAtOnce = 4;  // divides padded / lanes
    for (std::uint32_t i = threadIdx.x % lanes; i < padded; i += kAtOnce * lanes) {
#pragma unroll
      for (std::uint32_t n = 0; n < kAtOnce; ++n) look(i + n * lanes);
    }
  }
  /// Sum over a candidate's lanes.
  __device__ Atomic64 sum(Atomic64 x) const {
#pragma unroll 1
    for (std::uint32_t step = lanes / 2; step > 0; step /= 2) {
      x += __shfl_xor_sync(0xffffffffU, x, static_cast<int>(step));
    }
    return x;
  }
  /// How many have a smaller key, from bit kCountShift on, and below it the sum of their weights. Beyond the last
  /// candidate keys are kNobody.
  static constexpr int kCountShift = 54;
  __device__ Atomic64 before(Atomic64 key, const Atomic64* keys, const Atomic64* weights) const {
    Atomic64 x = 0;
    each([&](std::uint32_t i) {
      const Atomic64 other = weights[i] + (Atomic64{1} << kCountShift);
      x += keys[i] < key ? other : 0;
    });
    return sum(x);
  }
};

// --- Distances in falling bits from the first candidate, in bins: the first 8 one each, then 8 to an octave. So bins
// are as fine as the logits lie, whatever their spread.

inline constexpr int kDistanceBins = 256;  // 240 of them are used

__device__ inline std::uint32_t distance_bin(std::uint32_t distance) {
  if (distance < 8) return distance;
  const auto octave = static_cast<std::uint32_t>(31 - __clz(static_cast<int>(distance)));
  return 8 * (octave - 2) + (distance >> (octave - 3)) % 8;
}
/// The largest distance of a bin.
__device__ inline std::uint32_t end_of_distance_bin(std::uint32_t bin) {
  return bin < 8 ? bin : ((bin % 8 + 9) << (bin / 8 - 1)) - 1;
}
/// The end of the bin up to which at least `wanted` have been counted; all ones if there are fewer. A warp calls it.
__device__ inline std::uint32_t distance_of(const std::uint32_t* counts, std::uint32_t wanted) {
  constexpr int kOwn = kDistanceBins / 32;
  const unsigned lane = threadIdx.x % 32;
  std::uint32_t count[kOwn];
  std::uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) sum += count[i] = counts[kOwn * lane + static_cast<unsigned>(i)];
  std::uint32_t up_to = sum;
#pragma unroll
  for (unsigned step = 1; step < 32; step *= 2) {
    const std::uint32_t before = __shfl_up_sync(0xffffffffU, up_to, step);
    if (lane >= step) up_to += before;
  }
  std::uint32_t reached = up_to - sum;
  std::uint32_t bin = kOwn * lane;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    reached += count[i];
    bin += reached < wanted ? 1 : 0;
  }
  const unsigned there = __ballot_sync(0xffffffffU, static_cast<int>(up_to >= wanted));
  const std::uint32_t end =
      __shfl_sync(0xffffffffU, end_of_distance_bin(bin), there == 0 ? 0 : __ffs(static_cast<int>(there)) - 1);
  return there == 0 ? ~std::uint32_t{0} : end;
}

}  // namespace mmrec::kernels::sampling
