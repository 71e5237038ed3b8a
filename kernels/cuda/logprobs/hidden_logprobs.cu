// Log-probs straight from hidden states and the head on the device, without the logits of the whole vocabulary:
//
//   log p[r] = x[r, t[r]] − log Σ_v e^x[r, v],   x = hidden · headᵀ
//
// Devices of compute capability 9.0 keep x in the registers of the product (hidden_logprobs_sm90.cu). Here, for all
// others: a tile of x, 1,024 rows by 4,096 words of the vocabulary in fp32, is written by the matrix library into one
// of two 16 MB buffers and reduced from there, on the second stream, while the product of the next tile runs. Both
// buffers stay in L2. Up to kMatvecRows rows are multiplied by matvec, in wider tiles of no more bytes.
//
// A warp reduces 1,024 logits of a row to (max, sum) in one batch of loads: 4 KB in flight for each of 32 warps on a
// multiprocessor. The target's logit waits in the output. At the end a warp merges a row's parts. Bytes: the head once
// for each pass over at most 4 M / (V / 1,024) rows, the hidden states once for each 4,096 words (from L2 where they
// fit), each logit written and read once, in L2.
//
// What must stay true: tiles and parts lie on fixed grids of rows and words, so a row's bits depend on its place in the
// grid of rows and on whether the op has more than kMatvecRows of them, not on how the device is filled.
#include <algorithm>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "kernels/cuda/gemm/choose.h"
#include "kernels/cuda/logprobs/choose.h"
#include "kernels/cuda/logprobs/max_sum.cuh"
#include "kernels/cuda/runtime/launch.cuh"

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

/// Of a pass: targets and log-probs of its rows, results [rows, parts].
struct Rows {
  const int* targets;
  float* logprobs;
  PartSum* parts;
  std::int64_t count;
  std::int64_t parts_of_row;
};

/// The logits of the rows first_row.. for the words first_word..; a warp for each part of each row.
__global__ void __launch_bounds__(32 * kWarps)
    reduce_tile_kernel(MatrixView<const float, Device> logits, std::int64_t first_row, std::int64_t first_word,
                       Rows rows) {
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
  rows.parts[(first_row + r) * rows.parts_of_row + first_word / kPart + part] = sum;
  const std::int64_t in_part = target - first_word - part * kPart;
  if (in_part >= 0 && in_part < words) rows.logprobs[first_row + r] = row.row[in_part];
}

/// A warp merges a row's parts: lane by lane those that lie 32 apart, then the lanes.
__global__ void __launch_bounds__(32 * kWarps) finish_rows_kernel(Rows rows, std::int64_t vocab) {
  const auto lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t r = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (r >= rows.count) return;
  const std::int64_t target = rows.targets[r];
  if (target < 0) return;
  const auto* parts = reinterpret_cast<const float2*>(rows.parts + r * rows.parts_of_row);
  RowSum sum = widen(no_terms());
  for (std::int64_t p = lane; p < rows.parts_of_row; p += 32) {
    const float2 part = parts[p];
    sum = merge(sum, widen(PartSum{part.x, part.y}));
  }
  sum = warp_merge(sum);
  if (lane != 0) return;
  const bool is_valid = target < vocab;
  rows.logprobs[r] = is_valid ? log_probability(rows.logprobs[r], sum) : std::numeric_limits<float>::quiet_NaN();
}

template <class A>
void check(const HiddenLogprobs<Device, A>& op) {
  const auto fail = [](const std::string& what) { throw std::invalid_argument("hidden_logprobs: " + what); };
  if (op.hidden.rows < 0 || op.hidden.cols < 0 || op.head.rows < 0 || op.head.cols < 0) {
    fail("an operand has a negative size");
  }
  if (op.hidden.cols != op.head.cols) fail("hidden and head differ in model_dim");
  if (op.head.dtype != kDTypeOf<A>) fail("hidden and head differ in type");
  if (op.hidden.rows == 0 || op.head.rows == 0) return;
  if (op.targets == nullptr) fail("targets are null");
  if (op.logprobs == nullptr) fail("logprobs are null");
  if (op.hidden.data == nullptr || op.head.data == nullptr) fail("an operand is null");
}

/// By tiles of the logits.
template <class A>
void by_tiles(Cuda& cuda, const HiddenLogprobs<Device, A>& op) {
  const std::int64_t n = op.hidden.rows;
  const std::int64_t vocab = op.head.rows;
  const bool few_rows = n <= kMatvecRows;
  const std::int64_t tile_words = few_rows ? kTileElements / kMatvecRows : kTileWords;
  const std::int64_t parts = ceil_div(vocab, kPart);
  const std::int64_t fitting = std::max<std::int64_t>(kMostParts / parts, 1);
  const std::int64_t pass = fitting < kTileRows ? fitting : fitting / kTileRows * kTileRows;
  auto* const scratch = static_cast<std::byte*>(cuda.scratch());

  int tiles = 0;
  for (std::int64_t begin = 0; begin < n; begin += pass) {
    const Rows rows{op.targets + begin, op.logprobs + begin, reinterpret_cast<PartSum*>(scratch + 2 * kBufferBytes),
                    std::min(pass, n - begin), parts};
    for (std::int64_t v = 0; v < vocab; v += tile_words) {
      const std::int64_t words = std::min(tile_words, vocab - v);
      for (std::int64_t r = 0; r < rows.count; r += kTileRows) {
        const std::int64_t count = std::min(kTileRows, rows.count - r);
        auto* buffer = reinterpret_cast<float*>(scratch + (tiles % 2 == 0 ? 0 : kBufferBytes));
        const MatrixView<float, Device> logits(buffer, count, words, ceil_div(words, 4) * 4);
        const Linear<Device, A, float> product{
            .x = op.hidden.middle_rows(begin + r, count), .weight = op.head.middle_rows(v, words), .y = logits};
        linear_by(cuda, few_rows ? LinearWay::kMatvec : LinearWay::kLibrary, product);
        // The product after this one takes the buffer that the reduction before this one reads.
        if (tiles++ > 0) cuda.join();
        cuda.fork();
        const auto tasks = static_cast<unsigned>(ceil_div(count * ceil_div(words, kPart), kWarps));
        launch(cuda.side_stream(), {.grid = dim3(tasks), .block = dim3(32 * kWarps)}, reduce_tile_kernel, logits, r, v,
               rows);
      }
    }
    cuda.join();
    launch(cuda.stream(),
           {.grid = dim3(static_cast<unsigned>(ceil_div(rows.count, kWarps))), .block = dim3(32 * kWarps)},
           finish_rows_kernel, rows, vocab);
  }
}

}  // namespace

template <class A>
HiddenLogprobsWay choose_hidden_logprobs(const Cuda& cuda, const HiddenLogprobs<Device, A>& op) {
  if constexpr (sizeof(A) == 2) {
    if (gemm_sm90_supported(cuda, op.hidden, op.head)) return HiddenLogprobsWay::kInRegisters;
  }
  return HiddenLogprobsWay::kByTiles;
}

template <class A>
void hidden_logprobs_by(Cuda& cuda, HiddenLogprobsWay way, const HiddenLogprobs<Device, A>& op) {
  check(op);
  if (op.hidden.rows == 0 || op.head.rows == 0) return;
  if (way == HiddenLogprobsWay::kAuto) way = choose_hidden_logprobs(cuda, op);
  if constexpr (sizeof(A) == 2) {
    if (way == HiddenLogprobsWay::kInRegisters) return hidden_logprobs_sm90(cuda, op);
  }
  if (way != HiddenLogprobsWay::kByTiles) throw std::invalid_argument("hidden_logprobs: no such way for fp32");
  by_tiles(cuda, op);
}

template <class A>
void hidden_logprobs(Cuda& cuda, const HiddenLogprobs<Device, A>& op) {
  hidden_logprobs_by(cuda, HiddenLogprobsWay::kAuto, op);
}

#define MMREC_INSTANTIATE(A)                                                                        \
  template HiddenLogprobsWay choose_hidden_logprobs(const Cuda&, const HiddenLogprobs<Device, A>&); \
  template void hidden_logprobs_by(Cuda&, HiddenLogprobsWay, const HiddenLogprobs<Device, A>&);     \
  template void hidden_logprobs(Cuda&, const HiddenLogprobs<Device, A>&);
MMREC_INSTANTIATE(float)
MMREC_INSTANTIATE(Float16)
MMREC_INSTANTIATE(BFloat16)
#undef MMREC_INSTANTIATE

}  // namespace mmrec::kernels
