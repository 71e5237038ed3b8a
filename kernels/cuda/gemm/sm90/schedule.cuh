// The products of one launch on sm_90a, and which tile of them comes when.
//
// Tiles are taken in groups of kGroup cluster tiles of rows, through all columns, rows fastest: tiles that run at the
// same time form a near-square and meet in L2, and x is read from memory once, W once per group. They are dealt to
// clusters by their number alone.
#pragma once

#include <cstdint>

#include "kernels/cuda/gemm/sm90/tile.cuh"
#include "kernels/cuda/isa/ptx.cuh"
#include "kernels/cuda/runtime/launch.cuh"

namespace mmrec::kernels {

/// What not to multiply, decided on the device by what the kernel before this one has left in *counter: nothing at all
/// is done where it has reached `enough`, nor in cluster tiles whose rows, numbered from `first`, all lie below it. For
/// launches that are not persistent. by_bits: instead, what is done are the cluster tiles of rows whose bit in *counter
/// is set, and the epilogue skips the others. Null: everything is done.
struct GemmSkip {
  const std::uint32_t* counter = nullptr;
  std::uint32_t enough = 0;
  int first = 0;
  bool by_bits = false;
};

/// Sizes of one product. Tiles are those of clusters.
struct GemmProblem {
  int batch = 1;  // matrices of x
  int k_blocks = 0;
  int row_tiles = 0;  // of one matrix
  int column_tiles = 0;
};

/// Products of one launch, side by side: operand x of job j is x[j], and so on. Cluster tiles are numbered through all
/// jobs; those of job j end before tile end[j].
template <int kJobs>
struct GemmJobs {
  TensorMap x[kJobs];
  TensorMap w[kJobs];
  GemmProblem problem[kJobs];
  int end[kJobs];
  int tiles;  // of all
};

template <class Tile>
GemmProblem gemm_problem(std::int64_t batch, std::int64_t rows, std::int64_t columns, std::int64_t depth) {
  using Layout = GemmLayout<Tile>;
  return {.batch = static_cast<int>(batch),
          .k_blocks = static_cast<int>(ceil_div(depth, Layout::kDepth)),
          .row_tiles = static_cast<int>(ceil_div(rows, Layout::kRows * Tile::kClusterRows)),
          .column_tiles = static_cast<int>(ceil_div(columns, Layout::kPartRows))};
}

/// This block's place in its cluster.
template <class Tile>
__device__ inline int gemm_cluster_rank() {
  if constexpr (Tile::kClusterRows == 1) return 0;
  return static_cast<int>(ptx::cluster_rank());
}

/// Where a block's tile begins. Both may lie beyond the problem where a cluster tile does not fill.
struct GemmPlace {
  int batch = 0;
  int row = 0;
  int column = 0;  // in each part
  int job = 0;
};

/// The tile of block `rank` of the cluster that has cluster tile `index`.
template <class Tile, int kJobs>
__device__ inline GemmPlace gemm_place(const GemmJobs<kJobs>& jobs, int index, int rank) {
  int job = 0;
  if constexpr (kJobs != 1) {
    while (index >= jobs.end[job]) ++job;
    if (job != 0) index -= jobs.end[job - 1];
  }
  const GemmProblem& problem = jobs.problem[job];
  const int group_tiles = Tile::kGroup * problem.column_tiles;
  const int first = index / group_tiles * Tile::kGroup;
  const int height = min(Tile::kGroup, problem.batch * problem.row_tiles - first);
  const int row_tile = first + index % group_tiles % height;
  const int column_tile = index % group_tiles / height;
  return {row_tile / problem.row_tiles,
          (row_tile % problem.row_tiles * Tile::kClusterRows + rank) * GemmLayout<Tile>::kRows,
          column_tile * GemmLayout<Tile>::kPartRows, job};
}

}  // namespace mmrec::kernels
