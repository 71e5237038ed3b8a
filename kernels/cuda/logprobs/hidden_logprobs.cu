// Log-probs straight from hidden states and the head on the device, without the logits of the whole vocabulary:
//
//   log p[r] = x[r, t[r]] − log Σ_v e^x[r, v],   x = hidden · headᵀ
//
// Devices of compute capability 9.0 keep x in the registers of the product (hidden_logprobs_sm90.cu). Here, for all
// others: a tile of x, 1,024 rows by 4,096 words of the vocabulary in fp32, is written by `linear` into one
// of two 16 MB buffers and reduced from there, on the second stream, while the product of the next tile runs. Both
// buffers stay in L2. Up to kTileColumns rows are multiplied by matvec, in wider tiles of no more bytes.
//
// A warp reduces 1,024 logits of a row to (max, sum) in one batch of loads: 4 KB in flight for each of 32 warps on a
// multiprocessor. The target's logit waits in the output. At the end a row's parts are merged in their order. Bytes:
// the head once for each pass over at most 4 M / (V / 1,024) rows, the hidden states once for each 4,096 words (from L2
// where they fit), each logit written and read once, in L2.
//
// What must stay true: tiles and parts lie on fixed grids of rows and words, so a row's bits depend on its place in the
// grid of rows and on whether the op has more than kTileColumns of them, not on how the device is filled.
#include <algorithm>
#include <limits>
#include <stdexcept>

#include "kernels/cuda/gemm/algo.h"
#include "kernels/cuda/logprobs/algo.h"
#include "kernels/cuda/logprobs/max_sum.cuh"
#include "kernels/cuda/rows/rows.cuh"

namespace mmrec::kernels {
namespace {

constexpr std::int64_t kTileRows = 1024;
constexpr std::int64_t kTileWords = 4096;
constexpr std::int64_t kTileElements = kTileRows * kTileWords;
/// Words of the vocabulary that one warp reduces.
constexpr std::int64_t kPart = std::int64_t{kWarpBatch} * Vector16<float>::kSize;
static_assert(kTileWords % kPart == 0);
constexpr std::size_t kBufferBytes = kTileElements * sizeof(float);
constexpr std::int64_t kMostParts = (Cuda::kScratchBytes - 2 * kBufferBytes) / sizeof(PartSum);
constexpr int kWarps = 8;  // of a block; each on its own

/// The logits of the rows first_row.. for the words first_word..; a warp for each part of each row.
__global__ void __launch_bounds__(32 * kWarps)
    reduce_tile_kernel(MatrixView<const float, Device> logits, std::int64_t first_row, std::int64_t first_word,
                       LogprobRows rows) {
  const auto lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t tile_parts = (logits.cols + kPart - 1) / kPart;
  const std::int64_t task = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const std::int64_t r = task / tile_parts;
  if (r >= logits.rows) return;
  const std::int64_t part = task % tile_parts;
  const std::int64_t target = rows.targets[first_row + r];
  if (target < 0) return;
  const std::int64_t words = min(kPart, logits.cols - part * kPart);
  const AlignedRow<float> row(logits.row(r) + part * kPart, words);
  PartSum sum = lane_batch_sum<float>(row.body(), static_cast<int>(row.vectors), lane);
  if (lane < row.tail) sum = merge(sum, term(row.row[row.edge(lane)]));
  sum = warp_merge(sum);
  if (lane != 0) return;
  rows.parts[(first_word / kPart + part) * rows.rows + first_row + r] = sum;
  const std::int64_t in_part = target - first_word - part * kPart;
  if (in_part >= 0 && in_part < words) rows.logprobs[first_row + r] = row.row[in_part];
}

constexpr int kMergeRows = 32;
constexpr int kMergeRuns = 8;  // that a row's parts are cut into

/// A block takes 32 rows, a warp one run of their parts: first the maximum, then the sum relative to it, in fp64; the
/// runs are combined in their order.
__global__ void __launch_bounds__(kMergeRows* kMergeRuns) merge_parts_kernel(LogprobRows given, int count) {
  __shared__ float run_max[kMergeRuns][kMergeRows];
  __shared__ double run_sum[kMergeRuns][kMergeRows];
  const int lane = static_cast<int>(threadIdx.x) % kMergeRows;
  const int run = static_cast<int>(threadIdx.x) / kMergeRows;
  const int row = static_cast<int>(blockIdx.x) * kMergeRows + lane;
  const int length = (count + kMergeRuns - 1) / kMergeRuns;
  const int begin = min(run * length, count);
  const auto* parts = reinterpret_cast<const float2*>(given.parts);
  ptx::wait_for_predecessor();
  const bool is_scored = row < given.rows && given.targets[row] >= 0;  // the others have no parts
  const int end = is_scored ? min(begin + length, count) : begin;

  float max = -INFINITY;
#pragma unroll 8
  for (int t = begin; t < end; ++t) max = fmaxf(max, parts[std::int64_t{t} * given.rows + row].x);
  run_max[run][lane] = max;
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kMergeRuns; ++r) max = fmaxf(max, run_max[r][lane]);

  double sum = 0.0;
#pragma unroll 8
  for (int t = begin; t < end; ++t) {
    const float2 part = parts[std::int64_t{t} * given.rows + row];
    sum += static_cast<double>(part.y) * static_cast<double>(expf(part.x - max));
  }
  run_sum[run][lane] = sum;
  __syncthreads();
  if (run != 0 || !is_scored) return;
#pragma unroll
  for (int r = 1; r < kMergeRuns; ++r) sum += run_sum[r][lane];
  given.logprobs[row] = given.targets[row] < given.vocab ? log_probability(given.logprobs[row], RowSum{max, sum})
                                                         : std::numeric_limits<float>::quiet_NaN();
}

/// By tiles of the logits.
template <class A>
void by_tiles(Cuda& cuda, const HiddenLogprobs<Device, A>& op) {
  const std::int64_t n = op.hidden.rows;
  const std::int64_t vocab = op.head.rows;
  const bool few_rows = n <= kTileColumns;
  LinearAlgo algo = few_rows ? LinearAlgo::kMatvec : LinearAlgo::kLibrary;
  if constexpr (sizeof(A) == 4) {
    if (!few_rows && linear_parts_supported(cuda, op.hidden, op.head)) algo = LinearAlgo::kParts;
  }
  const std::int64_t tile_words = few_rows ? kTileElements / kTileColumns : kTileWords;
  const std::int64_t parts = ceil_div(vocab, kPart);
  const std::int64_t fitting = std::max<std::int64_t>(kMostParts / parts, 1);
  const std::int64_t pass = fitting < kTileRows ? fitting : fitting / kTileRows * kTileRows;
  auto* const scratch = static_cast<std::byte*>(cuda.scratch());

  int tiles = 0;
  for (std::int64_t begin = 0; begin < n; begin += pass) {
    const LogprobRows rows{op.targets + begin, op.logprobs + begin,
                           reinterpret_cast<PartSum*>(scratch + 2 * kBufferBytes),
                           static_cast<int>(std::min(pass, n - begin)), static_cast<int>(vocab)};
    for (std::int64_t v = 0; v < vocab; v += tile_words) {
      const std::int64_t words = std::min(tile_words, vocab - v);
      for (std::int64_t r = 0; r < rows.rows; r += kTileRows) {
        const std::int64_t count = std::min(kTileRows, rows.rows - r);
        auto* buffer = reinterpret_cast<float*>(scratch + (tiles % 2 == 0 ? 0 : kBufferBytes));
        const MatrixView<float, Device> logits(buffer, count, words, ceil_div(words, 4) * 4);
        const Linear<Device, A, float> product{
            .x = op.hidden.middle_rows(begin + r, count), .weight = op.head.middle_rows(v, words), .y = logits};
        linear(cuda, product, algo);
        // The product after this one takes the buffer that the reduction before this one reads.
        if (tiles++ > 0) cuda.join();
        cuda.fork();
        const std::int64_t tasks = ceil_div(count * ceil_div(words, kPart), kWarps);
        launch(cuda.side_stream(), {.grid = dims(tasks), .block = dim3(32 * kWarps)}, reduce_tile_kernel, logits, r, v,
               rows);
      }
    }
    cuda.join();
    merge_parts(cuda, rows, parts);
  }
}

}  // namespace

void merge_parts(Cuda& cuda, const LogprobRows& rows, std::int64_t count) {
  launch(cuda.stream(), overlapping(cuda, dims(ceil_div(rows.rows, kMergeRows)), dim3(kMergeRows * kMergeRuns)),
         merge_parts_kernel, rows, static_cast<int>(count));
}

template <class A>
HiddenLogprobsAlgo choose_hidden_logprobs(const Cuda& cuda, const HiddenLogprobs<Device, A>& op) {
  if constexpr (sizeof(A) == 2) {
    if (gemm_sm90_supported(cuda, op.hidden, op.head)) return HiddenLogprobsAlgo::kInRegisters;
  }
  return HiddenLogprobsAlgo::kByTiles;
}

template <class A>
void hidden_logprobs(Cuda& cuda, const HiddenLogprobs<Device, A>& op, HiddenLogprobsAlgo algo) {
  if (op.hidden.rows == 0 || op.head.rows == 0) return;
  if (algo == HiddenLogprobsAlgo::kAuto) algo = choose_hidden_logprobs(cuda, op);
  if constexpr (sizeof(A) == 2) {
    if (algo == HiddenLogprobsAlgo::kInRegisters) return hidden_logprobs_sm90(cuda, op);
  }
  if (algo != HiddenLogprobsAlgo::kByTiles) throw std::invalid_argument("hidden_logprobs: no such algorithm for fp32");
  by_tiles(cuda, op);
}

#define MMREC_INSTANTIATE(A)                                                                         \
  template HiddenLogprobsAlgo choose_hidden_logprobs(const Cuda&, const HiddenLogprobs<Device, A>&); \
  template void hidden_logprobs(Cuda&, const HiddenLogprobs<Device, A>&, HiddenLogprobsAlgo);
MMREC_FOR_EACH_TYPE(MMREC_INSTANTIATE)

}  // namespace mmrec::kernels
