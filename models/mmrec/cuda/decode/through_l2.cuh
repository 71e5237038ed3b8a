// Vectors that go from block to block through L2 (element.cuh), and what a block keeps of its own channels in shared
// memory: of one sequence (single.cuh) or of several (batch.cuh).
#pragma once

#include "kernels/cuda/element.cuh"
#include "models/mmrec/cuda/decode/context.cuh"

namespace mmrec::kernels {

/// An output of a stage, what its epilogue reads from memory, and where it goes: before the input has come.
struct L2Output {
  int row, part, sequence;  // the row of the part, or of the pass
  bool exists;
  int summed;  // number of its sum among [row][column]
  float bias, context_bias, h, c;
  double sum;
  void* to;  // memory that other blocks or the caller read; null where it is not read
};

template <class A, bool kOneSequence>
class ThroughL2 {
 public:
  __device__ ThroughL2(const DecodeContext<A>& context, std::uint32_t turn)
      : c_(context),
        local_(reinterpret_cast<float*>(context.shared + context.p.plan.local)),
        turn_(turn),
        set_(static_cast<std::byte*>(context.p.op.exchange) + DecodePlan::kHeaderBytes +
             turn * context.p.plan.set_bytes) {}

  template <class T>
  __device__ __forceinline__ T* vectors(int layer, Point point) const {
    return reinterpret_cast<T*>(set_ + layer * c_.p.plan.layer_bytes + c_.p.plan.at[point]);
  }
  /// Where a stage's input lies.
  template <class T>
  __device__ __forceinline__ T* input(int layer, Point point) const {
    return vectors<T>(point == Point::kOutput ? max(layer, 1) - 1 : layer, point);
  }
  /// The next step's set gets ready.
  __device__ __forceinline__ void clear_other_set() const {
    auto* other = reinterpret_cast<uint4*>(static_cast<std::byte*>(c_.p.op.exchange) + DecodePlan::kHeaderBytes +
                                           (1 - turn_) * c_.p.plan.set_bytes);
    constexpr std::uint32_t kOnes = 0xffffffffU;
#pragma unroll 1
    for (std::int64_t i = std::int64_t{blockIdx.x} * kConsumers + c_.thread(); i < c_.p.plan.set_bytes / kPieceBytes;
         i += std::int64_t{gridDim.x} * kConsumers) {
      other[i] = make_uint4(kOnes, kOnes, kOnes, kOnes);
    }
  }
  __device__ __forceinline__ int batch() const { return kOneSequence ? 1 : static_cast<int>(c_.p.op.shape.batch); }
  /// The residual stream of the block's channels begins.
  __device__ __forceinline__ void embed() const {
#pragma unroll 1
    for (int sequence = 0; sequence < batch(); ++sequence) {
#pragma unroll 1
      for (int i = c_.thread(); i < c_.channels.count; i += kConsumers) {
        local(Local::kResidual, i, sequence) = widen(c_.embedding_row(sequence)[c_.channels.first + i]);
      }
    }
  }

  /// And ends, as the step's output, without a head. By all consumers, after the last sums.
  __device__ __forceinline__ void store_output() const {
    barrier();
#pragma unroll 1
    for (int sequence = 0; sequence < batch(); ++sequence) {
#pragma unroll 1
      for (int i = c_.thread(); i < c_.channels.count; i += kConsumers) {
        c_.p.op.x[sequence * c_.dim + c_.channels.first + i] = local(Local::kResidual, i, sequence);
      }
    }
  }

  // --- Outputs ------------------------------------------------------------------------------------------------------

  template <Stage kStage>
  __device__ __forceinline__ int log_parts() const {
    const int parts = c_.template parts<kStage>();
    return (parts > 1 ? 1 : 0) + (parts > 2 ? 1 : 0);
  }
  /// How many numbers output() has: of a pass with `count` rows, or of all parts.
  template <Stage kStage>
  __device__ __forceinline__ int outputs(int count) const {
    const int width = c_.p.plan.log_width[kStage];
    if (!kOneSequence) return batch() << (width + log_parts<kStage>());
    return has_passes(kStage) ? count : c_.template parts<kStage>() << width;
  }
  /// The i-th; of a pass that begins with row `first` and has `count` rows, where the stage has passes.
  template <Stage kStage>
  __device__ __forceinline__ L2Output output(int layer, int i, int first, int count) const {
    constexpr StageInfo kInfo = stage_info(kStage);
    constexpr int kRecallBias = stage_info(Stage::kRecall).bias;
    const DecodeStep<Device, A>& op = c_.p.op;
    const int width = c_.p.plan.log_width[kStage];
    const int parts = c_.template parts<kStage>();
    L2Output out = {};
    out.row = i;
    if constexpr (!kOneSequence || !has_passes(kStage)) {
      out.row = i & ((1 << width) - 1);
      out.part = i >> width;
    }
    if constexpr (!kOneSequence) {
      out.part &= (1 << log_parts<kStage>()) - 1;
      out.sequence = i >> (width + log_parts<kStage>());
    }
    const int others = c_.owned(kInfo.others).count;
    const int own = has_passes(kStage) ? count : c_.owned(kInfo.owned).count;
    out.exists = out.sequence < batch() && out.part < parts && out.row < (out.part == 0 ? own : others);
    if (!out.exists) return out;
    out.summed = out.part == 0 ? out.row : out.row + own + (out.part - 1) * others;
    if constexpr (!kOneSequence) out.summed = out.summed * batch() + out.sequence;
    if constexpr (kStage == Stage::kProject) out.part += c_.p.plan.first_part;
    out.to = destination<kStage>(layer, out, first + out.row);
    if constexpr (kStage == Stage::kPredict) return out;
    const float* const* biases = c_.layers[layer].bias;
    const auto bias = [&](int number) {
      return biases[number] == nullptr ? 0.0F : __ldg(biases[number] + first + out.row);
    };
    out.bias = bias(kInfo.bias + out.part);
    const int channel = c_.channels.first + out.row;
    if constexpr (kStage == Stage::kAdvance) {
      out.context_bias = bias(kInfo.bias + 1);
      out.h = __ldcg(c_.h(layer, out.sequence) + channel);
      if (op.slots == 0) out.c = bias(kRecallBias);
      if (op.slots == 1) out.c = __ldg(c_.state_of(op.context, layer, out.sequence) + channel);
    }
    if constexpr (kStage == Stage::kNarrow)
      out.sum = __ldcg(c_.state_of(op.segment_sum, layer, out.sequence) + channel);
    return out;
  }

  /// Completes an output from its sum(number) and the sums of squares that scale it.
  template <Stage kStage, class Sum>
  __device__ __forceinline__ void finish(int layer, const L2Output& out, float* norm_sums, Sum sum) {
    const float scale = DecodeContext<A>::kScalesSums && is_normalised(kStage) ? c_.norm_scale(norm_sums) : 1.0F;
    const float y = __fmaf_rn(sum(out.summed), scale, out.bias);
    float context = 0.0F;  // the second network's rows come next
    if (kStage == Stage::kAdvance && c_.networks() == 2) {
      context = sum(out.summed + c_.channels.count * batch()) + out.context_bias;
    }
    epilogue<kStage, A>(*this, layer, out, y, context);
  }

  // --- The epilogue's words -----------------------------------------------------------------------------------------

  __device__ __forceinline__ const DecodeStep<Device, A>& op() const { return c_.p.op; }
  template <Point kPoint>
  __device__ __forceinline__ void send(const L2Output& out, float y) const {
    publish(static_cast<A*>(out.to), narrow<A>(y));
  }
  template <Point kPoint>
  __device__ __forceinline__ void send_sum(const L2Output& out, float x) const {
    publish(static_cast<float*>(out.to), x);
  }
  __device__ __forceinline__ void keep_gate(const L2Output& out, float y, float) const {
    local(out.part == 0 ? Local::kStateGate : Local::kMdiGate, out) = y;
  }
  __device__ __forceinline__ void keep_projection(const L2Output& out, float y) const {
    local(static_cast<Local>(out.part), out) = y;
  }
  __device__ __forceinline__ void keep_h(const L2Output& out, float h) const { local(Local::kH, out) = h; }
  __device__ __forceinline__ float& residual(const L2Output& out) const { return local(Local::kResidual, out); }
  __device__ __forceinline__ float query(const L2Output& out) const { return local(Local::kQ, out); }
  __device__ __forceinline__ Channel channel(const L2Output& out) const {
    return {.h = out.h,
            .c = out.c,
            .state_gate = local(Local::kStateGate, out),
            .mdi = local(Local::kMdiInput, out) + local(Local::kMdiGate, out),
            .z = local(Local::kZ, out),
            .v = local(Local::kV, out)};
  }
  __device__ __forceinline__ void store_state(int layer, const L2Output& out, double sum) const {
    const int channel = c_.channels.first + out.row;
    c_.h(layer, out.sequence)[channel] = local(Local::kH, out);
    c_.state_of(c_.p.op.segment_sum, layer, out.sequence)[channel] = sum;
  }

 private:
  __device__ __forceinline__ float& local(Local what, int channel, int sequence) const {
    return local_[(static_cast<int>(what) * batch() + sequence) * c_.p.plan.channels + channel];
  }
  __device__ __forceinline__ float& local(Local what, const L2Output& out) const {
    return local(what, out.row, out.sequence);
  }
  /// Computed while the input is on its way. `row` counts the owned rows.
  template <Stage kStage>
  __device__ __forceinline__ void* destination(int layer, const L2Output& out, int row) const {
    constexpr StageInfo kInfo = stage_info(kStage);
    if constexpr (kStage == Stage::kPredict) {
      return bytes_further(c_.p.op.logits, out.sequence * c_.p.op.slot_bytes) + c_.vocab.first + row;
    } else if constexpr (kInfo.output == Point::kCount) {
      return nullptr;
    } else {
      const Point to = kStage == Stage::kAdvance && c_.p.op.slots < 2 ? Point::kMixed : kInfo.output;
      const int vector = (kStage == Stage::kHide ? out.part * batch() : 0) + out.sequence;
      const int at = vector * c_.width(kInfo.output) + c_.owned(kInfo.others).first + row;
      if (to == Point::kMixed || to == Point::kOutput) return vectors<float>(layer, to) + at;
      return vectors<A>(layer, to) + at;
    }
  }

  const DecodeContext<A>& c_;
  float* local_;
  std::uint32_t turn_;
  std::byte* set_;
};

}  // namespace mmrec::kernels
