// What the kernels for 9 to 128 rows share (few_rows_sm90.cu, few_compact_sm90.cu): which tile of W a block has, how a
// tile that is cut along k is put together, and what becomes of its sums.
//
// A tile is 64 outputs by up to 32, 64 or 128 rows of x. Too few tiles to fill the device are cut along k: `slices`
// blocks of a cluster take a share of k each, leave their sums in shared memory, and each of them adds up all slices'
// sums of its share of the rows, in the order of the slices, and finishes them. How many slices there are follows from
// the weights' shape alone. A cluster has 4 blocks: several tiles, where there are fewer slices.
//
// What comes after the last k-block has nothing to hide behind and but a few warps, so the common epilogues are code
// without branches.
#pragma once

#include <algorithm>

#include "kernels/cuda/gemm/algo.h"
#include "kernels/cuda/gemm/operands.cuh"
#include "kernels/cuda/rows/rows.cuh"
#include "kernels/cuda/runtime/launch.cuh"

namespace mmrec::kernels {

// Of a block: two warpgroups, of which one or both multiply and both finish rows, and a warp that copies.
constexpr int kWarpgroup = 128;
constexpr int kFinishers = 2 * kWarpgroup;
constexpr int kCopyingWarp = kFinishers / 32;
constexpr int kOutputThreads = kOutputs / 4;              // that finish a row
constexpr int kRowsAtOnce = kFinishers / kOutputThreads;  // 16
constexpr int kThreads = kFinishers + 32;
constexpr int kDepth = kBoxColumns;  // of a k-block
constexpr int kRowBytes = kDepth * 2;
constexpr int kCluster = 4;

// Shared memory: the ring of stages, its barriers. A row's sums lie apart by as many banks as let a store of 8 outputs
// of 4 pairs of rows meet in none.
constexpr int kRingBytes = 100 * 1024;
constexpr int kMostStages = 16;
constexpr int kAlignment = 1024;
constexpr std::size_t kSharedBytes = kAlignment + kRingBytes + 2 * kMostStages * 8;
constexpr int kPitch = kOutputs + 4;
static_assert(kFewRows * kPitch * 4 <= kRingBytes);

struct FewRowsRing {
  std::byte* stages;
  std::uint64_t* full;
  std::uint64_t* empty;

  __device__ FewRowsRing() : stages(ptx::shared_memory<std::byte>()) {
    stages += (kAlignment - reinterpret_cast<std::uintptr_t>(stages) % kAlignment) % kAlignment;
    full = reinterpret_cast<std::uint64_t*>(stages + kRingBytes);
    empty = full + kMostStages;
    if (threadIdx.x == 0) {
      for (int s = 0; s < kMostStages; ++s) {
        ptx::mbarrier_init(&full[s], 1);
        ptx::mbarrier_init(&empty[s], 1);
      }
      ptx::mbarrier_init_fence();
    }
    __syncthreads();
  }
  /// [row][output], when the ring is done.
  __device__ float* sums() const { return reinterpret_cast<float*>(stages); }
};

template <class Y>
struct FewRowsJob {
  LinearOutput<Y> out;
  int k_blocks;
  int slices;
  int end;  // clusters of the jobs up to this one
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

template <class Y>
__device__ inline FewRowsPlace few_rows_place(const FewRowsJob<Y> (&jobs)[kMostGemmJobs]) {
  int cluster = static_cast<int>(blockIdx.x) / kCluster;
  int job = 0;
  while (cluster >= jobs[job].end) ++job;
  if (job != 0) cluster -= jobs[job - 1].end;
  const FewRowsJob<Y>& j = jobs[job];
  const int rank = static_cast<int>(ptx::cluster_rank());
  const int slice = rank % j.slices;
  const int tile = cluster * (kCluster / j.slices) + rank / j.slices;
  return {job,
          tile * kOutputs,
          rank - slice,
          slice,
          j.k_blocks * slice / j.slices,
          tile * kOutputs < j.out.columns ? j.k_blocks * (slice + 1) / j.slices : j.k_blocks * slice / j.slices};
}

/// By one thread: load_w(k, stage) and load_x(k, stage) of the block's k-blocks, of W as far ahead as there are stages
/// before the predecessor is waited for. (Into L2 further ahead: slower, the kernels before wait longer for x.)
template <int kStages, class LoadW, class LoadX>
__device__ inline void copy_stages(const FewRowsRing& ring, int count, const LoadW& load_w, const LoadX& load_x) {
  const int ahead = min(count, kStages);
  for (int k = 0; k < ahead; ++k) load_w(k, k);
  ptx::wait_for_predecessor();
  for (int k = 0; k < ahead; ++k) load_x(k, k);
  for (int k = ahead; k < count; ++k) {
    const int stage = k % kStages;
    ptx::mbarrier_wait(&ring.empty[stage], static_cast<std::uint32_t>(k / kStages - 1) & 1U);
    load_w(k, stage);
    load_x(k, stage);
  }
}

/// Where a thread of a warpgroup that multiplies leaves sum i of ptx::wgmma.
__device__ inline float* sums_of_thread(float* sums) {
  const int thread = static_cast<int>(threadIdx.x);
  return sums + thread % 4 * 2 * kPitch + thread % kWarpgroup / 32 * 16 + thread % 32 / 4;
}
__device__ constexpr int sum_offset(int i) { return (i / 4 * 8 + i % 2) * kPitch + i % 4 / 2 * 8; }

/// Loads four numbers of the bias or of a residual's row, from column `output` on. Columns that do not exist, and a
/// null row, give zeros.
template <class Y, class T>
__device__ inline void load_outputs(const LinearOutput<Y>& out, const T* row, int output, float (&to)[4]) {
  if (row != nullptr && out.vectors && output + 4 <= out.columns) return load(row + output, to);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to[i] = row != nullptr && output + i < out.columns ? read(row + output + i) : 0.0F;
  }
}
/// The bias of the outputs that the thread finishes.
template <class Y>
__device__ inline void load_bias(const LinearOutput<Y>& out, const FewRowsPlace& place, float (&to)[4]) {
  load_outputs(out, out.bias, place.output + static_cast<int>(threadIdx.x) % kOutputThreads * 4, to);
}

/// Four sums of a row, the slices' one after another.
template <int kSlices>
__device__ inline void load_sums(const float* from, int first_rank, float4 (&part)[kSlices]) {
  const auto* at = reinterpret_cast<const float4*>(from);
  if constexpr (kSlices == 1) {
    part[0] = *at;
  } else {
#pragma unroll
    for (int s = 0; s < kSlices; ++s) part[s] = ptx::load_from_cluster(at, static_cast<unsigned>(first_rank + s));
  }
}
/// Four outputs of a row before the activation: the slices' sums, one after another, then the bias.
template <int kSlices>
__device__ inline void add_up(const float4 (&part)[kSlices], const float (&bias)[4], float (&to)[4]) {
  to[0] = part[0].x, to[1] = part[0].y, to[2] = part[0].z, to[3] = part[0].w;
#pragma unroll
  for (int s = 1; s < kSlices; ++s) to[0] += part[s].x, to[1] += part[s].y, to[2] += part[s].z, to[3] += part[s].w;
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] += bias[i];
}

/// A thread's rows of its 4 outputs: every kRowsAtOnce-th of the block's share, which is every kSlices-th of all.
template <int kRows, int kSlices>
struct FewRowsShare {
  static constexpr int kMine = std::max(kRows / kSlices / kRowsAtOnce, 1);
  static constexpr int kTogether = std::min(kMine, 8 / kSlices);  // rows whose loads are under way at once
  __device__ static int row(const FewRowsPlace& place, int i) {
    return place.slice + kSlices * (static_cast<int>(threadIdx.x) / kOutputThreads + i * kRowsAtOnce);
  }
};

/// Epilogues of whole tiles whose outputs take 16 bytes, and any other.
enum class Finish : std::uint8_t { kPlain, kResidual, kGelu, kAny };

/// Adds up the slices' sums of the block's share of the rows, in the order of the slices, and finishes them. There are
/// few warps to hide latency, so nothing branches but in kAny: rows beyond the last are computed as well, of the last
/// one's residual, and not stored.
template <Finish kFinish, int kRows, int kSlices, class Y>
__device__ inline void finish_rows(const LinearOutput<Y>& out, const FewRowsPlace& place, const float* sums,
                                   const float (&bias)[4]) {
  using Share = FewRowsShare<kRows, kSlices>;
  constexpr bool kAny = kFinish == Finish::kAny;
  constexpr bool kResidual = kAny || kFinish == Finish::kResidual;
  constexpr int kTogether = kAny ? 1 : Share::kTogether;
  const int output = static_cast<int>(threadIdx.x) % kOutputThreads * 4;
  const int column = place.output + output;
  const int rows = out.rows;
  const float scale = out.residual_scale;
  const std::int64_t y_stride = out.y_stride;
  Y* y = out.y + column;
#pragma unroll(kAny ? 1 : Share::kMine)
  for (int first = 0; first < Share::kMine; first += kTogether) {
    if (kAny && (Share::row(place, first) >= rows || column >= out.columns)) return;
    float4 part[kTogether][kSlices];
    float residual[kTogether][4];
#pragma unroll
    for (int r = 0; r < kTogether; ++r) {
      const int row = Share::row(place, first + r);
      if constexpr (kResidual) {
        const Y* from = out.residual + min(row, rows - 1) * out.residual_stride;
        if constexpr (kAny) {
          load_outputs(out, out.residual == nullptr ? nullptr : from, column, residual[r]);
        } else {
          load(from + column, residual[r]);
        }
      }
      load_sums(sums + row * kPitch + output, place.first_rank, part[r]);
    }
#pragma unroll
    for (int r = 0; r < kTogether; ++r) {
      const int row = Share::row(place, first + r);
      float value[4];
      add_up(part[r], bias, value);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Activation known = kFinish == Finish::kGelu ? Activation::kGelu : Activation::kNone;
        value[i] = activate(value[i], kAny ? out.activation : known);
        if constexpr (kResidual) value[i] = __fmaf_rn(scale, residual[r][i], value[i]);
        if (kAny && column + i < out.columns) y[row * y_stride + i] = narrow<Y>(value[i]);
      }
      if (!kAny && row < rows) store(y + row * y_stride, value);
    }
  }
}

template <int kRows, int kSlices, class Y>
__device__ inline void finish_tile(const LinearOutput<Y>& out, const FewRowsPlace& place, const float* sums,
                                   const float (&bias)[4]) {
  const auto by = [&]<Finish kFinish>() { finish_rows<kFinish, kRows, kSlices>(out, place, sums, bias); };
  const bool whole = out.vectors && place.output + kOutputs <= out.columns;
  const bool residual = out.residual != nullptr;
  if (whole && out.activation == Activation::kNone && residual) return by.template operator()<Finish::kResidual>();
  if (whole && out.activation == Activation::kNone) return by.template operator()<Finish::kPlain>();
  if (whole && out.activation == Activation::kGelu && !residual) return by.template operator()<Finish::kGelu>();
  by.template operator()<Finish::kAny>();
}

/// By all threads of the block, when its sums are in shared memory.
template <int kRows, class Y>
__device__ inline void finish_block(const FewRowsJob<Y>& job, const FewRowsPlace& place, const float* sums,
                                    const float (&bias)[4]) {
  if (job.slices == 1) {
    __syncthreads();
  } else {
    ptx::cluster_sync_memory();
  }
  if (threadIdx.x < kFinishers) {
    switch (job.slices) {
      case 1:
        finish_tile<kRows, 1>(job.out, place, sums, bias);
        break;
      case 2:
        finish_tile<kRows, 2>(job.out, place, sums, bias);
        break;
      default:
        finish_tile<kRows, kCluster>(job.out, place, sums, bias);
    }
  }
  if (job.slices != 1) ptx::cluster_sync();  // a block stays while its sums are read
}

/// Adds a job behind those that end before cluster `begin`; returns where it ends. Its k-blocks have `depth` columns.
template <class A, class Y>
int set_few_rows_job(const Linear<Device, A, Y>& job, int depth, int begin, FewRowsJob<Y>& to) {
  const std::int64_t tiles = ceil_div(job.weight.rows, kOutputs);
  const int slices = few_rows_slices(job.weight);
  const int end = begin + static_cast<int>(ceil_div(tiles * slices, kCluster));
  to = {linear_output(job), static_cast<int>(ceil_div(job.weight.cols, depth)), slices, end};
  return end;
}

inline LaunchConfig few_rows_launch(int clusters) {
  return {.grid = dims(clusters * kCluster),
          .block = dim3(kThreads),
          .shared_bytes = kSharedBytes,
          .cluster = kCluster,
          .overlap_predecessor = true};
}

}  // namespace mmrec::kernels
