// The multiplying warps of a decode step of several sequences: the stages of step.cu, from inputs to epilogues.
//
// Every stage has the same steps. The warps ask memory for the epilogue's values, read the input from the exchange into
// the operand buffer, multiply their shares of k, add up the warps' sums and write the outputs. A warp puts only the
// steps that it multiplies into the buffer. So warps meet once per stage, before the sums are added up.
//
// Besides its trip through L2, a stage costs a chain of dependent instructions, each executed once. So stages share
// instructions where they can, and values that depend on the shape are computed before. One sequence is too little work
// to hide even that chain: single.cuh takes it, with the same bits.
//
// Of a quantised model compact rows meet vectors of integers as in single.cuh; upper and lower bytes of the vectors are
// products of their own.
#pragma once

#include <utility>

#include "models/mmrec/cuda/decode/attention.cuh"
#include "models/mmrec/cuda/decode/compact_product.cuh"
#include "models/mmrec/cuda/decode/l2_inputs.cuh"
#include "models/mmrec/cuda/decode/stream.cuh"

namespace mmrec::kernels {

/// Moves a warp's unfinished sums of `rows` rows from row `first` on to memory or back. The chains' sums lie `apart`
/// rows apart.
template <bool kStore, int kChains>
__device__ inline void move_chains(float* sums, TileSums& tile, int first, int rows, int columns, int apart) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  for_each_value(rows, columns, [&](int i, int row, int column) {
#pragma unroll
    for (int chain = 0; chain < kChains; ++chain) {
      float& there = warp_sums(sums, first + row + chain * apart, column, columns)[warp];
      if constexpr (kStore) {
        there = tile.chains[chain][i];
      } else {
        tile.chains[chain][i] = there;
      }
    }
  });
}

/// The vectors of a stage that warps multiply, of each sequence `pitch` bytes apart.
struct BatchInput {
  const std::byte* vectors;
  const float* scales;  // of integers
  int pitch;
  int columns;
};

/// A warp's part of a slot's product: of plain rows, whose lanes' first pieces lie `low` and `high` bytes from the
/// slot, the latter of rows that may not be there, `left` bytes from the warp's first step on. A warp asks for
/// kTogether steps at once: what it waits for is shared memory, not throughput. Returns bits of all that it has read of
/// the slot.
template <class A>
__device__ inline std::uint32_t multiply_slot(TileSums& sums, const std::byte* slot, int low, int high, bool has_high,
                                              int left, const BatchInput& x, const std::byte* in) {
  constexpr int kTogether = sizeof(A) == 4 ? 2 : 4;
  constexpr int kStride = kTileWarps * kStepBytes;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int piece = lane % 4 * kPieceBytes;
  const bool has_column = lane / 4 < x.columns;
  std::uint32_t loaded = 0;
#pragma unroll 1
  for (; left > (kTogether - 1) * kStride + kStepBytes - kPieceBytes; left -= kTogether * kStride) {
    uint4 a[kTogether];
    uint4 b[kTogether];
    uint4 v[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      b[i] = v[i] = make_uint4(0, 0, 0, 0);
      a[i] = *reinterpret_cast<const uint4*>(slot + low + i * kStride);
      if (has_high) b[i] = *reinterpret_cast<const uint4*>(slot + high + i * kStride);
      if (has_column) v[i] = *reinterpret_cast<const uint4*>(in + i * kStride);
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      multiply_step<A>(sums, a[i], b[i], v[i], x.columns);
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
      if (has_high) b = *reinterpret_cast<const uint4*>(slot + high);
      if (has_column) v = *reinterpret_cast<const uint4*>(in);
    }
    multiply_step<A>(sums, a, b, v, x.columns);
    loaded |= a.x | b.x;
    in += kStride;
    slot += kStride;
  }
  return loaded;
}

/// The same of a chunk of compact rows, which has `groups` groups. low, high: of rows.
template <bool kHalf, bool kByGroups>
__device__ inline std::uint32_t multiply_chunk(TileSums& sums, const std::byte* slot, int low, int high, int groups,
                                               const BatchInput& x, int k) {
  constexpr int kMost = kCompactChunkGroups / kTileWarps;  // groups of a warp
  constexpr int kGroupBytes = kHalf ? kCompactGroup / 2 : kCompactGroup;
  constexpr int kStep = 2 * kStepBytes;  // of a vector
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int t = lane % 4;
  const std::byte* const numbers = slot + t * (kHalf ? kPieceBytes / 2 : kPieceBytes);
  const auto* const scales = reinterpret_cast<const float*>(slot + groups * kGroupBytes);
  const std::byte* const in = x.vectors + k + min(lane / 4, x.columns - 1) * x.pitch + t * kPieceBytes;
  std::uint32_t loaded = 0;
  uint4 rows[kMost][2];
  float row_scales[kByGroups ? kMost : 1][2];
#pragma unroll
  for (int i = 0; i < kMost; ++i) {  // repeats the last group where the warp has fewer
    const int group = min(warp + i * kTileWarps, groups - 1);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = j == 0 ? low : high;
      if constexpr (kHalf) {
        const uint2 pairs = *reinterpret_cast<const uint2*>(numbers + row + group * kGroupBytes);
        rows[i][j] = make_uint4(pairs.x, pairs.y, 0, 0);
      } else {
        rows[i][j] = *reinterpret_cast<const uint4*>(numbers + row + group * kGroupBytes);
      }
      loaded |= rows[i][j].x;
      if (!kByGroups && i > 0) continue;
      row_scales[i][j] = scales[row / int{sizeof(float)} + (kByGroups ? group : 0)];
      loaded |= __float_as_uint(row_scales[i][j]);
    }
  }
  float x_scales[2] = {};  // of a lane's two sequences
  if (warp < groups) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      x_scales[c] = x.scales[(min(2 * t + c, x.columns - 1) * x.pitch + k + warp * kStep) / kStepBytes];
    }
  }
  int upper[4] = {};
  int lower[4] = {};
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    const int group = warp + i * kTileWarps;
    if (group < groups) {
      const uint4 a = kHalf ? widen_halves(rows[i][0]) : rows[i][0];
      const uint4 b = kHalf ? widen_halves(rows[i][1]) : rows[i][1];
      const std::byte* const step = in + group * kStep;
      multiply_group(upper, a, b, *reinterpret_cast<const uint4*>(step));
      multiply_group(lower, a, b, *reinterpret_cast<const uint4*>(step + kStepBytes));
    }
    if (kByGroups ? group < groups : i == kMost - 1) {
#pragma unroll
      for (int value = 0; value < 4; ++value) {
        add_scaled(sums.chains[0][value], upper[value], lower[value],
                   x_scales[value % 2] * row_scales[kByGroups ? i : 0][value / 2]);
        upper[value] = lower[value] = 0;
      }
    }
  }
  return loaded;
}

/// Consumes the next `count` rows of one panel of a product and writes the warps' sums of them from row `to` on. Sums
/// that a panel leaves unfinished wait there in two parts, `parked` rows apart, so that the order of additions does not
/// depend on panels.
template <class A, bool kCompact>
__device__ inline void multiply(const ProductShape& s, int panel, int panel_input, int count, const BatchInput& x,
                                L2Ring& ring, float* sums, int to, int parked) {
  constexpr int kChains = kCompact ? 1 : 2;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4;
  const int first = static_cast<int>(threadIdx.x) / 32 * kStepBytes + lane % 4 * kPieceBytes;  // of a plain row
  const int slot_bytes = s.slot_bytes;
  const int tile_rows = s.tile_rows;
  const int row_bytes = s.row_bytes;
  const int end = min(row_bytes, panel + s.panel_bytes);
#pragma unroll 1
  for (int tile = 0; tile < count; tile += tile_rows) {
    const int rows = min(tile_rows, count - tile);
    // Rows that the tile lacks repeat its last one. Their sums are not used.
    const int low = min(g, rows - 1) * s.slot_pitch;
    const int high = min(g + 8, rows - 1) * s.slot_pitch;
    TileSums tile_sums;
    if (panel > 0) move_chains<false, kChains>(sums, tile_sums, to + tile, rows, x.columns, parked);
    int in = 0;
#pragma unroll 1
    for (int k = panel; k < end; k += slot_bytes) {
      ring.wait_full();
      std::uint32_t loaded = 0;
      if constexpr (kCompact) {
        const int groups = min(s.input_bytes - panel_input - in, kChunkInput) / (kCompactGroup * int{sizeof(A)});
        const auto multiply_as = [&]<bool kHalf, bool kByGroups>() {
          loaded = multiply_chunk<kHalf, kByGroups>(tile_sums, ring.slot(), low, high, groups, x, in);
        };
        if (s.format.code == DType::kI4) {
          multiply_as.template operator()<true, true>();
        } else if (s.format.group != 0) {
          multiply_as.template operator()<false, true>();
        } else {
          multiply_as.template operator()<false, false>();
        }
        in += kChunkInput;
      } else {
        loaded = multiply_slot<A>(tile_sums, ring.slot(), low + first, high + first, rows > 8,
                                  min(slot_bytes, end - k) - (first - lane % 4 * kPieceBytes), x,
                                  x.vectors + in + min(g, x.columns - 1) * x.pitch + first);
        in += slot_bytes;
      }
      ring.release(ring.number(), loaded);
      ring.advance();
    }
    if (end < row_bytes) {
      move_chains<true, kChains>(sums, tile_sums, to + tile, rows, x.columns, parked);
    } else {
      store_sums(sums, tile_sums, to + tile, rows, x.columns);
    }
  }
}

/// visit<stage>() for a stage that is known at run time.
template <class Visit>
__device__ __forceinline__ void at_stage(Stage stage, Visit visit) {
  const auto at = [&]<Stage kStage>() {
    if (stage == kStage) visit.template operator()<kStage>();
    return stage == kStage;
  };
  [&]<int... kNumbers>(std::integer_sequence<int, kNumbers...>) {
    (at.template operator()<static_cast<Stage>(kNumbers)>() || ...);
  }
  (std::make_integer_sequence<int, kCountOf<Stage>>());
}

/// kCompact: of compact matrices.
template <class A, bool kCompact = false>
class BatchBlock {
 public:
  static constexpr bool kIsCluster = false;
  static constexpr bool kIsCompact = kCompact;
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
    StageInfo info = {};
    at_stage(stage, [&]<Stage kStage>() { info = stage_info(kStage); });
    const bool by_rows = info.has_passes();
    const int all_rows = by_rows ? c_.owned(info.owned).count : 0;
    const ProductShape& shape = c_.p.plan.products[info.first];
    if (stage == Stage::kRecall) attend_heads(c_, l2_, layer, reinterpret_cast<float*>(inputs_.operand()));
    L2Output out = {};
    int panel = 0;
    int panel_input = 0;  // where it begins in the vector
    int first = 0;
#pragma unroll 1
    while (true) {
      const int rows = min(c_.p.plan.sums_rows, all_rows - first);
      if (panel == 0) {
        at_stage(stage, [&]<Stage kStage>() { out = l2_.template output<kStage>(layer, c_.thread(), first, rows); });
      }
      if (first == 0 && !info.keeps_input()) {
        pitch_ = inputs_.template read<true>(l2_, info, layer, panel_input, shape.panel_input);
      }
      if (panel == 0) acquire_sums();
      int to = 0;
#pragma unroll 1
      for (int i = static_cast<int>(info.first); i < static_cast<int>(info.end); ++i) {
        const auto product = static_cast<Product>(i);
        const ProductShape& s = c_.p.plan.products[product];
        const bool is_second = product == Product::kContextUp;
        const int count = by_rows ? rows : c_.rows(s);
        const std::byte* const vectors = inputs_.operand() + (is_second ? batch() * pitch_ : 0);
        const BatchInput x = {vectors, kCompact ? inputs_.scales_at(vectors) : nullptr, pitch_, batch()};
        multiply<A, kCompact>(s, panel, panel_input, count, x, ring_, sums_, to, c_.channels.count);
        to += count;
      }
      barrier();
      panel += shape.panel_bytes;
      panel_input += shape.panel_input;
      if (panel < shape.row_bytes) continue;
      panel = panel_input = 0;
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
  L2Inputs<A, false, kCompact> inputs_;
  Ring ring_;
  float* sums_;
  int pitch_ = 0;  // of the operand's vectors
};

}  // namespace mmrec::kernels
