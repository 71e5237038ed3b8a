// A block's head of the attention in finish_segments (finish_segments.cu): the slots, which its threads hold from the
// first piece to the last, a tile's attention to them, and the slots that are made meanwhile.
#pragma once

#include <cmath>

#include "kernels/cuda/attention/softmax.cuh"
#include "kernels/cuda/element.cuh"
#include "models/mmrec/cuda/segments/exchange.cuh"

namespace mmrec::kernels::segments {

template <class A, bool kKnown>
class BlockAttention {
  using Context = BlockTasks<A, kKnown>;
  using Piece = typename Context::Piece;
  using Task = typename Context::Task;

 public:
  __device__ explicit BlockAttention(const Context& context) : c_(context), exchange_(context) {}

  /// Pairs of channels of a lane's share of the head, at most.
  static constexpr int kLanePairs = kKnown ? (kKnownSizes.width + 63) / 64 : kMostPairs;

  // --- Slots ---------------------------------------------------------------------------------------------------------

  /// Vector `i` of slot `slot` of this block's head. Vectors change places within 8, so that 8 lanes that read the same
  /// vector of 8 slots meet no bank twice.
  __device__ float4* slot_vector(int slot, int i) const {
    return at<float4>(c_.p.plan.work) + slot * (c_.width() / kGroup) + (i ^ (slot % 8));
  }
  __device__ float* ring(int slot) const {
    return bytes_further(c_.op.memory, c_.sequence * c_.op.slot_bytes) + slot * c_.dim() + c_.rank * c_.width();
  }
  __device__ void load_slots() {
    const int vectors = c_.width() / kGroup;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int slot = (thread() + k * kThreads) / vectors;
      const int i = (thread() + k * kThreads) % vectors;
      held_at_[k] = slot < c_.p.slots ? static_cast<int>(slot_vector(slot, i) - slot_vector(0, 0)) : -1;
      held_[k] = slot < c_.p.filled ? __ldcg(reinterpret_cast<const float4*>(ring(slot)) + i) : make_float4(0, 0, 0, 0);
    }
  }
  /// Whether vector `k` of the thread's share is one of slot `slot`.
  __device__ bool holds(int k, int slot) const {
    const auto vectors = static_cast<unsigned>(c_.width() / kGroup);
    return static_cast<unsigned>(held_at_[k]) - static_cast<unsigned>(slot) * vectors < vectors;
  }

  // --- Attention -----------------------------------------------------------------------------------------------------

  /// Attention of a warp's two rows, of the lane's pairs of channels.
  using Attended = Softmax<2 * kLanePairs>;

  /// This block's head of the tile that fetch() has asked for, but for a slot that is yet to be made. The newest slot
  /// comes last. The memory of slots and queries has no other use meanwhile.
  __device__ void attend_kept(const Task& task) {
    const Piece& piece = task.piece;
    if (piece.number >= c_.p.pieces) return;
    auto* q = at<float>(c_.p.plan.hidden);
    const int vectors = c_.width() / kGroup;
    const float scale = c_.p.scale;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      // Clears the slot that the new one replaces, which may hold NaN.
      const bool gone = task.fresh && holds(k, piece.newest);
      if (held_at_[k] >= 0) *(slot_vector(0, 0) + held_at_[k]) = gone ? make_float4(0, 0, 0, 0) : held_[k];
    }
#pragma unroll
    for (int k = 0; k < Context::kQueries; ++k) {
      const int i = thread() + k * kThreads;
      const float4 v = c_.widened(c_.fetched.q[k]);
      if (i < kRows * vectors) {
        *(reinterpret_cast<float4*>(q) + i) = make_float4(v.x * scale, v.y * scale, v.z * scale, v.w * scale);
      }
    }
    __syncthreads();
    attended_[0] = {}, attended_[1] = {};
    if (piece.slots > 0) {
      const int pairs = c_.width() / 2;
      const float* const rows[2] = {q + 2 * warp() * c_.width(), q + (2 * warp() + 1) * c_.width()};
      if (pairs <= 32) {
        attend_all<1>(rows, piece.slots, piece.newest);
      } else {
        attend_all<kLanePairs>(rows, piece.slots, piece.newest);
      }
      float2 newest[kLanePairs] = {};
#pragma unroll
      for (int i = 0; i < kLanePairs; ++i) {
        const int pair = lane() + 32 * i;
        queries_[0][i] = queries_[1][i] = make_float2(0, 0);
        if (pair >= pairs) continue;
        queries_[0][i] = reinterpret_cast<const float2*>(rows[0])[pair];
        queries_[1][i] = reinterpret_cast<const float2*>(rows[1])[pair];
        newest[i] = reinterpret_cast<const float2*>(slot_vector(piece.newest, pair / 2))[pair % 2];
      }
      if (!task.fresh) attend_newest(newest);
    }
    __syncthreads();
  }

  /// The first `slots` slots but `left_out`, a lane a slot for the scores and kPairs pairs of channels for the values.
  template <int kPairs>
  __device__ void attend_all(const float* const (&rows)[2], int slots, int left_out) {
    constexpr int kSlots = 8;  // at once
    for (int first = 0; first < slots; first += 32) {
      const int slot = min(first + lane(), slots - 1);
      float scores[2] = {};
#pragma unroll 8
      for (int i = 0; i < c_.width() / kGroup; ++i) {
        const float4 k = *slot_vector(slot, i);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const float4 v = reinterpret_cast<const float4*>(rows[n])[i];
          scores[n] = __fmaf_rn(v.x, k.x, scores[n]);
          scores[n] = __fmaf_rn(v.y, k.y, scores[n]);
          scores[n] = __fmaf_rn(v.z, k.z, scores[n]);
          scores[n] = __fmaf_rn(v.w, k.w, scores[n]);
        }
      }
      float weights[2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const bool counts = first + lane() < slots && slot != left_out;
        attended_[n].raise(warp_max(counts ? scores[n] : kNothing));
        weights[n] = counts ? weight_of(scores[n], attended_[n].max) : 0.0F;
        attended_[n].sum += warp_sum(weights[n]);
      }
      // The last slot stands in, with weight 0, for those past it; a lane without channels repeats the last ones.
      for (int begin = first; begin < min(slots, first + 32); begin += kSlots) {
#pragma unroll
        for (int j = 0; j < kSlots; ++j) {
          const float weight[2] = {__shfl_sync(0xffffffffU, weights[0], begin - first + j),
                                   __shfl_sync(0xffffffffU, weights[1], begin - first + j)};
#pragma unroll
          for (int i = 0; i < kPairs; ++i) {
            const int pair = min(lane() + 32 * i, c_.width() / 2 - 1);
            const float2 v =
                reinterpret_cast<const float2*>(slot_vector(min(begin + j, slots - 1), pair / 2))[pair % 2];
#pragma unroll
            for (int n = 0; n < 2; ++n) {
              attended_[n].values[2 * i] = __fmaf_rn(weight[n], v.x, attended_[n].values[2 * i]);
              attended_[n].values[2 * i + 1] = __fmaf_rn(weight[n], v.y, attended_[n].values[2 * i + 1]);
            }
          }
        }
      }
    }
  }

  /// The newest slot, of the lane's channels; zeros where it has none.
  __device__ void attend_newest(const float2 (&slot)[kLanePairs]) {
    float scores[2] = {};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < kLanePairs; ++i) {
        scores[n] = __fmaf_rn(queries_[n][i].x, slot[i].x, scores[n]);
        scores[n] = __fmaf_rn(queries_[n][i].y, slot[i].y, scores[n]);
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      scores[n] = warp_sum(scores[n]);
      Attended part;
      part.max = scores[n];
      part.sum = weight_of(scores[n], scores[n]);  // 1, or NaN
#pragma unroll
      for (int i = 0; i < kLanePairs; ++i) {
        part.values[2 * i] = part.sum * slot[i].x;
        part.values[2 * i + 1] = part.sum * slot[i].y;
      }
      merge(attended_[n], part);
    }
  }

  /// Makes the piece's newest slot, in each warp, and attends to it.
  __device__ void attend_made(const Piece& piece, float2 (&slot)[kLanePairs]) {
    auto* gathered = at<double2>(c_.p.plan.work);
    const int pairs = c_.width() / 2;
    const Piece before = c_.piece_of(piece.number - 1);
    const int shift = 31 - __clz(pairs);  // a power of two
    exchange_.gather(before, c_.rank * pairs, pairs, thread() >> shift, thread() & (pairs - 1), gathered);
    __syncthreads();
    const auto segment = static_cast<double>(c_.op.segment);
#pragma unroll
    for (int i = 0; i < kLanePairs; ++i) {
      const int pair = lane() + 32 * i;
      if (pair >= pairs) break;
      const double2 sum = exchange_.total(before, gathered, c_.rank * pairs, pairs, pair);
      const auto mean = [&](double v) {
        return static_cast<float>(c_.p.inverse != 0 ? v * c_.p.inverse : v / segment);
      };
      slot[i] = make_float2(mean(sum.x), mean(sum.y));
    }
    attend_newest(slot);
  }
  /// Keeps it for the block's threads and for later ops.
  __device__ void store_made(const Piece& piece, const float2 (&slot)[kLanePairs]) const {
    const int pairs = c_.width() / 2;
    if (warp() != 0) return;
#pragma unroll
    for (int i = 0; i < kLanePairs; ++i) {
      const int pair = lane() + 32 * i;
      if (pair >= pairs) break;
      at<float2>(c_.p.plan.normed)[pair] = slot[i];
      if (c_.index == 0) reinterpret_cast<float2*>(ring(piece.newest))[pair] = slot[i];
    }
  }
  /// Takes it into the threads' shares, after a barrier.
  __device__ void hold_made(const Piece& piece) {
    const int vectors = c_.width() / kGroup;
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (holds(k, piece.newest))
        held_[k] = *(at<float4>(c_.p.plan.normed) + ((thread() + k * kThreads) & (vectors - 1)));
    }
  }

  /// Gives the team the warp's rows of this block's head. Of neighbouring lanes one takes the first row's four
  /// channels, the other the second's.
  __device__ void share_attended() const {
    const bool odd = lane() % 2 != 0;
    float inverse[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) inverse[n] = attended_[n].sum == 0.0F ? 0.0F : 1.0F / attended_[n].sum;
#pragma unroll
    for (int i = 0; i < kLanePairs; ++i) {
      const int pair = lane() + 32 * i;
      const std::uint32_t low =
          ptx::to_pair<A>(attended_[0].values[2 * i] * inverse[0], attended_[0].values[2 * i + 1] * inverse[0]);
      const std::uint32_t high =
          ptx::to_pair<A>(attended_[1].values[2 * i] * inverse[1], attended_[1].values[2 * i + 1] * inverse[1]);
      const std::uint32_t other = __shfl_xor_sync(0xffffffffU, odd ? low : high, 1);
      if (pair >= c_.width() / 2) continue;
      const int row = 2 * warp() + (odd ? 1 : 0);
      exchange_.give(exchange_.attended_place(row, pair / 2), odd ? make_uint2(other, high) : make_uint2(low, other));
    }
  }

 private:
  const Context& c_;
  BlockExchange<A, kKnown> exchange_;
  float4 held_[kHeld];  // this thread's share of the slots, and where it lies among them in shared memory, or -1
  int held_at_[kHeld];
  Attended attended_[2];           // of the tile at hand, or of the next once it is prepared
  float2 queries_[2][kLanePairs];  // of the warp's rows, the lane's pairs of channels
};

}  // namespace mmrec::kernels::segments
