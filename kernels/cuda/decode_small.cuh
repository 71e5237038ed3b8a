// The multiplying warps of a decode step of one sequence of a model so small that no block has more than one round of
// anything to do in a stage (is_small in decode_plan.cuh): a block's rows are one or two tiles, rows fit a slot, a lane
// has one piece of a vector. The stages are those of decode_single.cuh, to the bit, without their loops.
//
// Such a stage is nothing but latency, and a vector is on its way for as long as the preparations of the stage that
// wants it take. So a stage asks for its input as soon as its weights are in registers and looks at what came after the
// rest of its preparations; only then, if it came too early, does it ask again. The vector x of the layer below is
// asked for by stage `gate`, which has no use for it.
#pragma once

#include "kernels/cuda/decode_single.cuh"

namespace mmrec::kernels {

template <class A>
class SmallBlock : private SingleBlock<A> {
  static_assert(sizeof(A) == 2 && DecodeBase<A>::kScalesSums);
  using Base = SingleBlock<A>;
  using Base::ask_state, Base::barrier, Base::first_vector, Base::is_normalised, Base::is_pair, Base::lane_,
      Base::networks, Base::norm_sums, Base::state_, Base::sums, Base::thread, Base::turn_of_norms_,
      Base::turn_of_sums_, Base::kVector, Base::dim_, Base::operand_, Base::p_, Base::ring_, Base::warp_;
  using typename Base::Output;

 public:
  using Base::Base;

  __device__ __forceinline__ void run() {
    const auto layers = static_cast<int>(p_.op.shape.layers);
    ask_state(0);
    this->clear_other_set();
    this->embed(1);
#pragma unroll 1
    for (int layer = 0; layer < layers; ++layer) {
      run_stage<Stage::kGate>(layer);
      run_stage<Stage::kProject>(layer);
      run_stage<Stage::kHide>(layer);
      run_stage<Stage::kAdvance>(layer);
      if (p_.op.slots > 1) {
        run_stage<Stage::kQuery>(layer);
        attend(layer);
        run_stage<Stage::kRecall>(layer);
      }
      run_stage<Stage::kWiden>(layer);
      if (layer + 1 < layers) ask_state(layer + 1);
      run_stage<Stage::kNarrow>(layer);
    }
    run_stage<Stage::kPredict>(layers);
  }

 private:
  static constexpr bool kAsksEarly = true;  // false: when everything else is prepared

  // --- Inputs --------------------------------------------------------------------------------------------------------

  /// A lane's pieces of a stage's input, and where they come from: null where it has none, or has it already.
  template <class T, int kCount>
  struct Asked {
    const T* from[kCount];
    uint4 value[kCount];
  };
  template <Stage kStage>
  using Input = Asked<std::conditional_t<is_normalised(kStage), float, A>, is_pair(kStage) ? 2 : 1>;

  static constexpr Point point_of(Stage stage) {
    switch (stage) {
      case Stage::kHide:
        return Point::kProjected;
      case Stage::kAdvance:
        return Point::kHidden;
      case Stage::kQuery:
        return Point::kState;
      case Stage::kRecall:
        return Point::kAttended;
      case Stage::kWiden:
        return Point::kMixed;
      case Stage::kNarrow:
        return Point::kFfn;
      default:
        return Point::kOutput;  // of the layer below
    }
  }
  /// Where a lane's piece of a vector of A lies, in bytes.
  __device__ __forceinline__ int piece() const {
    return ((lane_ >> 2) * kTileWarps + warp_) * kStepBytes + (lane_ & 3) * kPieceBytes;
  }
  template <class T, int kCount>
  __device__ __forceinline__ static void load(Asked<T, kCount>& asked) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (asked.from[i] != nullptr) asked.value[i] = load_shared_by_blocks(asked.from[i]);
    }
  }
  template <class T, int kCount>
  __device__ __forceinline__ static bool came(const Asked<T, kCount>& asked) {
    bool written = true;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      written = written && (asked.from[i] == nullptr || is_written<T>(asked.value[i]));
    }
    return written;
  }
  /// Where its input comes from, and what is there now.
  template <Stage kStage>
  __device__ __forceinline__ Input<kStage> ask(int layer) const {
    Input<kStage> asked = {};
    if constexpr (is_normalised(kStage)) {
      const int vector = first_vector();
      if (vector * kVector >= dim_) return asked;
      if (kStage == Stage::kProject && layer == 0) {
        const float4 x = this->embedding_vector(0, vector);
        asked.value[0] =
            make_uint4(__float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z), __float_as_uint(x.w));
        return asked;
      }
      const int of = kStage == Stage::kWiden ? layer : layer - 1;
      asked.from[0] = Base::template vectors<float>(of, point_of(kStage)) + vector * kVector;
    } else {
      const int at = piece();
      const int bytes = Base::template shape_of<kStage>().row_bytes;
      if (at >= bytes) return asked;
      asked.from[0] = Base::template vectors<A>(layer, point_of(kStage)) + at / int{sizeof(A)};
      if constexpr (is_pair(kStage)) {
        if (!p_.op.shape.dpg) asked.from[1] = asked.from[0] + bytes / int{sizeof(A)};
      }
    }
    load(asked);
    return asked;
  }
  /// Writes a stage's input, once it is written, into the operand buffer, each warp its steps; two vectors `pitch`
  /// apart. Returns the squares of what the lane wrote, of a vector that is normalised.
  template <Stage kStage>
  __device__ __forceinline__ float settle(int layer, Input<kStage> input, int pitch) const {
    float squares = 0.0F;
    float4 weight;
    if constexpr (is_normalised(kStage)) weight = this->norm_weight(Base::template norm<kStage>(layer), first_vector());
    if constexpr (!kAsksEarly) input = ask<kStage>(layer);
    while (!came(input)) {
      ptx::spin_briefly();
      load(input);
    }
    if constexpr (is_normalised(kStage)) {
      const float4 x = Base::as_floats(input.value[0]);
      squares = Base::squares(x);
      const int at = first_vector() * kVector;
      if (at < dim_) this->store_vector(operand_ + at * int{sizeof(A)}, weight, 1.0F, x);
    } else if (input.from[0] != nullptr) {
      *reinterpret_cast<uint4*>(operand_ + piece()) = input.value[0];
      if constexpr (is_pair(kStage)) {
        if (input.from[1] != nullptr) *reinterpret_cast<uint4*>(operand_ + piece() + pitch) = input.value[1];
      }
    }
    return squares;
  }

  // --- Product -------------------------------------------------------------------------------------------------------

  template <Stage kStage>
  struct Operands {
    static constexpr int kSteps = kStage == Stage::kNarrow ? kSmallFfnSteps : kSmallSteps;
    static constexpr int kTiles = tiles_at_once(Base::product_of(kStage));
    uint4 weights[kTiles][kSteps];
    std::uint32_t x[kSteps][2];
    int steps;  // of a row
  };
  __device__ __forceinline__ bool has_step(int i, int steps) const { return warp_ + i * kTileWarps < steps; }

  /// A warp's steps of the slots whose turn it is, which hold `rows` rows. They may then be filled again.
  template <Stage kStage>
  __device__ __forceinline__ void take(Operands<kStage>& operands, int rows) {
#pragma unroll
    for (int t = 0; t < operands.kTiles; ++t) {
      if (t * kSingleRows >= rows) break;
      // Rows that the tile lacks repeat its last one; nobody takes their sums.
      const int last = min(kSingleRows, rows - t * kSingleRows) - 1;
      const int row = min(lane_ >> 2, last) * (p_.plan.slot_row_bytes + kRowPadding);
      ring_.wait_full();
      const std::byte* slot = ring_.slot() + row + (lane_ & 3) * kPieceBytes + warp_ * kStepBytes;
#pragma unroll
      for (int i = 0; i < operands.kSteps; ++i) {
        if (!has_step(i, operands.steps)) continue;
        operands.weights[t][i] = *reinterpret_cast<const uint4*>(slot + i * kTileWarps * kStepBytes);
      }
      ptx::mbarrier_arrive(ring_.empty());
      ring_.advance();
    }
  }
  /// The warp's steps of the input, as SingleProduct::multiply wants them.
  template <Stage kStage>
  __device__ __forceinline__ void read(Operands<kStage>& operands, int pitch) const {
    const int vectors = is_pair(kStage) ? networks() : 1;
    const std::byte* x = operand_ + ((lane_ >> 3) & (vectors - 1)) * pitch + (lane_ & 3) * kPieceBytes +
                         ((lane_ >> 2) & 1) * 4 + warp_ * kStepBytes;
#pragma unroll
    for (int i = 0; i < operands.kSteps; ++i) {
      if (!has_step(i, operands.steps)) continue;
      const auto* words = reinterpret_cast<const std::uint32_t*>(x + i * kTileWarps * kStepBytes);
      operands.x[i][0] = words[0];
      operands.x[i][1] = words[2];
    }
  }
  /// The warp's sums of `rows` rows, to row `first` on.
  template <Stage kStage>
  __device__ __forceinline__ void multiply(const Operands<kStage>& operands, int first, int rows) const {
    TileSums tiles[Operands<kStage>::kTiles];
#pragma unroll
    for (int i = 0; i < operands.kSteps; ++i) {
      if (!has_step(i, operands.steps)) break;
#pragma unroll
      for (int t = 0; t < operands.kTiles; ++t) {
        if (t * kSingleRows >= rows) break;
        const uint4 w = operands.weights[t][i];
        ptx::mma_m16n8k16<A>(tiles[t].chains[0], {w.x, w.y, w.z, w.w}, {operands.x[i][0], operands.x[i][1]});
      }
    }
#pragma unroll
    for (int t = 0; t < operands.kTiles; ++t) {
      if (t * kSingleRows >= rows) break;
      Base::template store_tile<is_pair(kStage)>(tiles[t], first + t * kSingleRows, Base::template split<kStage>());
    }
  }

  // --- A stage -------------------------------------------------------------------------------------------------------

  template <Stage kStage>
  __device__ __forceinline__ void run_stage(int layer) {
    constexpr bool kIsGate = kStage == Stage::kGate;
    constexpr int kTogether = Operands<kStage>::kTiles * kSingleRows;
    lane_ = ptx::opaque(lane_);  // what follows from it is worked out for this stage, and not kept for the next layer
    const int all = Base::template rows<kStage>();
    if (kIsGate && kAsksEarly && all == 0) below_ = ask<Stage::kProject>(layer);
    if (all == 0) return;
    const ProductShape& shape = Base::template shape_of<kStage>();
    const int pitch = padded_row(shape.row_bytes);
    const int pass = kStage == Stage::kPredict ? p_.plan.sums_rows : all;
    Operands<kStage> operands = {};
    operands.steps = shape.row_bytes / kStepBytes;
    take(operands, min(kTogether, all));
    Input<kStage> input = {};
    if constexpr (kStage == Stage::kProject) {
      input = below_;
    } else if constexpr (!kIsGate && kAsksEarly) {
      input = ask<kStage>(layer);
    }
#pragma unroll 1
    for (int first = 0; first < all; first += pass) {
      const int count = min(pass, all - first);
      const Output out = Base::template output<kStage>(layer, thread(), first, count);
      if (first == 0) {
        float squares = 0.0F;
        if constexpr (kIsGate) {
          const int at = first_vector() * kVector;
          const float4 ones = make_float4(1, 1, 1, 1);
          if (at < dim_) this->store_vector(operand_ + at * int{sizeof(A)}, ones, 1.0F, state_[0]);
        } else {
          squares = settle<kStage>(layer, input, pitch);
        }
        __syncwarp();
        read(operands, pitch);
        multiply(operands, 0, min(kTogether, all));
        if constexpr (is_normalised(kStage)) {
          squares = Base::warp_sum(squares);
          if (lane_ == 0) norm_sums()[warp_] = squares;
        }
      }
      if constexpr (kStage == Stage::kPredict) {
#pragma unroll 1
        for (int row = first == 0 ? kTogether : 0; row < count; row += kTogether) {
          take(operands, min(kTogether, count - row));
          multiply(operands, row, min(kTogether, count - row));
        }
      }
      if constexpr (kIsGate && kAsksEarly) below_ = ask<Stage::kProject>(layer);
      barrier();
      if (out.exists) Base::template finish_output<kStage>(layer, out);
      turn_of_sums_ ^= 1;
    }
    if constexpr (is_normalised(kStage)) turn_of_norms_ ^= 1;
  }

  // --- Attention -----------------------------------------------------------------------------------------------------

  /// DecodeBase::attend_heads, to the bit, of heads that a warp holds in two registers a lane and of slots that the
  /// warps hold at once.
  __device__ __forceinline__ void attend(int layer) const {
    constexpr int kHeld = kSmallHead / 32;
    constexpr int kSlots = kSmallMemory / kTileWarps;  // of a warp
    const DecodeShape& shape = p_.op.shape;
    if (static_cast<int>(blockIdx.x) >= static_cast<int>(shape.heads)) return;
    const int lane = ptx::opaque(lane_);
    const int thread = warp_ * 32 + lane;
    const auto slots = static_cast<int>(p_.op.slots);
    const int width = p_.plan.head_width;
    const int head = static_cast<int>(blockIdx.x) * width;
    const float* memory = p_.op.memory + std::int64_t{layer} * shape.memory_slots * dim_ + head;
    float held[kSlots][kHeld];
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      const int slot = warp_ + j * kTileWarps;
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const int channel = lane + i * 32;
        held[j][i] = slot < slots && channel < width ? __ldg(memory + slot * dim_ + channel) : 0.0F;
      }
    }
    const A* query = Base::template vectors<A>(layer, Point::kQuery) + head + lane;
    const A* asked[kHeld];
    A came[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) asked[i] = lane + i * 32 < width ? query + i * 32 : nullptr;
    await_elements<A>(asked, came);

    float score[kSlots] = {};
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) score[j] = __fmaf_rn(widen(came[i]), held[j][i], score[j]);
    }
    Base::sum_each(score);
    float largest = -INFINITY;
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      score[j] = warp_ + j * kTileWarps < slots ? p_.plan.attention_scale * score[j] : -INFINITY;
      largest = fmaxf(largest, score[j]);
    }
    float weights = 0.0F;
    float sum[kHeld] = {};
    if (warp_ < slots) {
#pragma unroll
      for (int j = 0; j < kSlots; ++j) {
        const float weight = fast_exp(score[j] - largest);
        weights += weight;
#pragma unroll
        for (int i = 0; i < kHeld; ++i) sum[i] = __fmaf_rn(weight, held[j][i], sum[i]);
      }
    }
    auto* const joined = reinterpret_cast<float*>(operand_);  // [warp][channel, largest score, sum of weights]
    float* const mine = joined + warp_ * kAttentionRow;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) mine[lane + i * 32] = sum[i];
    if (lane == 0) {
      mine[kAttentionChannels] = largest;
      mine[kAttentionChannels + 1] = weights;
    }
    barrier();
    if (thread < width) {
      float of_warps[kTileWarps];
      float all_largest = -INFINITY;
#pragma unroll
      for (int w = 0; w < kTileWarps; ++w) {
        of_warps[w] = joined[w * kAttentionRow + kAttentionChannels];
        all_largest = fmaxf(all_largest, of_warps[w]);
      }
      float all_weights = 0.0F;
      float value = 0.0F;
#pragma unroll
      for (int w = 0; w < kTileWarps; ++w) {
        const float factor = fast_exp(of_warps[w] - all_largest);
        all_weights = __fmaf_rn(factor, joined[w * kAttentionRow + kAttentionChannels + 1], all_weights);
        value = __fmaf_rn(factor, joined[w * kAttentionRow + thread], value);
      }
      publish(Base::template vectors<A>(layer, Point::kAttended) + head + thread,
              narrow<A>(__fdividef(value, all_weights)));
    }
    barrier();  // the sums have been read
  }

  Input<Stage::kProject> below_ = {};  // x of the layer below, as asked for by `gate`
};

}  // namespace mmrec::kernels
