// The matrix product y = x Wᵀ of bf16, fp16 or fp8 operands for sm_90a, persistent and warp-specialised. It is a kernel
// template over its EPILOGUE, which receives the fp32 sums in registers, so y need not exist in memory. Long, because
// tiles, schedule, kernel and launch are one product.
//
// Roles. A block owns a tile of 128 rows of x and kColumns rows of W. One thread of the last
// warpgroup, the producer, copies k-blocks of 64 columns of both (tensor memory accelerator, 128-byte swizzle) into a
// ring of kStages stages; each of the other two warpgroups, the consumers, multiplies its 64 rows by all kColumns
// (wgmma, both operands from shared memory, sums in registers) and runs the epilogue on them. full[s] opens when stage
// s has all its bytes, empty[s] when every consumer that its copies reach has read it. Registers move from the producer
// to the consumers.
//
// Overlap. The producer runs ahead over tile borders, so the next tile's operands arrive during the epilogue.
// Consumers share nothing but the ring. They start kLead k-blocks apart and stay so: while one is in its epilogue the
// other has the tensor cores to itself and catches up by as many k-blocks, so an epilogue of up to
// kLead x 64 x kColumns x 64 / 2,048 clocks (2,048: multiply-adds a clock of an SM) costs no time of the tensor cores.
//
// Any number of rows and columns: what lies outside arrives as zeros, and the epilogue must not use sums outside. The
// order of a sum is that of k: same inputs, same bits.
//
// An epilogue is a class of consumer threads:
//   struct Parameters                                  the kernel's last parameter
//   kSharedBytes                                       shared memory of its own
//   Epilogue(const Parameters&, std::byte* shared, std::byte* ring)
//   void begin(const GemmPlace&)                       before the tile's main loop: start loads
//   void finish(const GemmPlace&, float (&sum)[kColumns / 2])   see ptx::wgmma for what is where
//   static void skipped(const Parameters&, const GemmPlace&)    or none: by all threads where GemmSkip leaves nothing
//                                                               to do
// `ring` may be overwritten in finish() where each block has one tile and both consumers have met before.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/gemm/operands.cuh"
#include "kernels/cuda/isa/ptx.cuh"
#include "kernels/cuda/runtime/launch.cuh"
#include "kernels/cuda/runtime/tensor_map.h"

namespace mmrec::kernels {

// --- Tiles, and where a block keeps their operands -------------------------------------------------------------------
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
//   kGroup         cluster tiles of rows in a group
//   kFolds         k is cut in slices (GemmProblem), whose sums are added one after another

/// 128 x 256: the least L2 and shared memory traffic a multiply-add, 80 of 128 bytes a clock of shared memory for the
/// products and 48 for the copies.
struct WideTile {
  static constexpr int kColumns = 256;
  static constexpr int kParts = 1;
  static constexpr int kStages = 4;
  static constexpr int kClusterRows = 2;
  static constexpr int kLead = 2;
  static constexpr int kGroup = 8;
  static constexpr bool kFolds = false;
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
/// Sums of all slices and of one take twice the registers, so there is no wide one.
template <class Tile>
struct FoldingTile : Tile {
  static constexpr bool kFolds = true;
};

template <class Tile>
struct GemmLayout {
  static constexpr int kConsumers = 2;  // warpgroups of 64 rows
  static constexpr int kWarpgroup = 128;
  static constexpr int kDepth = kBoxColumns;  // of a k-block; two numbers each of fp8
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

// --- The products of one launch, and which tile of them comes when.
//
// Tiles are taken in groups of kGroup cluster tiles of rows, through all columns, rows fastest: tiles that run at the
// same time form a near-square and meet in L2, and x is read from memory once, W once per group. They are dealt to
// clusters by their number alone.

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

/// The sums of a product go through k once, or once for each of several pairs of matrices: 2 bits of x and of w name
/// the matrix in its stack, the first pass lowest.
struct GemmPasses {
  int count = 1;
  unsigned x = 0, w = 0;
};

/// Sizes of one product. Tiles are those of clusters.
struct GemmProblem {
  int batch = 1;  // matrices of x
  GemmPasses passes;
  int pass_blocks = 0;
  int k_blocks = 0;   // of all passes
  int slices = 1;     // of k, where Tile::kFolds
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
GemmProblem gemm_problem(std::int64_t batch, std::int64_t rows, std::int64_t columns, std::int64_t depth,
                         const GemmPasses& passes = {}) {
  using Layout = GemmLayout<Tile>;
  const auto pass_blocks = static_cast<int>(ceil_div(depth, Layout::kDepth));
  return {.batch = passes.count == 1 ? static_cast<int>(batch) : 1,
          .passes = passes,
          .pass_blocks = pass_blocks,
          .k_blocks = passes.count * pass_blocks,
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

// --- The kernel.

/// The ring and a position in it, which producer and consumers move alike.
template <class Tile>
struct GemmRing {
  using Layout = GemmLayout<Tile>;
  std::byte* stages;
  std::uint64_t* full;
  std::uint64_t* empty;
  int stage = 0;
  std::uint32_t parity = 0;  // of how often the ring has been passed through

  __device__ explicit GemmRing(std::byte* shared)
      : stages(shared),
        full(reinterpret_cast<std::uint64_t*>(shared + Layout::kRingBytes)),
        empty(full + Tile::kStages) {}
  __device__ void advance() {
    if (++stage == Tile::kStages) {
      stage = 0;
      parity ^= 1U;
    }
  }
};

/// The producer's thread: its slices of every k-block of every tile.
template <class Tile, class T, int kJobs>
__device__ void gemm_produce(GemmRing<Tile> ring, const GemmJobs<kJobs>& jobs) {
  using Layout = GemmLayout<Tile>;
  const int rank = gemm_cluster_rank<Tile>();
  const int clusters = static_cast<int>(gridDim.x) / Tile::kClusterRows;
  constexpr auto kAll = static_cast<std::uint16_t>((1U << Tile::kClusterRows) - 1U);
  const int w_slice = rank * Layout::kWSlice;

  for (int index = static_cast<int>(blockIdx.x) / Tile::kClusterRows; index < jobs.tiles; index += clusters) {
    const GemmPlace place = gemm_place<Tile>(jobs, index, rank);
    const TensorMap* x_map = &jobs.x[place.job];
    const TensorMap* w_map = &jobs.w[place.job];
    const GemmProblem& problem = jobs.problem[place.job];
    const int w_row = place.column + w_slice % Layout::kPartRows;
    const int w_part = w_slice / Layout::kPartRows;
    for (int pass = 0; pass < problem.passes.count; ++pass) {
      const int x_matrix = place.batch + static_cast<int>(problem.passes.x >> 2 * pass & 3U);
      const int w_matrix = w_part + static_cast<int>(problem.passes.w >> 2 * pass & 3U);
      for (int k = 0; k < problem.pass_blocks; ++k) {
        ptx::mbarrier_wait(&ring.empty[ring.stage], ring.parity ^ 1U);
        std::uint64_t* full = &ring.full[ring.stage];
        ptx::mbarrier_arrive_expect(full, Layout::kStageBytes);
        std::byte* x = ring.stages + ring.stage * Layout::kStageBytes;
        std::byte* w = x + Layout::kXBytes + w_slice * Layout::kRowBytes;
        ptx::load_box(x, x_map, full, k * Layout::kDepth, place.row, x_matrix);
        if constexpr (Tile::kClusterRows == 1) {
          ptx::load_box(w, w_map, full, block_of_w<T>(k), w_row, w_matrix);
        } else {
          ptx::load_box_multicast(w, w_map, full, block_of_w<T>(k), w_row, w_matrix, kAll);
        }
        ring.advance();
      }
    }
  }
  // A block stays until all of its cluster have reported to its barriers that they have read its copies.
  if constexpr (Tile::kClusterRows != 1) {
    for (int s = 0; s < Tile::kStages; ++s) {
      ptx::mbarrier_wait(&ring.empty[ring.stage], ring.parity ^ 1U);
      ring.advance();
    }
  }
}

/// A consumer warpgroup: the sums of its 64 rows of every tile, each handed to the epilogue.
template <class Tile, class T, class Epilogue, int kJobs>
__device__ void gemm_consume(GemmRing<Tile> ring, Epilogue& epilogue, const GemmJobs<kJobs>& jobs, int consumer) {
  using Layout = GemmLayout<Tile>;
  const int rank = gemm_cluster_rank<Tile>();
  const int clusters = static_cast<int>(gridDim.x) / Tile::kClusterRows;
  const std::uint64_t x = ptx::wgmma_operand(ring.stages + consumer * 64 * Layout::kRowBytes);
  const std::uint64_t w = ptx::wgmma_operand(ring.stages + Layout::kXBytes);

  // A stage holds copies from all blocks of the cluster: each of them waits for its readers. A thread each tells one.
  const int thread = static_cast<int>(threadIdx.x) % Layout::kWarpgroup;
  const auto release = [&](int stage) {
    if (thread < Tile::kClusterRows) ptx::mbarrier_arrive_at(&ring.empty[stage], static_cast<unsigned>(thread));
  };

  bool first = true;
  for (int index = static_cast<int>(blockIdx.x) / Tile::kClusterRows; index < jobs.tiles; index += clusters) {
    const GemmPlace place = gemm_place<Tile>(jobs, index, rank);
    const int k_blocks = jobs.problem[place.job].k_blocks;
    const int lead = min(Tile::kLead, k_blocks - 1);
    epilogue.begin(place);
    if (Tile::kLead != 0 && first && consumer != 0) ptx::named_barrier_sync(consumer, 2 * Layout::kWarpgroup);
    float sum[Tile::kColumns / 2];
    int previous = 0;
    // A tile's first product is an instruction of its own that does not read the sums, or these would keep their
    // registers through the epilogue.
    const auto multiply = [&](int k, auto adds) {
      ptx::mbarrier_wait(&ring.full[ring.stage], ring.parity);
      ptx::wgmma_fence();
      const auto at = static_cast<std::uint64_t>(ring.stage * (Layout::kStageBytes / 16));
#pragma unroll
      for (int i = 0; i < Layout::kDepth / 16; ++i) {
        ptx::wgmma<T>(sum, x + at + 2 * i, w + at + 2 * i, adds || i != 0);
      }
      ptx::wgmma_commit();
      if (Tile::kLead != 0 && first && k == lead && consumer + 1 < Layout::kConsumers) {
        ptx::named_barrier_arrive(consumer + 1, 2 * Layout::kWarpgroup);
      }
      // The products before these have read their stage; these keep the tensor cores busy meanwhile.
      ptx::wgmma_wait<1>();
      if (adds) release(previous);
      previous = ring.stage;
      ring.advance();
    };
    const auto multiply_slice = [&](int begin, int end) {
      multiply(begin, std::false_type());
      for (int k = begin + 1; k < end; ++k) multiply(k, std::true_type());
      ptx::wgmma_wait_all(sum);
      release(previous);
    };
    if constexpr (Tile::kFolds) {
      const int slices = jobs.problem[place.job].slices;
      float total[Tile::kColumns / 2];
      for (int s = 0; s < slices; ++s) {
        multiply_slice(k_blocks * s / slices, k_blocks * (s + 1) / slices);
#pragma unroll
        for (int i = 0; i < Tile::kColumns / 2; ++i) total[i] = s == 0 ? sum[i] : total[i] + sum[i];
      }
      first = false;
      epilogue.finish(place, total);
    } else {
      multiply_slice(0, k_blocks);
      first = false;
      epilogue.finish(place, sum);
    }
  }
}

template <class Tile, class T, class Epilogue, int kJobs>
__global__ void __launch_bounds__(GemmLayout<Tile>::kThreads, 1)
    gemm_sm90_kernel(const __grid_constant__ GemmJobs<kJobs> jobs, const __grid_constant__ GemmSkip skip,
                     const __grid_constant__ typename Epilogue::Parameters parameters) {
  using Layout = GemmLayout<Tile>;
  auto* window = ptx::shared_memory<std::byte>();
  window += (Layout::kAlignment - reinterpret_cast<std::uintptr_t>(window) % Layout::kAlignment) % Layout::kAlignment;
  GemmRing<Tile> ring(window);
  // The same in all lanes, and through the shuffle the compiler knows it.
  const int warpgroup = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / Layout::kWarpgroup, 0);

  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&jobs.x[0]);
    ptx::prefetch_tensor_map(&jobs.w[0]);
    for (int s = 0; s < Tile::kStages; ++s) {
      ptx::mbarrier_init(&ring.full[s], 1);
      ptx::mbarrier_init(&ring.empty[s], Tile::kClusterRows * Layout::kConsumers);
    }
    ptx::mbarrier_init_fence();
  }
  if constexpr (Tile::kClusterRows == 1) {
    __syncthreads();
  } else {
    ptx::cluster_sync();
  }
  ptx::wait_for_predecessor();
  ptx::allow_successor();
  if (skip.counter != nullptr) {
    const std::uint32_t done = ptx::load_relaxed(skip.counter);
    const int index = static_cast<int>(blockIdx.x) / Tile::kClusterRows;
    const int row = gemm_place<Tile>(jobs, index, 0).row;
    constexpr int kRows = Layout::kRows * Tile::kClusterRows;
    if (skip.by_bits ? (done >> (row / kRows) & 1U) == 0 : done >= skip.enough) {
      if constexpr (requires { &Epilogue::skipped; }) {
        Epilogue::skipped(parameters, gemm_place<Tile>(jobs, index, gemm_cluster_rank<Tile>()));
      }
      return;
    }
    if (!skip.by_bits && skip.first + row + kRows <= static_cast<int>(done)) return;
  }

  if (warpgroup == Layout::kConsumers) {
    ptx::lower_registers<Layout::kProducerRegisters>();
    if (threadIdx.x == Layout::kConsumers * Layout::kWarpgroup) {
      gemm_produce<Tile, T>(ring, jobs);
    }
  } else {
    ptx::raise_registers<Layout::kConsumerRegisters>();
    Epilogue epilogue(parameters, window + Layout::kRingBytes + Layout::kBarrierBytes, window);
    gemm_consume<Tile, T>(ring, epilogue, jobs, warpgroup);
  }
}

// --- Launches.

/// Adds the product of x, `batch` matrices of `rows` rows, and w, kParts matrices of `columns` rows, as job `job`, the
/// jobs before which are set. With several passes the matrices are those that the passes name.
template <class Tile, int kJobs>
void set_gemm_job(GemmJobs<kJobs>& jobs, int job, const MatrixStack& x, const MatrixStack& w,
                  const GemmPasses& passes = {}) {
  using Layout = GemmLayout<Tile>;
  const GemmProblem problem = gemm_problem<Tile>(x.depth, x.rows, w.rows, x.columns, passes);
  jobs.x[job] = make_tensor_map(x, Layout::kRows);
  jobs.w[job] = make_tensor_map(w, Layout::kWBoxRows, Layout::kWBoxParts);
  jobs.problem[job] = problem;
  jobs.tiles = (job == 0 ? 0 : jobs.end[job - 1]) + problem.batch * problem.row_tiles * problem.column_tiles;
  jobs.end[job] = jobs.tiles;
}

/// Launches the products. With `persistent` as many clusters as fit the device take several tiles each; otherwise a
/// cluster has one tile, in the order of tiles.
template <class Tile, class T, class Epilogue, int kJobs>
void launch_gemm_sm90(Cuda& cuda, const GemmJobs<kJobs>& jobs, const typename Epilogue::Parameters& parameters,
                      bool persistent, GemmSkip skip = {}) {
  using Layout = GemmLayout<Tile>;
  const int clusters = persistent ? std::min(jobs.tiles, cuda.processors() / Tile::kClusterRows) : jobs.tiles;
  const LaunchConfig config = {.grid = dims(clusters * Tile::kClusterRows),
                               .block = dim3(Layout::kThreads),
                               .shared_bytes = Layout::shared_bytes(Epilogue::kSharedBytes),
                               .cluster = Tile::kClusterRows,
                               .overlap_predecessor = true};
  launch(cuda.stream(), config, gemm_sm90_kernel<Tile, T, Epilogue, kJobs>, jobs, skip, parameters);
}
template <class Tile, class T, class Epilogue>
void launch_gemm_sm90(Cuda& cuda, const MatrixStack& x, const MatrixStack& w,
                      const typename Epilogue::Parameters& parameters, bool persistent, GemmSkip skip = {}) {
  GemmJobs<1> jobs;
  set_gemm_job<Tile>(jobs, 0, x, w);
  launch_gemm_sm90<Tile, T, Epilogue>(cuda, jobs, parameters, persistent, skip);
}

}  // namespace mmrec::kernels
