// The multiplying warps of a decode step of one sequence: the stages of step.cu, from inputs to epilogues.
//
// There is little to multiply, so a stage takes as long as its chain of dependent instructions. Everything that does
// not need the input comes before the wait for it: what the epilogue reads from memory, addresses, and the first two
// slots of weights, which lie in registers when the input comes. Every stage has code of its own, in which its shape is
// known. A warp reads the steps of the input that it multiplies, and no others, so that warps meet once per stage,
// before their sums are added up; sums of a stage and of the next one have memory of their own.
#pragma once

#include "models/mmrec/cuda/decode/attention.cuh"
#include "models/mmrec/cuda/decode/single_product.cuh"

namespace mmrec::kernels {

template <class A>
class SingleBlock {
  using Context = DecodeContext<A>;
  using Weights = typename SingleProduct<A>::Weights;
  static constexpr int kVector = Context::kVector;
  static constexpr int kStride = Context::kStride;

 public:
  static constexpr bool kIsCluster = false;
  using Ring = L2Ring;
  using Stream = WarpStream;

  __device__ __forceinline__ SingleBlock(DecodeContext<A>& context, Ring ring, std::uint32_t turn)
      : c_(context), l2_(context, turn), product_(context, ring), operand_(context.shared + context.p.plan.operand) {}

  __device__ __forceinline__ void run() {
    const auto layers = static_cast<int>(c_.p.op.shape.layers);
    ask_state(0);
    l2_.clear_other_set();
    l2_.embed();
#pragma unroll 1
    for (int layer = 0; layer < layers; ++layer) {
      run_stage<Stage::kGate>(layer);
      run_stage<Stage::kProject>(layer);
      run_stage<Stage::kHide>(layer);
      run_stage<Stage::kAdvance>(layer);
      if (c_.p.op.slots > 1) {
        run_stage<Stage::kQuery>(layer);
        attend_heads(c_, l2_, layer, reinterpret_cast<float*>(operand_));
        run_stage<Stage::kRecall>(layer);
      }
      run_stage<Stage::kWiden>(layer);
      if (layer + 1 < layers) ask_state(layer + 1);
      run_stage<Stage::kNarrow>(layer);
    }
    run_stage<Stage::kPredict>(layers);
  }

 private:
  static constexpr int kHeldSlots = kMostTiles;
  static constexpr int kRounds = 2;   // fp32 vectors of a lane at once
  static constexpr int kGathers = 2;  // the same of pieces of A

  // --- Inputs --------------------------------------------------------------------------------------------------------

  /// h₋₁ of the layer: the first vectors of a lane.
  __device__ __forceinline__ void ask_state(int layer) {
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int vector = c_.first_vector() + i * kStride;
      state_[i] = vector * kVector < c_.dim ? c_.state_vector(layer, 0, vector) : make_float4(0, 0, 0, 0);
    }
  }
  /// Writes the stage's input, rounded to A, into the operand buffer, each warp its steps; two vectors `pitch` apart.
  template <Stage kStage>
  __device__ __forceinline__ void read_input(int layer, int pitch) {
    constexpr Point kInput = stage_info(kStage).input;
    if constexpr (kStage == Stage::kGate) {
      const float4 ones = make_float4(1, 1, 1, 1);
#pragma unroll 1
      for (int begin = c_.first_vector(), round = 0; (begin - c_.first_vector()) * kVector < c_.dim;
           begin += kRounds * kStride) {
#pragma unroll
        for (int i = 0; i < kRounds; ++i) {
          const int vector = begin + i * kStride;
          if (vector * kVector >= c_.dim) continue;
          const float4 x = round == 0 ? state_[i] : c_.state_vector(layer, 0, vector);
          c_.store_vector(operand_, vector, ones, 1.0F, x);
        }
        ++round;
      }
    } else if constexpr (is_normalised(kStage)) {
      const float* from = l2_.template input<float>(layer, kInput);
      const bool embeds = kStage == Stage::kProject && layer == 0;
      float scale = 1.0F;
      if constexpr (!Context::kScalesSums) {
        sum_squares(from, embeds);
        barrier();
        scale = c_.norm_scale(norm_sums());
      }
      float4 held[kRounds];  // weights of the first rounds
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        held[i] = c_.norm_weight(c_.norm(kInput, layer), c_.first_vector() + i * kStride);
      }
      float squares_sum = 0.0F;
      for_each_vector(from, embeds, [&](int vector, int round, float4 x) {
        squares_sum += squares(x);
        if (vector * kVector >= c_.dim) return;
        const float4 w =
            round < kRounds ? (round == 0 ? held[0] : held[1]) : c_.norm_weight(c_.norm(kInput, layer), vector);
        c_.store_vector(operand_, vector, w, scale, x);
      });
      squares_ = squares_sum;
    } else {
      gather<is_pair(kStage)>(l2_.template input<A>(layer, kInput), c_.width(kInput), pitch);
    }
    __syncwarp();
  }
  /// Vectors of A as they get written.
  template <bool kPair>
  __device__ __forceinline__ void gather(const A* from, int width, int pitch) const {
    constexpr int kRound = 32 * kTileWarps * kPieceBytes;
    const int bytes = width * int{sizeof(A)};
    const bool two = kPair && c_.networks() == 2;
    int at = (c_.lane / 4 * kTileWarps + c_.warp) * kStepBytes + c_.lane % 4 * kPieceBytes;
#pragma unroll 1
    for (int begin = 0; begin < bytes; begin += kPair ? kRound : kGathers * kRound) {
      const A* source[kGathers];
      uint4 value[kGathers];
      source[0] = at < bytes ? from + at / int{sizeof(A)} : nullptr;
      if constexpr (kPair) {
        source[1] = two && at < bytes ? source[0] + width : nullptr;
      } else {
        source[1] = at + kRound < bytes ? source[0] + kRound / int{sizeof(A)} : nullptr;
      }
      await<A>(source, value);
#pragma unroll
      for (int i = 0; i < kGathers; ++i) {
        if (source[i] != nullptr) *reinterpret_cast<uint4*>(operand_ + at + i * (kPair ? pitch : kRound)) = value[i];
      }
      at += kPair ? kRound : kGathers * kRound;
    }
  }
  /// visit(number, round, vector) for a lane's vectors of x, and zeros where it has none in a round.
  template <class Visit>
  __device__ __forceinline__ void for_each_vector(const float* from, bool embeds, Visit visit) const {
    static_assert(kRounds == 2);
    const int first = c_.first_vector();
    const auto exists = [&](int vector) { return vector * kVector < c_.dim; };
#pragma unroll 1
    for (int begin = 0; begin * kStride * kVector < c_.dim; begin += kRounds) {
      const int even = first + begin * kStride;
      const int odd = even + kStride;
      const bool has_odd = (begin + 1) * kStride * kVector < c_.dim;  // any lane
      if (embeds) {
        visit(even, begin, exists(even) ? c_.embedding_vector(0, even) : make_float4(0, 0, 0, 0));
        visit(odd, begin + 1, exists(odd) ? c_.embedding_vector(0, odd) : make_float4(0, 0, 0, 0));
      } else if (has_odd) {
        const float* const source[kRounds] = {exists(even) ? from + even * kVector : nullptr,
                                              exists(odd) ? from + odd * kVector : nullptr};
        uint4 read[kRounds];
        await<float>(source, read);
        visit(even, begin, as_floats(read[0]));
        visit(odd, begin + 1, as_floats(read[1]));
      } else {
        const float* const source[1] = {exists(even) ? from + even * kVector : nullptr};
        uint4 read[1];
        await<float>(source, read);
        visit(even, begin, as_floats(read[0]));
      }
    }
  }
  __device__ __forceinline__ void sum_squares(const float* from, bool embeds) {
    float sum[1] = {};
    for_each_vector(from, embeds, [&](int, int, float4 x) { sum[0] += squares(x); });
    sum_each(sum);
    if (c_.lane == 0) norm_sums()[c_.warp] = sum[0];
  }

  // --- A stage -------------------------------------------------------------------------------------------------------

  /// Sums of squares of one stage and of the next have memory of their own, too.
  __device__ __forceinline__ float* norm_sums() const {
    return reinterpret_cast<float*>(c_.shared + c_.p.plan.norm_sums) + turn_of_norms_ * kTileWarps;
  }
  template <Stage kStage>
  __device__ __forceinline__ void finish(int layer, const L2Output& out) {
    const float scale = Context::kScalesSums && is_normalised(kStage) ? c_.norm_scale(norm_sums()) : 1.0F;
    const float y = __fmaf_rn(product_.sum(out.summed), scale, out.bias);
    float context = 0.0F;  // the second network's rows come next
    if (kStage == Stage::kAdvance && c_.networks() == 2) {
      context = product_.sum(out.summed + c_.channels.count) + out.context_bias;
    }
    epilogue<kStage>(l2_, layer, out, y, context);
  }

  template <Stage kStage>
  __device__ __forceinline__ void run_stage(int layer) {
    constexpr int kTiles = tiles_at_once(stage_info(kStage).first);
    constexpr int kSteps = SingleProduct<A>::kSteps;
    constexpr int kParts = kHeldSlots / kTiles;  // of k, at once
    const int vectors = is_pair(kStage) ? c_.networks() : 1;
    const int slot_bytes = c_.p.plan.slot_row_bytes;
    const int all = c_.template rows<kStage>();
    if (all == 0) return;
    c_.forget_lane();
    // Rows that are multiplied by the first of two vectors; the others are by the second.
    const int split = c_.channels.count + (kStage == Stage::kHide ? c_.hidden.count : 0);
    const ProductShape& shape = c_.template shape_of<kStage>();
    const int pitch = padded_row(shape.row_bytes);
    const int pass = has_passes(kStage) ? c_.p.plan.sums_rows : all;
#pragma unroll 1
    for (int first = 0; first < all; first += pass) {
      const int count = min(pass, all - first);
      L2Output out = {};
#pragma unroll 1
      for (int row = 0; row < count; row += kTiles * kSingleRows) {
        const int tiles = min(kTiles, (count - row + kSingleRows - 1) / kSingleRows);
        TileSums sums[kTiles];
#pragma unroll 1
        for (int k = 0; k < shape.row_bytes; k += kParts * slot_bytes) {
          Weights held[kParts][kTiles];
          const auto steps = [&](int part) {
            return static_cast<int>(static_cast<unsigned>(min(slot_bytes, shape.row_bytes - k - part * slot_bytes)) /
                                    kStepBytes);
          };
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            if (part > 0 && k + part * slot_bytes >= shape.row_bytes) break;
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
              if (t == 0 || t < tiles)
                product_.take(held[part][t], min(kSingleRows, count - row - t * kSingleRows), steps(part));
            }
          }
          const bool begins = first + row + k == 0;
          if (row + k == 0) out = l2_.template output<kStage>(layer, c_.thread(), first, count);
          if (begins) read_input<kStage>(layer, pitch);
          // Squares are summed up over the warp between the steps of the product.
          constexpr bool kSumsSquares = Context::kScalesSums && is_normalised(kStage);
          static_assert(!kSumsSquares || (kParts == 1 && kSteps == 4));
          float squares = squares_;
          if constexpr (kSumsSquares) squares += __shfl_xor_sync(0xffffffffU, squares, 16);
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            if (part > 0 && k + part * slot_bytes >= shape.row_bytes) break;
            product_.multiply(sums, held[part], tiles, steps(part), operand_ + k + part * slot_bytes, pitch, vectors,
                              [&](int i) {
                                if constexpr (kSumsSquares) squares += __shfl_xor_sync(0xffffffffU, squares, 8 >> i);
                              });
          }
          if (kSumsSquares && begins && c_.lane == 0) norm_sums()[c_.warp] = squares;
        }
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          if (t < tiles) product_.template store_tile<is_pair(kStage)>(sums[t], row + t * kSingleRows, split);
        }
      }
      barrier();
      if (out.exists) finish<kStage>(layer, out);
      const int last = l2_.template outputs<kStage>(count);
#pragma unroll 1
      for (int i = c_.thread() + kConsumers; i < last; i += kConsumers) {
        const L2Output other = l2_.template output<kStage>(layer, i, first, count);
        if (other.exists) finish<kStage>(layer, other);
      }
      product_.turn();
    }
    if (is_normalised(kStage)) turn_of_norms_ ^= 1;
  }

  Context& c_;
  ThroughL2<A, true> l2_;
  SingleProduct<A> product_;
  std::byte* operand_;
  int turn_of_norms_ = 0;
  float squares_ = 0.0F;  // of a lane's part of the input
  float4 state_[kRounds];
};

}  // namespace mmrec::kernels
