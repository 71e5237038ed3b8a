// Log-probs from hidden states and the head matrix on the tensor cores of sm_90a; logits never leave the registers.
//
//   log p_r = logit_{r, target_r} − log Σ_v exp(logit_{r, v}),  logit = hidden headᵀ, summed in fp32
//
// The product is sm90/mainloop.cuh's at 128 x 256; its epilogue reduces a tile's 256 logits of each row to (max, Σ
// exp(logit − max)) and picks out the target's logit. A quad of lanes holds a row: 64 logits each, combined by
// shuffles. One such pair per row and vocabulary tile goes to scratch, [tile][row], and merge_kernel combines a row's
// tiles in their order.
//
// Cost. An epilogue is one ex2 per logit: a consumer's 64 x 256 take 1,024 clocks of the SM's 16 lanes, about 1,300 in
// all, in which the other consumer multiplies (WideTile::kLead x 512 clocks are covered). At D = 2,048 a tile
// multiplies for 32,768 clocks. Bytes: hidden once, the head once per group of 2,048 rows, 8 bytes per row and tile
// written and read twice (0.8 % of what bf16 logits would move). One block of 384 threads an SM: 128 + 40 registers a
// consumer's thread.
//
// Deterministic: fixed orders of summation, no atomics. A row's bits depend on its logits alone.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/gemm/operands.cuh"
#include "kernels/cuda/gemm/sm90/launch.cuh"
#include "kernels/cuda/logprobs/choose.h"
#include "kernels/logsumexp.h"

namespace mmrec::kernels {

namespace {

constexpr float kLog2E = 1.4426950408889634F;

class LogprobEpilogue {
 public:
  struct Parameters {
    const int* targets;
    float* target_logits;
    MaxSum* partials;  // [column tile][row_stride]
    std::int64_t row_stride;
    int rows;
    int vocab;
  };
  static constexpr int kSharedBytes = 0;

  __device__ LogprobEpilogue(const Parameters& parameters, std::byte*, std::byte*) : p_(parameters) {}

  __device__ void begin(const GemmPlace& place) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of(place, half);
      target_[half] = row < p_.rows ? __ldg(p_.targets + row) : -1;
    }
  }

  template <int kSize>
  __device__ void finish(const GemmPlace& place, float (&logit)[kSize]) {
    const int lane_column = static_cast<int>(threadIdx.x) % 4 * 2;
    if (place.column + 2 * kSize > p_.vocab) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (place.column + lane_column + i / 4 * 8 + i % 2 >= p_.vocab) logit[i] = -INFINITY;
      }
    }
    finish_row<0>(place, lane_column, logit);
    finish_row<1>(place, lane_column, logit);
  }

 private:
  /// The thread's two rows of a tile.
  __device__ static int row_of(const GemmPlace& place, int half) {
    return place.row + static_cast<int>(threadIdx.x) / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4 + 8 * half;
  }

  template <int kHalf, int kSize>
  __device__ void finish_row(const GemmPlace& place, int lane_column, const float (&logit)[kSize]) const {
    constexpr int kColumns = 2 * kSize;
    const int row = row_of(place, kHalf);
    // Few tiles hold the target of one of a warp's rows; only those search for it.
    const int column = target_[kHalf] - place.column - lane_column;
    if (target_[kHalf] >= 0 && column >= 0 && column < kColumns && column % 8 < 2) {
      float value = 0.0F;
#pragma unroll
      for (int j = 0; j < kSize / 4; ++j) {
        const float even = logit[4 * j + 2 * kHalf];
        const float odd = logit[4 * j + 2 * kHalf + 1];
        value = column == 8 * j ? even : value;
        value = column == 8 * j + 1 ? odd : value;
      }
      p_.target_logits[row] = value;
    }
    const MaxSum part = reduce<kHalf>(logit);
    if (lane_column == 0 && row < p_.rows && place.column < p_.vocab) {
      p_.partials[place.column / kColumns * p_.row_stride + row] = part;
    }
  }

  /// A row's (max, sum) over the quad's logits. Two chains each keep the adders busy.
  template <int kHalf, int kSize>
  __device__ static MaxSum reduce(const float (&logit)[kSize]) {
    float max0 = -INFINITY;
    float max1 = -INFINITY;
#pragma unroll
    for (int i = 2 * kHalf; i < kSize; i += 4) {
      max0 = fmaxf(max0, logit[i]);
      max1 = fmaxf(max1, logit[i + 1]);
    }
    float max = fmaxf(max0, max1);
    max = fmaxf(max, __shfl_xor_sync(0xffffffffU, max, 1));
    max = fmaxf(max, __shfl_xor_sync(0xffffffffU, max, 2));
    // Of logits that all are -inf none counts; NaN passes by the maximum and arrives in the sum.
    const float origin = max == -INFINITY ? 0.0F : max;
    float sum0 = 0.0F;
    float sum1 = 0.0F;
#pragma unroll
    for (int i = 2 * kHalf; i < kSize; i += 4) {
      sum0 += ptx::exp2_approx((logit[i] - origin) * kLog2E);
      sum1 += ptx::exp2_approx((logit[i + 1] - origin) * kLog2E);
    }
    float sum = sum0 + sum1;
    sum += __shfl_xor_sync(0xffffffffU, sum, 1);
    sum += __shfl_xor_sync(0xffffffffU, sum, 2);
    return {max, sum};
  }

  const Parameters& p_;
  int target_[2] = {-1, -1};
};

constexpr int kMergeRows = 32;
constexpr int kMergeRuns = 8;  // a row's tiles are cut into so many runs

/// logprobs[r] = target's logit, which it holds, − log Σ over all tiles. A block takes 32 rows, a warp one run of their
/// tiles: first the maximum, then the sum relative to it, in fp64; the runs are combined in their order.
__global__ void __launch_bounds__(kMergeRows* kMergeRuns)
    merge_kernel(const MaxSum* partials, std::int64_t row_stride, int tiles, int rows, const int* targets, int vocab,
                 float* logprobs) {
  __shared__ float run_max[kMergeRuns][kMergeRows];
  __shared__ double run_sum[kMergeRuns][kMergeRows];
  const int lane = static_cast<int>(threadIdx.x) % kMergeRows;
  const int run = static_cast<int>(threadIdx.x) / kMergeRows;
  const int row = static_cast<int>(blockIdx.x) * kMergeRows + lane;
  const int length = (tiles + kMergeRuns - 1) / kMergeRuns;
  const int begin = min(run * length, tiles);
  const int end = row < rows ? min(begin + length, tiles) : begin;
  ptx::wait_for_predecessor();

  float max = -INFINITY;
#pragma unroll 8
  for (int t = begin; t < end; ++t) max = fmaxf(max, partials[t * row_stride + row].max);
  run_max[run][lane] = max;
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kMergeRuns; ++r) max = fmaxf(max, run_max[r][lane]);

  double sum = 0.0;
#pragma unroll 8
  for (int t = begin; t < end; ++t) {
    const MaxSum part = partials[t * row_stride + row];
    sum += static_cast<double>(part.sum) * static_cast<double>(expf(part.max - max));
  }
  run_sum[run][lane] = sum;
  __syncthreads();
  if (run != 0 || row >= rows || targets[row] < 0) return;
#pragma unroll
  for (int r = 1; r < kMergeRuns; ++r) sum += run_sum[r][lane];
  logprobs[row] = targets[row] < vocab ? log_probability(logprobs[row], MaxSum64{static_cast<double>(max), sum})
                                       : std::numeric_limits<float>::quiet_NaN();
}

template <class Tile, class A>
void launch_chunk(Cuda& cuda, MatrixView<const A, Device> hidden, const WeightView<Device>& head, const int* targets,
                  float* logprobs) {
  const auto rows = static_cast<int>(hidden.rows);
  const std::int64_t tiles = ceil_div(head.rows, Tile::kColumns);
  const LogprobEpilogue::Parameters parameters = {.targets = targets,
                                                  .target_logits = logprobs,
                                                  .partials = static_cast<MaxSum*>(cuda.scratch()),
                                                  .row_stride = rows,
                                                  .rows = rows,
                                                  .vocab = static_cast<int>(head.rows)};
  launch_gemm_sm90<Tile, A, LogprobEpilogue>(cuda, matrix_stack(hidden), matrix_stack(head), parameters, true);
  const LaunchConfig config = {.grid = dim3(static_cast<unsigned>(ceil_div(rows, kMergeRows))),
                               .block = dim3(kMergeRows * kMergeRuns),
                               .overlap_predecessor = true};
  launch(cuda.stream(), config, merge_kernel, parameters.partials, parameters.row_stride, static_cast<int>(tiles), rows,
         targets, parameters.vocab, logprobs);
}

}  // namespace

template <class A>
void hidden_logprobs_sm90(Cuda& cuda, const HiddenLogprobs<Device, A>& op) {
  // Rows of one launch: whole cluster tiles whose partial results fit in the scratch.
  constexpr std::int64_t kUnit = std::int64_t{GemmLayout<WideTile>::kRows} * WideTile::kClusterRows;
  const std::int64_t row_bytes = ceil_div(op.head.rows, WideTile::kColumns) * static_cast<std::int64_t>(sizeof(MaxSum));
  const std::int64_t chunk =
      std::max(static_cast<std::int64_t>(Cuda::kScratchBytes) / row_bytes / kUnit, std::int64_t{1}) * kUnit;
  for (std::int64_t first = 0; first < op.hidden.rows; first += chunk) {
    const MatrixView<const A, Device> hidden = op.hidden.middle_rows(first, std::min(chunk, op.hidden.rows - first));
    if (hidden.rows <= GemmLayout<WideTile>::kRows) {
      launch_chunk<WideSingleTile>(cuda, hidden, op.head, op.targets + first, op.logprobs + first);
    } else {
      launch_chunk<WideTile>(cuda, hidden, op.head, op.targets + first, op.logprobs + first);
    }
  }
}

template void hidden_logprobs_sm90(Cuda&, const HiddenLogprobs<Device, BFloat16>&);
template void hidden_logprobs_sm90(Cuda&, const HiddenLogprobs<Device, Float16>&);

}  // namespace mmrec::kernels
