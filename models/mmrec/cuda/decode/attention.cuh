// Attention to the memory slots in a decode step: softmax(q · slots / √d) · slots. Warps share the slots of a head;
// each sums up its own with weights relative to its own largest score, then a thread joins the warps' sums of a
// channel.
#pragma once

#include <cmath>

#include "models/mmrec/cuda/decode/through_l2.cuh"

namespace mmrec::kernels {

/// A warp's part of a head: every kTileWarps-th slot, kSlots of them at once, and of every 32nd channel lane l's.
template <int kSlots, int kChannels>
struct WarpAttention {
  static constexpr int kRow = 32 * kChannels + 2;  // floats that a warp leaves: sums, largest score, sum of weights

  float largest = -INFINITY;
  float weights = 0.0F;
  float sum[kChannels] = {};

  /// score: partial sums, of a lane's channels. slot: the first one's number, less than `slots`.
  __device__ __forceinline__ void add(float (&score)[kSlots], const float (&held)[kSlots][kChannels], int slot,
                                      int slots, float scale, bool is_first) {
    sum_each(score);
    const float before = largest;
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      score[j] = slot + j * kTileWarps < slots ? scale * score[j] : -INFINITY;
      largest = fmaxf(largest, score[j]);
    }
    if (!is_first) {
      const float kept = fast_exp(before - largest);
      weights *= kept;
#pragma unroll
      for (int i = 0; i < kChannels; ++i) sum[i] *= kept;
    }
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      const float weight = fast_exp(score[j] - largest);
      weights += weight;
#pragma unroll
      for (int i = 0; i < kChannels; ++i) sum[i] = __fmaf_rn(weight, held[j][i], sum[i]);
    }
  }
  /// rows: [warp][kRow]
  __device__ __forceinline__ void store(float* rows, int warp, int lane) const {
    float* const row = rows + warp * kRow;
#pragma unroll
    for (int i = 0; i < kChannels; ++i) row[lane + i * 32] = sum[i];
    if (lane != 0) return;
    row[kRow - 2] = largest;
    row[kRow - 1] = weights;
  }
  /// After a barrier.
  __device__ __forceinline__ static float join(const float* rows, int channel) {
    float all_largest = rows[kRow - 2];
#pragma unroll
    for (int w = 1; w < kTileWarps; ++w) all_largest = fmaxf(all_largest, rows[w * kRow + kRow - 2]);
    float all_weights = 0.0F;
    float value = 0.0F;
#pragma unroll
    for (int w = 0; w < kTileWarps; ++w) {
      const float* of_warp = rows + w * kRow;
      const float factor = fast_exp(of_warp[kRow - 2] - all_largest);
      all_weights = __fmaf_rn(factor, of_warp[kRow - 1], all_weights);
      value = __fmaf_rn(factor, of_warp[channel], value);
    }
    return __fdividef(value, all_weights);
  }
};

/// Where vectors go through L2: a block takes a head of a sequence at a time, of any width, and of its slots, which may
/// be many, some before the query is there. `rows` is memory that the warps have no other use for now.
template <class A, bool kOneSequence>
__device__ void attend_heads(const DecodeContext<A>& c, const ThroughL2<A, kOneSequence>& l2, int layer, float* rows) {
  constexpr int kAhead = 4;  // slots of a warp at once
  constexpr int kHeld = kAttentionChannels / 32;
  using Part = WarpAttention<kAhead, kHeld>;
  static_assert(Part::kRow == kAttentionRow);
  const int lane = ptx::opaque(c.lane);  // nothing that follows from it is kept for the next layer
  const int thread = c.warp * 32 + lane;
  const auto heads = static_cast<int>(c.p.op.shape.heads);
  const auto slots = static_cast<int>(c.p.op.slots);
  const int width = c.p.plan.head_width;
#pragma unroll 1
  for (int task = static_cast<int>(blockIdx.x); task < l2.batch() * heads; task += static_cast<int>(gridDim.x)) {
    const int b = l2.batch() == 1 ? 0 : task / heads;
    const int head = (task - b * heads) * width;
    const A* query = l2.template vectors<A>(layer, Point::kQuery) + std::int64_t{b} * c.dim + head;
    A* attended = l2.template vectors<A>(layer, Point::kAttended) + std::int64_t{b} * c.dim + head;
    const float* memory = c.memory(layer, b) + head;
    const auto read = [&](int slot, int channel) {
      return slot < slots && channel < width ? __ldg(memory + std::int64_t{slot} * c.dim + channel) : 0.0F;
    };
#pragma unroll 1
    for (int begin = 0; begin < width; begin += kAttentionChannels) {
      float held[kAhead][kHeld];
      const auto hold = [&](int slot) {
        const float* from = memory + std::int64_t{slot} * c.dim + begin + lane;
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
#pragma unroll
          for (int i = 0; i < kHeld; ++i) {
            const bool exists = slot + j * kTileWarps < slots && begin + lane + i * 32 < width;
            held[j][i] = exists ? __ldg(from + j * kTileWarps * c.dim + i * 32) : 0.0F;
          }
        }
      };
      hold(c.warp);
      const A* asked[kHeld];
      A came[kHeld];
      float q[kHeld];
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const int channel = begin + lane + i * 32;
        asked[i] = channel < width ? query + channel : nullptr;
      }
      await_elements<A>(asked, came);
#pragma unroll
      for (int i = 0; i < kHeld; ++i) q[i] = widen(came[i]);
      Part part;
#pragma unroll 1
      for (int slot = c.warp; slot < slots; slot += kAhead * kTileWarps) {
        if (slot != c.warp) hold(slot);
        float score[kAhead] = {};
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
#pragma unroll
          for (int i = 0; i < kHeld; ++i) score[j] = __fmaf_rn(q[i], held[j][i], score[j]);
        }
#pragma unroll 1
        for (int i = lane; i < width; i += 32) {  // the other channels of a wide head
          if (i == begin + lane) i += kAttentionChannels;
          if (i >= width) break;
          const float other = widen(await_element(query + i));
#pragma unroll
          for (int j = 0; j < kAhead; ++j) score[j] = __fmaf_rn(other, read(slot + j * kTileWarps, i), score[j]);
        }
        part.add(score, held, slot, slots, c.p.plan.attention_scale, false);
      }
      part.store(rows, c.warp, lane);
      barrier();
      if (thread < kAttentionChannels && begin + thread < width) {
        publish(attended + begin + thread, narrow<A>(Part::join(rows, thread)));
      }
      barrier();  // the sums have been read
    }
  }
}

}  // namespace mmrec::kernels
