// What the kernels for 9 to 128 rows share (few_rows_sm90.cu, few_compact_sm90.cu): which tile of W a block has, how a
// tile that is cut along k is put together, and what becomes of its sums. Ring and exchange: few_rows_ring.cuh.
//
// A tile is 64 outputs by up to 32, 64 or 128 rows of x. Too few tiles to fill the device are cut along k: `slices`
// blocks of a cluster take a share of k each and a share of the rows. They exchange their sums of the others' rows, and
// each adds up all slices' sums of its own, in the order of the slices, and finishes them by code without branches. How
// many slices there are follows from the weights' shape alone. A cluster has 8 blocks: several tiles, where there are
// fewer slices.
#pragma once

#include <algorithm>

#include "kernels/cuda/gemm/few_rows_ring.cuh"
#include "kernels/cuda/rows/rows.cuh"
#include "kernels/cuda/rows/scaled.cuh"

namespace mmrec::kernels {

template <class Y>
struct FewRowsJob {
  LinearOutput<Y> out;
  const float* x_squares;  // or null
  int columns_of_x;
  ScaledRows<Device, BFloat16> scaled;
  int k_blocks;
  int slices;
  int end;  // clusters of the jobs up to this one
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

/// By the warp for norms: the factors of the slice's rows. await_sums() waits for them.
template <int kRows, class Y>
__device__ inline void find_factors(const FewRowsJob<Y>& job, const FewRowsPlace& place,
                                    const FewRowsRing<kRows>& ring) {
  const int of_slice = kRows / min(job.slices, FewRowsRing<kRows>::kGroups);
  const int first = place.slice * of_slice, end = min(first + of_slice, job.out.rows);
  if (job.x_squares == nullptr) {
    for (int row = static_cast<int>(threadIdx.x) % 32; row < kRows; row += 32) ring.factors[row] = 1.0F;
  } else {
    scaled_factors(job.x_squares, job.columns_of_x, first, end,
                   [&](int row, float factor) { ring.factors[row] = factor; });
  }
  ptx::named_barrier_arrive(kSumsBarrier, kFinishers + 32);
}

/// The four outputs, before bias and activation.
template <int kSlices, int kRows>
__device__ inline void add_up(const FewRowsRing<kRows>& ring, const FewRowsPlace& place, int row, int output,
                              float (&to)[4]) {
  constexpr int kParts = FewRowsShare<kRows, kSlices>::kSends ? kSlices : 1;
  float part[kParts][4];
  load_sums<kSlices>(ring, place, row, output, part);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to[i] = part[0][i];
#pragma unroll
    for (int s = 1; s < kParts; ++s) to[i] += part[s][i];
  }
}

/// Epilogues of outputs that take 16 bytes, of those with a residual also one that leaves scaled rows, and any other.
enum class Finish : std::uint8_t { kPlain, kResidual, kScaled, kGelu, kAny };

/// Finishes the slice's rows: a thread has 4 outputs of every kRowsAtOnce-th. There are few warps to hide latency, so
/// residuals are on their way before the sums are there, and nothing branches but in kAny: what does not exist is
/// computed as well, of the last one's operands, and not stored.
template <Finish kFinish, int kSlices, int kRows, class Y>
__device__ inline void finish_rows(const FewRowsJob<Y>& job, const FewRowsPlace& place, const FewRowsRing<kRows>& ring,
                                   const float (&bias)[4]) {
  constexpr bool kAny = kFinish == Finish::kAny;
  constexpr bool kScaled = kFinish == Finish::kScaled;
  constexpr bool kResidual = kAny || kScaled || kFinish == Finish::kResidual;
  const LinearOutput<Y>& out = job.out;
  constexpr int kOfSlice = FewRowsShare<kRows, kSlices>::kOfSlice;
  constexpr int kMine = std::max(kOfSlice / kRowsAtOnce, 1);
  const int output = static_cast<int>(threadIdx.x) % kOutputThreads * 4;
  const int column = place.output + output;
  const int first = static_cast<int>(threadIdx.x) / kOutputThreads;
  const int first_row = place.slice * kOfSlice;
  float residual[kMine][4];
#pragma unroll
  for (int r = 0; kResidual && r < kMine; ++r) {
    const Y* const from = out.residual + min(first_row + first + r * kRowsAtOnce, out.rows - 1) * out.residual_stride;
    if constexpr (kAny) {
      load_outputs(out, out.residual == nullptr ? nullptr : from, column, residual[r]);
    } else {
      load(from + min(column, out.columns - 4), residual[r]);
    }
  }
  float weight[4];
  if constexpr (kScaled) load(job.scaled.weight + min(column, out.columns - 4), weight);
  await_sums<kSlices>(ring, place);
  float value[kMine][4];
#pragma unroll
  for (int r = 0; r < kMine; ++r) {
    add_up<kSlices>(ring, place, min(first + r * kRowsAtOnce, kOfSlice - 1), output, value[r]);
  }
#pragma unroll
  for (int r = 0; r < kMine; ++r) {
    const int of_slice = first + r * kRowsAtOnce;
    const int row = first_row + of_slice;
    const bool exists = of_slice < kOfSlice && row < out.rows;
    Y* const y = out.y + row * out.y_stride + column;
    const float factor = ring.factors[min(row, kRows - 1)];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Activation known = kFinish == Finish::kGelu ? Activation::kGelu : Activation::kNone;
      float& v = value[r][i];
      v = activate(__fmaf_rn(v, factor, bias[i]), kAny ? out.activation : known);
      if constexpr (kResidual) v = __fmaf_rn(out.residual_scale, residual[r][i], v);
      if (kAny && exists && column + i < out.columns) y[i] = narrow<Y>(v);
    }
    if (!kAny && exists && column < out.columns) store(y, value[r]);
    if constexpr (kScaled)
      leave_scaled<kScaledPart>(job.scaled, exists && column < out.columns, row, column, value[r], weight);
  }
  if (FewRowsShare<kRows, kSlices>::kReads) ptx::cluster_wait();  // others have read this block's sums
}

/// By the threads that finish rows, when leave_sums() has been called.
template <int kSlices, int kRows, class Y>
__device__ inline void finish_rows(const FewRowsJob<Y>& job, const FewRowsPlace& place, const FewRowsRing<kRows>& ring,
                                   const float (&bias)[4]) {
  const LinearOutput<Y>& out = job.out;
  const bool vectors = out.vectors && out.columns % 4 == 0;
  const bool residual = out.residual != nullptr;
  if constexpr (std::is_same_v<Y, float>) {
    if (job.scaled.squares != nullptr) return finish_rows<Finish::kScaled, kSlices>(job, place, ring, bias);
  }
  if (vectors && out.activation == Activation::kNone && residual) {
    finish_rows<Finish::kResidual, kSlices>(job, place, ring, bias);
  } else if (vectors && out.activation == Activation::kNone) {
    finish_rows<Finish::kPlain, kSlices>(job, place, ring, bias);
  } else if (vectors && out.activation == Activation::kGelu && !residual) {
    finish_rows<Finish::kGelu, kSlices>(job, place, ring, bias);
  } else {
    finish_rows<Finish::kAny, kSlices>(job, place, ring, bias);
  }
}

/// By the threads that finish rows, of which the first warpgroup has sums.
template <int kRows, class Y>
__device__ inline void finish_block(const FewRowsJob<Y>& job, const FewRowsPlace& place, const FewRowsRing<kRows>& ring,
                                    const float (&bias)[4], const float (&sum)[kRows / 2]) {
  const auto by = [&]<int kSlices>() {
    if (threadIdx.x < kWarpgroup) leave_sums<kSlices>(ring, place, job.out.rows, sum);
    finish_rows<kSlices>(job, place, ring, bias);
  };
  static_assert(kMostSlices == 8);
  if (job.slices == 1) return by.template operator()<1>();
  if (job.slices == 2) return by.template operator()<2>();
  if (job.slices == 4) return by.template operator()<4>();
  by.template operator()<8>();
}

/// Adds a job behind those that end before cluster `begin`; returns where it ends. Its k-blocks have `depth` columns.
template <class A, class Y>
int set_few_rows_job(const Linear<Device, A, Y>& job, int depth, int begin, FewRowsJob<Y>& to) {
  const std::int64_t tiles = ceil_div(job.weight.rows, kOutputs);
  const int slices = few_rows_slices(job.weight);
  const int end = begin + static_cast<int>(ceil_div(tiles * slices, kCluster));
  to = {.out = linear_output(job),
        .x_squares = job.x_squares,
        .columns_of_x = static_cast<int>(job.weight.cols),
        .scaled = {},
        .k_blocks = static_cast<int>(ceil_div(job.weight.cols, depth)),
        .slices = slices,
        .end = end};
  if constexpr (std::is_same_v<A, BFloat16>) to.scaled = job.scaled;
  return end;
}

template <int kRows>
LaunchConfig few_rows_launch(int clusters, int threads) {
  return {.grid = dims(clusters * kCluster),
          .block = dims(threads),
          .shared_bytes = FewRowsRing<kRows>::kSharedBytes,
          .cluster = kCluster,
          .overlap_predecessor = true};
}

}  // namespace mmrec::kernels
