// What the blocks of a decode step have in common, whether they multiply one sequence (single.cuh) or several
// (block.cuh): the exchange and its turns, what a block remembers of its channels, the recurrence, the
// attention.
#pragma once

#include <cmath>

#include "kernels/cuda/exchange.cuh"
#include "kernels/cuda/recurrence/equations.cuh"
#include "models/mmrec/cuda/decode/shares.cuh"
#include "models/mmrec/cuda/decode/stream.cuh"

namespace mmrec::kernels {

inline constexpr int kConsumers = 32 * kTileWarps;

/// What needs neither ring nor exchange.
template <class A>
class DecodeMath {
 protected:
  __device__ DecodeMath(const DecodeParams<A>& p, std::byte* shared)
      : p_(p),
        layers_(reinterpret_cast<const LayerShare*>(shared + p.plan.layers)),
        channels_(p.plan.splits[static_cast<int>(Owned::kChannels)].mine()),
        dim_(static_cast<int>(p.op.shape.dim)),
        warp_(__shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / 32, 0)) {}  // known to be one value

  /// A normalised vector is multiplied before its scale is known, and the scale follows the sum: nobody waits for the
  /// sum of all squares. Float16 has not got the range for it.
  static constexpr bool kScalesSums = !std::is_same_v<A, Float16>;
  static constexpr int kVector = 4;                                           // floats of 16 bytes
  static constexpr int kStepVectors = kStepBytes / int{sizeof(A)} / kVector;  // of fp32 that become a step
  static constexpr int kStride = 32 * kTileWarps;                             // from a lane's vector to its next one

  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int lane() { return thread() % 32; }
  __device__ static void barrier() { ptx::named_barrier_sync(1, kConsumers); }

  // --- Vectors -------------------------------------------------------------------------------------------------------

  /// A lane's vectors of a fp32 operand: number round * kStride + first_vector().
  __device__ int first_vector() const {
    return warp_ * kStepVectors + lane() / kStepVectors * kTileWarps * kStepVectors + lane() % kStepVectors;
  }
  /// Where its first vector goes, and how much further each next one: parts of steps of A that lie side by side.
  __device__ int narrowed_first() const { return first_vector() * kVector * int{sizeof(A)}; }
  static constexpr int kNarrowedStride = kStride * kVector * int{sizeof(A)};

  __device__ float4 norm_weight(const float* weight, int vector) const {
    if (weight == nullptr || vector * kVector >= dim_) return make_float4(1, 1, 1, 1);
    return __ldg(reinterpret_cast<const float4*>(weight) + vector);
  }
  __device__ float4 state_vector(int layer, int sequence, int vector) const {
    const float* h = bytes_further(p_.op.h, sequence * p_.op.slot_bytes) + std::int64_t{layer} * dim_;
    return __ldcg(reinterpret_cast<const float4*>(h) + vector);
  }
  __device__ const A* embedding_row(int sequence) const {
    return p_.op.embedding + std::int64_t{p_.op.tokens[sequence]} * dim_;
  }
  __device__ float4 embedding_vector(int sequence, int vector) const {
    const A* row = embedding_row(sequence) + vector * kVector;
    return make_float4(widen(row[0]), widen(row[1]), widen(row[2]), widen(row[3]));
  }
  __device__ static float squares(float4 x) {
    return __fmaf_rn(x.w, x.w, __fmaf_rn(x.z, x.z, __fmaf_rn(x.y, x.y, x.x * x.x)));
  }
  /// From the warps' sums of squares, added up as norm_scale does.
  __device__ float norm_scale_of(float sum) const { return norm_factor_fast(sum * p_.plan.share_of_dim); }
  __device__ float norm_scale(const float* of_warps) const {
    const float4 a = reinterpret_cast<const float4*>(of_warps)[0];
    const float4 b = reinterpret_cast<const float4*>(of_warps)[1];
    return norm_scale_of(((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w)));
  }
  /// Rounds weight ⊙ (scale x).
  __device__ static void store_vector(std::byte* to, float4 w, float scale, float4 x) {
    const float4 y = make_float4(w.x * (scale * x.x), w.y * (scale * x.y), w.z * (scale * x.z), w.w * (scale * x.w));
    if constexpr (sizeof(A) == 4) {
      *reinterpret_cast<float4*>(to) = y;
    } else {
      *reinterpret_cast<uint2*>(to) = make_uint2(ptx::to_pair<A>(y.x, y.y), ptx::to_pair<A>(y.z, y.w));
    }
  }
  __device__ static float4 as_floats(uint4 v) {
    return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
  }
  __device__ static float warp_sum(float x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffffU, x, mask);
    return x;
  }

  // --- A channel -----------------------------------------------------------------------------------------------------

  /// What the recurrence and the residual stream want of a channel, from memory or from earlier stages.
  struct Channel {
    float h = 0.0F, c = 0.0F;
    float state_gate = 0.0F, mdi = 0.0F, z = 0.0F, v = 0.0F, residual = 0.0F;
  };
  struct Advanced {
    float h, x;
  };
  /// γ, h and y, but for what attention adds later.
  __device__ Advanced advance(const Channel& in, float gamma_input, float context_input) const {
    const DecodeStep<Device, A>& op = p_.op;
    const float gamma = decay_of(gamma_input, !op.shape.dpg, context_input);
    const float h = gated_step(in.state_gate, in.mdi, in.z, gamma, op.mdi_mix)(in.h);
    return {h, residual_sum(in.residual, h, in.v) + in.c};
  }
  /// Of several values at once, each to every lane.
  template <int kCount>
  __device__ static void sum_each(float (&x)[kCount]) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] += __shfl_xor_sync(0xffffffffU, x[i], mask);
    }
  }

  const DecodeParams<A>& p_;
  const LayerShare* layers_;
  Range channels_;
  int dim_, warp_;
};

template <class A>
class DecodeBase : protected DecodeMath<A> {
  using Math = DecodeMath<A>;

 protected:
  using Math::barrier, Math::lane, Math::sum_each, Math::thread, Math::channels_, Math::dim_, Math::p_, Math::warp_;
  __device__ DecodeBase(const DecodeParams<A>& p, std::byte* shared, Ring ring, std::uint32_t turn)
      : Math(p, shared),
        ring_(ring),
        operand_(shared + p.plan.operand),
        sums_(reinterpret_cast<float*>(shared + p.plan.sums)),
        norm_sums_(reinterpret_cast<float*>(shared + p.plan.norm_sums)),
        local_(reinterpret_cast<float*>(shared + p.plan.local)),
        turn_(turn),
        set_(static_cast<std::byte*>(p.op.exchange) + DecodePlan::kHeaderBytes + turn_ * p.plan.set_bytes) {}

  // --- Exchange ------------------------------------------------------------------------------------------------------

  template <class T>
  __device__ T* vectors(int layer, Point point) const {
    return reinterpret_cast<T*>(set_ + layer * p_.plan.layer_bytes + p_.plan.at[static_cast<int>(point)]);
  }

  __device__ void clear_other_set() const {
    auto* other = reinterpret_cast<uint4*>(static_cast<std::byte*>(p_.op.exchange) + DecodePlan::kHeaderBytes +
                                           (1 - turn_) * p_.plan.set_bytes);
    constexpr std::uint32_t kOnes = 0xffffffffU;
#pragma unroll 1
    for (std::int64_t i = std::int64_t{blockIdx.x} * kConsumers + thread(); i < p_.plan.set_bytes / kPieceBytes;
         i += std::int64_t{gridDim.x} * kConsumers) {
      other[i] = make_uint4(kOnes, kOnes, kOnes, kOnes);
    }
  }

  // --- A channel, as kept between stages -----------------------------------------------------------------------------

  __device__ float& local(Local what, int channel, int sequence, int batch) const {
    return local_[(static_cast<int>(what) * batch + sequence) * p_.plan.channels + channel];
  }
  __device__ void embed(int batch) const {
#pragma unroll 1
    for (int sequence = 0; sequence < batch; ++sequence) {
#pragma unroll 1
      for (int i = thread(); i < channels_.count; i += kConsumers) {
        local(Local::kResidual, i, sequence, batch) = widen(Math::embedding_row(sequence)[channels_.first + i]);
      }
    }
  }

  // --- Attention -----------------------------------------------------------------------------------------------------

  /// softmax(q · slots / √d) · slots, a head of a sequence at a time. A warp scores every eighth slot, some of which it
  /// asks for before the query is there, and sums them up with weights relative to its own largest score; then a thread
  /// joins the warps' sums of a channel.
  __device__ void attend_heads(int layer, int batch) const {
    constexpr int kAhead = 4;                     // slots of a warp at once
    const int lane = ptx::opaque(thread() % 32);  // nothing that follows from it is kept for the next layer
    const int thread = warp_ * 32 + lane;
    const DecodeShape& shape = p_.op.shape;
    const auto heads = static_cast<int>(shape.heads);
    const auto slots = static_cast<int>(p_.op.slots);
    const int width = p_.plan.head_width;
    auto* const joined = reinterpret_cast<float*>(operand_);  // [warp][channel, largest score, sum of weights]
    float* const mine = joined + warp_ * kAttentionRow;
#pragma unroll 1
    for (int task = static_cast<int>(blockIdx.x); task < batch * heads; task += static_cast<int>(gridDim.x)) {
      const int b = batch == 1 ? 0 : task / heads;
      const int head = (task - b * heads) * width;
      const A* query = vectors<A>(layer, Point::kQuery) + std::int64_t{b} * dim_ + head;
      A* attended = vectors<A>(layer, Point::kAttended) + std::int64_t{b} * dim_ + head;
      const float* memory =
          bytes_further(p_.op.memory, b * p_.op.slot_bytes) + std::int64_t{layer} * shape.memory_slots * dim_ + head;
      const auto read = [&](int slot, int channel) {
        return slot < slots && channel < width ? __ldg(memory + std::int64_t{slot} * dim_ + channel) : 0.0F;
      };
#pragma unroll 1
      for (int begin = 0; begin < width; begin += kAttentionChannels) {
        constexpr int kHeld = kAttentionChannels / 32;
        float held[kAhead][kHeld];
        const auto hold = [&](int slot) {
          const float* from = memory + std::int64_t{slot} * dim_ + begin + lane;
#pragma unroll
          for (int j = 0; j < kAhead; ++j) {
#pragma unroll
            for (int i = 0; i < kHeld; ++i) {
              const bool exists = slot + j * kTileWarps < slots && begin + lane + i * 32 < width;
              held[j][i] = exists ? __ldg(from + j * kTileWarps * dim_ + i * 32) : 0.0F;
            }
          }
        };
        hold(warp_);
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
        float largest = -INFINITY;
        float weights = 0.0F;
        float sum[kHeld] = {};
#pragma unroll 1
        for (int slot = warp_; slot < slots; slot += kAhead * kTileWarps) {
          if (slot != warp_) hold(slot);
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
          sum_each(score);
          const float before = largest;
#pragma unroll
          for (int j = 0; j < kAhead; ++j) {
            score[j] = slot + j * kTileWarps < slots ? p_.plan.attention_scale * score[j] : -INFINITY;
            largest = fmaxf(largest, score[j]);
          }
          const float kept = fast_exp(before - largest);
          weights *= kept;
#pragma unroll
          for (int i = 0; i < kHeld; ++i) sum[i] *= kept;
#pragma unroll
          for (int j = 0; j < kAhead; ++j) {
            const float weight = fast_exp(score[j] - largest);
            weights += weight;
#pragma unroll
            for (int i = 0; i < kHeld; ++i) sum[i] = __fmaf_rn(weight, held[j][i], sum[i]);
          }
        }
#pragma unroll
        for (int i = 0; i < kHeld; ++i) mine[lane + i * 32] = sum[i];
        if (lane == 0) {
          mine[kAttentionChannels] = largest;
          mine[kAttentionChannels + 1] = weights;
        }
        barrier();
        if (thread < kAttentionChannels && begin + thread < width) {
          float all_largest = joined[kAttentionChannels];
#pragma unroll
          for (int w = 1; w < kTileWarps; ++w) {
            all_largest = fmaxf(all_largest, joined[w * kAttentionRow + kAttentionChannels]);
          }
          float all_weights = 0.0F;
          float value = 0.0F;
#pragma unroll
          for (int w = 0; w < kTileWarps; ++w) {
            const float* of_warp = joined + w * kAttentionRow;
            const float factor = fast_exp(of_warp[kAttentionChannels] - all_largest);
            all_weights = __fmaf_rn(factor, of_warp[kAttentionChannels + 1], all_weights);
            value = __fmaf_rn(factor, of_warp[thread], value);
          }
          publish(attended + begin + thread, narrow<A>(__fdividef(value, all_weights)));
        }
        barrier();  // the sums have been read
      }
    }
  }

  Ring ring_;
  std::byte* operand_;
  float* sums_;
  float* norm_sums_;
  float* local_;
  std::uint32_t turn_;
  std::byte* set_;
};

}  // namespace mmrec::kernels
