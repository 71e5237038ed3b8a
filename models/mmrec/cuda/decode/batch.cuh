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
#include "models/mmrec/cuda/decode/l2_inputs.cuh"

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
 public:
  static constexpr bool kIsCluster = false;
  using Ring = L2Ring;
  using Stream = WarpStream;

  __device__ __forceinline__ BatchBlock(DecodeContext<A>& context, Ring ring, std::uint32_t turn)
      : c_(context),
        l2_(context, turn),
        inputs_(context),
        ring_(ring),
        sums_(reinterpret_cast<float*>(context.shared + context.p.plan.sums)) {}

  __device__ void run() {
    inputs_.ask_state(0);
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
      if (stage == Stage::kPredict && !c_.predicts()) break;
    }
    acquire_sums();
    if (!c_.predicts()) l2_.store_output();
  }

 private:
  __device__ int batch() const { return l2_.batch(); }
  /// Sums have been read; and wait until all warps' have, before new ones are written.
  __device__ static void release_sums() { ptx::named_barrier_arrive(2, 2 * kConsumers); }
  __device__ static void acquire_sums() { ptx::named_barrier_sync(2, 2 * kConsumers); }

  // --- A stage -------------------------------------------------------------------------------------------------------

  /// In passes over panels of the operand, or over rows as many as the sums have room for.
  __device__ void run_stage(int layer, Stage stage) {
    const StageInfo info = stage_info_at(stage);
    const bool by_rows = info.has_passes();
    const int all_rows = by_rows ? c_.owned(info.owned).count : 0;
    const int panel_bytes = c_.p.plan.products[info.first].panel_bytes;
    const int row_bytes = c_.p.plan.products[info.first].row_bytes;
    if (stage == Stage::kRecall) attend_heads(c_, l2_, layer, reinterpret_cast<float*>(inputs_.operand()));
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
      if (first == 0) pitch = inputs_.template read<true>(l2_, info, layer, panel, panel_bytes);
      if (panel == 0) acquire_sums();
      int to = 0;
#pragma unroll 1
      for (int i = static_cast<int>(info.first); i < static_cast<int>(info.end); ++i) {
        const auto product = static_cast<Product>(i);
        const ProductShape& s = c_.p.plan.products[product];
        const bool is_second = product == Product::kContextIn || product == Product::kContextUp;
        const int count = by_rows ? rows : c_.rows(s);
        multiply<A>(s, panel, count, inputs_.operand() + (is_second ? batch() * pitch : 0), pitch, batch(), c_.warp,
                    ring_, sums_, to, c_.channels.count);
        to += count;
      }
      barrier();
      panel += panel_bytes;
      if (panel < row_bytes) continue;
      panel = 0;
      at_stage(stage, [&]<Stage kStage>() {
        const int last = l2_.template outputs<kStage>(rows);
        for (int i = c_.thread();;) {
          if (out.exists) {
            l2_.template finish<kStage>(layer, out, inputs_.norm_sums(out.sequence),
                                        [&](int row) { return total(sums_, row, 0, 1); });
          }
          i += kConsumers;
          if (i >= last) break;
          out = l2_.template output<kStage>(layer, i, first, rows);
        }
      });
      release_sums();
      first += rows;
      if (first >= all_rows) break;
    }
    if (stage == Stage::kWiden && layer + 1 < c_.p.op.shape.layers) inputs_.ask_state(layer + 1);
  }

  DecodeContext<A>& c_;
  ThroughL2<A, false> l2_;
  L2Inputs<A, false> inputs_;
  Ring ring_;
  float* sums_;
};

}  // namespace mmrec::kernels
