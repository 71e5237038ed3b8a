// The ring of stages of the kernels for 9 to 128 rows, and how blocks that share a product along k exchange their sums
// (few_rows.cuh, few_advance_sm90.cu).
//
// What comes after the last k-block has nothing to hide behind and but a few warps. So sums go from registers into the
// other block, whose threads wait for their bytes (st.async). (Copies of sums by the copy engine take longer.
// docs/measurements has figures.) Sums of up to 128 rows would take the memory of a stage that is needed: they stay in
// the ring, where the other blocks read them.
#pragma once

#include <algorithm>

#include "kernels/cuda/gemm/algo.h"
#include "kernels/cuda/gemm/operands.cuh"
#include "kernels/cuda/runtime/launch.cuh"

namespace mmrec::kernels {

// norms of x.
constexpr int kWarpgroup = 128;
constexpr int kFinishers = 2 * kWarpgroup;
constexpr int kCopyingWarp = kFinishers / 32;
constexpr int kNormWarp = kCopyingWarp + 1;
constexpr int kOutputThreads = kOutputs / 4;              // that finish a row
constexpr int kRowsAtOnce = kFinishers / kOutputThreads;  // 16
constexpr int kThreads = kFinishers + 64;
constexpr int kDepth = kBoxColumns;  // of a k-block
constexpr int kRowBytes = kDepth * 2;
constexpr int kCluster = kMostSlices;
constexpr int kSumsBarrier = 2;  // of the block's own sums and factors

// Sums lie as the product's threads have them (ptx::wgmma): of every 8 rows a thread has one vector of 16 bytes, 2 rows
// of 2 outputs 8 apart. Gaps let threads of neighbouring outputs, which read one number of a vector, meet in no bank.
constexpr int kRowGroup = 8;
__device__ constexpr int vector_of_thread(int thread) { return thread + thread / 16; }
constexpr int kGroupVectors = vector_of_thread(kWarpgroup);

/// Shared memory, such that two blocks and some of other kernels fit a multiprocessor: the ring of stages, what the
/// other slices send, barriers, and factors of x's rows. When the ring is done its memory takes the block's own sums;
/// of many rows also those of all slices, added up. kRows: of x, 32, 64 or 128.
constexpr int kMostStages = 16;
constexpr int kAlignment = 1024;
template <int kRows>
struct FewRowsRing {
  static constexpr int kGroups = kRows / kRowGroup;
  static constexpr bool kSends = kRows <= 64;
  static constexpr int kBytes = 96 * 1024;
  static constexpr int kReceivedAt = kSends ? kBytes : kGroups * kGroupVectors * 16;
  static constexpr int kReceivedBytes = (kCluster - 1) * std::max(kGroups / kCluster, 1) * kGroupVectors * 16;
  static constexpr int kBarriersAt = kSends ? kReceivedAt + kReceivedBytes : kBytes;
  static constexpr int kFactorsAt = kBarriersAt + (2 * kMostStages + 1) * 8;
  static constexpr std::size_t kSharedBytes = kAlignment + kFactorsAt + kRows * sizeof(float);
  std::byte* stages;
  uint4* received;
  std::uint64_t* full;
  std::uint64_t* empty;
  std::uint64_t* arrived;
  float* factors;

  /// Other blocks of the cluster use the barriers after ptx::cluster_wait(), which all threads must call once.
  __device__ FewRowsRing()
      : stages(begin()),
        received(reinterpret_cast<uint4*>(stages + kReceivedAt)),
        full(reinterpret_cast<std::uint64_t*>(stages + kBarriersAt)),
        empty(full + kMostStages),
        arrived(empty + kMostStages),
        factors(reinterpret_cast<float*>(stages + kFactorsAt)) {
    if (threadIdx.x == 0) {
      for (int s = 0; s < kMostStages; ++s) {
        ptx::mbarrier_init(&full[s], 1);
        ptx::mbarrier_init(&empty[s], 1);
      }
      ptx::mbarrier_init(arrived, 1);
      ptx::mbarrier_init_fence();
    }
    __syncthreads();
    ptx::cluster_arrive();
  }
  __device__ uint4* own_sums() const { return reinterpret_cast<uint4*>(stages); }

 private:
  __device__ static std::byte* begin() {
    auto* const memory = ptx::shared_memory<std::byte>();
    return memory + (kAlignment - reinterpret_cast<std::uintptr_t>(memory) % kAlignment) % kAlignment;
  }
};

/// A stage of plain numbers: a k-block of W and of x. kRows: of x, 32, 64 or 128.
template <int kRows>
struct FewRowsStage {
  static constexpr int kWBytes = kOutputs * kRowBytes;
  static constexpr int kBytes = kWBytes + kRows * kRowBytes;
  static constexpr int kCount = FewRowsRing<kRows>::kBytes / kBytes;
  static_assert(kCount <= kMostStages);
};

/// The tile and the slice of it that a block works on.
struct FewRowsPlace {
  int job;
  int output;  // the tile's first; beyond the last where a cluster is not full
  int first_rank;
  int slice;
  int k_begin;
  int k_end;
};

/// By one thread: load_w(k, stage) and load_x(k, stage) of the block's k-blocks, of W as far ahead as there are stages
/// before the predecessor is waited for. (Into L2 further ahead: slower, the kernels before wait longer for x.)
template <int kStages, int kRows, class LoadW, class LoadX>
__device__ inline void copy_stages(const FewRowsRing<kRows>& ring, int count, const LoadW& load_w,
                                   const LoadX& load_x) {
  const int ahead = min(count, kStages);
  for (int k = 0; k < ahead; ++k) load_w(k, k);
  ptx::cluster_wait();
  ptx::wait_for_predecessor();
  for (int k = 0; k < ahead; ++k) load_x(k, k);
  for (int k = ahead; k < count; ++k) {
    const int stage = k % kStages;
    ptx::mbarrier_wait(&ring.empty[stage], static_cast<std::uint32_t>(k / kStages - 1) & 1U);
    load_w(k, stage);
    load_x(k, stage);
  }
}

/// The same of `count` plain k-blocks from k-block k_begin on: rows of W from `output` on, rows of x from first_row on.
template <int kRows>
__device__ inline void copy_plain_stages(const FewRowsRing<kRows>& ring, const TensorMap& w, const TensorMap& x,
                                         int k_begin, int count, int output, int first_row) {
  using Stage = FewRowsStage<kRows>;
  const std::uint64_t hint = ptx::evict_first();
  const auto load_w = [&](int k, int stage) {
    ptx::mbarrier_arrive_expect(&ring.full[stage], Stage::kBytes);
    ptx::load_box(ring.stages + stage * Stage::kBytes, &w, &ring.full[stage], (k_begin + k) * kDepth, output, 0, hint);
  };
  const auto load_x = [&](int k, int stage) {
    ptx::load_box(ring.stages + stage * Stage::kBytes + Stage::kWBytes, &x, &ring.full[stage], (k_begin + k) * kDepth,
                  first_row, 0);
  };
  copy_stages<Stage::kCount>(ring, count, load_w, load_x);
}

/// By the warpgroup that multiplies alone: the sums of `count` k-blocks of plain numbers, of which Stage says how they
/// lie: W, then x.
template <class A, class Stage, int kRows>
__device__ inline void multiply(const FewRowsRing<kRows>& ring, int count, float (&sum)[kRows / 2]) {
  const std::uint64_t w = ptx::wgmma_operand(ring.stages);
  const std::uint64_t x = ptx::wgmma_operand(ring.stages + Stage::kWBytes);
  for (int k = 0; k < count; ++k) {
    const int stage = k % Stage::kCount;
    ptx::mbarrier_wait(&ring.full[stage], static_cast<std::uint32_t>(k / Stage::kCount) & 1U);
    ptx::wgmma_fence();
    const auto at = static_cast<std::uint64_t>(stage * (Stage::kBytes / 16));
#pragma unroll
    for (int i = 0; i < kDepth / 16; ++i) ptx::wgmma<A>(sum, w + at + 2 * i, x + at + 2 * i, true);
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    if (k != 0 && threadIdx.x == 0) ptx::mbarrier_arrive(&ring.empty[(k - 1) % Stage::kCount]);
  }
  ptx::wgmma_wait_all(sum);
  ptx::named_barrier_sync(1, kWarpgroup);  // nobody reads the ring any more
}

/// How slices share the groups of rows: the first kOwners of them have kGroups each.
template <int kRows, int kSlices>
struct FewRowsShare {
  static constexpr int kOwners = std::min(kSlices, FewRowsRing<kRows>::kGroups);
  static constexpr int kGroups = FewRowsRing<kRows>::kGroups / kOwners;
  static constexpr int kOfSlice = kGroups * kRowGroup;  // rows
  static constexpr bool kSends = kSlices > 1 && FewRowsRing<kRows>::kSends;
  static constexpr bool kReads = kSlices > 1 && !kSends;
};

/// Called by the warpgroup that has multiplied. A block keeps the sums of the rows that it finishes. It sends the other
/// sums to the blocks that finish those rows, or leaves them for these to read. It sends no rows that x does not have.
template <int kSlices, int kRows>
__device__ inline void leave_sums(const FewRowsRing<kRows>& ring, const FewRowsPlace& place, int rows,
                                  const float (&sum)[kRows / 2]) {
  using Share = FewRowsShare<kRows, kSlices>;
  const int real = (rows + kRowGroup - 1) / kRowGroup;
  if (Share::kSends && threadIdx.x == 0) {
    const int own = min(max(real - place.slice * Share::kGroups, 0), Share::kGroups);
    ptx::mbarrier_arrive_expect(ring.arrived, static_cast<unsigned>((kSlices - 1) * own * kWarpgroup * 16));
  }
  const int at = vector_of_thread(static_cast<int>(threadIdx.x) % kWarpgroup);
  const auto vector = [&](int slice, int group) {
    const float* const from = sum + 4 * (slice * Share::kGroups + group);
    return make_uint4(__float_as_uint(from[0]), __float_as_uint(from[1]), __float_as_uint(from[2]),
                      __float_as_uint(from[3]));
  };
#pragma unroll
  for (int slice = 0; slice < Share::kOwners; ++slice) {
    if (Share::kReads || kSlices == 1 || slice == place.slice) {
      const int first = Share::kReads ? slice * Share::kGroups : 0;
#pragma unroll
      for (int g = 0; g < Share::kGroups; ++g) ring.own_sums()[(first + g) * kGroupVectors + at] = vector(slice, g);
      continue;
    }
    const int sender = place.slice - (place.slice > slice ? 1 : 0);  // among the others
    const auto rank = static_cast<unsigned>(place.first_rank + slice);
    const ptx::ClusterPlace there =
        ptx::place_in_cluster(ring.received + sender * Share::kGroups * kGroupVectors + at, rank);
    const ptx::ClusterPlace arrived = ptx::place_in_cluster(ring.arrived, rank);
#pragma unroll
    for (int g = 0; g < Share::kGroups; ++g) {
      if (slice * Share::kGroups + g >= real) break;
      ptx::store_async(there + g * kGroupVectors * 16, vector(slice, g), arrived);
    }
  }
}

/// Adds up all slices' sums of the slice's rows, read where they are, into `received`.
template <int kSlices, int kRows>
__device__ inline void read_sums(const FewRowsRing<kRows>& ring, const FewRowsPlace& place) {
  constexpr int kGroups = FewRowsShare<kRows, kSlices>::kGroups;
  constexpr int kMine = kGroups * kWarpgroup / kFinishers;
  const int thread = static_cast<int>(threadIdx.x);
  const int at = thread / kWarpgroup * kGroupVectors + vector_of_thread(thread % kWarpgroup);
  const auto* const own = reinterpret_cast<const float4*>(ring.own_sums()) + place.slice * kGroups * kGroupVectors + at;
  auto* const to = reinterpret_cast<float4*>(ring.received) + at;
  float4 part[kSlices][kMine];
#pragma unroll
  for (int s = 0; s < kSlices; ++s) {
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const auto rank = static_cast<unsigned>(place.first_rank + s);
      part[s][i] = ptx::load_from_cluster(own + i * (kFinishers / kWarpgroup) * kGroupVectors, rank);
    }
  }
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    float4 sum = part[0][i];
#pragma unroll
    for (int s = 1; s < kSlices; ++s) {
      const float4& p = part[s][i];
      sum.x += p.x, sum.y += p.y, sum.z += p.z, sum.w += p.w;
    }
    to[i * (kFinishers / kWarpgroup) * kGroupVectors] = sum;
  }
}

/// By threads that finish rows: waits for all slices' sums.
template <int kSlices, int kRows>
__device__ inline void await_sums(const FewRowsRing<kRows>& ring, const FewRowsPlace& place) {
  using Share = FewRowsShare<kRows, kSlices>;
  if constexpr (Share::kReads) {
    ptx::cluster_sync_memory();
    read_sums<kSlices>(ring, place);
    ptx::cluster_arrive();
  }
  ptx::named_barrier_sync(kSumsBarrier, kFinishers + 32);
  if constexpr (Share::kSends) ptx::mbarrier_wait(ring.arrived, 0);
}
/// Sums of four neighbouring outputs of a row of the slice, each slice's, or those of all.
template <int kSlices, int kParts, int kRows>
__device__ inline void load_sums(const FewRowsRing<kRows>& ring, const FewRowsPlace& place, int row, int output,
                                 float (&part)[kParts][4]) {
  using Share = FewRowsShare<kRows, kSlices>;
  constexpr int kSliceVectors = Share::kGroups * kGroupVectors;
  const int thread = output / 16 * 32 + output % 8 * 4 + row % kRowGroup / 2;  // of the first output
  const int at = (row / kRowGroup * kGroupVectors + vector_of_thread(thread)) * 4 + output % 16 / 8 * 2 + row % 2;
#pragma unroll
  for (int s = 0; s < kParts; ++s) {
    const int sender = s - (s > place.slice ? 1 : 0);
    const bool is_own = kSlices == 1 || (Share::kSends && s == place.slice);
    const uint4* const vectors = is_own ? ring.own_sums() : ring.received + sender * kSliceVectors;
    const float* const sums = reinterpret_cast<const float*>(vectors) + at;
#pragma unroll
    for (int i = 0; i < 4; ++i) part[s][i] = sums[i * 16];  // outputs' threads are 4 apart
  }
}

}  // namespace mmrec::kernels
