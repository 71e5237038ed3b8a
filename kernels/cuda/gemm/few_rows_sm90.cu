// y = act(x Wᵀ + bias) + residual_scale residual on the tensor cores of sm_90a, for 9 to 128 rows: weights are streamed
// once, and all that matters is to keep them coming. Tiles and epilogue: few_rows.cuh.
//
// The weights are the left operand of the product, 64 outputs a tile, and all rows of x the right one (32, 64 or 128
// columns, zeros beyond), so that few rows do not leave the tensor cores' tiles empty.
//
// A warp copies k-blocks of 64 columns of W and of x (tensor memory accelerator) into a ring, a warpgroup multiplies,
// and another one helps to finish rows. Two blocks fit a multiprocessor, and the first copies of W go out before the
// kernel waits for its predecessor, which has no part in them: in a chain of products the next matrix is on its way
// while the vector it will meet is computed. W is the first to leave L2 and is fetched in no more than the 128 bytes of
// a row that a copy takes; x stays.
//
// Bytes: W once from memory; x once per tile from L2, rows / 64 of what W is; for each slice the sums once to another
// block's multiprocessor, 4 bytes per output and row. Deterministic: fixed orders of summation. A row's bits depend on
// the row, the weights and the epilogue's operands alone.
#include <algorithm>

#include "kernels/cuda/gemm/algo.h"
#include "kernels/cuda/gemm/few_rows.cuh"

namespace mmrec::kernels {
namespace {

template <class Y>
struct FewRowsJobs {
  TensorMap w[kMostGemmJobs];
  TensorMap x[kMostGemmJobs];
  FewRowsJob<Y> job[kMostGemmJobs];
};

template <class A, class Y, int kRows>
__global__ void __launch_bounds__(kThreads, 2) few_rows_kernel(const __grid_constant__ FewRowsJobs<Y> jobs) {
  using Stage = FewRowsStage<kRows>;
  ptx::allow_successor();
  const FewRowsRing<kRows> ring;
  const FewRowsPlace place = few_rows_place(jobs.job);
  const FewRowsJob<Y>& job = jobs.job[place.job];
  const int warp = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int count = place.k_end - place.k_begin;
  float bias[4] = {};  // of the outputs that the thread will finish

  if (warp == kCopyingWarp) {
    if (lane == 0) {
      copy_plain_stages(ring, jobs.w[place.job], jobs.x[place.job], place.k_begin, count, place.output, 0);
    } else {
      ptx::cluster_wait();
    }
    return;
  }
  if (warp == kNormWarp) {
    ptx::cluster_wait();
    ptx::wait_for_predecessor();
    return find_factors(job, place, ring);
  }
  load_bias(job.out, place, bias);
  ptx::cluster_wait();
  ptx::wait_for_predecessor();
  float sum[kRows / 2] = {};
  if (warp < kWarpgroup / 32) multiply<A, Stage>(ring, count, sum);
  finish_block(job, place, ring, bias, sum);
}

template <int kRows, class A, class Y>
void launch_few_rows(Cuda& cuda, std::span<const Linear<Device, A, Y>> jobs) {
  FewRowsJobs<Y> parameters = {};
  int clusters = 0;
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    clusters = set_few_rows_job(jobs[i], kDepth, clusters, parameters.job[i]);
    parameters.w[i] = make_tensor_map(matrix_stack<A>(jobs[i].weight), kOutputs, 1, /*wide=*/false);
    parameters.x[i] = make_tensor_map(matrix_stack(jobs[i].x), kRows);
  }
  launch(cuda.stream(), few_rows_launch<kRows>(clusters, kThreads), few_rows_kernel<A, Y, kRows>, parameters);
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
