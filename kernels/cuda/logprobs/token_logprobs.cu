// Token log-probs from logits and their gradient on the device.
//
//   forward   log p[r] = x[r, t[r]] − log Σ_v e^x[r, v]
//   backward  d[r, v] = g[r] (δ(v = t[r]) − e^x[r, v] / Σ e^x)
//
// Forward. A row is cut into parts of 8 KB on a grid that begins at the row's first 16-byte boundary; the few elements
// before and after the vectors are one part more. A warp reads a part as two batches of eight 16-byte loads a lane, so
// 4 KB are in flight for each warp while it waits: 32 warps keep 128 KB in flight on a multiprocessor, about four times
// what the memory's latency needs, which leaves the tail of a launch saturated until few blocks are left. Rows of one
// part take one warp and no barrier; longer rows 4 or 8 warps of a block, warp w taking parts w, w + W, …. Bytes: the
// logits once. Instructions: about 5.5 for a 16-bit logit, one of them on the special function unit, where the memory's
// pace would let some 14 pass (H200: 8.8 bf16 logits a cycle and multiprocessor, of 128 lanes and 16 special
// functions).
//
// Where rows are too few to fill the device, several blocks share a row: each leaves its parts' results in scratch and
// the block that arrives last merges them as a single block would have.
//
// What must stay true: how a row is summed (parts, then each warp's parts in order, then warps in order) follows from
// its width and alignment alone, so its bits depend neither on the number of rows nor on the launch. After every
// reduction all lanes hold its result.
//
// Backward. One block a row. The first pass keeps as much of the row on chip as shared memory holds: all of it up to
// 113 KB (V = 56,000 in 16 bits) with two blocks on a multiprocessor, else with one; the rest is read again, from L2.
// Bytes: logits once, gradient once.
#include <algorithm>
#include <bit>
#include <limits>
#include <stdexcept>
#include <string>

#include "kernels/cuda/logprobs/max_sum.cuh"
#include "kernels/cuda/rows/rows.cuh"
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/cuda/runtime/launch.cuh"

namespace mmrec::kernels {
namespace {

constexpr int kPartBatches = 2;
constexpr int kPartVectors = kPartBatches * kWarpBatch;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// Targets of either width.
struct Targets {
  const void* data;
  bool wide;

  __device__ std::int64_t operator[](std::int64_t row) const {
    return wide ? static_cast<const std::int64_t*>(data)[row]
                : static_cast<std::int64_t>(static_cast<const std::int32_t*>(data)[row]);
  }
};

// --- Targets outside of the vocabulary -------------------------------------------------------------------------------

constexpr unsigned kCheckThreads = 1024;
constexpr unsigned long long kNoRow = ~0ULL;

/// The first row whose target is bad. One block looks at all of them.
__global__ void __launch_bounds__(kCheckThreads)
    find_bad_target_kernel(Targets targets, std::int64_t rows, std::int64_t vocab, unsigned long long* found) {
  __shared__ unsigned long long first;
  if (threadIdx.x == 0) first = kNoRow;
  __syncthreads();
  for (std::int64_t r = threadIdx.x; r < rows; r += blockDim.x) {
    const std::int64_t target = targets[r];
    if (target >= 0 && target < vocab) continue;
    atomicMin(&first, static_cast<unsigned long long>(r));
    break;  // a thread's later rows are larger
  }
  __syncthreads();
  if (threadIdx.x == 0) *found = first;
}

/// Throws std::invalid_argument unless all targets are in the vocabulary; rows > 0.
template <class T, class Index>
void check_targets(Cuda& cuda, const char* op, const MatrixView<const T, Device>& logits, const Index* targets) {
  const auto fail = [&](const std::string& what) { throw std::invalid_argument(std::string(op) + ": " + what); };
  if (logits.rows > std::numeric_limits<std::int32_t>::max()) fail("more than 2^31 - 1 rows");
  auto* found = static_cast<unsigned long long*>(cuda.scratch());
  launch(cuda.stream(), {.grid = dim3(1), .block = dim3(kCheckThreads)}, find_bad_target_kernel,
         Targets{targets, sizeof(Index) == 8}, logits.rows, logits.cols, found);
  unsigned long long row = 0;
  cuda.download(found, &row, 1);
  if (row != kNoRow) {
    Index target = 0;
    cuda.download(targets + row, &target, 1);
    fail("target " + std::to_string(target) + " of row " + std::to_string(row) + " lies outside [0, " +
         std::to_string(logits.cols) + ")");
  }
}

// --- Forward ---------------------------------------------------------------------------------------------------------

/// Parts of a row: the vectors', then one for the elements around them where there are any. Rows have less than 2^31.
template <class T>
__device__ int count_parts(const AlignedRow<T>& row) {
  return static_cast<int>((row.vectors + kPartVectors - 1) / kPartVectors) + (row.head + row.tail > 0 ? 1 : 0);
}

/// One part, by a warp. Every lane receives the result.
template <class T>
__device__ PartSum part_sum(const AlignedRow<T>& row, int part, int lane) {
  const std::int64_t first = std::int64_t{part} * kPartVectors;
  if (first >= row.vectors) {
    return warp_merge(lane < row.head + row.tail ? term(widen(row.row[row.edge(lane)])) : no_terms());
  }
  const int count = static_cast<int>(min(row.vectors - first, std::int64_t{kPartVectors}));
  const uint4* const from = row.body() + first;
  PartSum sum = lane_batch_sum<T>(from, count, lane);
#pragma unroll
  for (int done = kWarpBatch; done < kPartVectors; done += kWarpBatch) {
    if (done < count) sum = merge(sum, lane_batch_sum<T>(from + done, count - done, lane));
  }
  return warp_merge(sum);
}

/// Where several blocks share a row: rounds of kWarps parts for each, results [row, part], arrivals [row] (zero before
/// and after).
struct SharedRows {
  int rounds = 0;
  std::int64_t most_parts = 0;  // of any row
  PartSum* parts = nullptr;
  std::uint32_t* arrivals = nullptr;
};

/// Leaves this block's parts in scratch. True for the last block of the row, which sees them all.
template <class T, int kWarps>
__device__ bool leave_parts(const AlignedRow<T>& row, const SharedRows& shared, std::int64_t r, int w, int lane) {
  __shared__ bool is_last;
  const int first = static_cast<int>(blockIdx.y) * shared.rounds * kWarps;
  const int end = min(first + shared.rounds * kWarps, count_parts(row));
  for (int p = first + w; p < end; p += kWarps) {
    const PartSum part = part_sum(row, p, lane);
    if (lane == 0) shared.parts[r * shared.most_parts + p] = part;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = ptx::add_acq_rel(shared.arrivals + r, 1) == gridDim.y - 1;
    if (is_last) shared.arrivals[r] = 0;
  }
  __syncthreads();
  return is_last;
}

template <int kWarps>
constexpr int kRowsPerBlock = kWarps == 1 ? 4 : 1;
template <int kWarps>
constexpr int kThreads = 32 * kWarps* kRowsPerBlock<kWarps>;
/// Warps on a multiprocessor, which registers are limited for.
template <int kWarps>
constexpr int kResidentWarps = kWarps == 1 ? 24 : 32;

/// Brings the first quarter of a warp's first part into L2, while the kernel before drains. It may still be writing the
/// logits: what it writes lies in L2, too.
template <class T>
__device__ void ask_ahead(const AlignedRow<T>& row, int part, int lane) {
  constexpr int kLine = 8;  // vectors
  const std::int64_t at = std::int64_t{part} * kPartVectors + lane * kLine;
  if (lane < kPartVectors / 4 / kLine && at < row.vectors) ptx::prefetch_l2(row.body() + at);
}

template <class T, int kWarps, bool kSharedRow>
__global__ void __launch_bounds__(kThreads<kWarps>, 32 * kResidentWarps<kWarps> / kThreads<kWarps>)
    token_logprobs_kernel(MatrixView<const T, Device> logits, Targets targets, float* logprobs, SharedRows shared,
                          unsigned resident) {
  ptx::allow_successor();
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int w = static_cast<int>(threadIdx.x / 32) % kWarps;
  std::int64_t r = blockIdx.x;
  if constexpr (kWarps == 1) {
    r = r * kRowsPerBlock<kWarps> + threadIdx.x / 32;
    if (r >= logits.rows) return;
  }
  const AlignedRow<T> row(logits.row(r), logits.cols);
  if (!kSharedRow && blockIdx.x < resident) ask_ahead(row, w, lane);
  ptx::wait_for_predecessor();
  const std::int64_t target = targets[r];  // asked for early, needed last

  RowSum sum = widen(no_terms());
  const int parts = count_parts(row);
  if constexpr (kSharedRow) {
    if (!leave_parts<T, kWarps>(row, shared, r, w, lane)) return;
    const auto* bits = reinterpret_cast<const float2*>(shared.parts + r * shared.most_parts);
    for (int p = w; p < parts; p += kWarps) {
      const float2 part = __ldcg(bits + p);
      sum = merge(sum, widen(PartSum{part.x, part.y}));
    }
  } else {
    for (int p = w; p < parts; p += kWarps) sum = merge(sum, widen(part_sum(row, p, lane)));
  }

  const bool is_valid = target >= 0 && target < logits.cols;
  const float logit = is_valid ? widen(row.row[target]) : kNan;  // on its way while the warps meet
  if constexpr (kWarps > 1) {
    __shared__ RowSum sums[kWarps];
    if (lane == 0) sums[w] = sum;
    __syncthreads();
    if (w != 0) return;
#pragma unroll
    for (int i = 1; i < kWarps; ++i) sum = merge(sum, sums[i]);
  }
  if (lane == 0) logprobs[r] = is_valid ? log_probability(logit, sum) : kNan;
}

/// How many blocks should share a row so that two stand on every multiprocessor, at least one part for each warp.
std::int64_t blocks_per_row(const Cuda& cuda, std::int64_t rows, std::int64_t parts, int warps) {
  const std::int64_t blocks = std::min(ceil_div(parts, warps), ceil_div(2 * cuda.processors(), rows));
  const bool fits = rows <= static_cast<std::int64_t>(Cuda::kFlagWords) &&
                    parts <= static_cast<std::int64_t>(Cuda::kScratchBytes / sizeof(PartSum)) / rows;
  return fits ? blocks : 1;
}

template <class T, int kWarps>
void run(Cuda& cuda, const MatrixView<const T, Device>& logits, Targets targets, float* logprobs, std::int64_t parts) {
  const dim3 block(kThreads<kWarps>);
  const std::int64_t across = ceil_div(logits.rows, kRowsPerBlock<kWarps>);
  if constexpr (kWarps > 1) {
    const std::int64_t blocks = blocks_per_row(cuda, logits.rows, parts, kWarps);
    if (blocks > 1) {
      const std::int64_t rounds = ceil_div(ceil_div(parts, kWarps), blocks);
      const SharedRows shared{static_cast<int>(rounds), parts, static_cast<PartSum*>(cuda.scratch()), cuda.flags()};
      const dim3 grid = dims(across, ceil_div(ceil_div(parts, kWarps), rounds));
      return launch(cuda.stream(), overlapping(cuda, grid, block), token_logprobs_kernel<T, kWarps, true>, logits,
                    targets, logprobs, shared, 0U);
    }
  }
  // Blocks that start with the launch; later ones have nothing to wait for.
  const auto resident = static_cast<unsigned>(cuda.processors() * 32 * kResidentWarps<kWarps> / kThreads<kWarps>);
  launch(cuda.stream(), overlapping(cuda, dims(across), block), token_logprobs_kernel<T, kWarps, false>, logits,
         targets, logprobs, SharedRows{}, resident);
}

// --- Backward --------------------------------------------------------------------------------------------------------

constexpr unsigned kMostBackwardThreads = 1024;

/// What every thread needs of a row: d = scale · e^(x − max), but `at_target` for the target.
struct RowGradient {
  float max, scale, at_target;
};

/// Vectors of the row stay in shared memory up to `kept`, each read back by the thread that put it there.
template <class T>
__global__ void __launch_bounds__(kMostBackwardThreads)
    token_logprobs_backward_kernel(MatrixView<const T, Device> logits, Targets targets, const float* grad,
                                   MatrixView<T, Device> d_logits, std::int64_t kept) {
  constexpr int kSize = Vector16<T>::kSize;
  __shared__ PartSum sums[kMostBackwardThreads / 32];
  __shared__ RowGradient gradient;
  auto* const chip = ptx::shared_memory<uint4>();
  const auto thread = static_cast<int>(threadIdx.x);
  const auto threads = static_cast<int>(blockDim.x);
  const int lane = thread % 32;
  const std::int64_t r = blockIdx.x;
  T* const d = d_logits.row(r);
  AlignedRow<T> row(logits.row(r), logits.cols);
  if ((reinterpret_cast<std::uintptr_t>(d) - reinterpret_cast<std::uintptr_t>(row.row)) % 16 != 0) {
    row.head = row.cols;  // no common boundaries: element by element
    row.vectors = row.tail = 0;
  }
  const std::int64_t edges = row.head + row.tail;
  const uint4* const body = row.body();
  const std::int64_t target = targets[r];
  const bool is_valid = target >= 0 && target < row.cols;
  const float logit = is_valid ? widen(row.row[target]) : kNan;  // before the row may be overwritten

  PartSum sum = no_terms();
  for (std::int64_t first = thread; first < row.vectors; first += std::int64_t{kBatch} * threads) {
    uint4 v[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const std::int64_t at = first + std::int64_t{i} * threads;
      v[i] = at < row.vectors ? __ldcg(body + at) : masked_vector<T>();
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const std::int64_t at = first + std::int64_t{i} * threads;
      if (at < kept) chip[at] = v[i];
    }
    sum = merge(sum, batch_sum<T>(v));
  }
  for (std::int64_t i = thread; i < edges; i += threads) sum = merge(sum, term(widen(row.row[row.edge(i)])));
  sum = warp_merge(sum);
  if (lane == 0) sums[thread / 32] = sum;
  __syncthreads();
  if (thread < 32) {
    const RowSum all = warp_merge(widen(lane < threads / 32 ? sums[lane] : no_terms()));
    const double g = is_valid ? static_cast<double>(grad[r]) : static_cast<double>(kNan);
    const double p = static_cast<double>(exp_below(logit, all.max)) / all.sum;
    if (lane == 0) gradient = {all.max, static_cast<float>(-g / all.sum), static_cast<float>(g * (1.0 - p))};
  }
  __syncthreads();
  const auto [max, scale, at_target] = gradient;

  constexpr int kAhead = kBatch / 2;
  for (std::int64_t first = thread; first < row.vectors; first += std::int64_t{kAhead} * threads) {
    uint4 v[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const std::int64_t at = first + std::int64_t{i} * threads;
      if (at < row.vectors) v[i] = at < kept ? chip[at] : __ldcg(body + at);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const std::int64_t at = first + std::int64_t{i} * threads;
      if (at >= row.vectors) continue;
      const std::int64_t column = row.head + at * kSize;
      const Vector16<T> x(v[i]);
      Vector16<T> y;
#pragma unroll
      for (int k = 0; k < kSize; ++k) y.values[k] = narrow<T>(scale * exp_below(widen(x.values[k]), max));
      if (target >= column && target < column + kSize) {
#pragma unroll
        for (int k = 0; k < kSize; ++k) {
          if (target == column + k) y.values[k] = narrow<T>(at_target);
        }
      }
      ptx::store_streaming(d + column, y.bits);
    }
  }
  for (std::int64_t i = thread; i < edges; i += threads) {
    const std::int64_t column = row.edge(i);
    d[column] = narrow<T>(column == target ? at_target : scale * exp_below(widen(row.row[column]), max));
  }
}

/// A thread for every batch of the row, half of them and one block more on a multiprocessor where two rows fit on chip.
LaunchConfig backward_config(const Cuda& cuda, std::int64_t rows, std::int64_t row_bytes) {
  constexpr std::size_t kReserved = 2048;  // of each block: static shared memory and the system's
  const auto bytes = static_cast<std::size_t>(row_bytes) / 16 * 16;
  const bool pairs = bytes + kReserved <= cuda.shared_memory_per_processor() / 2;
  const auto batches = static_cast<unsigned>(std::min<std::int64_t>(ceil_div(row_bytes, 16 * kBatch), 1 << 16));
  const unsigned most = pairs ? kMostBackwardThreads / 2 : kMostBackwardThreads;
  const unsigned threads = std::clamp(std::bit_ceil(batches), 32U, most);
  return {.grid = dims(rows),
          .block = dim3(threads),
          .shared_bytes = std::min(bytes, (cuda.shared_memory_per_block() - kReserved) / 16 * 16)};
}

}  // namespace

template <class T, class Index>
void token_logprobs_unchecked(Cuda& cuda, const TokenLogprobs<T, Index, Device>& op) {
  if (op.logits.rows == 0) return;
  const Targets targets{op.targets, sizeof(Index) == 8};
  const std::int64_t elements_of_part = kPartVectors * Vector16<T>::kSize;
  const std::int64_t parts = ceil_div(op.logits.cols, elements_of_part) + 1;  // at most
  if (op.logits.cols <= elements_of_part) {
    run<T, 1>(cuda, op.logits, targets, op.logprobs, parts);
  } else if (op.logits.cols <= 4 * elements_of_part) {
    run<T, 4>(cuda, op.logits, targets, op.logprobs, parts);
  } else {
    run<T, 8>(cuda, op.logits, targets, op.logprobs, parts);
  }
}

template <class T, class Index>
void token_logprobs(Cuda& cuda, const TokenLogprobs<T, Index, Device>& op) {
  if (op.logits.rows == 0) return;
  check_targets(cuda, "token_logprobs", op.logits, op.targets);
  token_logprobs_unchecked(cuda, op);
}

template <class T, class Index>
void token_logprobs_backward(Cuda& cuda, const TokenLogprobsBackward<T, Index, Device>& op) {
  if (op.logits.rows == 0) return;
  check_targets(cuda, "token_logprobs_backward", op.logits, op.targets);
  const LaunchConfig config =
      backward_config(cuda, op.logits.rows, op.logits.cols * static_cast<std::int64_t>(sizeof(T)));
  launch(cuda.stream(), config, token_logprobs_backward_kernel<T>, op.logits, Targets{op.targets, sizeof(Index) == 8},
         op.grad, op.d_logits, static_cast<std::int64_t>(config.shared_bytes / 16));
}

#define MMREC_INSTANTIATE(T, Index)                                                      \
  template void token_logprobs(Cuda&, const TokenLogprobs<T, Index, Device>&);           \
  template void token_logprobs_unchecked(Cuda&, const TokenLogprobs<T, Index, Device>&); \
  template void token_logprobs_backward(Cuda&, const TokenLogprobsBackward<T, Index, Device>&);
#define MMREC_INSTANTIATE_BOTH(T) MMREC_INSTANTIATE(T, std::int32_t) MMREC_INSTANTIATE(T, std::int64_t)
MMREC_FOR_EACH_TYPE(MMREC_INSTANTIATE_BOTH)

}  // namespace mmrec::kernels
