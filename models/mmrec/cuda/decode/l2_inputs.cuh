// How the input of a stage gets from L2 to the product, of one sequence or several: rounded to A, in the operand buffer
// in shared memory. A warp reads just the steps that it multiplies, so no warp waits for another one.
//
// Or as integers for compact rows: elements are divided by a scale, which makes the largest one 32,512, and rounded. A
// step of 64 has its upper bytes (signed) first, then its lower ones (signed too: value = 256 upper + lower), each in
// the order in which lanes multiply them (kernels/cuda/gemm/compact.h). A sequence's steps of a warp in a chunk of
// compact rows have one scale; so do those of ffn_out's input in two chunks, and those of both networks' hidden units.
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
  static constexpr int kSequences = kOneSequence ? 1 : 4;                // at once: more take too many registers
  // What a lane asks for at once of each sequence, in vectors of fp32 or in pieces of A: what a scale of integers is
  // of.
  static constexpr int kAtOnce = 2;
  static_assert(kAtOnce * kStride * kVector == kCompactChunkGroups * kCompactGroup);

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

  /// h₋₁ of the layer: the first vectors of a lane. Of several sequences they would take too many registers.
  __device__ __forceinline__ void ask_state(int layer) {
    if constexpr (kOneSequence) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) state_[i] = state_vector(layer, 0, first_vector() + i * kStride);
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
    const bool is_pair = kPair && stage.is_pair() && c_.networks() == 2;
    return gather(l2.template input<A>(layer, point) + panel / int{sizeof(A)}, is_pair, width,
                  min(width * int{sizeof(A)} - panel, panel_bytes));
  }

 private:
  /// As in DecodeContext, with this operand's steps.
  __device__ __forceinline__ int first_vector() const {
    constexpr int kVectors = kStep / int{sizeof(A)} / kVector;
    return c_.warp * kVectors + c_.lane / kVectors * kTileWarps * kVectors + c_.lane % kVectors;
  }
  /// The origin of an fp32 operand.
  enum class Source : std::uint8_t { kState, kEmbedding, kExchange };

  __device__ __forceinline__ int batch() const { return kOneSequence ? 1 : static_cast<int>(c_.p.op.shape.batch); }
  __device__ __forceinline__ bool has(int sequence) const { return kOneSequence || sequence < batch(); }
  /// visit(first) for every kSequences sequences.
  template <class Visit>
  __device__ __forceinline__ void for_each_group(Visit visit) const {
    if constexpr (kOneSequence) {
      visit(0);
    } else {
#pragma unroll 1
      for (int first = 0; first < batch(); first += kSequences) visit(first);
    }
  }
  __device__ __forceinline__ float4 state_vector(int layer, int sequence, int vector) const {
    return vector * kVector < c_.dim ? c_.state_vector(layer, sequence, vector) : make_float4(0, 0, 0, 0);
  }

  /// Waits for a lane's pieces of all sequences; from(sequence, i) is where the i-th of a sequence lies, or null.
  /// Places of many are computed again rather than kept.
  template <class T, class From>
  __device__ __forceinline__ static void await_all(uint4 (&to)[kSequences * kAtOnce], From from) {
    if constexpr (kOneSequence) {
      const T* const places[] = {from(0, 0), from(0, 1)};
      static_assert(kAtOnce == 2);
      await<T>(places, to);
    } else {
      await_each<T>(to, [&](int i) { return from(i / kAtOnce, i % kAtOnce); });
    }
  }

  /// Vectors of `bytes` bytes, `stride` elements apart, as they get written. is_pair: each sequence has two, batch()
  /// vectors apart, whose pieces are taken together.
  __device__ __forceinline__ int gather(const A* from, bool is_pair, int stride, int bytes) const {
    constexpr int kLanesOfStep = kStep / kPieceBytes;
    constexpr int kChunk = kConsumers * kPieceBytes;  // that all lanes read at once
    const int pitch = padded_row(bytes);
    const int begin = (c_.lane / kLanesOfStep * kTileWarps + c_.warp) * kStep + c_.lane % kLanesOfStep * kPieceBytes;
    const int next_chunk = is_pair ? 0 : kChunk;  // of the second piece
    const int next_row = is_pair ? batch() : 0;
    for_each_group([&](int group) {
#pragma unroll 1
      for (int at = begin; at - begin < bytes; at += is_pair ? kChunk : kAtOnce * kChunk) {
        const auto place = [&](int i) { return at + i * next_chunk; };
        const auto row = [&](int sequence, int i) { return group + sequence + i * next_row; };
        const auto exists = [&](int sequence, int i) {
          return has(group + sequence) && place(i) < bytes && (i == 0 || next_chunk + next_row > 0);
        };
        uint4 pieces[kSequences * kAtOnce];
        await_all<A>(pieces, [&](int sequence, int i) {
          return exists(sequence, i) ? from + row(sequence, i) * stride + place(i) / int{sizeof(A)} : nullptr;
        });
#pragma unroll
        for (int sequence = 0; sequence < kSequences; ++sequence) {
          if (!has(group + sequence)) break;
          if constexpr (kIntegers) {
            float x[kAtOnce][kPieceBytes / sizeof(A)];
            int to[kAtOnce];
            bool there[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
              const uint4 v = pieces[sequence * kAtOnce + i];
              const std::uint32_t words[] = {v.x, v.y, v.z, v.w};
#pragma unroll
              for (int j = 0; j < 4; ++j) {
                x[i][2 * j] = widen_part<A>(words[j], 0);
                x[i][2 * j + 1] = widen_part<A>(words[j], 1);
              }
              to[i] = row(sequence, i) * pitch + place(i);
              there[i] = exists(sequence, i);
            }
            store_integers(to, x, there);
          } else {
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
              if (exists(sequence, i)) {
                *reinterpret_cast<uint4*>(operand_ + row(sequence, i) * pitch + place(i)) =
                    pieces[sequence * kAtOnce + i];
              }
            }
          }
        }
      }
    });
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
      std::byte* const to = step + inner % 32 / 8 * 16 + inner / 32 * 8 + inner % 8;  // halves of 32, lanes' 8 of each
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
        // Behind this sum a float's lower 16 bits are the nearest integer, plus 128.
        constexpr float kAsInteger = 1.5F * (1 << 23) + 128.0F;
        std::uint32_t v[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) v[j] = __float_as_uint(__fmaf_rn(x[part][i + j], factor, kAsInteger));
        const std::uint32_t first = __byte_perm(v[0], v[1], 0x5140);  // lower bytes of both, then upper ones
        const std::uint32_t second = __byte_perm(v[2], v[3], 0x5140);
        *reinterpret_cast<std::uint32_t*>(to + i) = __byte_perm(first, second, 0x7632);
        *reinterpret_cast<std::uint32_t*>(to + kElements + i) = __byte_perm(first, second, 0x5410) ^ 0x80808080U;
      }
      if (inner == 0) *scales_at(step) = largest * (1.0F / kLargest);
    }
  }

  /// Every sequence's fp32 vector, or if there is a weight rmsnorm of it, rounded: up to the scale, unless that must
  /// come first (DecodeContext::kScalesSums).
  __device__ __forceinline__ int narrowed(const float* weight, Source kind, int layer, const float* from) {
    const int pitch = padded_row(c_.dim * int{sizeof(A)});
    float scale_of_lane = 1.0F;  // lane b has that of sequence b
    if (!Context::kScalesSums && weight != nullptr) {
      for_each_group([&](int group) {
        float sums[kSequences] = {};
        for_each_chunk(nullptr, kind, layer, group, from,
                       [&](int, const auto&, const auto& x) { add_squares(x, sums); });
        put_squares(sums, group);
      });
      barrier();
      if (c_.lane < batch()) scale_of_lane = c_.norm_scale(norm_sums(c_.lane));
    }
    for_each_group([&](int group) {
      float sums[kSequences] = {};
      for_each_chunk(weight, kind, layer, group, from, [&](int vector, const float4(&w)[kAtOnce], const auto& x) {
#pragma unroll
        for (int sequence = 0; sequence < kSequences; ++sequence) {
          if (!has(group + sequence)) break;
          if constexpr (kIntegers) {
            float y[kAtOnce][kVector];
            int to[kAtOnce];
            bool there[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
              const int at = vector + i * kStride;
              const float4 v = x[sequence][i];
              y[i][0] = w[i].x * v.x;
              y[i][1] = w[i].y * v.y;
              y[i][2] = w[i].z * v.z;
              y[i][3] = w[i].w * v.w;
              to[i] = (group + sequence) * pitch + at * kVector * int{sizeof(A)};
              there[i] = at * kVector < c_.dim;
            }
            store_integers(to, y, there);
          } else {
            const float scale = Context::kScalesSums ? 1.0F : __shfl_sync(0xffffffffU, scale_of_lane, group + sequence);
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
              const int at = vector + i * kStride;
              if (at * kVector < c_.dim)
                c_.store_vector(operand_ + (group + sequence) * pitch, at, w[i], scale, x[sequence][i]);
            }
          }
        }
        if (Context::kScalesSums && weight != nullptr) add_squares(x, sums);
      });
      if (Context::kScalesSums && weight != nullptr) {
        if constexpr (kOneSequence) {
          squares_ = sums[0];
        } else {
          put_squares(sums, group);
        }
      }
    });
    __syncwarp();
    return pitch;
  }
  /// visit(number of a lane's first vector, their norm weights, [sequence][vector]) for all of a lane's vectors,
  /// kAtOnce of each sequence at a time; zeros where it has none.
  template <class Visit>
  __device__ __forceinline__ void for_each_chunk(const float* weight, Source kind, int layer, int group,
                                                 const float* from, Visit visit) const {
    const int first = first_vector();
    float4 w[kAtOnce];
    const auto ask_weights = [&](int vector) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) w[i] = c_.norm_weight(weight, vector + i * kStride);
    };
    ask_weights(first);  // in the loop the compiler would do it behind the wait
#pragma unroll 1
    for (int begin = 0; begin * kVector < c_.dim; begin += kAtOnce * kStride) {
      const int vector = first + begin;
      float4 x[kSequences][kAtOnce];
      if (kind == Source::kExchange) {
        uint4 pieces[kSequences * kAtOnce];
        await_all<float>(pieces, [&](int sequence, int i) {
          const int at = (vector + i * kStride) * kVector;
          return has(group + sequence) && at < c_.dim ? from + (group + sequence) * c_.dim + at : nullptr;
        });
#pragma unroll
        for (int i = 0; i < kSequences * kAtOnce; ++i) x[i / kAtOnce][i % kAtOnce] = as_floats(pieces[i]);
      } else {
#pragma unroll
        for (int sequence = 0; sequence < kSequences; ++sequence) {
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            const int at = vector + i * kStride;
            float4& to = x[sequence][i];
            to = make_float4(0, 0, 0, 0);
            if (!has(group + sequence) || at * kVector >= c_.dim) continue;
            if (kind == Source::kEmbedding) {
              to = c_.embedding_vector(group + sequence, at);
            } else if (kOneSequence && begin == 0) {
              to = state_[i];
            } else {
              to = c_.state_vector(layer, group + sequence, at);
            }
          }
        }
      }
      visit(vector, w, x);
      ask_weights(vector + kAtOnce * kStride);
    }
  }
  __device__ __forceinline__ static void add_squares(const float4 (&x)[kSequences][kAtOnce],
                                                     float (&sums)[kSequences]) {
#pragma unroll
    for (int sequence = 0; sequence < kSequences; ++sequence) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) sums[sequence] += squares(x[sequence][i]);  // of 0 where the lane has none
    }
  }
  __device__ __forceinline__ void put_squares(float (&sums)[kSequences], int group) const {
    sum_each(sums);
#pragma unroll
    for (int sequence = 0; sequence < kSequences; ++sequence) {
      if (c_.lane == 0 && has(group + sequence)) norm_sums(group + sequence)[c_.warp] = sums[sequence];
    }
  }

  const Context& c_;
  std::byte* operand_;
  float* norm_sums_;
  int turn_ = 0;
  float squares_ = 0.0F;
  float4 state_[kAtOnce];
};

}  // namespace mmrec::kernels
