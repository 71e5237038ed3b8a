// y = act(x Wᵀ + bias) + residual_scale residual on the tensor cores of sm_90a, for 9 to 128 rows: weights are streamed
// once, and all that matters is to keep them coming.
//
// The weights are the left operand of the product, 64 outputs a tile, and all rows of x the right one (32, 64 or 128
// columns, zeros beyond), so that few rows do not leave the tensor cores' tiles empty. Too few tiles to fill the device
// are cut along k: `slices` blocks of a cluster take a share of k each, leave their sums in shared memory, and each of
// them adds up all slices' sums of its share of the rows, in the order of the slices, and finishes them. How many
// slices there are follows from the weights' shape alone. A cluster has 4 blocks: several tiles, where there are fewer
// slices.
//
// A warp copies k-blocks of 64 columns of W and of x (tensor memory accelerator) into a ring, a warpgroup multiplies.
// Two blocks fit a multiprocessor, and the first copies of W go out before the kernel waits for its predecessor, which
// has no part in them: in a chain of products the next matrix is on its way while the vector it will meet is computed.
//
// Bytes: W once from memory; x once per tile from L2, rows / 64 of what W is; for each slice the sums once to another
// block's multiprocessor, 4 bytes per output and row. Deterministic: fixed orders of summation. A row's bits depend on
// the row, the weights and the epilogue's operands alone.
#include <algorithm>

#include "kernels/cuda/gemm_sm90.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear_sm90.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/rows.cuh"

namespace mmrec::kernels {

namespace {

constexpr int kMostJobs = 8;
constexpr int kConsumers = 1;              // warpgroups
constexpr int kOutputs = 64 * kConsumers;  // of a tile
constexpr int kWarpgroup = 128;
constexpr int kConsumerThreads = kConsumers * kWarpgroup;
constexpr int kOutputThreads = kOutputs / 4;                    // that finish a row
constexpr int kRowsAtOnce = kConsumerThreads / kOutputThreads;  // 8
constexpr int kThreads = kConsumerThreads + 32;
constexpr int kDepth = kBoxColumns;  // of a k-block
constexpr int kRowBytes = kDepth * 2;
constexpr int kCluster = 4;
constexpr int kMostBlocks = 128;    // of a matrix that is cut: one a multiprocessor, beside one of the next kernel's
constexpr int kLeastBlocksOfK = 2;  // in a slice

template <class Y>
struct FewRowsJob {
  LinearOutput<Y> out;
  int k_blocks;
  int slices;
  int end;  // clusters of the jobs up to this one
};
template <class Y>
struct FewRowsJobs {
  TensorMap w[kMostJobs];
  TensorMap x[kMostJobs];
  FewRowsJob<Y> job[kMostJobs];
};

/// kRows: of x, 32, 64 or 128.
template <int kRows>
struct FewRowsLayout {
  static constexpr int kWBytes = kOutputs * kRowBytes;
  static constexpr int kStageBytes = kWBytes + kRows * kRowBytes;
  static constexpr int kStages = 100 * 1024 / kStageBytes;
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kAlignment = 1024;
  static constexpr std::size_t kSharedBytes = kAlignment + kRingBytes + 2 * kStages * 8;
  // A row's sums lie apart by as many banks as let a store of 8 outputs of 4 pairs of rows meet in none.
  static constexpr int kPitch = kOutputs + 4;
  static_assert(kRows * kPitch * 4 <= kRingBytes);
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
__device__ inline FewRowsPlace few_rows_place(const FewRowsJobs<Y>& jobs) {
  int cluster = static_cast<int>(blockIdx.x) / kCluster;
  int job = 0;
  while (cluster >= jobs.job[job].end) ++job;
  if (job != 0) cluster -= jobs.job[job - 1].end;
  const FewRowsJob<Y>& j = jobs.job[job];
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

/// Four outputs of a row from their sums, residual and bias.
template <class Y>
__device__ inline void finish_outputs(const LinearOutput<Y>& out, int row, int output, const float (&sum)[4],
                                      const float (&residual)[4], const float (&bias)[4]) {
  float y[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    y[i] = __fmaf_rn(out.residual_scale, residual[i], activate(sum[i] + bias[i], out.activation));
  }
  Y* to = out.y + row * out.y_stride + output;
  if (out.vectors && output + 4 <= out.columns) return store(to, y);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (output + i < out.columns) to[i] = narrow<Y>(y[i]);
  }
}

/// Four neighbours from `output` of a row of the bias or the residual; zeros beyond the row, or if there is none.
template <class Y, class T>
__device__ inline void load_outputs(const LinearOutput<Y>& out, const T* row, int output, float (&to)[4]) {
  if (row != nullptr && out.vectors && output + 4 <= out.columns) return load(row + output, to);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float value[1] = {0.0F};
    if (row != nullptr && output + i < out.columns) load(row + output + i, value);
    to[i] = value[0];
  }
}

/// Adds up the slices' sums of the block's share of the rows, every kSlices-th, in the order of the slices.
template <class Y, int kSlices, int kPitch>
__device__ inline void finish_rows(const LinearOutput<Y>& out, const FewRowsPlace& place, const float* sums,
                                   const float (&bias)[4]) {
  constexpr int kRows = std::min(4, kCluster / kSlices);  // of a thread that are under way at once
  const int thread = static_cast<int>(threadIdx.x);
  const int output = thread % kOutputThreads * 4;
  if (place.output + output >= out.columns) return;
  for (int first = thread / kOutputThreads; place.slice + kSlices * first < out.rows; first += kRows * kRowsAtOnce) {
    float4 part[kRows][kSlices];
    float residual[kRows][4];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = place.slice + kSlices * (first + r * kRowsAtOnce);
      if (row >= out.rows) continue;
      const auto* from = reinterpret_cast<const float4*>(sums + row * kPitch + output);
#pragma unroll
      for (int s = 0; s < kSlices; ++s) {
        if constexpr (kSlices == 1) {
          part[r][s] = *from;
        } else {
          part[r][s] = ptx::load_from_cluster(from, static_cast<unsigned>(place.first_rank + s));
        }
      }
      const Y* residual_row = out.residual == nullptr ? nullptr : out.residual + row * out.residual_stride;
      load_outputs(out, residual_row, place.output + output, residual[r]);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = place.slice + kSlices * (first + r * kRowsAtOnce);
      if (row >= out.rows) continue;
      float sum[4] = {part[r][0].x, part[r][0].y, part[r][0].z, part[r][0].w};
#pragma unroll
      for (int s = 1; s < kSlices; ++s) {
        sum[0] += part[r][s].x, sum[1] += part[r][s].y, sum[2] += part[r][s].z, sum[3] += part[r][s].w;
      }
      finish_outputs(out, row, place.output + output, sum, residual[r], bias);
    }
  }
}

template <class A, class Y, int kRows>
__global__ void __launch_bounds__(kThreads, 2) few_rows_kernel(const __grid_constant__ FewRowsJobs<Y> jobs) {
  using Layout = FewRowsLayout<kRows>;
  constexpr int kStages = Layout::kStages;
  ptx::allow_successor();
  auto* ring = ptx::shared_memory<std::byte>();
  ring += (Layout::kAlignment - reinterpret_cast<std::uintptr_t>(ring) % Layout::kAlignment) % Layout::kAlignment;
  auto* full = reinterpret_cast<std::uint64_t*>(ring + Layout::kRingBytes);
  std::uint64_t* empty = full + kStages;
  auto* sums = reinterpret_cast<float*>(ring);  // [row][output], when the ring is done
  const FewRowsPlace place = few_rows_place(jobs);
  const FewRowsJob<Y>& job = jobs.job[place.job];
  const int warp = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int count = place.k_end - place.k_begin;
  float bias[4] = {};  // of the outputs that the thread will finish

  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(&full[s], 1);
      ptx::mbarrier_init(&empty[s], kConsumers);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();

  if (warp == kConsumerThreads / 32) {
    if (lane == 0) {
      const auto load_w = [&](int k, int stage) {
        ptx::mbarrier_arrive_expect(&full[stage], Layout::kStageBytes);
        ptx::load_box(ring + stage * Layout::kStageBytes, &jobs.w[place.job], &full[stage],
                      (place.k_begin + k) * kDepth, place.output, 0);
      };
      const auto load_x = [&](int k, int stage) {
        ptx::load_box(ring + stage * Layout::kStageBytes + Layout::kWBytes, &jobs.x[place.job], &full[stage],
                      (place.k_begin + k) * kDepth, 0, 0);
      };
      const int ahead = min(count, kStages);
      for (int k = 0; k < ahead; ++k) load_w(k, k);
      ptx::wait_for_predecessor();
      for (int k = 0; k < ahead; ++k) load_x(k, k);
      for (int k = ahead; k < count; ++k) {
        const int stage = k % kStages;
        ptx::mbarrier_wait(&empty[stage], static_cast<std::uint32_t>(k / kStages - 1) & 1U);
        load_w(k, stage);
        load_x(k, stage);
      }
    }
    __syncwarp();
  } else {
    load_outputs(job.out, job.out.bias, place.output + static_cast<int>(threadIdx.x) % kOutputThreads * 4, bias);
    ptx::wait_for_predecessor();
    const int consumer = warp / 4;
    const std::uint64_t w = ptx::wgmma_operand(ring + consumer * 64 * kRowBytes);
    const std::uint64_t x = ptx::wgmma_operand(ring + Layout::kWBytes);
    float sum[kRows / 2] = {};
    for (int k = 0; k < count; ++k) {
      const int stage = k % kStages;
      ptx::mbarrier_wait(&full[stage], static_cast<std::uint32_t>(k / kStages) & 1U);
      ptx::wgmma_fence();
      const auto at = static_cast<std::uint64_t>(stage * (Layout::kStageBytes / 16));
#pragma unroll
      for (int i = 0; i < kDepth / 16; ++i) ptx::wgmma<A>(sum, w + at + 2 * i, x + at + 2 * i, true);
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      if (k != 0 && threadIdx.x % kWarpgroup == 0) ptx::mbarrier_arrive(&empty[(k - 1) % kStages]);
    }
    ptx::wgmma_wait_all(sum);
    ptx::named_barrier_sync(1, kConsumerThreads);  // nobody reads the ring any more
    float* to = sums + lane % 4 * 2 * Layout::kPitch + warp * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) to[(i / 4 * 8 + i % 2) * Layout::kPitch + i % 4 / 2 * 8] = sum[i];
  }

  if (job.slices == 1) {
    __syncthreads();
  } else {
    ptx::cluster_sync_memory();
  }
  if (warp < kConsumerThreads / 32) {
    switch (job.slices) {
      case 1:
        finish_rows<Y, 1, Layout::kPitch>(job.out, place, sums, bias);
        break;
      case 2:
        finish_rows<Y, 2, Layout::kPitch>(job.out, place, sums, bias);
        break;
      default:
        finish_rows<Y, kCluster, Layout::kPitch>(job.out, place, sums, bias);
    }
  }
  if (job.slices != 1) ptx::cluster_sync();  // a block stays while its sums are read
}

/// Slices of k: as many as run at once, each of some length.
int slices_of(std::int64_t outputs, std::int64_t k_blocks) {
  const std::int64_t tiles = ceil_div(outputs, kOutputs);
  int slices = 1;
  while (slices < kCluster && 2 * slices * tiles <= kMostBlocks && 2 * slices * kLeastBlocksOfK <= k_blocks) {
    slices *= 2;
  }
  return slices;
}

template <int kRows, class A, class Y>
void launch_few_rows(Cuda& cuda, std::span<const Linear<Device, A, Y>> jobs) {
  FewRowsJobs<Y> parameters = {};
  int clusters = 0;
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    const std::int64_t k_blocks = ceil_div(jobs[i].weight.cols, kDepth);
    const int slices = slices_of(jobs[i].weight.rows, k_blocks);
    clusters += static_cast<int>(ceil_div(ceil_div(jobs[i].weight.rows, kOutputs) * slices, kCluster));
    parameters.w[i] = make_tensor_map(matrix_stack(jobs[i].weight), kOutputs);
    parameters.x[i] = make_tensor_map(matrix_stack(jobs[i].x), kRows);
    parameters.job[i] = {linear_output(jobs[i]), static_cast<int>(k_blocks), slices, clusters};
  }
  const LaunchConfig config = {.grid = dim3(static_cast<unsigned>(clusters * kCluster)),
                               .block = dim3(kThreads),
                               .shared_bytes = FewRowsLayout<kRows>::kSharedBytes,
                               .cluster = kCluster,
                               .overlap_predecessor = true};
  launch(cuda.stream(), config, few_rows_kernel<A, Y, kRows>, parameters);
}

}  // namespace

template <class A, class Y>
void linear_few_rows_sm90(Cuda& cuda, std::span<const Linear<Device, A, Y>> jobs) {
  while (!jobs.empty()) {
    const auto some = jobs.first(std::min<std::size_t>(jobs.size(), kMostJobs));
    std::int64_t rows = 0;
    for (const Linear<Device, A, Y>& job : some) rows = std::max(rows, job.x.rows);
    if (rows <= 32) {
      launch_few_rows<32>(cuda, some);
    } else if (rows <= 64) {
      launch_few_rows<64>(cuda, some);
    } else {
      launch_few_rows<kFewRows>(cuda, some);
    }
    jobs = jobs.subspan(some.size());
  }
}

template void linear_few_rows_sm90(Cuda&, std::span<const Linear<Device, BFloat16, BFloat16>>);
template void linear_few_rows_sm90(Cuda&, std::span<const Linear<Device, BFloat16, float>>);
template void linear_few_rows_sm90(Cuda&, std::span<const Linear<Device, Float16, Float16>>);
template void linear_few_rows_sm90(Cuda&, std::span<const Linear<Device, Float16, float>>);

}  // namespace mmrec::kernels
