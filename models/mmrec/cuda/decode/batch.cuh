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

#include <utility>

#include "models/mmrec/cuda/decode/attention.cuh"
#include "models/mmrec/cuda/decode/batch_product.cuh"

namespace mmrec::kernels {

/// visit<stage>() for a stage that is known at run time.
template <class Visit, int... kNumbers>
__device__ __forceinline__ void at_stage(Stage stage, Visit visit, std::integer_sequence<int, kNumbers...>) {
  const auto at = [&]<Stage kStage>() {
    if (stage == kStage) visit.template operator()<kStage>();
    return stage == kStage;
  };
  (at.template operator()<static_cast<Stage>(kNumbers)>() || ...);
}
template <class Visit>
__device__ __forceinline__ void at_stage(Stage stage, Visit visit) {
  at_stage(stage, visit, std::make_integer_sequence<int, kCountOf<Stage>>());
}
__device__ __forceinline__ StageInfo stage_info_at(Stage stage) {
  StageInfo info = {};
  at_stage(stage, [&]<Stage kStage>() { info = stage_info(kStage); });
  return info;
}

template <class A>
class BatchBlock {
  using Context = DecodeContext<A>;
  static constexpr bool kScalesSums = Context::kScalesSums;
  static constexpr int kVector = Context::kVector;
  static constexpr int kStride = Context::kStride;

 public:
  static constexpr bool kIsCluster = false;
  using Ring = L2Ring;
  using Stream = WarpStream;

  __device__ __forceinline__ BatchBlock(DecodeContext<A>& context, Ring ring, std::uint32_t turn)
      : c_(context),
        l2_(context, turn),
        ring_(ring),
        operand_(context.shared + context.p.plan.operand),
        sums_(reinterpret_cast<float*>(context.shared + context.p.plan.sums)),
        norm_sums_(reinterpret_cast<float*>(context.shared + context.p.plan.norm_sums)) {}

  __device__ void run() {
    ask_state(0);
    l2_.clear_other_set();
    l2_.embed();
    release_sums();
    const auto layers = static_cast<int>(c_.p.op.shape.layers);
    int layer = 0;
    auto stage = Stage::kGate;
#pragma unroll 1
    while (true) {
      run_stage(layer, stage);
      if (stage == Stage::kPredict) break;
      const bool skips_attention = stage == Stage::kAdvance && c_.p.op.slots < 2;
      stage = skips_attention ? Stage::kWiden : static_cast<Stage>(static_cast<int>(stage) + 1);
      if (stage == Stage::kPredict && ++layer < layers) stage = Stage::kGate;
    }
    acquire_sums();
  }

 private:
  static constexpr int kAhead = 8;   // reads of a lane at once
  static constexpr int kRounds = 4;  // the same of fp32 vectors

  __device__ int batch() const { return l2_.batch(); }
  /// Sums have been read; and wait until all warps' have, before new ones are written.
  __device__ static void release_sums() { ptx::named_barrier_arrive(2, 2 * kConsumers); }
  __device__ static void acquire_sums() { ptx::named_barrier_sync(2, 2 * kConsumers); }

  // --- Operands ------------------------------------------------------------------------------------------------------

  // Each writes vectors, rounded to A, into the operand buffer and returns how many bytes these are apart.

  /// `rows` vectors of `bytes` bytes, `stride` elements apart, as they get written. A lane reads a piece of a step.
  __device__ int gather(const A* from, int rows, int stride, int bytes) const {
    const int pitch = padded_row(bytes);
    const int piece = c_.lane % 4 * kPieceBytes;
    const int mine = ((bytes + kStepBytes - 1) / kStepBytes - c_.warp + kTileWarps - 1) / kTileWarps;  // steps of a row
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
        const int step = first + c_.lane / kLanesOfStep;  // of all rows'
        const int row = (step * reciprocal) >> kBits;
        const int at = ((step - row * mine) * kTileWarps + c_.warp) * kStepBytes + piece;
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
    return pitch;
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
    return c_.state_vector(layer, at.sequence, at.vector(c_.first_vector()));
  }
  /// What a fp32 operand comes from.
  enum class Source : std::uint8_t { kState, kEmbedding, kExchange };
  /// Every sequence's fp32 vector, or if there is a weight rmsnorm of it up to the scale, rounded.
  __device__ int narrowed(const float* weight, Source kind, int layer, const float* from) const {
    const int pitch = padded_row(c_.dim * int{sizeof(A)});
    const int first = c_.first_vector();
    float scale_of_lane = 1.0F;  // lane b has that of sequence b
    if (!kScalesSums && weight != nullptr) {
      for_each_vector(kind, layer, from, true, [](const Position&, float4) {});
      barrier();
      if (c_.lane < batch()) scale_of_lane = c_.norm_scale(norm_sums_ + c_.lane * kTileWarps);
    }
    float4 held[kRounds];  // weights of the first rounds
#pragma unroll
    for (int i = 0; i < kRounds; ++i) held[i] = c_.norm_weight(weight, first + i * kStride);
    for_each_vector(kind, layer, from, kScalesSums && weight != nullptr, [&](const Position& at, float4 x) {
      const float scale = kScalesSums ? 1.0F : __shfl_sync(0xffffffffU, scale_of_lane, at.sequence % 32);
      if (!exists(at)) return;
      float4 w = held[0];
#pragma unroll
      for (int i = 1; i < kRounds; ++i) {
        if (at.round == i) w = held[i];
      }
      if (at.round >= kRounds) w = c_.norm_weight(weight, at.vector(first));
      c_.store_vector(operand_ + at.sequence * pitch, at.vector(first), w, scale, x);
    });
    __syncwarp();
    return pitch;
  }
  /// visit(position, vector) for all of a lane's vectors, and zeros where it has none in a round; sums up their squares
  /// if asked to.
  template <class Visit>
  __device__ void for_each_vector(Source kind, int layer, const float* from, bool sums_squares, Visit visit) const {
    const int first = c_.first_vector();
    float squares_sum = 0.0F;
    Position at = {};
    const auto ends_sequence = [&](const Position& of) {
      return (of.round + 1) * kStride * kVector >= c_.dim && of.sequence < batch();
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
        source[i] = exists(at) ? from + std::int64_t{at.sequence} * c_.dim + at.vector(first) * kVector : nullptr;
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
          x[i] = c_.embedding_vector(of[i].sequence, of[i].vector(first));
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
        if (c_.lane == 0 && ends_sequence(of[i])) norm_sums_[of[i].sequence * kTileWarps + c_.warp] = of_squares[i];
      }
    }
  }
  __device__ bool exists(const Position& at) const {
    return at.sequence < batch() && at.vector(c_.first_vector()) * kVector < c_.dim;
  }
  __device__ void next(Position& at) const {
    if (++at.round * kStride * kVector < c_.dim) return;
    at.round = 0;
    ++at.sequence;
  }

  // --- A stage -------------------------------------------------------------------------------------------------------

  /// The stage's operand, or `panel` of it.
  __device__ int read_input(int layer, const StageInfo& stage, int panel, int panel_bytes) const {
    const bool is_state = stage.input == Point::kCount;
    if (is_state || stage.is_normalised()) {
      const bool embeds = layer == 0 && stage.first == Product::kQvzk;
      const Source source = is_state ? Source::kState : embeds ? Source::kEmbedding : Source::kExchange;
      const float* from = l2_.template input<float>(layer, is_state ? Point::kOutput : stage.input);
      return narrowed(is_state ? nullptr : c_.norm(stage.input, layer), source, layer, from);
    }
    const int width = c_.width(stage.input);
    const int bytes = min(width * int{sizeof(A)} - panel, panel_bytes);
    return gather(l2_.template input<A>(layer, stage.input) + panel / int{sizeof(A)},
                  stage.is_pair() ? c_.networks() * batch() : batch(), width, bytes);
  }
  template <Stage kStage>
  __device__ void finish(int layer, const L2Output& out) {
    const float* const squares_sums = norm_sums_ + out.sequence * kTileWarps;
    const float scale = kScalesSums && is_normalised(kStage) ? c_.norm_scale(squares_sums) : 1.0F;
    const float y = __fmaf_rn(total(sums_, out.summed, 0, 1), scale, out.bias);
    float context = 0.0F;  // the second network's rows come next, in columns of their own if there are such
    if (kStage == Stage::kAdvance && c_.networks() == 2) {
      const int columns = l2_.template columns<kStage>();
      context = total(sums_, out.summed + c_.channels.count * columns + columns - batch(), 0, 1) + out.context_bias;
    }
    epilogue<kStage>(l2_, layer, out, y, context);
  }

  /// In passes over panels of the operand, or over rows as many as the sums have room for.
  __device__ void run_stage(int layer, Stage stage) {
    const StageInfo info = stage_info_at(stage);
    const bool by_rows = info.has_passes();
    const int all_rows = by_rows ? c_.owned(info.owned).count : 0;
    const int columns = info.is_pair() && c_.p.plan.pairs ? 2 * batch() : batch();
    const int panel_bytes = c_.p.plan.products[info.first].panel_bytes;
    const int row_bytes = c_.p.plan.products[info.first].row_bytes;
    if (stage == Stage::kRecall) attend_heads(c_, l2_, layer, reinterpret_cast<float*>(operand_));
    int pitch = 0;
    L2Output out = {};
    int panel = 0;
    int first = 0;
#pragma unroll 1
    while (true) {
      const int rows = min(c_.p.plan.sums_rows, all_rows - first);
      if (panel == 0) {
        at_stage(stage, [&]<Stage kStage>() { out = l2_.template output<kStage>(layer, c_.thread(), first, rows); });
      }
      if (first == 0) pitch = read_input(layer, info, panel, panel_bytes);
      if (panel == 0) acquire_sums();
      int to = 0;
#pragma unroll 1
      for (int i = static_cast<int>(info.first); i < static_cast<int>(info.end); ++i) {
        const auto product = static_cast<Product>(i);
        const ProductShape& s = c_.p.plan.products[product];
        const bool is_second = product == Product::kContextIn || product == Product::kContextUp;
        const int count = by_rows ? rows : c_.rows(s);
        multiply<A>(s, panel, count, operand_ + (is_second ? batch() * pitch : 0), pitch, columns, c_.warp, ring_,
                    sums_, to, c_.channels.count);
        to += count;
      }
      barrier();
      panel += panel_bytes;
      if (panel < row_bytes) continue;
      panel = 0;
      at_stage(stage, [&]<Stage kStage>() {
        const int last = l2_.template outputs<kStage>(rows);
        for (int i = c_.thread();;) {
          if (out.exists) finish<kStage>(layer, out);
          i += kConsumers;
          if (i >= last) break;
          out = l2_.template output<kStage>(layer, i, first, rows);
        }
      });
      release_sums();
      first += rows;
      if (first >= all_rows) break;
    }
    if (stage == Stage::kWiden && layer + 1 < c_.p.op.shape.layers) ask_state(layer + 1);
  }

  Context& c_;
  ThroughL2<A, false> l2_;
  Ring ring_;
  std::byte* operand_;
  float* sums_;
  float* norm_sums_;
  float4 state_[kRounds];
};

}  // namespace mmrec::kernels
