// The tiles of the product for sm_90a (mainloop.cuh) and where a block keeps their operands.
//
// A block owns 128 rows of x and kColumns rows of W. A k-block, 64 columns of both, costs the tensor cores 128 kColumns
// 64 / 2,048 clocks (multiply-adds a clock of an SM) and reads (128 + kColumns) x 128 bytes of L2. The kClusterRows
// blocks of a cluster, which have the same rows of W, copy a slice of them each and multicast it: at 128 x 256 and two
// blocks that is 32 KB of L2 in 1,024 clocks.
//
// A variant is a struct of constants:
//   kColumns       64, 128 or 256
//   kParts         the tile of W is kParts runs of kColumns / kParts rows, at the same rows of each matrix of a stack
//   kStages        of the ring
//   kClusterRows   blocks that share a tile of W
//   kLead          k-blocks that the first consumer starts ahead of the second
//   kGroup         cluster tiles of rows in a group (schedule.cuh)
#pragma once

#include <algorithm>
#include <cstddef>

#include "kernels/cuda/runtime/tensor_map.h"

namespace mmrec::kernels {

/// 128 x 256: the least L2 and shared memory traffic a multiply-add, 80 of 128 bytes a clock of shared memory for the
/// products and 48 for the copies.
struct WideTile {
  static constexpr int kColumns = 256;
  static constexpr int kParts = 1;
  static constexpr int kStages = 4;
  static constexpr int kClusterRows = 2;
  static constexpr int kLead = 2;
  static constexpr int kGroup = 8;
};
/// The same without clusters, for a single tile of rows.
struct WideSingleTile : WideTile {
  static constexpr int kClusterRows = 1;
};
/// 128 x 128 and 128 x 64, for products whose wide tiles would leave multiprocessors without any. More bytes of shared
/// memory a multiply-add than it delivers: 1.1 and 1.7 times the clocks of the tensor cores.
struct SquareTile : WideSingleTile {
  static constexpr int kColumns = 128;
  static constexpr int kStages = 6;
  static constexpr int kLead = 3;
};
struct SlimTile : WideSingleTile {
  static constexpr int kColumns = 64;
  static constexpr int kStages = 8;
  static constexpr int kLead = 3;
};

template <class Tile>
struct GemmLayout {
  static constexpr int kConsumers = 2;  // warpgroups of 64 rows
  static constexpr int kWarpgroup = 128;
  static constexpr int kDepth = kBoxColumns;  // of a k-block
  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kThreads = kWarpgroup * (kConsumers + 1);
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;

  static constexpr int kRowBytes = kDepth * 2;
  static constexpr int kXBytes = kRows * kRowBytes;
  static constexpr int kStageBytes = kXBytes + Tile::kColumns * kRowBytes;
  static constexpr int kRingBytes = Tile::kStages * kStageBytes;
  static constexpr int kAlignment = 1024;  // of the swizzle's pattern
  static constexpr int kBarrierBytes = 2 * Tile::kStages * 8;

  // The slice of W that one block copies, and the runs of W's rows that a box of the slice takes.
  static constexpr int kWSlice = Tile::kColumns / Tile::kClusterRows;
  static constexpr int kPartRows = Tile::kColumns / Tile::kParts;
  static constexpr int kWBoxRows = std::min(kWSlice, kPartRows);
  static constexpr int kWBoxParts = kWSlice / kWBoxRows;

  static_assert(kWSlice % 8 == 0 && kWSlice % kWBoxRows == 0 && kPartRows % kWBoxRows == 0 && kWBoxRows <= 256);
  static_assert(Tile::kLead < Tile::kStages, "the second consumer's start waits in the ring");

  static constexpr std::size_t shared_bytes(int epilogue_bytes) {
    return static_cast<std::size_t>(kAlignment + kRingBytes + kBarrierBytes + epilogue_bytes);
  }
};

}  // namespace mmrec::kernels
