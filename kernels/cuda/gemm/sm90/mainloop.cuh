// The matrix product y = x Wᵀ of bf16 or fp16 operands for sm_90a, persistent and warp-specialised, as a kernel
// template over what becomes of the fp32 sums: the EPILOGUE receives them in registers, so y need not exist in memory.
//
// Who does what. A block owns a tile of 128 rows of x and kColumns rows of W (tile.cuh). One thread of the last
// warpgroup, the producer, copies k-blocks of 64 columns of both (tensor memory accelerator, 128-byte swizzle) into a
// ring of kStages stages; each of the other two warpgroups, the consumers, multiplies its 64 rows by all kColumns
// (wgmma, both operands from shared memory, sums in registers) and runs the epilogue on them. full[s] opens when stage
// s has all its bytes, empty[s] when every consumer that its copies reach has read it. Registers move from the producer
// to the consumers.
//
// What overlaps. The producer runs ahead over tile borders, so the next tile's operands arrive during the epilogue.
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

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/gemm/sm90/schedule.cuh"

namespace mmrec::kernels {

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
template <class Tile, int kJobs>
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
    const int k_blocks = jobs.problem[place.job].k_blocks;
    const int w_row = place.column + w_slice % Layout::kPartRows;
    const int w_part = w_slice / Layout::kPartRows;
    for (int k = 0; k < k_blocks; ++k) {
      ptx::mbarrier_wait(&ring.empty[ring.stage], ring.parity ^ 1U);
      std::uint64_t* full = &ring.full[ring.stage];
      ptx::mbarrier_arrive_expect(full, Layout::kStageBytes);
      std::byte* x = ring.stages + ring.stage * Layout::kStageBytes;
      std::byte* w = x + Layout::kXBytes + w_slice * Layout::kRowBytes;
      ptx::load_box(x, x_map, full, k * Layout::kDepth, place.row, place.batch);
      if constexpr (Tile::kClusterRows == 1) {
        ptx::load_box(w, w_map, full, k * Layout::kDepth, w_row, w_part);
      } else {
        ptx::load_box_multicast(w, w_map, full, k * Layout::kDepth, w_row, w_part, kAll);
      }
      ring.advance();
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
    multiply(0, std::false_type());
    for (int k = 1; k < k_blocks; ++k) multiply(k, std::true_type());
    ptx::wgmma_wait_all(sum);
    release(previous);
    first = false;
    epilogue.finish(place, sum);
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
      gemm_produce<Tile>(ring, jobs);
    }
  } else {
    ptx::raise_registers<Layout::kConsumerRegisters>();
    Epilogue epilogue(parameters, window + Layout::kRingBytes + Layout::kBarrierBytes, window);
    gemm_consume<Tile, T>(ring, epilogue, jobs, warpgroup);
  }
}

}  // namespace mmrec::kernels
