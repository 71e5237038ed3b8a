// What finish_segments (finish_segments.cu) works out on the host: how rows, products and attention are divided, where
// a block keeps what in shared memory and a team in what it exchanges, and the parameters of a launch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/isa/ptx.cuh"
#include "models/mmrec/cuda/ops.h"

namespace mmrec::kernels::segments {

inline constexpr int kTeam = 8;   // blocks
inline constexpr int kRows = 16;  // of a tile
inline constexpr int kWarps = 8;
inline constexpr int kThreads = 32 * kWarps;
inline constexpr int kTileOutputs = 8;  // of a product's tile
inline constexpr int kTiles = 3;        // of a warp at once
inline constexpr int kStep = 64;        // bytes of k
inline constexpr int kHeld = 4;         // vectors of a thread's share of the slots
inline constexpr int kMostDim = 512;    // D
inline constexpr int kMostQueries = 2;  // vectors of a thread's share of the queries
inline constexpr int kMostPairs = 2;    // of a lane's share of a head
inline constexpr int kGroups = 4;       // that divide the tiles whose sums are added up
inline constexpr int kPlaces = 4;       // that a team's tiles take in turn to exchange what they have computed

/// Where things lie in a block's shared memory, in bytes.
struct Plan {
  int ffn_in;  // after memory_out's rows
  int ffn_out;
  int hidden;  // kRows operands of W_2, before them of W_o, before them the queries
  int normed;  // kRows operands of W_1; staging; the newest slot
  int work;    // slots of a head, partial sums of products, tiles' sums
  int norm;
  int bias;  // of the hidden units
  int bytes;
};

/// Where things lie in a place of a team's memory, in bytes: kRows operands of W_o, of the norm (fp32) and of W_2.
struct Exchange {
  int attended;
  int mixed;
  int hidden;
  int bytes;
};

/// A team's counters, in a line of their own: blocks that have begun, and that have left.
inline constexpr int kCounterWords = 32;

struct Sizes {
  int dim;
  int ffn;
  int width;  // of a head
  friend constexpr bool operator==(const Sizes&, const Sizes&) = default;
};
/// They have a kernel of their own, in which addresses and ends of loops are numbers.
inline constexpr Sizes kKnownSizes = {384, 768, 64};

template <class A>
struct Params {
  FinishSegments<Device, A> op;
  Sizes sizes;
  ulonglong2* sums;         // [B][pieces][tiles][D / 2]
  std::uint32_t* counters;  // [team][kCounterWords]
  std::byte* exchange;      // [team][kPlaces]
  Exchange places;
  Plan plan;
  int time;
  int segment;
  double inverse;    // of the segment's length where it is a power of two, else 0
  int into_segment;  // of the first time
  int slots;         // of the ring
  int filled;        // of them, before the first piece
  int next_slot;     // to be filled
  int teams;         // of a sequence
  int pieces;
  int tiles;  // of the longest piece
};

__device__ inline int thread() { return static_cast<int>(threadIdx.x); }
__device__ inline int warp() { return static_cast<int>(threadIdx.x / 32); }
__device__ inline int lane() { return static_cast<int>(threadIdx.x % 32); }
/// What lies at an offset of the plan's.
template <class T>
__device__ inline T* at(int offset) {
  return reinterpret_cast<T*>(ptx::shared_memory<std::byte>() + offset);
}

/// Byte `byte` of row `row` of `pitch` bytes of an operand.
__device__ inline int place(int row, int pitch, int byte) { return row * pitch + (byte ^ (row % 2 * kStep)); }

}  // namespace mmrec::kernels::segments
