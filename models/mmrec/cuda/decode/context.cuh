// The context of a multiplying warp of a decode step, for every algorithm: its place, its block's rows, and vectors on
// their way to the product.
//
// Algorithms consist of members that refer to this context and to nothing else. It is an object beside the block, and
// no member holds the address of another one. Otherwise the compiler cannot split the objects into registers: it keeps
// them in local memory and no longer knows which addresses are in shared memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/isa/ptx.cuh"
#include "kernels/cuda/recurrence/equations.cuh"
#include "models/mmrec/cuda/decode/plan.cuh"

namespace mmrec::kernels {

inline constexpr int kConsumers = 32 * kTileWarps;

/// The barrier of the multiplying warps.
__device__ inline void barrier() { ptx::named_barrier_sync(1, kConsumers); }

__device__ inline float4 as_floats(uint4 v) {
  return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}
__device__ inline float squares(float4 x) {
  return __fmaf_rn(x.w, x.w, __fmaf_rn(x.z, x.z, __fmaf_rn(x.y, x.y, x.x * x.x)));
}
/// Of several values at once over a warp, each to every lane.
template <int kCount>
__device__ inline void sum_each(float (&x)[kCount]) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] += __shfl_xor_sync(0xffffffffU, x[i], mask);
  }
}

template <class A>
struct DecodeContext {
  __device__ DecodeContext(const DecodeParams<A>& params, std::byte* shared_memory)
      : p(params),
        shared(shared_memory),
        layers(reinterpret_cast<const LayerShare*>(shared + p.plan.layers)),
        channels(p.plan.splits[Owned::kChannels].mine()),
        hidden(p.plan.splits[Owned::kHidden].mine()),
        ffn(p.plan.splits[Owned::kFfn].mine()),
        vocab(p.plan.splits[Owned::kVocab].mine()),
        dim(static_cast<int>(p.op.shape.dim)),
        warp(__shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / 32, 0)),  // known to be one value
        lane(static_cast<int>(threadIdx.x) % 32) {}

  /// A normalised vector is multiplied before its scale is known, and the sum is scaled afterwards. So no product waits
  /// for the sum of squares. Float16 lacks the range for this.
  static constexpr bool kScalesSums = !std::is_same_v<A, Float16>;
  static constexpr int kVector = 4;                                           // floats of 16 bytes
  static constexpr int kStepVectors = kStepBytes / int{sizeof(A)} / kVector;  // of fp32 that become a step
  static constexpr int kStride = 32 * kTileWarps;                             // from a lane's vector to its next one

  __device__ __forceinline__ int thread() const { return warp * 32 + lane; }
  /// Makes the compiler compute values that depend on the lane anew, instead of keeping them for the next stage.
  __device__ __forceinline__ void forget_lane() { lane = ptx::opaque(lane); }
  __device__ __forceinline__ int networks() const { return p.op.shape.dpg ? 1 : 2; }

  __device__ __forceinline__ bool predicts() const { return p.op.shape.vocab > 0; }

  // --- State --------------------------------------------------------------------------------------------------------

  /// Layer's part of a sequence's h, context or segment_sum.
  template <class T>
  __device__ __forceinline__ T* state_of(T* of_first, int layer, int sequence) const {
    return bytes_further(of_first, sequence * p.op.slot_bytes) + std::int64_t{layer} * dim;
  }
  __device__ __forceinline__ float* h(int layer, int sequence) const { return state_of(p.op.h, layer, sequence); }
  __device__ __forceinline__ const float* memory(int layer, int sequence) const {
    return bytes_further(p.op.memory, sequence * p.op.slot_bytes) + std::int64_t{layer} * p.op.shape.memory_slots * dim;
  }
  __device__ __forceinline__ const A* embedding_row(int sequence) const {
    return p.op.embedding + std::int64_t{p.op.tokens[sequence]} * dim;
  }

  // --- Stages -------------------------------------------------------------------------------------------------------

  template <Stage kStage>
  __device__ __forceinline__ const ProductShape& shape_of() const {
    return p.plan.products[stage_info(kStage).first];
  }
  /// The weights of a vector's norm, and its elements.
  __device__ __forceinline__ const float* norm(Point input, int layer) const {
    return input == Point::kMixed ? layers[layer].norm2 : layers[layer].norm1;
  }
  __device__ __forceinline__ int width(Point point) const {
    return static_cast<int>(point == Point::kHidden ? p.op.shape.gate_hidden
                            : point == Point::kFfn  ? p.op.shape.ffn
                                                    : p.op.shape.dim);
  }
  /// Parts of a stage's outputs.
  template <Stage kStage>
  __device__ __forceinline__ int parts() const {
    if (kStage == Stage::kGate) return 2;
    if (kStage == Stage::kProject) return shape_of<kStage>().slices;
    return kStage == Stage::kHide ? networks() : 1;
  }
  __device__ __forceinline__ Range owned(Owned what) const {
    return what == Owned::kChannels ? channels : what == Owned::kHidden ? hidden : what == Owned::kFfn ? ffn : vocab;
  }
  /// Rows that the block multiplies, in a stage or in a product.
  template <Stage kStage>
  __device__ __forceinline__ int rows() const {
    constexpr StageInfo kInfo = stage_info(kStage);
    if (kStage == Stage::kAdvance) return networks() * channels.count;
    return owned(kInfo.owned).count + (parts<kStage>() - 1) * owned(kInfo.others).count;
  }
  __device__ __forceinline__ int rows(const ProductShape& s) const {
    return s.slices == 0 ? 0 : owned(s.owned).count + (s.slices - 1) * owned(s.others).count;
  }

  // --- Vectors ------------------------------------------------------------------------------------------------------

  /// A lane's vectors of a fp32 operand: number round * kStride + first_vector().
  __device__ __forceinline__ int first_vector() const {
    return warp * kStepVectors + lane / kStepVectors * kTileWarps * kStepVectors + lane % kStepVectors;
  }
  __device__ __forceinline__ float4 norm_weight(const float* weight, int vector) const {
    if (weight == nullptr || vector * kVector >= dim) return make_float4(1, 1, 1, 1);
    return __ldg(reinterpret_cast<const float4*>(weight) + vector);
  }
  __device__ __forceinline__ float4 state_vector(int layer, int sequence, int vector) const {
    return __ldcg(reinterpret_cast<const float4*>(h(layer, sequence)) + vector);
  }
  __device__ __forceinline__ float4 embedding_vector(int sequence, int vector) const {
    const A* row = embedding_row(sequence) + vector * kVector;
    return make_float4(widen(row[0]), widen(row[1]), widen(row[2]), widen(row[3]));
  }
  /// From the warps' sums of squares, added up as norm_scale does.
  __device__ __forceinline__ float norm_scale_of(float sum) const {
    return norm_factor_fast(sum * p.plan.share_of_dim);
  }
  __device__ __forceinline__ float norm_scale(float* of_warps) const { return norm_scale_of(total(of_warps, 0, 0, 1)); }
  /// Rounds weight ⊙ (scale x), to a vector's place in an operand.
  __device__ __forceinline__ static void store_vector(std::byte* operand, int vector, float4 w, float scale, float4 x) {
    const float4 y = make_float4(w.x * (scale * x.x), w.y * (scale * x.y), w.z * (scale * x.z), w.w * (scale * x.w));
    std::byte* const to = operand + vector * kVector * int{sizeof(A)};
    if constexpr (sizeof(A) == 4) {
      *reinterpret_cast<float4*>(to) = y;
    } else {
      *reinterpret_cast<uint2*>(to) = make_uint2(ptx::to_pair<A>(y.x, y.y), ptx::to_pair<A>(y.z, y.w));
    }
  }

  const DecodeParams<A>& p;
  std::byte* shared;
  const LayerShare* layers;
  Range channels, hidden, ffn, vocab;
  int dim, warp, lane;
};

// --- Epilogues, once for all algorithms: the equations of a block between its products, applied to a stage's sums.
//
// An algorithm says how values cross blocks and where it keeps a channel's values. Its functions work by lane or by
// warp:
//   send<point>(out, y)        y rounded to A, for other blocks
//   send_sum<point>(out, x)    the residual stream, for other blocks
//   keep_gate, keep_projection, keep_h, residual    a channel's values for later stages
//   channel, query                                  a channel's values from earlier stages and memory
//   store_state                                     h and the running sum, to memory
//
// h goes to memory at the end of its layer. Every block has read the layer's old h before it sent its part of y, and
// whoever is at the layer's end has got all of y, or what follows from all of it.

/// The inputs of a channel's recurrence and residual stream, from memory or from earlier stages.
struct Channel {
  float h, c;
  float state_gate, mdi, z, v;
};

/// Output `out` of a stage, of value y with its bias; other: of the second network in `advance`, where there is one.
template <Stage kStage, class A, class Algo, class Output>
__device__ __forceinline__ void epilogue(Algo& algo, int layer, const Output& out, float y, float other) {
  constexpr Point kTo = stage_info(kStage).output;
  const auto& op = algo.op();
  if constexpr (kStage == Stage::kGate) {
    algo.keep_gate(out, y, other);
  } else if constexpr (kStage == Stage::kProject) {
    algo.keep_projection(out, widen(narrow<A>(y)));
  } else if constexpr (kStage == Stage::kHide) {
    algo.template send<kTo>(out, op.shape.dpg ? relu(y) : gelu(y));
  } else if constexpr (kStage == Stage::kAdvance) {
    const Channel in = algo.channel(out);
    const float gamma = decay_of(y, !op.shape.dpg, other);
    const float h = gated_step(in.state_gate, in.mdi, in.z, gamma, op.mdi_mix)(in.h);
    const float x = residual_sum(algo.residual(out), h, in.v) + in.c;
    if (op.slots > 1) {
      algo.template send<kTo>(out, h);
    } else {
      algo.template send_sum<Point::kMixed>(out, x);
    }
    algo.residual(out) = x;
    algo.keep_h(out, h);
  } else if constexpr (kStage == Stage::kQuery) {
    algo.template send<kTo>(out, __fmaf_rn(0.5F, algo.query(out), y));
  } else if constexpr (kStage == Stage::kRecall || kStage == Stage::kNarrow) {
    const float x = algo.residual(out) + y;
    algo.template send_sum<kTo>(out, x);
    algo.residual(out) = x;
    if constexpr (kStage == Stage::kNarrow) algo.store_state(layer, out, out.sum + static_cast<double>(x));
  } else if constexpr (kStage == Stage::kWiden) {
    algo.template send<kTo>(out, gelu(y));
  } else {
    *static_cast<float*>(out.to) = y;
  }
}

}  // namespace mmrec::kernels
