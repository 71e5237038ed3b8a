// Where a decode step keeps what: a block's shared memory, and the memory through which blocks exchange vectors.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/tile_product.cuh"
#include "kernels/decode_step.h"

namespace mmrec::kernels {

inline constexpr int kRowBytesOfFullSlot = 1024;
/// A ring slot holds up to 16 rows of 1 KB, or fewer of accordingly more, every row padded.
inline constexpr int kSlotBytes = kTileRows * (kRowBytesOfFullSlot + kRowPadding);
inline constexpr int kLeastSlots = 3;

/// Bytes of a row that one slot takes where blocks own up to `rows` rows of a matrix.
MMREC_HOST_DEVICE constexpr int slot_row_bytes(int rows) {
  int together = kTileRows;
  while (together > 1 && together / 2 >= rows) together /= 2;
  return kTileRows / together * kRowBytesOfFullSlot;
}

/// The most that one of `blocks` owns of `total`.
MMREC_HOST_DEVICE constexpr int most_of(std::int64_t total, int blocks) {
  return static_cast<int>((total + blocks - 1) / blocks);
}

/// What a block remembers of its own channels between stages, fp32 [B, channels] each.
enum class Local : std::uint8_t { kResidual, kQ, kV, kZ, kStateGate, kMdiGate, kMdiInput, kCount };

/// Points of a block of the model after which blocks exchange vectors.
enum class Point : std::uint8_t { kProjected, kHidden, kState, kQuery, kAttended, kMixed, kFfn, kOutput, kCount };

struct DecodePlan {
  // Shared memory: byte offsets. The ring is at 0.
  int slots = 0;
  int operand = 0;    // vectors that are multiplied
  int sums = 0;       // of the warps, for sums_rows rows
  int norm_sums = 0;  // of squares, [B, norm_chunks]
  int local = 0;      // Local
  int layers = 0;     // DecodeLayer [L]
  int barriers = 0;   // full and empty, [slots] each
  int shared_bytes = 0;
  int sums_rows = 0;    // multiple of kTileRows
  int norm_chunks = 0;  // of 32 vectors of 4 floats
  int channels = 0;     // the most that a block owns
  int panel_bytes = 0;  // of ffn_out's rows that are multiplied per reading of its operand

  // Exchange memory: words, then two sets of vectors, used by turns. Byte offsets in a layer's part of a set.
  //   word 0: the set whose turn it is; word 1: blocks that have finished; from word kFirstHint on: announcements
  //   [L, Point]
  static constexpr int kFirstHint = 32;
  std::int64_t projected = 0;  // A [z, k][B, D]
  std::int64_t hidden = 0;     // A [γ, context][B, gate_hidden]
  std::int64_t state = 0;      // A [B, D]
  std::int64_t query = 0;      // A [B, D]
  std::int64_t attended = 0;   // A [B, D]
  std::int64_t mixed = 0;      // fp32 [B, D]
  std::int64_t ffn = 0;        // A [B, F]
  std::int64_t output = 0;     // fp32 [B, D]
  std::int64_t layer_bytes = 0;
  std::int64_t header_bytes = 0;
  std::int64_t set_bytes = 0;
};

template <class A>
struct DecodeParams {
  DecodeStep<Device, A> op;
  DecodePlan plan;
};

inline void lay_out_exchange(DecodePlan& plan, const DecodeShape& s, std::int64_t element) {
  std::int64_t at = 0;
  const auto place = [&](std::int64_t bytes) {
    const std::int64_t here = at;
    at += (bytes + 15) / 16 * 16;
    return here;
  };
  plan.projected = place(2 * s.batch * s.dim * element);
  plan.hidden = place(2 * s.batch * s.gate_hidden * element);
  plan.state = place(s.batch * s.dim * element);
  plan.query = place(s.batch * s.dim * element);
  plan.attended = place(s.batch * s.dim * element);
  plan.mixed = place(s.batch * s.dim * 4);
  plan.ffn = place(s.batch * s.ffn * element);
  plan.output = place(s.batch * s.dim * 4);
  plan.layer_bytes = at;
  plan.set_bytes = s.layers * at;
  const std::int64_t words = DecodePlan::kFirstHint + s.layers * static_cast<std::int64_t>(Point::kCount);
  plan.header_bytes = (words * 4 + 127) / 128 * 128;
}

/// For `blocks` blocks of `shared_limit` bytes of shared memory. slots < kLeastSlots: it does not fit.
inline DecodePlan make_decode_plan(const DecodeShape& s, int element, int blocks, int shared_limit) {
  DecodePlan plan;
  lay_out_exchange(plan, s, element);
  const int batch = static_cast<int>(s.batch);
  const auto rows_of = [&](std::int64_t size) { return batch * padded_row(static_cast<int>(size)); };
  plan.channels = most_of(s.dim, blocks);
  const int hidden = most_of(s.gate_hidden, blocks);
  constexpr int kHeadRows = 64;
  const int rows = std::max({4 * plan.channels, plan.channels + 2 * hidden, most_of(s.ffn, blocks),
                             std::min(kHeadRows, most_of(s.vocab, blocks))});
  plan.sums_rows = (rows + kTileRows - 1) / kTileRows * kTileRows;
  plan.norm_chunks = static_cast<int>((s.dim + 127) / 128);

  // The operand: a fp32 row that is normalised in place; two rows of A; scores of the attention; ffn_out's input, whole
  // where that takes little, else as much of it as the others leave room for.
  const std::int64_t attention = (s.dim / s.heads + s.memory_slots) * 4;
  const int ffn_slot = std::min(slot_row_bytes(plan.channels), static_cast<int>(s.ffn * element));
  int operand = std::max({rows_of(s.dim * 4), 2 * rows_of(s.dim * element), 2 * rows_of(s.gate_hidden * element),
                          rows_of(ffn_slot), static_cast<int>((attention + 15) / 16 * 16)});
  constexpr int kLittle = 32 << 10;
  plan.panel_bytes = static_cast<int>(s.ffn * element);
  if (rows_of(plan.panel_bytes) <= std::max(operand, kLittle)) {
    operand = std::max(operand, rows_of(plan.panel_bytes));
  } else {
    plan.panel_bytes = ffn_slot;
    while (rows_of(plan.panel_bytes + ffn_slot) <= operand) plan.panel_bytes += ffn_slot;
  }

  int at = 0;
  const auto place = [&](std::int64_t bytes) {
    const int here = at;
    at += static_cast<int>((bytes + 15) / 16 * 16);
    return here;
  };
  plan.operand = place(operand);
  plan.sums = place(std::int64_t{4} * plan.sums_rows * batch * kTileWarps);
  plan.norm_sums = place(std::int64_t{4} * batch * plan.norm_chunks);
  plan.local = place(std::int64_t{4} * static_cast<int>(Local::kCount) * batch * plan.channels);
  plan.layers = place(s.layers * static_cast<std::int64_t>(sizeof(DecodeLayer<Device, float>)));
  constexpr int kBarrierBytes = 2 * static_cast<int>(sizeof(std::uint64_t));
  plan.slots = std::max(0, (shared_limit - at) / (kSlotBytes + kBarrierBytes));
  const int ring = plan.slots * kSlotBytes;
  for (int* offset : {&plan.operand, &plan.sums, &plan.norm_sums, &plan.local, &plan.layers}) *offset += ring;
  plan.barriers = ring + at;
  plan.shared_bytes = plan.barriers + plan.slots * kBarrierBytes;
  return plan;
}

}  // namespace mmrec::kernels
