// The multiplying warps of a decode step of several sequences: the stages of step.cu, from inputs to epilogues.
//
// Every stage goes the same way. Ask memory for what the epilogue needs; read the input from the exchange into the
// operand buffer; multiply, each warp its share of k; add up the warps' sums and write the outputs. A warp reads into
// the buffer just the steps that it multiplies, so warps meet once per stage, before the sums are added up.
//
// What a stage costs beyond its trip through L2 is a chain of dependent instructions, each executed once. So stages run
// through the same instructions where they can, and whatever depends on the shape is worked out before. One sequence is
// too little work to hide even that: single.cuh, to the bit the same.
#pragma once

#include "models/mmrec/cuda/decode/base.cuh"

namespace mmrec::kernels {

template <class A>
class DecodeBlock : private DecodeBase<A> {
  using Base = DecodeBase<A>;
  using Base::as_floats, Base::attend_heads, Base::barrier, Base::embedding_vector, Base::first_vector,
      Base::kScalesSums, Base::kStride, Base::kVector, Base::lane, Base::narrowed_first, Base::norm_weight,
      Base::squares, Base::store_vector, Base::sum_each, Base::thread, Base::p_, Base::layers_, Base::ring_,
      Base::channels_, Base::dim_, Base::warp_, Base::operand_, Base::sums_, Base::norm_sums_;

 public:
  __device__ DecodeBlock(const DecodeParams<A>& p, std::byte* shared, Ring ring, std::uint32_t turn)
      : Base(p, shared, ring, turn),
        segments_(reinterpret_cast<const Segment*>(shared + p.plan.segments)),
        stages_(reinterpret_cast<const StageShare*>(shared + p.plan.stage_shares)) {}

  __device__ void run() {
    ask_state(0);
    this->clear_other_set();
    this->embed(batch());
    release_sums();
    const auto layers = static_cast<int>(p_.op.shape.layers);
    int layer = 0;
    auto stage = Stage::kGate;
#pragma unroll 1
    while (true) {
      run_stage(layer, stage);
      if (stage == Stage::kPredict) break;
      const bool skips_attention = stage == Stage::kAdvance && p_.op.slots < 2;
      stage = skips_attention ? Stage::kWiden : static_cast<Stage>(static_cast<int>(stage) + 1);
      if (stage == Stage::kPredict && ++layer < layers) stage = Stage::kGate;
    }
    acquire_sums();
  }

 private:
  static constexpr int kAhead = 8;   // reads of a lane at once
  static constexpr int kRounds = 4;  // the same of fp32 vectors

  template <class T>
  __device__ T* vectors(int layer, Point point) const {
    return Base::template vectors<T>(layer, point);
  }
  __device__ int batch() const { return static_cast<int>(p_.op.shape.batch); }
  /// Sums have been read; and wait until all warps' have, before new ones are written.
  __device__ static void release_sums() { ptx::named_barrier_arrive(2, 2 * kConsumers); }
  __device__ static void acquire_sums() { ptx::named_barrier_sync(2, 2 * kConsumers); }

  // --- Operands ------------------------------------------------------------------------------------------------------

  /// `rows` vectors of `bytes` bytes, `stride` elements apart, as they get written. A lane reads a piece of a step.
  __device__ Operand gather(const A* from, int rows, int stride, int bytes) const {
    const int pitch = padded_row(bytes);
    const int piece = lane() % 4 * kPieceBytes;
    const int mine = ((bytes + kStepBytes - 1) / kStepBytes - warp_ + kTileWarps - 1) / kTileWarps;  // steps of a row
    const int all = rows * mine;
    constexpr int kLanesOfStep = kStepBytes / kPieceBytes;
    constexpr int kBits = 26;  // all * mine is less than 2^26: then this division is exact
    const int reciprocal = (1 << kBits) / max(mine, 1) + 1;
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
        const int step = first + lane() / kLanesOfStep;  // of all rows'
        const int row = (step * reciprocal) >> kBits;
        const int at = ((step - row * mine) * kTileWarps + warp_) * kStepBytes + piece;
        to[i] = row * pitch + at;
        if (step < all && at < bytes) source[i] = from + row * stride + at / int{sizeof(A)};
      }
      await<A>(source, value);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (source[i] != nullptr) *reinterpret_cast<uint4*>(operand_ + to[i]) = value[i];
      }
    }
    __syncwarp();
    return {pitch, kStepBytes};
  }

  /// Where a lane is among its vectors of all sequences.
  struct Position {
    int sequence, round;
    __device__ int vector(int first) const { return round * kStride + first; }
  };
  /// h₋₁ of the layer, for narrowed(): the first vectors of a lane.
  __device__ void ask_state(int layer) {
    Position at = {};
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      state_[i] = exists(at) ? state_vector(layer, at) : make_float4(0, 0, 0, 0);
      next(at);
    }
  }
  __device__ float4 state_vector(int layer, const Position& at) const {
    return Base::state_vector(layer, at.sequence, at.vector(first_vector()));
  }
  /// What a fp32 operand comes from.
  enum class Source : std::uint8_t { kState, kEmbedding, kExchange };
  /// Every sequence's fp32 vector, or if there is a weight rmsnorm of it up to the scale, rounded.
  __device__ Operand narrowed(const float* weight, Source kind, int layer, const float* from) const {
    const int pitch = padded_row(dim_ * int{sizeof(A)});
    const int first = first_vector();
    float scale_of_lane = 1.0F;  // lane b has that of sequence b
    if (!kScalesSums && weight != nullptr) {
      for_each_vector(kind, layer, from, true, [](const Position&, float4) {});
      barrier();
      if (lane() < batch()) scale_of_lane = this->norm_scale(norm_sums_ + lane() * kTileWarps);
    }
    float4 held[kRounds];  // weights of the first rounds
#pragma unroll
    for (int i = 0; i < kRounds; ++i) held[i] = norm_weight(weight, first + i * kStride);
    for_each_vector(kind, layer, from, kScalesSums && weight != nullptr, [&](const Position& at, float4 x) {
      const float scale = kScalesSums ? 1.0F : __shfl_sync(0xffffffffU, scale_of_lane, at.sequence % 32);
      if (!exists(at)) return;
      float4 w = held[0];
#pragma unroll
      for (int i = 1; i < kRounds; ++i) {
        if (at.round == i) w = held[i];
      }
      if (at.round >= kRounds) w = norm_weight(weight, at.vector(first));
      store_vector(operand_ + at.sequence * pitch + narrowed_first() + at.round * Base::kNarrowedStride, w, scale, x);
    });
    __syncwarp();
    return {pitch, kStepBytes};
  }
  /// visit(position, vector) for all of a lane's vectors, and zeros where it has none in a round; sums up their squares
  /// if asked to.
  template <class Visit>
  __device__ void for_each_vector(Source kind, int layer, const float* from, bool sums_squares, Visit visit) const {
    const int first = first_vector();
    float squares_sum = 0.0F;
    Position at = {};
    const auto ends_sequence = [&](const Position& of) {
      return (of.round + 1) * kStride * kVector >= dim_ && of.sequence < batch();
    };
#pragma unroll 1
    for (bool begins = true; at.sequence < batch(); begins = false) {
      const float* source[kRounds];
      Position of[kRounds];
      uint4 read[kRounds];
      float4 x[kRounds];
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        of[i] = at;
        source[i] = exists(at) ? from + std::int64_t{at.sequence} * dim_ + at.vector(first) * kVector : nullptr;
        next(at);
      }
      if (kind == Source::kExchange) await<float>(source, read);
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        if (kind == Source::kExchange) {
          x[i] = as_floats(read[i]);
        } else if (source[i] == nullptr) {
          x[i] = make_float4(0, 0, 0, 0);
        } else if (kind == Source::kEmbedding) {
          x[i] = embedding_vector(of[i].sequence, of[i].vector(first));
        } else {
          x[i] = begins ? state_[i] : state_vector(layer, of[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < kRounds; ++i) visit(of[i], x[i]);
      if (!sums_squares) continue;
      float of_squares[kRounds];
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        squares_sum += squares(x[i]);  // x is 0 where there is no source
        of_squares[i] = squares_sum;
        if (ends_sequence(of[i])) squares_sum = 0.0F;
      }
      sum_each(of_squares);
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        if (lane() == 0 && ends_sequence(of[i])) norm_sums_[of[i].sequence * kTileWarps + warp_] = of_squares[i];
      }
    }
  }
  __device__ bool exists(const Position& at) const {
    return at.sequence < batch() && at.vector(first_vector()) * kVector < dim_;
  }
  __device__ void next(Position& at) const {
    if (++at.round * kStride * kVector < dim_) return;
    at.round = 0;
    ++at.sequence;
  }

  // --- Stages --------------------------------------------------------------------------------------------------------

  __device__ float& local(Local what, int channel, int sequence) const {
    return Base::local(what, channel, sequence, batch());
  }
  /// An output of a stage, and what its epilogue reads from memory.
  struct Output {
    int row, part, sequence;  // the row of the part, or of the pass
    int kind;                 // the part, among q, v, z, k
    bool exists;
    int at;      // of a channel in a vector [B, D]
    int summed;  // number of its sum among [row][column]
    float bias, context_bias, h, c;
    double sum;
    void* to;  // what other blocks or the caller read
  };
  /// An output's channel in its sequence's h, context or segment_sum.
  template <class T>
  __device__ T* state_of(T* first, int layer, const Output& out) const {
    return bytes_further(first, out.sequence * p_.op.slot_bytes) + std::int64_t{layer} * dim_ + channels_.first +
           out.row;
  }

  /// Where an output goes that is not this block's own. Worked out while the input is on its way.
  __device__ void* destination(int layer, Stage stage, const Output& out, int first) const {
    const DecodeStep<Device, A>& op = p_.op;
    const auto share = [&](Owned what) {
      return p_.plan.splits[static_cast<int>(what)].mine().first + first + out.row;
    };
    constexpr int kZ = 2;  // of q, v, z, k
    switch (stage) {
      case Stage::kProject:
        return vectors<A>(layer, Point::kProjected) + (out.kind - kZ) * batch() * dim_ + out.at;  // from z on
      case Stage::kHide:
        return vectors<A>(layer, Point::kHidden) +
               ((out.part - 1) * batch() + out.sequence) * static_cast<int>(op.shape.gate_hidden) +
               share(Owned::kHidden);
      case Stage::kAdvance:
        if (op.slots > 1) return vectors<A>(layer, Point::kState) + out.at;
        return vectors<float>(layer, Point::kMixed) + out.at;
      case Stage::kQuery:
        return vectors<A>(layer, Point::kQuery) + out.at;
      case Stage::kRecall:
        return vectors<float>(layer, Point::kMixed) + out.at;
      case Stage::kWiden:
        return vectors<A>(layer, Point::kFfn) + out.sequence * static_cast<int>(op.shape.ffn) + share(Owned::kFfn);
      case Stage::kNarrow:
        return vectors<float>(layer, Point::kOutput) + out.at;
      case Stage::kPredict:
        return bytes_further(op.logits, out.sequence * op.slot_bytes) + share(Owned::kVocab);
      default:
        return nullptr;
    }
  }
  /// The i-th of a pass that begins with row `first` and has `rows` rows, where a stage has passes.
  __device__ Output output(const StageShare& shape, int layer, Stage stage, int i, int first, int rows) const {
    const DecodeStep<Device, A>& op = p_.op;
    Output out = {};
    out.row = i & ((1 << shape.log_width) - 1);
    out.part = (i >> shape.log_width) & ((1 << shape.log_parts) - 1);
    out.sequence = i >> (shape.log_width + shape.log_parts);
    out.at = out.sequence * dim_ + channels_.first + out.row;
    const int width = rows > 0 ? rows : out.part == 0 ? shape.width : shape.other_width;
    out.exists = out.sequence < batch() && out.row < width && out.part < shape.parts;
    if (!out.exists) return out;
    out.kind = out.part + (stage == Stage::kProject ? p_.plan.first_part : 0);
    const int columns = this->columns(stage);
    const int row = out.part == 0 ? out.row : out.row + shape.width + (out.part - 1) * shape.other_width;
    const bool of_second = stage == Stage::kHide && out.part == 2;
    out.summed = row * columns + out.sequence + (of_second ? columns - batch() : 0);
    out.to = destination(layer, stage, out, first);
    if (stage == Stage::kPredict) return out;
    const float* const* biases = layers_[layer].bias + shape.bias;
    const auto bias = [&](int part) { return biases[part] == nullptr ? 0.0F : __ldg(biases[part] + first + out.row); };
    out.bias = bias(out.kind);
    if (stage == Stage::kAdvance) {
      out.context_bias = bias(1);
      out.h = __ldcg(state_of(op.h, layer, out));
      constexpr int kRecallBias = 3;  // memory_out's, from this stage's first
      if (op.slots == 0) out.c = bias(kRecallBias);
      if (op.slots == 1) out.c = __ldg(state_of(op.context, layer, out));
    }
    if (stage == Stage::kNarrow) out.sum = __ldcg(state_of(op.segment_sum, layer, out));
    return out;
  }

  /// The stage's operand, or `panel` of it.
  __device__ Operand input(int layer, Stage stage, int panel, int panel_bytes) const {
    const DecodeShape& shape = p_.op.shape;
    if (stage == Stage::kGate || stage == Stage::kProject || stage == Stage::kWiden || stage == Stage::kPredict) {
      const LayerShare& share = layers_[layer];
      const float* weight = stage == Stage::kGate ? nullptr : stage == Stage::kWiden ? share.norm2 : share.norm1;
      const float* from = stage == Stage::kWiden ? vectors<float>(layer, Point::kMixed)
                                                 : vectors<float>(max(layer, 1) - 1, Point::kOutput);
      const Source source = stage == Stage::kGate                    ? Source::kState
                            : layer == 0 && stage == Stage::kProject ? Source::kEmbedding
                                                                     : Source::kExchange;
      return narrowed(weight, source, layer, from);
    }
    const int width = stage == Stage::kAdvance  ? static_cast<int>(shape.gate_hidden)
                      : stage == Stage::kNarrow ? static_cast<int>(shape.ffn)
                                                : dim_;
    const Point point = stage == Stage::kHide      ? Point::kProjected
                        : stage == Stage::kAdvance ? Point::kHidden
                        : stage == Stage::kQuery   ? Point::kState
                        : stage == Stage::kRecall  ? Point::kAttended
                                                   : Point::kFfn;
    const int bytes = min(width * int{sizeof(A)} - panel, panel_bytes);
    return gather(vectors<A>(layer, point) + panel / int{sizeof(A)},
                  is_pair(stage) && !shape.dpg ? 2 * batch() : batch(), width, bytes);
  }

  /// From the sums to what other blocks or this one read.
  __device__ void finish_output(const StageShare& shape, int layer, Stage stage, const Output& out) const {
    const DecodeStep<Device, A>& op = p_.op;
    const int row = out.row;
    const int b = out.sequence;
    const float scale = kScalesSums && is_normalised(stage) ? this->norm_scale(norm_sums_ + b * kTileWarps) : 1.0F;
    const float y = __fmaf_rn(sum(out.summed), scale, out.bias);
    switch (stage) {
      case Stage::kGate:
        local(out.part == 0 ? Local::kStateGate : Local::kMdiGate, row, b) = y;
        return;
      case Stage::kProject: {
        constexpr int kZ = 2;  // of q, v, z, k
        const A rounded = narrow<A>(y);
        if (out.kind >= kZ) publish(static_cast<A*>(out.to), rounded);
        if (out.kind > kZ) return;
        const Local to = out.kind == 0 ? Local::kQ : out.kind == 1 ? Local::kV : Local::kZ;
        local(to, row, b) = widen(rounded);
        return;
      }
      case Stage::kAdvance: {  // the second network's rows come next, in columns of their own if there are such
        const int columns = this->columns(stage);
        const float context = sum(out.summed + shape.width * columns + columns - batch());
        return advance(layer, out, y, context + out.context_bias);
      }
      case Stage::kQuery:
        publish(static_cast<A*>(out.to), narrow<A>(__fmaf_rn(0.5F, local(Local::kQ, row, b), y)));
        return;
      case Stage::kRecall:
      case Stage::kNarrow: {
        const bool ends = stage == Stage::kNarrow;
        float& residual = local(Local::kResidual, row, b);
        const float x = residual + y;
        publish(static_cast<float*>(out.to), x);
        residual = x;
        if (ends) *state_of(op.segment_sum, layer, out) = out.sum + static_cast<double>(x);
        return;
      }
      case Stage::kHide:
      case Stage::kWiden: {
        if (stage == Stage::kHide && out.part == 0) {
          local(Local::kMdiInput, row, b) = widen(narrow<A>(y));
          return;
        }
        const float hidden = stage == Stage::kHide && op.shape.dpg ? (y < 0.0F ? 0.0F : y) : gelu(y);  // NaN stays
        publish(static_cast<A*>(out.to), narrow<A>(hidden));
        return;
      }
      default:
        *static_cast<float*>(out.to) = y;
        return;
    }
  }

  /// h and, where that needs no attention, y.
  __device__ void advance(int layer, const Output& out, float gamma_input, float context_input) const {
    const DecodeStep<Device, A>& op = p_.op;
    const int row = out.row;
    const int b = out.sequence;
    const typename Base::Advanced next =
        Base::advance({.h = out.h,
                       .c = out.c,
                       .state_gate = local(Local::kStateGate, row, b),
                       .mdi = local(Local::kMdiInput, row, b) + local(Local::kMdiGate, row, b),
                       .z = local(Local::kZ, row, b),
                       .v = local(Local::kV, row, b),
                       .residual = local(Local::kResidual, row, b)},
                      gamma_input, context_input);
    if (op.slots > 1) {
      publish(static_cast<A*>(out.to), narrow<A>(next.h));
    } else {
      publish(static_cast<float*>(out.to), next.x);
    }
    local(Local::kResidual, row, b) = next.x;
    *state_of(op.h, layer, out) = next.h;
  }

  /// In passes over panels of the operand, or over rows as many as the sums have room for.
  __device__ void run_stage(int layer, Stage stage) {
    const StageShare shape = stages_[static_cast<int>(stage)];
    const bool by_rows = stage == Stage::kWiden || stage == Stage::kPredict;
    const int all_rows = by_rows ? shape.width : 0;
    if (stage == Stage::kRecall) attend_heads(layer, batch());
    Operand x = {};
    Output out = {};
    int panel = 0;
    int first = 0;
#pragma unroll 1
    while (true) {
      const int rows = min(p_.plan.sums_rows, all_rows - first);
      const int panel_bytes = segments_[shape.first].panel_bytes;
      const int row_bytes = segments_[shape.first].row_bytes;
      if (panel == 0) out = output(shape, layer, stage, thread(), first, rows);
      if (first == 0) x = input(layer, stage, panel, panel_bytes);
      if (panel == 0) acquire_sums();
      int to = 0;
#pragma unroll 1
      for (int i = shape.first; i < shape.end; ++i) {
        const Segment s = segments_[i];
        const bool is_second = i == static_cast<int>(Product::kContextIn) || i == static_cast<int>(Product::kContextUp);
        const int count = by_rows ? rows : s.rows;
        multiply<A>(s, panel, count, operand_ + (is_second ? batch() * x.pitch : 0), x, columns(stage), warp_, ring_,
                    sums_, to, channels_.count);
        to += count;
      }
      barrier();
      panel += panel_bytes;
      if (panel < row_bytes) continue;
      panel = 0;
      for (int i = thread();;) {
        if (out.exists) finish_output(shape, layer, stage, out);
        i += kConsumers;
        if (i >= batch() << (shape.log_width + shape.log_parts)) break;
        out = output(shape, layer, stage, i, first, rows);
      }
      release_sums();
      first += rows;
      if (first >= all_rows) break;
    }
    if (stage == Stage::kWiden && layer + 1 < p_.op.shape.layers) ask_state(layer + 1);
  }
  __device__ float sum(int number) const { return total(sums_, number, 0, 1); }
  /// Of the sums: the sequences, for both networks' vectors where they are multiplied at once.
  __device__ int columns(Stage stage) const {
    return (stage == Stage::kHide || stage == Stage::kAdvance) && p_.plan.pairs ? 2 * batch() : batch();
  }

  const Segment* segments_;
  const StageShare* stages_;
  float4 state_[kRounds];
};

}  // namespace mmrec::kernels
