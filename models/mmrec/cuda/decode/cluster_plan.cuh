// Which models a cluster decodes (cluster.cuh), and the shared memory of its blocks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "models/mmrec/cuda/decode/plan.cuh"

namespace mmrec::kernels {

/// A block's ring has at most so many slots: a named barrier each, besides those of the consumers and of the block.
inline constexpr int kClusterSlots = 14;
/// And at least so many: those of a stage's weights are held at once (q, v, z, k).
inline constexpr int kLeastClusterSlots = 4;
/// Of a block, the most: units of channels and of the ffn, steps (tile_product.cuh) of a row that a warp multiplies and
/// in ffn_out's rows; channels of a head and memory slots.
inline constexpr int kClusterUnits = 3;
inline constexpr int kClusterFfnUnits = 6;
inline constexpr int kClusterSteps = 2;
inline constexpr int kClusterFfnSteps = 4;
inline constexpr int kClusterHead = 64;
inline constexpr int kClusterMemory = 32;
/// Units of a product in a slot: as many as a block has of channels; one where rows are long, two such where they are
/// short.
MMREC_HOST_DEVICE constexpr int in_slot(Product product) {
  return product == Product::kFfnOut ? 1 : product == Product::kGammaUp ? 2 * kClusterUnits : kClusterUnits;
}
/// Rows of the head between two barriers.
inline constexpr int kClusterPass = 256 / (in_slot(Product::kHead) * kUnit) * in_slot(Product::kHead) * kUnit;

/// A cluster reads at most so many bytes of weights for each vector that its blocks exchange: with more, the whole
/// device's bandwidth is meant to be worth more than short ways.
inline constexpr std::int64_t kClusterBytes = std::int64_t{5} << 18;

inline constexpr int kSquares = kClusterSteps * kTileWarps * kStepBytes / 2 / 4;  // of a vector, each of 4 channels

inline bool is_for_cluster(const DecodeShape& s) {
  const auto steps = [](std::int64_t size, int most) {
    constexpr int kStep = kStepBytes / 2;
    return size > 0 && size % kStep == 0 && size <= most * kTileWarps * kStep;
  };
  const std::int64_t width = s.heads > 0 ? s.dim / s.heads : 0;
  constexpr std::int64_t kChannels = kClusterBlocks * kUnit;  // all blocks own some (through_cluster.cuh)
  constexpr std::int64_t kMost = kChannels * kClusterUnits;
  const auto units = [](std::int64_t size) { return (size + kChannels - 1) / kChannels; };  // of a block, the most
  const bool fits = s.batch == 1 && steps(s.dim, kClusterSteps) && s.dim >= kChannels && s.dim <= kMost &&
                    steps(s.gate_hidden, kClusterSteps) &&
                    (s.dpg ? 1 : 2) * units(s.gate_hidden) <= 2 * kClusterUnits && steps(s.ffn, kClusterFfnSteps) &&
                    s.ffn <= kChannels * kClusterFfnUnits && s.heads <= kClusterBlocks && width % kUnit == 0 &&
                    width * s.heads == s.dim && width <= kClusterHead && s.memory_slots <= kClusterMemory;
  constexpr std::int64_t kExchanges = 7;
  return fits && s.layers * layer_bytes(s, 2) + 2 * s.vocab * s.dim <= kClusterBytes * kExchanges * s.layers;
}

/// Half a unit's rows in a slot, and kRowPadding after them.
MMREC_HOST_DEVICE constexpr int run_bytes(int row_bytes) { return kUnit / 2 * row_bytes + kRowPadding; }

/// slots < kLeastClusterSlots: it does not fit.
inline DecodePlan make_cluster_plan(const DecodeShape& s, bool attends, int shared_limit) {
  constexpr int kElement = 2;
  DecodePlan plan;
  plan.first_part = attends ? 0 : 1;
  plan.single = true;
  plan.slot_rows = kUnit;
  plan.slot_row_bytes = 0;
  divide(plan, s, kElement, kClusterBlocks, kUnit);

  for (int i = 0; i < kCountOf<Product>; ++i) {
    ProductShape& product = plan.products.of[i];
    const int units = in_slot(static_cast<Product>(i));
    product.tile_rows = units * kUnit;
    plan.slot_bytes = std::max(plan.slot_bytes, units * 2 * run_bytes(product.row_bytes));
  }
  plan.sums_rows = kClusterPass;

  int end = 0;
  const auto place = [&](int bytes, int alignment = 16) {
    end = (end + alignment - 1) / alignment * alignment;
    const int here = end;
    end += bytes;
    return here;
  };
  const int networks = s.dpg ? 1 : 2;
  const auto vector = [&](Point point, int places, int bytes) {
    plan.at[point] = place(places, 128);
    plan.point_bytes[point] = bytes;
  };
  const int hidden = static_cast<int>(s.gate_hidden) * kElement;
  const int ffn = static_cast<int>(s.ffn) * kElement;
  const int row_bytes = static_cast<int>(s.dim) * kElement;
  const int square_bytes = row_bytes / 2;  // a float for 4 channels
  vector(Point::kHidden, networks * padded_row(hidden), networks * hidden);
  vector(Point::kState, row_bytes, row_bytes);
  vector(Point::kQuery, plan.head_width * kElement, plan.head_width * kElement);
  vector(Point::kAttended, row_bytes, row_bytes);
  vector(Point::kMixed, 4 * kSquares + row_bytes, square_bytes + row_bytes);
  vector(Point::kFfn, ffn, ffn);
  vector(Point::kOutput, 4 * kSquares + row_bytes, square_bytes + row_bytes);
  plan.operand = place(row_bytes, 128);
  plan.local = place(4 * kTileWarps * (kClusterHead + 2));
  plan.sums = place(2 * 4 * kTileWarps * plan.sums_rows, 128);
  plan.layers = place(static_cast<int>((s.layers + 1) * static_cast<std::int64_t>(sizeof(LayerShare))));
  plan.points = place(kCountOf<Point> * static_cast<int>(sizeof(std::uint64_t)));
  plan.barriers = place(kClusterSlots * static_cast<int>(sizeof(std::uint64_t)));
  const int first = (end + 127) / 128 * 128;
  plan.slots = std::clamp((shared_limit - first) / plan.slot_bytes, 0, kClusterSlots);
  plan.ring = first;
  plan.shared_bytes = first + plan.slots * plan.slot_bytes;
  return plan;
}

}  // namespace mmrec::kernels
