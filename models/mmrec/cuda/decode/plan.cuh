// Where a decode step keeps its data and which block owns which rows: a block's shared memory, the memory through which
// blocks exchange vectors, the shapes of products and stages. All of it is worked out on the host, so that a block
// divides nothing.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/gemm/compact.h"
#include "kernels/cuda/gemm/tile_product.cuh"
#include "models/mmrec/cuda/decode/stages.cuh"
#include "models/mmrec/fused_ops.h"

namespace mmrec::kernels {

/// A ring slot holds 16 rows of so many bytes, or fewer of accordingly more, every row padded; for one sequence 8 rows.
/// The copy engine and the product are the faster the longer rows are; where the ring would get too short for that,
/// slots are smaller.
inline constexpr int kSlotRowBytes[] = {2048, 1024};
inline constexpr int kSingleRows = 8;
inline constexpr int kEnoughSlots = 4;
inline constexpr int kLeastSlots = 2;

/// Of ffn_out's input as integers: the chunks of compact rows whose numbers have one scale for a warp.
inline constexpr int kScaledChunks = 2;
/// Bytes of a vector that a chunk of compact rows multiplies, in 16 bits or as integers.
inline constexpr int kChunkInput = kCompactChunkGroups * kCompactGroup * 2;

/// One sequence of a small model goes through one cluster of so many blocks (cluster.cuh): the largest there is.
/// A unit is the 8 outputs that are one piece of 16-bit elements.
inline constexpr int kClusterBlocks = 16;
inline constexpr int kUnit = 8;

/// Channels of a head that are attended to at once, and what a warp leaves of them, in floats.
inline constexpr int kAttentionChannels = 128;
inline constexpr int kAttentionRow = kAttentionChannels + 2;

struct Range {
  int first, count;
};
/// How blocks divide rows, so many at a time: the first `more` blocks own one time more than `least`.
struct Split {
  int least = 0, more = 0, unit = 1;
  Split() = default;
  Split(std::int64_t total, int blocks, int rows = 1)
      : least(static_cast<int>(total / rows / blocks)), more(static_cast<int>(total / rows % blocks)), unit(rows) {}
  int most() const { return unit * (least + (more > 0 ? 1 : 0)); }
  __device__ Range mine() const {
    const auto block = static_cast<int>(blockIdx.x);
    return {unit * (least * block + min(block, more)), unit * (least + (block < more ? 1 : 0))};
  }
};

/// Of one sequence: tiles of 8 rows that are multiplied at once. Where a block of a small model has one, parts of k
/// are.
inline constexpr int kMostTiles = 2;
MMREC_HOST_DEVICE constexpr int tiles_at_once(Product product) {
  const bool has_one_tile =
      product == Product::kMemoryQ || product == Product::kMemoryOut || product == Product::kFfnOut;
  return has_one_tile ? 1 : kMostTiles;
}
/// A block multiplies its rows of `slices` matrices that are stacked; or, where slice_bytes is 0, of that many products
/// from this one on, the further ones' rows divided as `others`. Of none where the model has no such matrix or another
/// product has taken it in.
struct ProductShape {
  Owned owned = Owned::kChannels;
  Owned others = Owned::kChannels;
  int slices = 1;
  WeightFormat format;  // plain: numbers of A
  int input_bytes = 0;  // of the vector, in A
  int row_bytes = 0;
  int slot_bytes = 0;   // of a row in one slot
  int slot_pitch = 0;   // from there to the next row
  int tile_rows = 0;    // in one slot
  int tiles = 1;        // that are multiplied at once: their slots of the same k follow each other
  int panel_bytes = 0;  // of a row that are multiplied before the next tile of rows
  int panel_input = 0;  // the same of the vector
  std::int64_t slice_bytes = 0;
};

/// A block's share of one layer: its first row of every product, and the biases of its first row in every part of every
/// stage, null where there is none.
struct LayerShare {
  Table<Product, const std::byte*> rows;
  const float* bias[kBiases];
  const float* norm1;
  const float* norm2;
};
struct DecodePlan {
  Table<Owned, Split> splits;
  Table<Product, ProductShape> products;

  // Shared memory: byte offsets.
  int slots = 0;
  int slot_bytes = 0;
  int first_part = 0;  // of q, v, z, k: q is not needed where there is nothing to attend to
  int slot_rows = 0;
  int slot_row_bytes = 0;
  bool single = false;            // of one sequence: for single.cuh, whose slots have rows of slot_row_bytes at most
  int operand_scales = 0;         // of its steps, where they are integers
  int operand = 0;                // vectors that are multiplied; of a cluster h before the step
  int sums = 0;                   // of the warps, for sums_rows rows, twice if single
  int norm_sums = 0;              // of squares, [B, kTileWarps], twice if single
  int local = 0;                  // Local; of a cluster the attention's sums
  int layers = 0;                 // LayerShare [L + 1], the last one for the head
  int barriers = 0;               // full and empty, [slots] each
  int ring = 0;                   // of a cluster; else at 0
  int points = 0;                 // barriers of a cluster's vectors, [Point]
  Table<Point, int> point_bytes;  // of a cluster: that a block gets of a vector
  int shared_bytes = 0;
  int sums_rows = 0;            // multiple of kTileRows
  int channels = 0;             // the most that a block owns
  Table<Stage, int> log_width;  // a power of two that holds the outputs of a part, or of a pass
  float share_of_dim = 0.0F;    // 1 / D
  int head_width = 0;
  float attention_scale = 0.0F;

  // Exchange memory: two words (the set whose turn it is; blocks that have finished), then two sets of vectors, used
  // by turns. Byte offsets in a layer's part of a set:
  //   kHidden A [γ, context][B, gate_hidden]; kState, kQuery, kAttended A [B, D];
  //   kMixed fp32 [B, D]; kFfn A [B, F]; kOutput fp32 [B, D]
  // A cluster's vectors lie in shared memory, at these offsets.
  Table<Point, std::int64_t> at;
  std::int64_t layer_bytes = 0;
  std::int64_t set_bytes = 0;
  static constexpr std::int64_t kHeaderBytes = 128;
};

template <class A>
struct DecodeParams {
  DecodeStep<Device, A> op;
  DecodePlan plan;
};

inline void lay_out_exchange(DecodePlan& plan, const DecodeShape& s, std::int64_t element) {
  std::int64_t end = 0;
  const auto place = [&](Point point, std::int64_t bytes) {
    plan.at[point] = end;
    end += (bytes + 15) / 16 * 16;
  };
  const std::int64_t channels = s.batch * s.dim;
  place(Point::kHidden, 2 * s.batch * s.gate_hidden * element);
  place(Point::kState, channels * element);
  place(Point::kQuery, channels * element);
  place(Point::kAttended, channels * element);
  place(Point::kMixed, channels * 4);
  place(Point::kFfn, s.batch * s.ffn * element);
  place(Point::kOutput, channels * 4);
  plan.layer_bytes = end;
  plan.set_bytes = s.layers * end;
}

/// The format of a product's rows.
MMREC_HOST_DEVICE constexpr WeightFormat format_of(const DecodeFormats& f, Product product) {
  const WeightFormat in_order[] = {f.gate,     f.gamma_in,   f.context_in, f.qvzk,    f.gamma_up, f.context_up,
                                   f.memory_q, f.memory_out, f.ffn_in,     f.ffn_out, f.head};
  return in_order[static_cast<int>(product)];
}
/// From one row to the next in a slot: rows that are read together, a quarter warp's at once, lie in other banks.
inline int slot_pitch(WeightFormat format, int bytes) {
  const int padding = is_quantized(format.code) && bits_of(format.code) == 4 ? kRowPadding / 2 : kRowPadding;
  return (bytes + 127 - padding) / 128 * 128 + padding;
}

/// Which block multiplies which rows, in slots of 16 rows of slot_row_bytes, but for ffn_out's panels.
inline void divide(DecodePlan& plan, const DecodeShape& s, int element, int blocks, int unit = 1,
                   const DecodeFormats& formats = {}) {
  const std::int64_t totals[] = {s.dim, s.gate_hidden, s.ffn, s.vocab};
  for (int i = 0; i < kCountOf<Owned>; ++i) {
    const auto owned = static_cast<Owned>(i);
    plan.splits[owned] = Split(totals[i], blocks, owned == Owned::kVocab ? 1 : unit);
  }
  const auto most = [&](Owned owned) { return plan.splits[owned].most(); };
  const int networks = s.dpg ? 1 : 2;
  const auto product = [&](Product which, Owned owned, Owned others, int slices, std::int64_t in,
                           bool stacked = false) {
    const int rows = slices == 0 ? 0 : most(owned) + (slices - 1) * most(others);
    int tile_rows = plan.slot_rows;
    while (tile_rows > 1 && tile_rows / 2 >= rows) tile_rows /= 2;
    const WeightFormat format = format_of(formats, which);
    const bool is_compact = is_quantized(format.code);
    const auto input_bytes = static_cast<int>(in * element);
    const int row_bytes = is_compact ? static_cast<int>(compact_row_bytes(format, in)) : input_bytes;
    const int slot_bytes = is_compact ? compact_chunk_bytes(format, kCompactChunkGroups)
                                      : (plan.single ? 1 : plan.slot_rows / tile_rows) * plan.slot_row_bytes;
    plan.products[which] = {.owned = owned,
                            .others = others,
                            .slices = slices,
                            .format = format,
                            .input_bytes = input_bytes,
                            .row_bytes = row_bytes,
                            .slot_bytes = slot_bytes,
                            .slot_pitch = slot_pitch(format, slot_bytes),
                            .tile_rows = tile_rows,
                            .tiles = plan.single ? tiles_at_once(which) : 1,
                            .panel_bytes = row_bytes,
                            .panel_input = input_bytes,
                            .slice_bytes = stacked ? totals[static_cast<int>(owned)] * row_bytes : 0};
  };
  const auto of_channels = [&](Product which, int slices, std::int64_t in, bool stacked = false) {
    product(which, Owned::kChannels, Owned::kChannels, slices, in, stacked);
  };
  const int apart = networks == 2 && !plan.single ? 1 : 0;  // products of the second network's own
  of_channels(Product::kGate, 2, s.dim, true);
  product(Product::kGammaIn, Owned::kHidden, Owned::kHidden, networks, s.dim);
  product(Product::kContextIn, Owned::kHidden, Owned::kHidden, 0, s.dim);
  of_channels(Product::kQvzk, 4 - plan.first_part, s.dim, true);
  of_channels(Product::kGammaUp, networks - apart, s.gate_hidden);
  of_channels(Product::kContextUp, apart, s.gate_hidden);
  of_channels(Product::kMemoryQ, 1, s.dim);
  of_channels(Product::kMemoryOut, 1, s.dim);
  product(Product::kFfnIn, Owned::kFfn, Owned::kFfn, 1, s.dim);
  of_channels(Product::kFfnOut, 1, s.ffn);
  product(Product::kHead, Owned::kVocab, Owned::kVocab, 1, s.dim);

  plan.channels = most(Owned::kChannels);
  plan.share_of_dim = 1.0F / static_cast<float>(s.dim);
  plan.head_width = static_cast<int>(s.dim / s.heads);
  plan.attention_scale = 1.0F / std::sqrt(static_cast<float>(plan.head_width - s.head_padding));
  constexpr int kManyRows = 64;
  const int rows = std::max({4 * plan.channels, 2 * most(Owned::kHidden),
                             std::min(kManyRows, std::max(most(Owned::kFfn), most(Owned::kVocab)))});
  static_assert(kMostTiles * kSingleRows == kTileRows);
  plan.sums_rows = (rows + kTileRows - 1) / kTileRows * kTileRows;

  for (int i = 0; i < kCountOf<Stage>; ++i) {
    const auto stage = static_cast<Stage>(i);
    const StageInfo info = stage_info(stage);
    const int width = has_passes(stage) ? plan.sums_rows : std::max(most(info.owned), most(info.others));
    plan.log_width[stage] = static_cast<int>(std::bit_width(static_cast<unsigned>(std::max(width, 1) - 1)));
  }
}

/// With slots of one size.
inline DecodePlan make_decode_plan(const DecodeShape& s, bool attends, int element, int blocks, int shared_limit,
                                   bool single, int slot_row_bytes, const DecodeFormats& formats = {}) {
  DecodePlan plan;
  plan.first_part = attends ? 0 : 1;
  plan.single = single;
  plan.slot_rows = single ? kSingleRows : kTileRows;
  plan.slot_row_bytes = slot_row_bytes;
  lay_out_exchange(plan, s, element);
  divide(plan, s, element, blocks, 1, formats);
  const int batch = static_cast<int>(s.batch);
  const auto rows_of = [&](std::int64_t size) { return batch * padded_row(static_cast<int>(size)); };

  // The operand: two rows of A; the attention's sums; ffn_out's input, whole where there is one sequence or that
  // takes little, else as much of it as the others leave room for: whole slots of rows, or what a scale is of.
  ProductShape& ffn_out = plan.products[Product::kFfnOut];
  constexpr int kAttention = (kTileWarps * kAttentionRow * 4 + 15) / 16 * 16;
  const bool is_compact = formats.are_compact();
  const int panel = std::min(is_compact ? kScaledChunks * kChunkInput : ffn_out.slot_bytes, ffn_out.input_bytes);
  int operand =
      std::max({2 * rows_of(s.dim * element), 2 * rows_of(s.gate_hidden * element), rows_of(panel), kAttention});
  constexpr int kLittle = 32 << 10;
  if (single || rows_of(ffn_out.input_bytes) <= std::max(operand, kLittle)) {
    operand = std::max(operand, rows_of(ffn_out.input_bytes));
  } else {
    ffn_out.panel_input = panel;
    while (rows_of(ffn_out.panel_input + panel) <= operand) ffn_out.panel_input += panel;
    ffn_out.panel_bytes = is_compact ? ffn_out.panel_input / kChunkInput * ffn_out.slot_bytes : ffn_out.panel_input;
  }

  int end = 0;
  const auto place = [&](std::int64_t bytes) {
    const int here = end;
    end += static_cast<int>((bytes + 15) / 16 * 16);
    return here;
  };
  plan.operand = place(operand);
  if (is_compact) plan.operand_scales = place(operand / kStepBytes * 4);
  const std::int64_t twice = single ? 2 : 1;
  plan.sums = place(twice * 4 * plan.sums_rows * batch * kTileWarps);
  plan.norm_sums = place(twice * 4 * batch * kTileWarps);
  plan.local = place(std::int64_t{4} * kCountOf<Local> * batch * plan.channels);
  plan.layers = place((s.layers + 1) * static_cast<std::int64_t>(sizeof(LayerShare)));
  constexpr int kBarrierBytes = 2 * static_cast<int>(sizeof(std::uint64_t));
  for (const ProductShape& p : plan.products.of)
    plan.slot_bytes = std::max(plan.slot_bytes, p.tile_rows * p.slot_pitch);
  plan.slots = std::max(0, (shared_limit - end) / (plan.slot_bytes + kBarrierBytes));
  const int ring = plan.slots * plan.slot_bytes;
  for (int* offset : {&plan.operand, &plan.operand_scales, &plan.sums, &plan.norm_sums, &plan.local, &plan.layers}) {
    *offset += ring;
  }
  plan.barriers = ring + end;
  plan.shared_bytes = plan.barriers + plan.slots * kBarrierBytes;
  return plan;
}
/// For `blocks` blocks of `shared_limit` bytes of shared memory, of one sequence or several. slots < kLeastSlots: it
/// does not fit.
inline DecodePlan make_decode_plan(const DecodeShape& s, bool attends, int element, int blocks, int shared_limit,
                                   bool single) {
  const DecodePlan long_slots = make_decode_plan(s, attends, element, blocks, shared_limit, single, kSlotRowBytes[0]);
  if (long_slots.slots >= kEnoughSlots) return long_slots;
  return make_decode_plan(s, attends, element, blocks, shared_limit, single, kSlotRowBytes[1]);
}

}  // namespace mmrec::kernels
