// How the input of a stage gets from L2 to the product, of one sequence or several: rounded to A, in the operand buffer
// in shared memory. A warp reads just the steps that it multiplies, so no warp waits for another one.
//
// Or as integers for compact rows: elements are divided by a scale, which makes the largest one 32,512, and rounded. A
// step of 64 has its upper bytes (signed) first, then its lower ones (signed too: value = 256 upper + lower). All steps
// of a warp in a chunk of compact rows have one scale.
#pragma once

#include <climits>

#include "models/mmrec/cuda/decode/through_l2.cuh"

namespace mmrec::kernels {

template <class A, bool kOneSequence, bool kIntegers = false>
class L2Inputs {
  using Context = DecodeContext<A>;
  static constexpr int kVector = Context::kVector;
  static constexpr int kStride = Context::kStride;
  static constexpr int kStep = kIntegers ? 2 * kStepBytes : kStepBytes;  // bytes
  static constexpr int kRounds = kOneSequence ? 2 : 4;                   // fp32 vectors of a lane at once
  static constexpr int kAhead = kOneSequence ? 2 : 8;                    // the same of pieces of A

 public:
  __device__ __forceinline__ explicit L2Inputs(const Context& context)
      : c_(context),
        operand_(context.shared + context.p.plan.operand),
        norm_sums_(reinterpret_cast<float*>(context.shared + context.p.plan.norm_sums)) {}

  __device__ __forceinline__ std::byte* operand() const { return operand_; }
  /// Of integers: the scales of the operand's steps from `step` on.
  __device__ __forceinline__ float* scales_at(const std::byte* step) const {
    return reinterpret_cast<float*>(c_.shared + c_.p.plan.operand_scales) + (step - operand_) / kStepBytes;
  }
  /// The warps' sums of squares of the normalised input. Those of one stage and of the next have memory of their own
  /// where there is one sequence, whose warps meet once per stage.
  __device__ __forceinline__ float* norm_sums(int sequence) const {
    return norm_sums_ + (kOneSequence ? turn_ : sequence) * kTileWarps;
  }
  __device__ __forceinline__ void turn() { turn_ ^= 1; }
  /// Of one sequence: a lane's part of the sum of squares, which is yet to be added up over the warp.
  __device__ __forceinline__ float squares_of_lane() const { return squares_; }

  /// h₋₁ of the layer: the first vectors of a lane.
  __device__ __forceinline__ void ask_state(int layer) {
    Position at = {};
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      state_[i] = exists(at) ? state_vector(layer, at) : make_float4(0, 0, 0, 0);
      next(at);
    }
  }

  /// Writes the stage's input, vectors side by side, and returns how many bytes they are apart; of what is A already,
  /// panel_bytes bytes of each from byte `panel` on. kPair: whether there may be two vectors of a sequence.
  template <bool kPair>
  __device__ __forceinline__ int read(const ThroughL2<A, kOneSequence>& l2, const StageInfo& stage, int layer,
                                      int panel = 0, int panel_bytes = INT_MAX) {
    const Point point = stage.input;
    if (point == Point::kCount) return narrowed(nullptr, Source::kState, layer, nullptr);
    if (stage.is_normalised()) {
      const Source kind = layer == 0 && stage.input == Point::kOutput ? Source::kEmbedding : Source::kExchange;
      return narrowed(c_.norm(point, layer), kind, layer, l2.template input<float>(layer, point));
    }
    const int width = c_.width(point);
    return gather<kPair>(l2.template input<A>(layer, point) + panel / int{sizeof(A)},
                         kPair && stage.is_pair() ? c_.networks() * batch() : batch(), width,
                         min(width * int{sizeof(A)} - panel, panel_bytes));
  }

 private:
  /// As in DecodeContext, with this operand's steps.
  __device__ __forceinline__ int first_vector() const {
    constexpr int kVectors = kStep / int{sizeof(A)} / kVector;
    return c_.warp * kVectors + c_.lane / kVectors * kTileWarps * kVectors + c_.lane % kVectors;
  }
  /// Where a lane is among its vectors of all sequences.
  struct Position {
    int sequence, round;
    __device__ __forceinline__ int vector(int first) const { return round * kStride + first; }
  };
  /// The origin of an fp32 operand.
  enum class Source : std::uint8_t { kState, kEmbedding, kExchange };

  __device__ __forceinline__ int batch() const { return kOneSequence ? 1 : static_cast<int>(c_.p.op.shape.batch); }
  /// Of any lane.
  __device__ __forceinline__ bool has_round(const Position& at) const {
    return at.round * kStride * kVector < c_.dim && (kOneSequence || at.sequence < batch());
  }
  __device__ __forceinline__ bool exists(const Position& at) const {
    return (kOneSequence || at.sequence < batch()) && at.vector(first_vector()) * kVector < c_.dim;
  }
  __device__ __forceinline__ bool ends_sequence(const Position& at) const {
    return (at.round + 1) * kStride * kVector >= c_.dim && at.sequence < batch();
  }
  __device__ __forceinline__ void next(Position& at) const {
    ++at.round;
    if (kOneSequence || at.round * kStride * kVector < c_.dim) return;
    at.round = 0;
    ++at.sequence;
  }
  __device__ __forceinline__ float4 state_vector(int layer, const Position& at) const {
    return c_.state_vector(layer, at.sequence, at.vector(first_vector()));
  }

  /// `rows` vectors of `bytes` bytes, `stride` elements apart, as they get written; one, or a pair where there is one
  /// sequence. A lane reads a piece of a step.
  template <bool kPair>
  __device__ __forceinline__ int gather(const A* from, int rows, int stride, int bytes) const {
    const int pitch = padded_row(bytes);
    constexpr int kLanesOfStep = kStep / kPieceBytes;
    const int piece = c_.lane % kLanesOfStep * kPieceBytes;
    const int mine = ((bytes + kStep - 1) / kStep - c_.warp + kTileWarps - 1) / kTileWarps;  // steps of a row
    const int all = rows * mine;
    constexpr int kBits = 26;  // all * mine is less than 2^26: then this division is exact
    const int reciprocal = kOneSequence ? 0 : (1 << kBits) / max(mine, 1) + 1;
#pragma unroll 1
    for (int begin = 0; begin < all; begin += kAhead * 32 / kLanesOfStep) {
      const A* source[kAhead];
      int to[kAhead];
      uint4 value[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        source[i] = nullptr;
        to[i] = 0;
        const int first = begin + i * 32 / kLanesOfStep;
        if (first >= all) continue;
        const int step = first + c_.lane / kLanesOfStep;  // of all rows'
        const int row = !kOneSequence ? (step * reciprocal) >> kBits : kPair && step >= mine ? 1 : 0;
        const int at = ((step - row * mine) * kTileWarps + c_.warp) * kStep + piece;
        to[i] = row * pitch + at;
        if (step < all && at < bytes) source[i] = from + row * stride + at / int{sizeof(A)};
      }
      await<A>(source, value);
      if constexpr (kIntegers) {
        float x[kAhead][kPieceBytes / sizeof(A)];
        bool exists[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const std::uint32_t words[] = {value[i].x, value[i].y, value[i].z, value[i].w};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            x[i][2 * j] = widen_part<A>(words[j], 0);
            x[i][2 * j + 1] = widen_part<A>(words[j], 1);
          }
          exists[i] = source[i] != nullptr;
        }
        store_integers(to, x, exists);
      } else {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          if (source[i] != nullptr) *reinterpret_cast<uint4*>(operand_ + to[i]) = value[i];
        }
      }
    }
    __syncwarp();
    return pitch;
  }

  /// Writes elements of the warp's steps, with one scale: x[i] where they would lie at byte at[i] of the operand, if
  /// exists[i], which is so for whole steps. By all lanes.
  template <int kParts, int kCount>
  __device__ __forceinline__ void store_integers(const int (&at)[kParts], const float (&x)[kParts][kCount],
                                                 const bool (&exists)[kParts]) const {
    constexpr int kElements = kStep / int{sizeof(A)};
    const int inner = c_.lane % (kElements / kCount) * kCount;  // the first in its step
    constexpr float kLargest = 32512.0F;                        // 127 * 256
    std::uint32_t most = 0;                                     // of bits, so that a NaN is more than all numbers
#pragma unroll
    for (const auto& part : x) {
#pragma unroll
      for (const float v : part) most = max(most, __float_as_uint(fabsf(v)));
    }
    const float largest = __uint_as_float(ptx::warp_max(most));
    constexpr float kLeast = 1e-30F;  // less is 0
    const float factor = largest < kLeast ? 0.0F : __fdividef(kLargest, largest);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (!exists[part]) continue;
      std::byte* const step = operand_ + at[part] - inner * int{sizeof(A)};
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
        std::uint32_t high = 0;
        std::uint32_t low = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const auto v = static_cast<std::uint32_t>(__float2int_rn(x[part][i + j] * factor) + 128);
          high |= (v >> 8 & 0xffU) << (8 * j);
          low |= ((v & 0xffU) ^ 0x80U) << (8 * j);
        }
        *reinterpret_cast<std::uint32_t*>(step + inner + i) = high;
        *reinterpret_cast<std::uint32_t*>(step + kElements + inner + i) = low;
      }
      if (inner == 0) *scales_at(step) = largest * (1.0F / kLargest);
    }
  }

  /// Every sequence's fp32 vector, or if there is a weight rmsnorm of it, rounded: up to the scale, unless that must
  /// come first (DecodeContext::kScalesSums).
  __device__ __forceinline__ int narrowed(const float* weight, Source kind, int layer, const float* from) {
    const int pitch = padded_row(c_.dim * int{sizeof(A)});
    const int first = first_vector();
    float scale_of_lane = 1.0F;  // lane b has that of sequence b
    float squares_sum = 0.0F;
    if (!Context::kScalesSums && weight != nullptr) {
      for_each_round(kind, layer, from,
                     [&](const Position(&of)[kRounds], const float4(&x)[kRounds]) { add_squares(of, x, squares_sum); });
      if constexpr (kOneSequence) put_squares(squares_sum);
      barrier();
      if (kOneSequence || c_.lane < batch()) scale_of_lane = c_.norm_scale(norm_sums(c_.lane));
    }
    float4 held[kRounds];  // weights of the first rounds
#pragma unroll
    for (int i = 0; i < kRounds; ++i) held[i] = c_.norm_weight(weight, first + i * kStride);
    for_each_round(kind, layer, from, [&](const Position(&of)[kRounds], const float4(&x)[kRounds]) {
      const auto weight_at = [&](const Position& at) {
        float4 w = held[0];
#pragma unroll
        for (int j = 1; j < kRounds; ++j) {
          const float4 v = held[j];
          const bool is_its = at.round == j;
          w = make_float4(is_its ? v.x : w.x, is_its ? v.y : w.y, is_its ? v.z : w.z, is_its ? v.w : w.w);
        }
        return at.round >= kRounds ? c_.norm_weight(weight, at.vector(first)) : w;
      };
      if constexpr (kIntegers) {
        float y[kRounds][kVector];
        int to[kRounds];
        bool there[kRounds];
#pragma unroll
        for (int i = 0; i < kRounds; ++i) {
          const float4 w = weight_at(of[i]);
          y[i][0] = w.x * x[i].x;
          y[i][1] = w.y * x[i].y;
          y[i][2] = w.z * x[i].z;
          y[i][3] = w.w * x[i].w;
          to[i] = of[i].vector(first) * kVector * int{sizeof(A)};
          there[i] = exists(of[i]);
        }
        store_integers(to, y, there);
      } else {
#pragma unroll
        for (int i = 0; i < kRounds; ++i) {
          const Position& at = of[i];
          const float scale = Context::kScalesSums || kOneSequence
                                  ? scale_of_lane
                                  : __shfl_sync(0xffffffffU, scale_of_lane, at.sequence % 32);
          if (!exists(at)) continue;
          c_.store_vector(operand_ + at.sequence * pitch, at.vector(first), weight_at(at), scale, x[i]);
        }
      }
      if (Context::kScalesSums && weight != nullptr) add_squares(of, x, squares_sum);
    });
    squares_ = squares_sum;
    __syncwarp();
    return pitch;
  }
  /// visit(positions, vectors) for all of a lane's vectors, some at once; zeros where it has none in a round.
  template <class Visit>
  __device__ __forceinline__ void for_each_round(Source kind, int layer, const float* from, Visit visit) const {
    const int first = first_vector();
    Position at = {};
#pragma unroll 1
    for (bool begins = true; has_round(at); begins = false) {
      const float* source[kRounds];
      Position of[kRounds];
      uint4 read[kRounds];
      float4 x[kRounds];
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        of[i] = at;
        source[i] = exists(at) ? from + std::int64_t{at.sequence} * c_.dim + at.vector(first) * kVector : nullptr;
        next(at);
      }
      if (kind == Source::kExchange) await<float>(source, read);
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        if (kind == Source::kExchange) {
          x[i] = as_floats(read[i]);
        } else if (!exists(of[i])) {
          x[i] = make_float4(0, 0, 0, 0);
        } else if (kind == Source::kEmbedding) {
          x[i] = c_.embedding_vector(of[i].sequence, of[i].vector(first));
        } else {
          x[i] = state_[i];
          if (!begins) x[i] = state_vector(layer, of[i]);
        }
      }
      visit(of, x);
    }
  }
  /// Of several sequences, as soon as one's are complete they are added up over the warp, several at once.
  __device__ __forceinline__ void add_squares(const Position (&of)[kRounds], const float4 (&x)[kRounds],
                                              float& sum) const {
    float sums[kRounds];
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      if (kOneSequence && i > 0 && !has_round(of[i])) break;
      sum += squares(x[i]);  // x is 0 where the lane has none
      sums[i] = sum;
      if (!kOneSequence && ends_sequence(of[i])) sum = 0.0F;
    }
    if constexpr (!kOneSequence) {
      sum_each(sums);
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        if (c_.lane == 0 && ends_sequence(of[i])) norm_sums(of[i].sequence)[c_.warp] = sums[i];
      }
    }
  }
  __device__ __forceinline__ void put_squares(float sum) const {
    float sums[1] = {sum};
    sum_each(sums);
    if (c_.lane == 0) norm_sums(0)[c_.warp] = sums[0];
  }

  const Context& c_;
  std::byte* operand_;
  float* norm_sums_;
  int turn_ = 0;
  float squares_ = 0.0F;
  float4 state_[kRounds];
};

}  // namespace mmrec::kernels
