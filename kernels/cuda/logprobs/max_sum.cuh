// Sums of exponentials on the device: batches of 16-byte vectors in registers, lanes of a warp, parts of a row.
//
// Every level keeps (max, sum), which stand for sum · e^max, with a finite max: −inf, NaN and +inf then do what they
// should without a branch. A −inf logit adds 0, a NaN makes the sum NaN, +inf makes it +inf, no logits at all (or −inf
// alone) leave it 0.
//
// Cost for a logit: half an instruction for the maximum (16-bit logits are compared in pairs), one to widen it, one
// subtraction, one product, one 2^x, one addition; the maximum of a whole batch is known before its first exponential,
// so sums are rescaled once a batch. e^(x − max) is 2^((x − max) log2 e): subtracting first keeps it exact to a few
// units in the last place however large x is.
//
// Order: a lane's terms, then lanes by a butterfly whose additions commute, so that all lanes hold the same bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/isa/ptx.cuh"
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/logsumexp.h"

namespace mmrec::kernels {

inline constexpr float kLargestFinite = std::numeric_limits<float>::max();

/// Vectors of one batch in a lane: loads in flight before the first is used.
inline constexpr int kBatch = 8;
/// Vectors of one batch in a warp.
inline constexpr int kWarpBatch = 32 * kBatch;

/// Without initial values, so that it may lie in shared memory.
template <class Real>
struct ExpSum {
  float max;
  Real sum;
};
using PartSum = ExpSum<float>;
using RowSum = ExpSum<double>;  // as many terms as there may be, hence wider
__device__ inline PartSum no_terms() { return {-kLargestFinite, 0.0F}; }

/// e^(x − max)
__device__ inline float exp_below(float x, float max) { return fast_exp(x - max); }

/// Never NaN.
__device__ inline float clamp_to_finite(float max) { return fminf(fmaxf(max, -kLargestFinite), kLargestFinite); }

// The fused multiply-adds are spelled out: a sum that two kernels compute has the same bits in both.
template <class Real>
__device__ inline ExpSum<Real> merge(ExpSum<Real> a, ExpSum<Real> b) {
  const float max = fmaxf(a.max, b.max);
  return {max, std::fma(a.sum, Real{exp_below(a.max, max)}, b.sum * Real{exp_below(b.max, max)})};
}
__device__ inline PartSum term(float x) {
  const float max = clamp_to_finite(x);
  return {max, exp_below(x, max)};
}
__device__ inline RowSum widen(PartSum part) { return {part.max, static_cast<double>(part.sum)}; }

/// Over the lanes of a warp; every lane receives the result.
template <class Real>
__device__ inline ExpSum<Real> warp_merge(ExpSum<Real> lane) {
  const float max = warp_max(lane.max);
  return {max, warp_sum(lane.sum * Real{exp_below(lane.max, max)})};
}

/// log p of a row's logit, NaN where the row has no probabilities.
__device__ inline float log_probability(float logit, RowSum row) {
  return log_probability(logit, MaxSum64{static_cast<double>(row.max), row.sum});
}

/// The 32-bit words that a 16-byte vector of T is made of: one float or two halves.
template <class T>
struct Word {
  static constexpr int kValues = 4 / sizeof(T);
  /// −inf in every value.
  static constexpr std::uint32_t kMasked = kValues == 1                  ? 0xff800000U
                                           : std::is_same_v<T, BFloat16> ? 0xff80ff80U
                                                                         : 0xfc00fc00U;
  __device__ static std::uint32_t max(std::uint32_t a, std::uint32_t b) {
    if constexpr (kValues == 1) {
      return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
    } else {
      return ptx::max_pair<T>(a, b);
    }
  }
  __device__ static void widen(std::uint32_t word, float (&x)[kValues]) {
#pragma unroll
    for (int v = 0; v < kValues; ++v) x[v] = widen_part<T>(word, v);
  }
};

template <class T>
__device__ inline uint4 masked_vector() {
  constexpr std::uint32_t kMasked = Word<T>::kMasked;
  return make_uint4(kMasked, kMasked, kMasked, kMasked);
}

/// The logits of a lane's vectors.
template <class T>
__device__ inline PartSum batch_sum(const uint4 (&v)[kBatch]) {
  using W = Word<T>;
  std::uint32_t top = v[0].x;
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    top = W::max(top, W::max(W::max(v[i].x, v[i].y), W::max(v[i].z, v[i].w)));
  }
  float x[W::kValues];
  W::widen(top, x);
  const float max = clamp_to_finite(W::kValues == 1 ? x[0] : fmaxf(x[0], x[W::kValues - 1]));
  float sums[2] = {0.0F, 0.0F};  // vectors take turns: shorter chains of additions
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    const std::uint32_t words[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
    float parts[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      W::widen(words[w], x);
      parts[w] = exp_below(x[0], max);
      if constexpr (W::kValues == 2) parts[w] += exp_below(x[1], max);
    }
    sums[i % 2] += (parts[0] + parts[1]) + (parts[2] + parts[3]);
  }
  return {max, sums[0] + sums[1]};
}

/// The calling lane's vectors of a warp's batch: from[lane], from[lane + 32], …; those at `count` and beyond are
/// masked.
template <class T>
__device__ inline PartSum lane_batch_sum(const uint4* from, int count, int lane) {
  uint4 v[kBatch];
  from += lane;
  if (count >= kWarpBatch) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) v[i] = ptx::load_streaming(from + 32 * i);
  } else {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      v[i] = lane + 32 * i < count ? ptx::load_streaming(from + 32 * i) : masked_vector<T>();
    }
  }
  return batch_sum<T>(v);
}

/// A row as vectors on 16-byte boundaries with fewer elements than a vector before and after them.
template <class T>
struct AlignedRow {
  const T* row;
  std::int64_t cols;
  std::int64_t head;  // elements before the vectors
  std::int64_t vectors;
  std::int64_t tail;  // elements after them

  __device__ AlignedRow(const T* data, std::int64_t n) : row(data), cols(n) {
    constexpr int kSize = Vector16<T>::kSize;
    const auto misplaced = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(data) % 16 / sizeof(T));
    head = min((kSize - misplaced) % kSize, n);
    vectors = (n - head) / kSize;
    tail = (n - head) % kSize;
  }
  __device__ const uint4* body() const { return reinterpret_cast<const uint4*>(row + head); }
  /// The i-th of the head + tail elements outside of the vectors, as a column.
  __device__ std::int64_t edge(std::int64_t i) const { return i < head ? i : cols - tail + (i - head); }
};

// --- What both algorithms of hidden_logprobs (algo.h) leave of the logits.

/// Some rows of an op. A row whose target is negative is left alone; `logprobs` holds the target's logit meanwhile.
struct LogprobRows {
  const int* targets;
  float* logprobs;
  PartSum* parts;  // [part of the vocabulary][row]
  int rows;
  int vocab;
};

/// logprobs[r] −= log Σ over `count` parts. A target beyond the vocabulary gives NaN.
void merge_parts(Cuda& cuda, const LogprobRows& rows, std::int64_t count);

/// HiddenLogprobsAlgo::kInRegisters, of rows and a vocabulary that are not empty.
template <class A>
void hidden_logprobs_sm90(Cuda& cuda, const HiddenLogprobs<Device, A>& op);

}  // namespace mmrec::kernels
