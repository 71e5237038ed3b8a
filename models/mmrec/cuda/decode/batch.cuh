// The multiplying warps of a decode step of several sequences: the stages of step.cu, from inputs to epilogues.
//
// Every stage has the same steps. The warps ask memory for the epilogue's values, read the input from the exchange into
// the operand buffer, multiply their shares of k, add up the warps' sums and write the outputs. A warp puts only the
// steps that it multiplies into the buffer. So warps meet once per stage, before the sums are added up.
//
// Besides its trip through L2, a stage costs a chain of dependent instructions, each executed once. So stages share
// instructions where they can, and values that depend on the shape are computed before. One sequence is too little work
// to hide even that chain: single.cuh takes it, with the same bits.
#pragma once

#include <utility>

#include "models/mmrec/cuda/decode/attention.cuh"
#include "models/mmrec/cuda/decode/l2_inputs.cuh"
#include "models/mmrec/cuda/decode/stream.cuh"

namespace mmrec::kernels {

/// Moves a warp's unfinished sums of `rows` rows from row `first` on to memory or back. The two chains' sums lie
/// `apart` rows apart.
template <bool kStore>
__device__ inline void move_chains(float* sums, TileSums& tile, int first, int rows, int columns, int apart) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  for_each_value(rows, columns, [&](int i, int row, int column) {
#pragma unroll
    for (int chain = 0; chain < 2; ++chain) {
      float& there = warp_sums(sums, first + row + chain * apart, column, columns)[warp];
      if constexpr (kStore) {
        there = tile.chains[chain][i];
      } else {
        tile.chains[chain][i] = there;
      }
    }
  });
}

/// Consumes the next `count` rows of one panel of a product and writes the warps' sums of them from row `to` on. Sums
/// that a panel leaves unfinished wait there in two parts, `parked` rows apart, so that the order of additions does not
/// depend on panels. Vectors lie vector_pitch bytes apart. A warp asks for kTogether steps at once: what it waits for
/// is shared memory, not throughput.
template <class A>
__device__ inline void multiply(const ProductShape& s, int panel, int count, const std::byte* vectors, int vector_pitch,
                                int columns, int warp, L2Ring& ring, float* sums, int to, int parked) {
  constexpr int kTogether = sizeof(A) == 4 ? 2 : 4;
  constexpr int kStride = kTileWarps * kStepBytes;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4;
  const int piece = lane % 4 * kPieceBytes;
  const int pitch = s.slot_bytes + kRowPadding;
  const int slot_bytes = s.slot_bytes;
  const int tile_rows = s.tile_rows;
  const int row_bytes = s.row_bytes;
  const int end = min(row_bytes, panel + s.panel_bytes);
  const std::byte* const vector = vectors + min(g, columns - 1) * vector_pitch + warp * kStepBytes + piece;
#pragma unroll 1
  for (int tile = 0; tile < count; tile += tile_rows) {
    const int rows = min(tile_rows, count - tile);
    // Rows that the tile lacks repeat its last one. Their sums are not used.
    const int low = min(g, rows - 1) * pitch + warp * kStepBytes + piece;
    const int high = min(g + 8, rows - 1) * pitch + warp * kStepBytes + piece;
    const std::byte* in = vector;
    TileSums tile_sums;
    if (panel > 0) move_chains<false>(sums, tile_sums, to + tile, rows, columns, parked);
#pragma unroll 1
    for (int k = panel; k < end; k += slot_bytes) {
      const int bytes = min(slot_bytes, end - k) - warp * kStepBytes;
      ring.wait_full();
      const std::byte* slot = ring.slot();
      std::uint32_t loaded = 0;
      int left = bytes;
#pragma unroll 1
      for (; left > (kTogether - 1) * kStride + kStepBytes - kPieceBytes; left -= kTogether * kStride) {
        uint4 a[kTogether];
        uint4 b[kTogether];
        uint4 v[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          b[i] = v[i] = make_uint4(0, 0, 0, 0);
          a[i] = *reinterpret_cast<const uint4*>(slot + low + i * kStride);
          if (rows > 8) b[i] = *reinterpret_cast<const uint4*>(slot + high + i * kStride);
          if (g < columns) v[i] = *reinterpret_cast<const uint4*>(in + i * kStride);
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          multiply_step<A>(tile_sums, a[i], b[i], v[i], columns);
          loaded |= a[i].x | b[i].x;
        }
        in += kTogether * kStride;
        slot += kTogether * kStride;
      }
#pragma unroll 1
      for (; left > 0; left -= kStride) {  // the others, the last of which may be incomplete
        uint4 a = make_uint4(0, 0, 0, 0);
        uint4 b = a;
        uint4 v = a;
        if (left > piece) {
          a = *reinterpret_cast<const uint4*>(slot + low);
          if (rows > 8) b = *reinterpret_cast<const uint4*>(slot + high);
          if (g < columns) v = *reinterpret_cast<const uint4*>(in);
        }
        multiply_step<A>(tile_sums, a, b, v, columns);
        loaded |= a.x | b.x;
        in += kStride;
        slot += kStride;
      }
      ring.release(ring.number(), loaded);
      ring.advance();
    }
    if (end < row_bytes) {
      move_chains<true>(sums, tile_sums, to + tile, rows, columns, parked);
    } else {
      store_sums(sums, tile_sums, to + tile, rows, columns);
    }
  }
}

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
  static constexpr bool kIsCompact = false;
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
  /// Says that this warp has read its sums; and waits until all warps have, before new sums are written.
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
    L2Output out = {};
    int panel = 0;
    int first = 0;
#pragma unroll 1
    while (true) {
      const int rows = min(c_.p.plan.sums_rows, all_rows - first);
      if (panel == 0) {
        at_stage(stage, [&]<Stage kStage>() { out = l2_.template output<kStage>(layer, c_.thread(), first, rows); });
      }
      if (first == 0 && !info.keeps_input()) pitch_ = inputs_.template read<true>(l2_, info, layer, panel, panel_bytes);
      if (panel == 0) acquire_sums();
      int to = 0;
#pragma unroll 1
      for (int i = static_cast<int>(info.first); i < static_cast<int>(info.end); ++i) {
        const auto product = static_cast<Product>(i);
        const ProductShape& s = c_.p.plan.products[product];
        const bool is_second = product == Product::kContextUp;
        const int count = by_rows ? rows : c_.rows(s);
        multiply<A>(s, panel, count, inputs_.operand() + (is_second ? batch() * pitch_ : 0), pitch_, batch(), c_.warp,
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
  int pitch_ = 0;  // of the operand's vectors
};

}  // namespace mmrec::kernels
