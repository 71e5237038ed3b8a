// Log-probs from hidden states and the head matrix on the tensor cores of sm_90a; logits never leave the registers.
//
//   log p_r = logit_{r, target_r} − log Σ_v exp(logit_{r, v}),  logit = hidden headᵀ, summed in fp32
//
// The product is sm90.cuh's at 128 x 256; its epilogue reduces a tile's 256 logits of each row to (max, Σ
// exp(logit − max)) and picks out the target's logit. A quad of lanes holds a row: 64 logits each, combined by
// shuffles. One such pair per row and vocabulary tile goes to scratch, [tile][row], and merge_parts combines a row's
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

#include "kernels/cuda/gemm/operands.cuh"
#include "kernels/cuda/gemm/sm90.cuh"
#include "kernels/cuda/logprobs/max_sum.cuh"

namespace mmrec::kernels {
namespace {

class LogprobEpilogue {
 public:
  using Parameters = LogprobRows;
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
      p_.logprobs[row] = value;
    }
    const PartSum part = reduce<kHalf>(logit);
    if (lane_column == 0 && row < p_.rows && place.column < p_.vocab) {
      p_.parts[std::int64_t{place.column / kColumns} * p_.rows + row] = part;
    }
  }

  /// A row's (max, sum) over the quad's logits. Two chains each keep the adders busy.
  template <int kHalf, int kSize>
  __device__ static PartSum reduce(const float (&logit)[kSize]) {
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
      sum0 += exp_below(logit[i], origin);
      sum1 += exp_below(logit[i + 1], origin);
    }
    float sum = sum0 + sum1;
    sum += __shfl_xor_sync(0xffffffffU, sum, 1);
    sum += __shfl_xor_sync(0xffffffffU, sum, 2);
    return {max, sum};
  }

  const Parameters& p_;
  int target_[2] = {-1, -1};
};

}  // namespace

template <class A>
void hidden_logprobs_sm90(Cuda& cuda, const HiddenLogprobs<Device, A>& op) {
  // Rows of one launch: whole cluster tiles whose partial results fit in the scratch.
  constexpr std::int64_t kUnit = std::int64_t{GemmLayout<WideTile>::kRows} * WideTile::kClusterRows;
  const std::int64_t parts = ceil_div(op.head.rows, WideTile::kColumns);
  const std::int64_t row_bytes = parts * static_cast<std::int64_t>(sizeof(PartSum));
  const std::int64_t chunk =
      std::max(static_cast<std::int64_t>(Cuda::kScratchBytes) / row_bytes / kUnit, std::int64_t{1}) * kUnit;
  const MatrixStack head = matrix_stack<A>(op.head);
  for (std::int64_t first = 0; first < op.hidden.rows; first += chunk) {
    const MatrixStack hidden = matrix_stack(op.hidden.middle_rows(first, std::min(chunk, op.hidden.rows - first)));
    const LogprobRows rows = {.targets = op.targets + first,
                              .logprobs = op.logprobs + first,
                              .parts = static_cast<PartSum*>(cuda.scratch()),
                              .rows = static_cast<int>(hidden.rows),
                              .vocab = static_cast<int>(op.head.rows)};
    hidden.rows <= GemmLayout<WideTile>::kRows
        ? launch_gemm_sm90<WideSingleTile, A, LogprobEpilogue>(cuda, hidden, head, rows, true)
        : launch_gemm_sm90<WideTile, A, LogprobEpilogue>(cuda, hidden, head, rows, true);
    merge_parts(cuda, rows, parts);
  }
}

template void hidden_logprobs_sm90(Cuda&, const HiddenLogprobs<Device, BFloat16>&);
template void hidden_logprobs_sm90(Cuda&, const HiddenLogprobs<Device, Float16>&);

}  // namespace mmrec::kernels
