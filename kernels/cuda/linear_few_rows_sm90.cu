// y = act(x Wᵀ + bias) + residual_scale residual on the tensor cores of sm_90a, for 9 to 128 rows: weights are streamed
// once, and all that matters is to keep them coming.
//
// The weights are the left operand of the product, 128 outputs a tile, and all rows of x the right one (32, 64 or 128
// columns, zeros beyond), so that few rows do not leave the tensor cores' tiles empty. Too few tiles to fill the device
// are cut along k: `slices` blocks of a cluster take a share of k each, leave their sums in shared memory, and each of
// them adds up all slices' sums of its share of the rows, in the order of the slices, and finishes them. How many
// slices there are follows from the weights' shape alone. A cluster has 8 blocks: several tiles, where there are fewer
// slices.
//
// A warp copies k-blocks of 64 columns of W and of x (tensor memory accelerator) into a ring; two warpgroups multiply
// 64 outputs each. Two blocks fit a multiprocessor, and the first copies of W go out before the kernel waits for its
// predecessor, which has no part in them: in a chain of products the next matrix is on its way while the vector it will
// meet is computed.
//
// Bytes: W once from memory; x once per tile from L2, rows / 128 of what W is. Deterministic: fixed orders of
// summation. A row's bits depend on the row, the weights and the epilogue's operands alone.
#include <bit>

#include "kernels/cuda/gemm_sm90.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/linear_sm90.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/rows.cuh"

namespace mmrec::kernels {

namespace {

constexpr int kMostJobs = 8;
constexpr int kOutputs = 128;  // of a tile
constexpr int kWarpgroup = 128;
constexpr int kConsumers = kOutputs / 64;  // warpgroups
constexpr int kConsumerThreads = kConsumers * kWarpgroup;
constexpr int kThreads = kConsumerThreads + 32;
constexpr int kDepth = kBoxColumns;  // of a k-block
constexpr int kRowBytes = kDepth * 2;
constexpr int kCluster = 8;
constexpr int kMostBlocks = 256;    // that run at once: two a multiprocessor
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
  static constexpr int kStages = kRows == 128 ? 3 : kRows == 64 ? 4 : 5;
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

/// Row `row`, outputs output..output + 3.
template <class Y>
__device__ inline void finish_outputs(const LinearOutput<Y>& out, int row, int output, const float (&sum)[4]) {
  if (out.vectors && output + 4 <= out.columns) {
    float residual[4] = {};
    float bias[4] = {};
    if (out.residual != nullptr) load(out.residual + row * out.residual_stride + output, residual);
    if (out.bias != nullptr) load(out.bias + output, bias);
    float y[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      y[i] = __fmaf_rn(out.residual_scale, residual[i], activate(sum[i] + bias[i], out.activation));
    }
    return store(out.y + row * out.y_stride + output, y);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (output + i >= out.columns) return;
    float residual[1] = {0.0F};
    if (out.residual != nullptr) load(out.residual + row * out.residual_stride + (output + i), residual);
    const float bias = out.bias == nullptr ? 0.0F : __ldg(out.bias + output + i);
    out.y[row * out.y_stride + (output + i)] =
        narrow<Y>(__fmaf_rn(out.residual_scale, residual[0], activate(sum[i] + bias, out.activation)));
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
    const int output = place.output + 4 * lane;
    for (int row = place.slice + job.slices * warp; row < job.out.rows; row += job.slices * (kConsumerThreads / 32)) {
      const auto* from = reinterpret_cast<const float4*>(sums + row * Layout::kPitch) + lane;
      float total[4] = {};
      const auto add = [&](float4 v) { total[0] += v.x, total[1] += v.y, total[2] += v.z, total[3] += v.w; };
      if (job.slices == 1) {
        add(*from);
      } else {
        float4 parts[kCluster];
#pragma unroll
        for (int s = 0; s < kCluster; ++s) {
          if (s < job.slices) parts[s] = ptx::load_from_cluster(from, static_cast<unsigned>(place.first_rank + s));
        }
#pragma unroll
        for (int s = 0; s < kCluster; ++s) {
          if (s < job.slices) add(parts[s]);
        }
      }
      if (output < job.out.columns) finish_outputs(job.out, row, output, total);
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
