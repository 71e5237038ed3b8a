// Where a decode step keeps what and who owns which rows: a block's shared memory, the memory through which blocks
// exchange vectors, the shapes of products and stages. All of it is worked out on the host, so that a block divides
// nothing.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/tile_product.cuh"
#include "kernels/decode_step.h"

namespace mmrec::kernels {

/// A ring slot holds 16 rows of so many bytes, or fewer of accordingly more, every row padded. The copy engine and the
/// product are the faster the longer rows are; where the ring would get too short for that, slots are smaller.
inline constexpr int kSlotRowBytes[] = {2048, 1024};
inline constexpr int kEnoughSlots = 4;
inline constexpr int kLeastSlots = 2;

struct Range {
  int first, count;
};
/// How blocks divide rows: the first `more` blocks own one more than `least`.
struct Split {
  int least = 0, more = 0;
  Split() = default;
  Split(std::int64_t total, int blocks)
      : least(static_cast<int>(total / blocks)), more(static_cast<int>(total % blocks)) {}
  int most() const { return least + (more > 0 ? 1 : 0); }
  __device__ Range mine() const {
    const auto block = static_cast<int>(blockIdx.x);
    return {least * block + min(block, more), least + (block < more ? 1 : 0)};
  }
};

/// What is divided: channels, units of the hidden layers, rows of the head.
enum class Owned : std::uint8_t { kChannels, kHidden, kFfn, kVocab, kCount };

/// In the order of the stream.
enum class Product : std::uint8_t {
  kGate,
  kQvzk,
  kGateZ,
  kGammaIn,
  kContextIn,
  kGammaUp,
  kContextUp,
  kMemoryQ,
  kMemoryOut,
  kFfnIn,
  kFfnOut,
  kHead,
  kCount
};
/// A block multiplies its rows of each of `slices` matrices that are stacked; of none where the model has no such.
struct ProductShape {
  Owned owned = Owned::kChannels;
  int slices = 1;
  int row_bytes = 0;
  int slot_bytes = 0;   // of a row in one slot
  int tile_rows = 0;    // in one slot
  int panel_bytes = 0;  // of a row that are multiplied before the next tile of rows
  std::int64_t slice_bytes = 0;
};

/// In the order of time; kPredict comes once, after all layers.
enum class Stage : std::uint8_t {
  kGate,
  kProject,
  kHide,
  kAdvance,
  kQuery,
  kRecall,
  kWiden,
  kNarrow,
  kPredict,
  kCount
};
/// The outputs of a stage are those of one to three matrices or slices, its parts.
struct StageShape {
  Product first = Product::kCount, end = Product::kCount;
  Owned owned = Owned::kChannels;   // by part 0
  Owned others = Owned::kChannels;  // by other parts
  int parts = 1;
  int log_width = 0, log_parts = 0;  // powers of two that hold the outputs of a part, and the parts
  int bias = 0;                      // number of part 0's in LayerShare
};

/// What a block reads of one layer: its first row of every product and the biases of its first row in every part of
/// every stage, null where there is none.
inline constexpr int kBiases = 15;
struct LayerShare {
  const std::byte* rows[static_cast<int>(Product::kCount)];
  const float* bias[kBiases];
  const float* norm1;
  const float* norm2;
};
/// What a block multiplies in a product of any layer: ProductShape with its own number of rows.
struct alignas(16) Segment {
  int rows, row_bytes, slot_bytes, tile_rows;
  int panel_bytes, count;  // of rows in a slice
  std::int64_t slice_bytes;
};
/// StageShape with the block's own widths of the parts.
struct alignas(16) StageShare {
  int first, end, log_width, log_parts;
  int width, other_width, parts, bias;
};

/// What a block remembers of its own channels between stages, fp32 [B, channels] each.
enum class Local : std::uint8_t { kResidual, kQ, kV, kZ, kStateGate, kMdiGate, kMdiInput, kCount };

/// Points of a block of the model after which blocks exchange vectors.
enum class Point : std::uint8_t { kProjected, kHidden, kState, kQuery, kAttended, kMixed, kFfn, kOutput, kCount };

struct DecodePlan {
  Split splits[static_cast<int>(Owned::kCount)];
  ProductShape products[static_cast<int>(Product::kCount)];
  StageShape stages[static_cast<int>(Stage::kCount)];

  // Shared memory: byte offsets. The ring is at 0.
  int slots = 0;
  int slot_bytes = 0;
  int operand = 0;    // vectors that are multiplied
  int sums = 0;       // of the warps, for sums_rows rows
  int norm_sums = 0;  // of squares, [B, kTileWarps]
  int local = 0;      // Local
  int layers = 0;     // LayerShare [L + 1], the last one for the head
  int segments = 0;   // Segment [Product]
  int stage_shares = 0;
  int barriers = 0;  // full and empty, [slots] each
  int shared_bytes = 0;
  int sums_rows = 0;  // multiple of kTileRows
  int channels = 0;   // the most that a block owns

  // Exchange memory: two words (the set whose turn it is; blocks that have finished), then two sets of vectors, used
  // by turns. Byte offsets in a layer's part of a set:
  //   kProjected A [z, k][B, D]; kHidden A [γ, context][B, gate_hidden]; kState, kQuery, kAttended A [B, D];
  //   kMixed fp32 [B, D]; kFfn A [B, F]; kOutput fp32 [B, D]
  std::int64_t at[static_cast<int>(Point::kCount)] = {};
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
    plan.at[static_cast<int>(point)] = end;
    end += (bytes + 15) / 16 * 16;
  };
  const std::int64_t channels = s.batch * s.dim;
  place(Point::kProjected, 2 * channels * element);
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

/// Who multiplies what in slots of 16 rows of `slot_row_bytes`, but for ffn_out's panels.
inline void divide(DecodePlan& plan, const DecodeShape& s, int element, int blocks, int slot_row_bytes) {
  const std::int64_t totals[] = {s.dim, s.gate_hidden, s.ffn, s.vocab};
  for (int i = 0; i < static_cast<int>(Owned::kCount); ++i) plan.splits[i] = Split(totals[i], blocks);
  const auto most = [&](Owned owned) { return plan.splits[static_cast<int>(owned)].most(); };
  const auto product = [&](Product which, Owned owned, int slices, std::int64_t in) {
    int tile_rows = kTileRows;
    while (tile_rows > 1 && tile_rows / 2 >= slices * most(owned)) tile_rows /= 2;
    plan.products[static_cast<int>(which)] = {.owned = owned,
                                              .slices = slices,
                                              .row_bytes = static_cast<int>(in * element),
                                              .slot_bytes = kTileRows / tile_rows * slot_row_bytes,
                                              .tile_rows = tile_rows,
                                              .panel_bytes = static_cast<int>(in * element),
                                              .slice_bytes = totals[static_cast<int>(owned)] * in * element};
  };
  const int networks = s.dpg ? 1 : 2;
  product(Product::kGate, Owned::kChannels, 2, s.dim);
  product(Product::kQvzk, Owned::kChannels, s.dpg ? 3 : 4, s.dim);
  product(Product::kGateZ, Owned::kChannels, 1, s.dim);
  product(Product::kGammaIn, Owned::kHidden, 1, s.dim);
  product(Product::kContextIn, Owned::kHidden, networks - 1, s.dim);
  product(Product::kGammaUp, Owned::kChannels, 1, s.gate_hidden);
  product(Product::kContextUp, Owned::kChannels, networks - 1, s.gate_hidden);
  product(Product::kMemoryQ, Owned::kChannels, 1, s.dim);
  product(Product::kMemoryOut, Owned::kChannels, 1, s.dim);
  product(Product::kFfnIn, Owned::kFfn, 1, s.dim);
  product(Product::kFfnOut, Owned::kChannels, 1, s.ffn);
  product(Product::kHead, Owned::kVocab, 1, s.dim);

  plan.channels = most(Owned::kChannels);
  constexpr int kManyRows = 64;
  const int rows = std::max({4 * plan.channels, plan.channels + 2 * most(Owned::kHidden),
                             std::min(kManyRows, std::max(most(Owned::kFfn), most(Owned::kVocab)))});
  plan.sums_rows = (rows + kTileRows - 1) / kTileRows * kTileRows;

  const auto log = [](int x) { return static_cast<int>(std::bit_width(static_cast<unsigned>(std::max(x, 1) - 1))); };
  int bias = 0;
  const auto stage = [&](Stage which, Product first, int products, int parts, Owned owned, Owned others) {
    const bool by_rows = which == Stage::kWiden || which == Stage::kPredict;
    plan.stages[static_cast<int>(which)] = {
        .first = first,
        .end = static_cast<Product>(static_cast<int>(first) + products),
        .owned = owned,
        .others = others,
        .parts = parts,
        .log_width = log(by_rows ? plan.sums_rows : std::max(most(owned), most(others))),
        .log_parts = log(parts),
        .bias = bias};
  };
  const auto channel_stage = [&](Stage which, Product first, int products, int parts) {
    stage(which, first, products, parts, Owned::kChannels, Owned::kChannels);
  };
  channel_stage(Stage::kGate, Product::kGate, 1, 2);
  bias += 2;
  channel_stage(Stage::kProject, Product::kQvzk, 1, s.dpg ? 3 : 4);
  bias += 4;
  stage(Stage::kHide, Product::kGateZ, 3, 1 + networks, Owned::kChannels, Owned::kHidden);
  bias += 3;
  channel_stage(Stage::kAdvance, Product::kGammaUp, 2, 1);  // an output takes both products
  bias += 2;
  channel_stage(Stage::kQuery, Product::kMemoryQ, 1, 1);
  bias += 1;
  channel_stage(Stage::kRecall, Product::kMemoryOut, 1, 1);
  bias += 1;
  stage(Stage::kWiden, Product::kFfnIn, 1, 1, Owned::kFfn, Owned::kFfn);
  bias += 1;
  channel_stage(Stage::kNarrow, Product::kFfnOut, 1, 1);
  stage(Stage::kPredict, Product::kHead, 1, 1, Owned::kVocab, Owned::kVocab);
}

/// The plan with slots of one size.
inline DecodePlan make_decode_plan(const DecodeShape& s, int element, int blocks, int shared_limit,
                                   int slot_row_bytes) {
  DecodePlan plan;
  lay_out_exchange(plan, s, element);
  divide(plan, s, element, blocks, slot_row_bytes);
  const int batch = static_cast<int>(s.batch);
  const auto rows_of = [&](std::int64_t size) { return batch * padded_row(static_cast<int>(size)); };

  // The operand: a fp32 row that is normalised in place; two rows of A; scores of the attention; ffn_out's input, whole
  // where that takes little, else as much of it as the others leave room for.
  ProductShape& ffn_out = plan.products[static_cast<int>(Product::kFfnOut)];
  const std::int64_t attention = (s.dim / s.heads + s.memory_slots) * 4;
  const int ffn_slot = std::min(ffn_out.slot_bytes, ffn_out.row_bytes);
  int operand = std::max({rows_of(s.dim * 4), 2 * rows_of(s.dim * element), 2 * rows_of(s.gate_hidden * element),
                          rows_of(ffn_slot), static_cast<int>((attention + 15) / 16 * 16)});
  constexpr int kLittle = 32 << 10;
  if (rows_of(ffn_out.panel_bytes) <= std::max(operand, kLittle)) {
    operand = std::max(operand, rows_of(ffn_out.panel_bytes));
  } else {
    ffn_out.panel_bytes = ffn_slot;
    while (rows_of(ffn_out.panel_bytes + ffn_slot) <= operand) ffn_out.panel_bytes += ffn_slot;
  }

  int end = 0;
  const auto place = [&](std::int64_t bytes) {
    const int here = end;
    end += static_cast<int>((bytes + 15) / 16 * 16);
    return here;
  };
  plan.operand = place(operand);
  plan.sums = place(std::int64_t{4} * plan.sums_rows * batch * kTileWarps);
  plan.norm_sums = place(std::int64_t{4} * batch * kTileWarps);
  plan.local = place(std::int64_t{4} * static_cast<int>(Local::kCount) * batch * plan.channels);
  plan.layers = place((s.layers + 1) * static_cast<std::int64_t>(sizeof(LayerShare)));
  plan.segments = place(static_cast<std::int64_t>(Product::kCount) * static_cast<std::int64_t>(sizeof(Segment)));
  plan.stage_shares = place(static_cast<std::int64_t>(Stage::kCount) * static_cast<std::int64_t>(sizeof(StageShare)));
  constexpr int kBarrierBytes = 2 * static_cast<int>(sizeof(std::uint64_t));
  plan.slot_bytes = kTileRows * (slot_row_bytes + kRowPadding);
  plan.slots = std::max(0, (shared_limit - end) / (plan.slot_bytes + kBarrierBytes));
  const int ring = plan.slots * plan.slot_bytes;
  for (int* offset :
       {&plan.operand, &plan.sums, &plan.norm_sums, &plan.local, &plan.layers, &plan.segments, &plan.stage_shares}) {
    *offset += ring;
  }
  plan.barriers = ring + end;
  plan.shared_bytes = plan.barriers + plan.slots * kBarrierBytes;
  return plan;
}
/// For `blocks` blocks of `shared_limit` bytes of shared memory. slots < kLeastSlots: it does not fit.
inline DecodePlan make_decode_plan(const DecodeShape& s, int element, int blocks, int shared_limit) {
  const DecodePlan plan = make_decode_plan(s, element, blocks, shared_limit, kSlotRowBytes[0]);
  if (plan.slots >= kEnoughSlots) return plan;
  return make_decode_plan(s, element, blocks, shared_limit, kSlotRowBytes[1]);
}

}  // namespace mmrec::kernels
