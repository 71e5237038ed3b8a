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
// W is the first to leave L2 and is fetched in no more than the 128 bytes of a row that a copy takes; x stays.
//
// What comes after the last k-block has nothing to hide behind and but a few warps, so another warpgroup helps to
// finish rows, and the common epilogues are code without branches.
//
// Bytes: W once from memory; x once per tile from L2, rows / 64 of what W is; for each slice the sums once to another
// block's multiprocessor, 4 bytes per output and row. Deterministic: fixed orders of summation. A row's bits depend on
// the row, the weights and the epilogue's operands alone.
#include <algorithm>

#include "kernels/cuda/gemm/algo.h"
#include "kernels/cuda/gemm/operands.cuh"
#include "kernels/cuda/rows/rows.cuh"

namespace mmrec::kernels {
namespace {

constexpr int kOutputs = 64;     // of a tile
constexpr int kWarpgroup = 128;  // threads that multiply, and as many that help them to finish rows
constexpr int kFinishers = 2 * kWarpgroup;
constexpr int kCopyingWarp = kWarpgroup / 32;             // between them
constexpr int kOutputThreads = kOutputs / 4;              // that finish a row
constexpr int kRowsAtOnce = kFinishers / kOutputThreads;  // 16
constexpr int kThreads = kFinishers + 32;
constexpr int kDepth = kBoxColumns;  // of a k-block
constexpr int kRowBytes = kDepth * 2;
constexpr int kCluster = 4;
constexpr int kMostBlocks = 128;    // of a matrix that is cut: one a multiprocessor, beside one of the next kernel's
constexpr int kLeastBlocksOfK = 4;  // in a slice

template <class Y>
struct FewRowsJob {
  LinearOutput<Y> out;
  int k_blocks;
  int slices;
  int end;  // clusters of the jobs up to this one
};
template <class Y>
struct FewRowsJobs {
  TensorMap w[kMostGemmJobs];
  TensorMap x[kMostGemmJobs];
  FewRowsJob<Y> job[kMostGemmJobs];
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

/// Four neighbours from `output` of a row of the bias or the residual; zeros beyond the row, or if there is none.
template <class Y, class T>
__device__ inline void load_outputs(const LinearOutput<Y>& out, const T* row, int output, float (&to)[4]) {
  if (row != nullptr && out.vectors && output + 4 <= out.columns) return load(row + output, to);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to[i] = row != nullptr && output + i < out.columns ? read(row + output + i) : 0.0F;
  }
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
/// Four outputs of a row, and its residual: 0 if there is none.
template <int kSlices>
__device__ inline void add_up(const float4 (&part)[kSlices], const float (&bias)[4], float (&to)[4]) {
  to[0] = part[0].x, to[1] = part[0].y, to[2] = part[0].z, to[3] = part[0].w;
#pragma unroll
  for (int s = 1; s < kSlices; ++s) to[0] += part[s].x, to[1] += part[s].y, to[2] += part[s].z, to[3] += part[s].w;
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] += bias[i];
}

/// The thread's number among those that finish.
__device__ inline int finisher() {
  const int thread = static_cast<int>(threadIdx.x);
  return thread < kWarpgroup ? thread : thread - 32;
}

/// A thread's rows of its 4 outputs: every kRowsAtOnce-th of the block's share, which is every kSlices-th of all.
template <int kRows, int kSlices>
struct FewRowsShare {
  static constexpr int kMine = std::max(kRows / kSlices / kRowsAtOnce, 1);
  static constexpr int kTogether = std::min(kMine, 8 / kSlices);  // rows whose loads are under way at once
  __device__ static int row(const FewRowsPlace& place, int i) {
    return place.slice + kSlices * (finisher() / kOutputThreads + i * kRowsAtOnce);
  }
};

/// Epilogues of whole tiles whose outputs take 16 bytes, and any other.
enum class Finish : std::uint8_t { kPlain, kResidual, kGelu, kAny };

/// Adds up the slices' sums of the block's share of the rows, in the order of the slices, and finishes them. There are
/// few warps to hide latency, so nothing branches but in kAny: rows beyond the last are computed as well, of the last
/// one's residual, and not stored.
template <Finish kFinish, int kRows, int kSlices, class Y>
__device__ inline void finish_rows(const LinearOutput<Y>& out, const FewRowsPlace& place, const float* sums, int pitch,
                                   const float (&bias)[4]) {
  using Share = FewRowsShare<kRows, kSlices>;
  constexpr bool kAny = kFinish == Finish::kAny;
  constexpr bool kResidual = kAny || kFinish == Finish::kResidual;
  constexpr int kTogether = kAny ? 1 : Share::kTogether;
  const int output = finisher() % kOutputThreads * 4;
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
      load_sums(sums + row * pitch + output, place.first_rank, part[r]);
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
__device__ inline void finish_tile(const LinearOutput<Y>& out, const FewRowsPlace& place, const float* sums, int pitch,
                                   const float (&bias)[4]) {
  const auto by = [&]<Finish kFinish>() { finish_rows<kFinish, kRows, kSlices>(out, place, sums, pitch, bias); };
  const bool whole = out.vectors && place.output + kOutputs <= out.columns;
  const bool residual = out.residual != nullptr;
  if (whole && out.activation == Activation::kNone && residual) return by.template operator()<Finish::kResidual>();
  if (whole && out.activation == Activation::kNone) return by.template operator()<Finish::kPlain>();
  if (whole && out.activation == Activation::kGelu && !residual) return by.template operator()<Finish::kGelu>();
  by.template operator()<Finish::kAny>();
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
      ptx::mbarrier_init(&empty[s], 1);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();

  if (warp == kCopyingWarp) {
    if (lane == 0) {
      const std::uint64_t hint = ptx::evict_first();
      const auto load_w = [&](int k, int stage) {
        ptx::mbarrier_arrive_expect(&full[stage], Layout::kStageBytes);
        ptx::load_box(ring + stage * Layout::kStageBytes, &jobs.w[place.job], &full[stage],
                      (place.k_begin + k) * kDepth, place.output, 0, hint);
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
    load_outputs(job.out, job.out.bias, place.output + finisher() % kOutputThreads * 4, bias);
    ptx::wait_for_predecessor();
  }
  if (warp < kCopyingWarp) {
    const std::uint64_t w = ptx::wgmma_operand(ring);
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
      if (k != 0 && threadIdx.x == 0) ptx::mbarrier_arrive(&empty[(k - 1) % kStages]);
    }
    ptx::wgmma_wait_all(sum);
    ptx::named_barrier_sync(1, kWarpgroup);  // nobody reads the ring any more
    float* to = sums + lane % 4 * 2 * Layout::kPitch + warp * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) to[(i / 4 * 8 + i % 2) * Layout::kPitch + i % 4 / 2 * 8] = sum[i];
  }

  if (job.slices == 1) {
    __syncthreads();
  } else {
    ptx::cluster_sync_memory();
  }
  if (warp != kCopyingWarp) {
    switch (job.slices) {
      case 1:
        finish_tile<kRows, 1>(job.out, place, sums, Layout::kPitch, bias);
        break;
      case 2:
        finish_tile<kRows, 2>(job.out, place, sums, Layout::kPitch, bias);
        break;
      default:
        finish_tile<kRows, kCluster>(job.out, place, sums, Layout::kPitch, bias);
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
    parameters.w[i] = make_tensor_map(matrix_stack<A>(jobs[i].weight), kOutputs, 1, /*wide=*/false);
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
  std::int64_t rows = 0;
  for (const Linear<Device, A, Y>& job : jobs) rows = std::max(rows, job.x.rows);
  if (rows <= 32) return launch_few_rows<32>(cuda, jobs);
  if (rows <= 64) return launch_few_rows<64>(cuda, jobs);
  launch_few_rows<kFewRows>(cuda, jobs);
}

#define MMREC_INSTANTIATE(A, Y) template void linear_few_rows_sm90(Cuda&, std::span<const Linear<Device, A, Y>>);
MMREC_FOR_EACH_HALF_PRODUCT(MMREC_INSTANTIATE)

}  // namespace mmrec::kernels
