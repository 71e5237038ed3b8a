// The softmax of a chunk of slots in registers, and the monoid that joins chunks.
#pragma once

#include <cstdint>

#include "kernels/cuda/rows/rows.cuh"

namespace mmrec::kernels {

inline constexpr int kBatch = 4;  // slots whose scores are formed together
inline constexpr float kNothing = -INFINITY;

/// The softmax of some slots: Σ 2^(score - max) and the same sum of kValues channels of their values.
template <int kValues>
struct Softmax {
  float max = kNothing;
  float sum = 0.0F;
  float values[kValues] = {};
};

/// 2^(from - to) for to >= from: 0 for the empty sum.
__device__ inline float weight_of(float from, float to) {
  return ptx::exp2_approx(from - (to == kNothing ? 0.0F : to));
}

/// The channels of a lane: pieces lane, lane + lanes, … of 4 channels.
template <int kValues, class T>
__device__ inline void load_channels(const T* row, int lane, int lanes, int d, float (&to)[kValues]) {
#pragma unroll
  for (int i = 0; i < kValues / kGroup; ++i) {
    float piece[kGroup];
    load_group<true>(row, i * lanes + lane, d, piece);
#pragma unroll
    for (int c = 0; c < kGroup; ++c) to[i * kGroup + c] = piece[c];
  }
}

/// The softmax of one chunk of `count` slots for kTokens tokens, whose q a group of lanes holds. All lanes of a warp
/// bring the same `most_slots` >= count; going on past count changes nothing. slot(j, i) is the lane's piece i of slot
/// j, 0 <= j < max(count, 1). kHold: slots are read once and held in registers, else they are read again for the
/// values.
template <bool kHold, int kTokens, int kValues, class Slot>
__device__ inline void attend_chunk(const float (&q)[kTokens][kValues], int lanes, int count, int most_slots,
                                    const Slot& slot, Softmax<kValues> (&result)[kTokens]) {
  constexpr int kPieces = kValues / kGroup;
#pragma unroll
  for (Softmax<kValues>& r : result) r = {};
  const int last = max(count, 1) - 1;
  for (int first = 0; first < most_slots; first += kBatch) {
    float4 held[kHold ? kBatch : 1][kHold ? kPieces : 1];
    float scores[kTokens][kBatch] = {};
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const float4 k = slot(min(first + j, last), i);
        if constexpr (kHold) held[j][i] = k;
#pragma unroll
        for (int n = 0; n < kTokens; ++n) {
          float& score = scores[n][j];
          score = __fmaf_rn(q[n][kGroup * i], k.x, score);
          score = __fmaf_rn(q[n][kGroup * i + 1], k.y, score);
          score = __fmaf_rn(q[n][kGroup * i + 2], k.z, score);
          score = __fmaf_rn(q[n][kGroup * i + 3], k.w, score);
        }
      }
    }
    for (int offset = 1; offset < lanes; offset *= 2) {
#pragma unroll
      for (int n = 0; n < kTokens; ++n) {
#pragma unroll
        for (int j = 0; j < kBatch; ++j) scores[n][j] += __shfl_xor_sync(0xffffffffU, scores[n][j], offset);
      }
    }
#pragma unroll
    for (int n = 0; n < kTokens; ++n) {
      Softmax<kValues>& r = result[n];
      float most = r.max;
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (first + j >= count) scores[n][j] = kNothing;
        most = fmaxf(most, scores[n][j]);
      }
      const float kept = weight_of(r.max, most);
      r.max = most;
      r.sum *= kept;
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        scores[n][j] = weight_of(scores[n][j], most);
        r.sum += scores[n][j];
      }
#pragma unroll
      for (float& value : r.values) value *= kept;
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const float4 v = kHold ? held[kHold ? j : 0][kHold ? i : 0] : slot(min(first + j, last), i);
#pragma unroll
        for (int n = 0; n < kTokens; ++n) {
          float* values = result[n].values + kGroup * i;
          values[0] = __fmaf_rn(scores[n][j], v.x, values[0]);
          values[1] = __fmaf_rn(scores[n][j], v.y, values[1]);
          values[2] = __fmaf_rn(scores[n][j], v.z, values[2]);
          values[3] = __fmaf_rn(scores[n][j], v.w, values[3]);
        }
      }
    }
  }
}

/// total = total, then part.
template <int kValues>
__device__ inline void merge(Softmax<kValues>& total, const Softmax<kValues>& part) {
  const float most = fmaxf(total.max, part.max);
  const float before = weight_of(total.max, most);
  const float after = weight_of(part.max, most);
  total.max = most;
  total.sum = __fmaf_rn(total.sum, before, part.sum * after);
#pragma unroll
  for (int i = 0; i < kValues; ++i) total.values[i] = __fmaf_rn(total.values[i], before, part.values[i] * after);
}

}  // namespace mmrec::kernels
