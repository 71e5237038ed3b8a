// The multiplying warps of a decode step of one sequence: the stages of step.cu, from inputs to epilogues.
//
// There is little to multiply, so a stage takes as long as its chain of dependent instructions. Everything that does
// not need the input comes before the wait for it: what the epilogue reads from memory, addresses, and the first two
// slots of weights, which lie in registers when the input comes. Every stage has code of its own, in which its shape is
// known. A warp reads the steps of the input that it multiplies, and no others, so that warps meet once per stage,
// before their sums are added up; sums of a stage and of the next one have memory of their own.
#pragma once

#include "models/mmrec/cuda/decode/single_product.cuh"

namespace mmrec::kernels {

template <class A>
class SingleBlock : protected SingleProduct<A> {
 protected:
  using Base = SingleProduct<A>;
  using Base::barrier, Base::kSteps, Base::lane, Base::lane_, Base::multiply, Base::store_tile, Base::sums, Base::take,
      Base::thread, Base::turn_of_sums_, Base::kScalesSums, Base::kStride, Base::kStepVectors, Base::kVector, Base::p_,
      Base::layers_, Base::ring_, Base::channels_, Base::dim_, Base::warp_, Base::operand_;
  using typename Base::Weights;

 public:
  __device__ __forceinline__ SingleBlock(const DecodeParams<A>& p, std::byte* shared, Ring ring, std::uint32_t turn)
      : Base(p, shared, ring, turn),
        hidden_(p.plan.splits[static_cast<int>(Owned::kHidden)].mine()),
        ffn_(p.plan.splits[static_cast<int>(Owned::kFfn)].mine()),
        vocab_(p.plan.splits[static_cast<int>(Owned::kVocab)].mine()) {}

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
        this->attend_heads(layer, 1);
        run_stage<Stage::kRecall>(layer);
      }
      run_stage<Stage::kWiden>(layer);
      if (layer + 1 < layers) ask_state(layer + 1);
      run_stage<Stage::kNarrow>(layer);
    }
    run_stage<Stage::kPredict>(layers);
  }

 protected:
  static constexpr int kHeldSlots = kMostTiles;
  static constexpr int kRounds = 2;   // fp32 vectors of a lane at once
  static constexpr int kGathers = 2;  // the same of pieces of A

  __device__ __forceinline__ int first_vector() const {
    return warp_ * kStepVectors + lane_ / kStepVectors * kTileWarps * kStepVectors + lane_ % kStepVectors;
  }
  template <class T>
  __device__ __forceinline__ T* vectors(int layer, Point point) const {
    return Base::template vectors<T>(layer, point);
  }

  // --- What a stage is -----------------------------------------------------------------------------------------------

  /// Its outputs are many of one kind, taken in passes.
  static constexpr bool has_passes(Stage stage) { return stage == Stage::kWiden || stage == Stage::kPredict; }
  template <Stage kStage>
  __device__ __forceinline__ const ProductShape& shape_of() const {
    return p_.plan.products[static_cast<int>(product_of(kStage))];
  }
  __device__ __forceinline__ int networks() const { return p_.op.shape.dpg ? 1 : 2; }
  /// Rows that the block multiplies.
  template <Stage kStage>
  __device__ __forceinline__ int rows() const {
    switch (kStage) {
      case Stage::kGate:
        return 2 * channels_.count;
      case Stage::kProject:
        return shape_of<kStage>().slices * channels_.count;
      case Stage::kHide:
        return channels_.count + networks() * hidden_.count;
      case Stage::kAdvance:
        return networks() * channels_.count;
      case Stage::kWiden:
        return ffn_.count;
      case Stage::kPredict:
        return vocab_.count;
      default:
        return channels_.count;
    }
  }
  /// Rows that are multiplied by the first of two vectors; the others are by the second.
  template <Stage kStage>
  __device__ __forceinline__ int split() const {
    return channels_.count + (kStage == Stage::kHide ? hidden_.count : 0);
  }

  // --- Inputs --------------------------------------------------------------------------------------------------------

  /// h₋₁ of the layer: the first vectors of a lane.
  __device__ __forceinline__ void ask_state(int layer) {
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int vector = first_vector() + i * kStride;
      state_[i] = vector * kVector < dim_ ? this->state_vector(layer, 0, vector) : make_float4(0, 0, 0, 0);
    }
  }
  /// Writes the stage's input, rounded to A, into the operand buffer, each warp its steps; two vectors `pitch` apart.
  template <Stage kStage>
  __device__ __forceinline__ void read_input(int layer, int pitch) {
    if constexpr (kStage == Stage::kGate) {
      const float4 ones = make_float4(1, 1, 1, 1);
#pragma unroll 1
      for (int begin = first_vector(), round = 0; (begin - first_vector()) * kVector < dim_;
           begin += kRounds * kStride) {
#pragma unroll
        for (int i = 0; i < kRounds; ++i) {
          const int vector = begin + i * kStride;
          if (vector * kVector >= dim_) continue;
          const float4 x = round == 0 ? state_[i] : this->state_vector(layer, 0, vector);
          this->store_vector(operand_ + vector * kVector * int{sizeof(A)}, ones, 1.0F, x);
        }
        ++round;
      }
    } else if constexpr (is_normalised(kStage)) {
      const float* from = kStage == Stage::kWiden ? vectors<float>(layer, Point::kMixed)
                                                  : vectors<float>(max(layer, 1) - 1, Point::kOutput);
      const bool embeds = kStage == Stage::kProject && layer == 0;
      float scale = 1.0F;
      if constexpr (!kScalesSums) {
        sum_squares(from, embeds);
        barrier();
        scale = this->norm_scale(norm_sums());
      }
      float4 held[kRounds];  // weights of the first rounds
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        held[i] = this->norm_weight(norm<kStage>(layer), first_vector() + i * kStride);
      }
      float squares_sum = 0.0F;
      for_each_vector(from, embeds, [&](int vector, int round, float4 x) {
        squares_sum += Base::squares(x);
        if (vector * kVector >= dim_) return;
        const float4 w =
            round < kRounds ? (round == 0 ? held[0] : held[1]) : this->norm_weight(norm<kStage>(layer), vector);
        this->store_vector(operand_ + vector * kVector * int{sizeof(A)}, w, scale, x);
      });
      squares_ = squares_sum;
    } else {
      const DecodeShape& shape = p_.op.shape;
      const int width = kStage == Stage::kAdvance  ? static_cast<int>(shape.gate_hidden)
                        : kStage == Stage::kNarrow ? static_cast<int>(shape.ffn)
                                                   : dim_;
      constexpr Point kFrom = kStage == Stage::kHide      ? Point::kProjected
                              : kStage == Stage::kAdvance ? Point::kHidden
                              : kStage == Stage::kQuery   ? Point::kState
                              : kStage == Stage::kRecall  ? Point::kAttended
                                                          : Point::kFfn;
      gather<is_pair(kStage)>(vectors<A>(layer, kFrom), width, pitch);
    }
    __syncwarp();
  }
  /// Vectors of A as they get written.
  template <bool kPair>
  __device__ __forceinline__ void gather(const A* from, int width, int pitch) const {
    constexpr int kRound = 32 * kTileWarps * kPieceBytes;
    const int bytes = width * int{sizeof(A)};
    const bool two = kPair && !p_.op.shape.dpg;
    int at = (lane() / 4 * kTileWarps + warp_) * kStepBytes + lane() % 4 * kPieceBytes;
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
    const int first = first_vector();
    const auto exists = [&](int vector) { return vector * kVector < dim_; };
#pragma unroll 1
    for (int begin = 0; begin * kStride * kVector < dim_; begin += kRounds) {
      const int even = first + begin * kStride;
      const int odd = even + kStride;
      const bool has_odd = (begin + 1) * kStride * kVector < dim_;  // any lane
      if (embeds) {
        visit(even, begin, exists(even) ? this->embedding_vector(0, even) : make_float4(0, 0, 0, 0));
        visit(odd, begin + 1, exists(odd) ? this->embedding_vector(0, odd) : make_float4(0, 0, 0, 0));
      } else if (has_odd) {
        const float* const source[kRounds] = {exists(even) ? from + even * kVector : nullptr,
                                              exists(odd) ? from + odd * kVector : nullptr};
        uint4 read[kRounds];
        await<float>(source, read);
        visit(even, begin, Base::as_floats(read[0]));
        visit(odd, begin + 1, Base::as_floats(read[1]));
      } else {
        const float* const source[1] = {exists(even) ? from + even * kVector : nullptr};
        uint4 read[1];
        await<float>(source, read);
        visit(even, begin, Base::as_floats(read[0]));
      }
    }
  }
  __device__ __forceinline__ void sum_squares(const float* from, bool embeds) {
    float sum = 0.0F;
    for_each_vector(from, embeds, [&](int, int, float4 x) { sum += Base::squares(x); });
    put_squares(sum);
  }
  __device__ __forceinline__ void put_squares(float sum) {
    sum = Base::warp_sum(sum);
    if (lane() == 0) norm_sums()[warp_] = sum;
  }
  template <Stage kStage>
  __device__ __forceinline__ const float* norm(int layer) const {
    return kStage == Stage::kWiden ? layers_[layer].norm2 : layers_[layer].norm1;
  }

  // --- Outputs -------------------------------------------------------------------------------------------------------

  /// An output of a stage, and what its epilogue reads from memory.
  struct Output {
    int row, part;  // the row of the part, or of the pass
    int kind;       // of q, v, z, k
    bool exists;
    int summed;
    float bias, context_bias, h, c;
    double sum;
    void* to;  // what other blocks or the caller read
  };
  __device__ __forceinline__ std::int64_t first_of(int layer) const {
    return std::int64_t{layer} * dim_ + channels_.first;
  }

  /// The i-th of a pass that begins with row `first` and has `count` rows.
  template <Stage kStage>
  __device__ __forceinline__ Output output(int layer, int i, int first, int count) const {
    const DecodeStep<Device, A>& op = p_.op;
    const StageShape& shape = p_.plan.stages[static_cast<int>(kStage)];
    Output out = {};
    if constexpr (has_passes(kStage)) {
      out.row = out.summed = i;
      out.exists = i < count;
    } else {
      out.row = i & ((1 << shape.log_width) - 1);
      out.part = i >> shape.log_width;
      const int others = kStage == Stage::kHide ? hidden_.count : channels_.count;
      out.exists = out.part < shape.parts && out.row < (out.part == 0 ? channels_.count : others);
      out.summed = out.part == 0 ? out.row : out.row + channels_.count + (out.part - 1) * others;
    }
    if (!out.exists) return out;
    const int channel = channels_.first + out.row;
    constexpr int kZ = 2;  // of q, v, z, k
    if constexpr (kStage == Stage::kProject) out.kind = out.part + p_.plan.first_part;
    if constexpr (kStage == Stage::kPredict) {
      out.to = op.logits + vocab_.first + first + out.row;
      return out;
    } else if constexpr (kStage == Stage::kProject) {
      if (out.kind >= kZ) out.to = vectors<A>(layer, Point::kProjected) + (out.kind - kZ) * dim_ + channel;
    } else if constexpr (kStage == Stage::kHide) {
      if (out.part > 0) {
        out.to = vectors<A>(layer, Point::kHidden) + (out.part - 1) * static_cast<int>(op.shape.gate_hidden) +
                 hidden_.first + out.row;
      }
    } else if constexpr (kStage == Stage::kAdvance) {
      out.to = op.slots > 1 ? static_cast<void*>(vectors<A>(layer, Point::kState) + channel)
                            : vectors<float>(layer, Point::kMixed) + channel;
    } else if constexpr (kStage == Stage::kQuery) {
      out.to = vectors<A>(layer, Point::kQuery) + channel;
    } else if constexpr (kStage == Stage::kRecall) {
      out.to = vectors<float>(layer, Point::kMixed) + channel;
    } else if constexpr (kStage == Stage::kWiden) {
      out.to = vectors<A>(layer, Point::kFfn) + ffn_.first + first + out.row;
    } else if constexpr (kStage == Stage::kNarrow) {
      out.to = vectors<float>(layer, Point::kOutput) + channel;
    }
    const float* const* biases = layers_[layer].bias + shape.bias;
    const auto bias = [&](int part) { return biases[part] == nullptr ? 0.0F : __ldg(biases[part] + first + out.row); };
    out.bias = bias(kStage == Stage::kProject ? out.kind : out.part);
    if constexpr (kStage == Stage::kAdvance) {
      out.context_bias = bias(1);
      out.h = __ldcg(op.h + first_of(layer) + out.row);
      constexpr int kRecallBias = 3;  // memory_out's, from this stage's first
      if (op.slots == 0) out.c = bias(kRecallBias);
      if (op.slots == 1) out.c = __ldg(op.context + first_of(layer) + out.row);
    }
    if constexpr (kStage == Stage::kNarrow) out.sum = __ldcg(op.segment_sum + first_of(layer) + out.row);
    return out;
  }
  __device__ __forceinline__ float& local(Local what, int channel) const { return Base::local(what, channel, 0, 1); }
  __device__ __forceinline__ float sum(int number) const { return total(sums(), number, 0, 1); }

  /// From the sums to what other blocks or this one read.
  template <Stage kStage>
  __device__ __forceinline__ void finish_output(int layer, const Output& out) const {
    const DecodeStep<Device, A>& op = p_.op;
    const int row = out.row;
    const float scale = kScalesSums && is_normalised(kStage) ? this->norm_scale(norm_sums()) : 1.0F;
    const float y = __fmaf_rn(sum(out.summed), scale, out.bias);
    if constexpr (kStage == Stage::kGate) {
      local(out.part == 0 ? Local::kStateGate : Local::kMdiGate, row) = y;
    } else if constexpr (kStage == Stage::kProject) {
      const A rounded = narrow<A>(y);
      if (out.to != nullptr) publish(static_cast<A*>(out.to), rounded);
      constexpr int kK = 3;  // of q, v, z, k
      const Local to = out.kind == 0 ? Local::kQ : out.kind == 1 ? Local::kV : Local::kZ;
      if (out.kind != kK) local(to, row) = widen(rounded);
    } else if constexpr (kStage == Stage::kHide) {
      if (out.part == 0) {
        local(Local::kMdiInput, row) = widen(narrow<A>(y));
      } else {
        publish(static_cast<A*>(out.to), narrow<A>(op.shape.dpg ? (y < 0.0F ? 0.0F : y) : gelu(y)));  // NaN stays
      }
    } else if constexpr (kStage == Stage::kAdvance) {
      const float context = op.shape.dpg ? 0.0F : sum(out.summed + channels_.count) + out.context_bias;
      const typename Base::Advanced next =
          this->advance({.h = out.h,
                         .c = out.c,
                         .state_gate = local(Local::kStateGate, row),
                         .mdi = local(Local::kMdiInput, row) + local(Local::kMdiGate, row),
                         .z = local(Local::kZ, row),
                         .v = local(Local::kV, row),
                         .residual = local(Local::kResidual, row)},
                        y, context);
      if (op.slots > 1) {
        publish(static_cast<A*>(out.to), narrow<A>(next.h));
      } else {
        publish(static_cast<float*>(out.to), next.x);
      }
      local(Local::kResidual, row) = next.x;
      op.h[first_of(layer) + row] = next.h;
    } else if constexpr (kStage == Stage::kQuery) {
      publish(static_cast<A*>(out.to), narrow<A>(__fmaf_rn(0.5F, local(Local::kQ, row), y)));
    } else if constexpr (kStage == Stage::kRecall || kStage == Stage::kNarrow) {
      const float x = local(Local::kResidual, row) + y;
      publish(static_cast<float*>(out.to), x);
      local(Local::kResidual, row) = x;
      if (kStage == Stage::kNarrow) op.segment_sum[first_of(layer) + row] = out.sum + static_cast<double>(x);
    } else if constexpr (kStage == Stage::kWiden) {
      publish(static_cast<A*>(out.to), narrow<A>(gelu(y)));
    } else {
      *static_cast<float*>(out.to) = y;
    }
  }

  // --- A stage -------------------------------------------------------------------------------------------------------

  /// Sums of squares of one stage and of the next have memory of their own, too.
  __device__ __forceinline__ float* norm_sums() const { return Base::norm_sums_ + turn_of_norms_ * kTileWarps; }

  template <Stage kStage>
  __device__ __forceinline__ void run_stage(int layer) {
    constexpr int kTiles = tiles_at_once(product_of(kStage));
    constexpr int kParts = kHeldSlots / kTiles;  // of k, at once
    const int vectors = is_pair(kStage) ? networks() : 1;
    const int slot_bytes = p_.plan.slot_row_bytes;
    const int all = rows<kStage>();
    if (all == 0) return;
    lane_ = ptx::opaque(lane_);  // what follows from it is worked out for this stage, and not kept for the next layer
    const ProductShape& shape = shape_of<kStage>();
    const int pitch = padded_row(shape.row_bytes);
    const int pass = has_passes(kStage) ? p_.plan.sums_rows : all;
#pragma unroll 1
    for (int first = 0; first < all; first += pass) {
      const int count = min(pass, all - first);
      Output out = {};
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
              if (t < tiles) take(held[part][t], min(kSingleRows, count - row - t * kSingleRows), steps(part));
            }
          }
          const bool begins = first + row + k == 0;
          if (row + k == 0) out = output<kStage>(layer, thread(), first, count);
          if (begins) read_input<kStage>(layer, pitch);
          // Squares are summed up over the warp between the steps of the product.
          constexpr bool kSumsSquares = kScalesSums && is_normalised(kStage);
          static_assert(!kSumsSquares || (kParts == 1 && kSteps == 4));
          float squares = squares_;
          if constexpr (kSumsSquares) squares += __shfl_xor_sync(0xffffffffU, squares, 16);
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            if (part > 0 && k + part * slot_bytes >= shape.row_bytes) break;
            multiply(sums, held[part], tiles, steps(part), operand_ + k + part * slot_bytes, pitch, vectors,
                     [&](int i) {
                       if constexpr (kSumsSquares) squares += __shfl_xor_sync(0xffffffffU, squares, 8 >> i);
                     });
          }
          if (kSumsSquares && begins && lane_ == 0) norm_sums()[warp_] = squares;
        }
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          if (t < tiles) Base::template store_tile<is_pair(kStage)>(sums[t], row + t * kSingleRows, split<kStage>());
        }
      }
      barrier();
      if (out.exists) finish_output<kStage>(layer, out);
      const StageShape& outputs = p_.plan.stages[static_cast<int>(kStage)];
      const int last = has_passes(kStage) ? count : outputs.parts << outputs.log_width;
#pragma unroll 1
      for (int i = thread() + kConsumers; i < last; i += kConsumers) {
        const Output other = output<kStage>(layer, i, first, count);
        if (other.exists) finish_output<kStage>(layer, other);
      }
      turn_of_sums_ ^= 1;
    }
    if (is_normalised(kStage)) turn_of_norms_ ^= 1;
  }

  Range hidden_, ffn_, vocab_;
  int turn_of_norms_ = 0;
  float squares_ = 0.0F;  // of a lane's part of the input
  float4 state_[kRounds];
};

}  // namespace mmrec::kernels
