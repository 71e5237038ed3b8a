// Attention of one head to banks of past states, by the two algorithms of algo.h. Long, because both are here.
//
// kSplit, few rows: a block takes a part of the bank's written rows for one row of q, tile by tile, with the (max, sum)
// monoid and the weighted values. A second kernel merges the parts and counts the unwritten rows. Bytes: the bank once;
// for odd widths once more from L2.
//
// kProducts, many rows: `linear` computes scores = q Bankᵀ and P Bank, for several runs a launch. A kernel before them
// rounds a run's bank to A, as it lies and transposed. A kernel between them computes P from the scores. Bytes of a run
// beside the products': 4 + 4 sizes of A per element of the bank, 4 + 2 sizes of A per score.
#include "kernels/cuda/attention/algo.h"

#include <array>
#include <stdexcept>
#include <vector>

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/rows/rows.cuh"

namespace mmrec::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kTile = 16;                 // rows of the bank between two rescalings
constexpr std::int64_t kMostSplits = 32;  // of a bank, whatever the number of rows: a row's bits do not depend on it
constexpr std::int64_t kLeastProductRows = 16;
constexpr std::int64_t kMostRuns = 32;  // of a launch that knows them by number
constexpr std::int64_t kMostGrid = 65535;

// --- kSplit ---------------------------------------------------------------------------------------------------------

template <class A>
struct SplitParams {
  BankAttention<Device, A> op;
  float* parts;  // [rows at hand, splits, D + 2]: the values, their sum of weights and their largest score
  int splits;
  std::int64_t first_run;  // of this launch; its runs' row blockIdx.z
  std::int64_t first_row;
  std::int64_t most_rows;  // longer runs are skipped
};

template <class A>
__device__ inline float* part_of(const SplitParams<A>& p, std::int64_t run, std::int64_t row, int split) {
  return p.parts + ((run * gridDim.z + row) * p.splits + split) * (p.op.q.cols + 2);
}

/// The run, the row of q and the bank's rows [begin, end) of a block.
struct SplitPlace {
  BankRun run;
  std::int64_t row;
  bool exists;
  int begin, end;

  template <class A>
  __device__ explicit SplitPlace(const SplitParams<A>& p)
      : run(p.op.runs.list[p.first_run + blockIdx.y]),
        row(p.first_row + blockIdx.z),
        exists(row < run.rows && run.rows <= p.most_rows) {
    const auto used = static_cast<int>(run.used_before(p.op.layer, p.op.slots));
    begin = static_cast<int>(std::int64_t{used} * blockIdx.x / p.splits);
    end = static_cast<int>(std::int64_t{used} * (blockIdx.x + 1) / p.splits);
  }
};

/// Any width.
template <class A>
__global__ void __launch_bounds__(kThreads) bank_split_kernel(const __grid_constant__ SplitParams<A> p) {
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  auto* const shared = ptx::shared_memory<float>();
  float* const q = shared;                      // [D]
  float* const values = shared + p.op.q.cols;   // [D]
  float* const weights = values + p.op.q.cols;  // [kTile]
  const SplitPlace place(p);
  if (!place.exists) return;
  const auto& [run, row, exists, begin, end] = place;
  const std::int64_t dim = p.op.q.cols;
  const int thread = static_cast<int>(threadIdx.x);
  for (std::int64_t c = thread; c < dim; c += kThreads) {
    q[c] = read(p.op.q.row(run.first + row) + c) * p.op.scale;
    values[c] = 0.0F;
  }
  __syncthreads();
  float most = -INFINITY;
  float sum = 0.0F;
  for (int first = begin; first < end; first += kTile) {
    const int count = min(kTile, end - first);
    for (int j = thread / 32; j < count; j += kWarps) {
      const float* const slot = run.bank + (first + j) * dim;
      float dot = 0.0F;
      for (std::int64_t c = thread % 32; c < dim; c += 32) dot = __fmaf_rn(q[c], __ldcg(slot + c), dot);
      dot = warp_sum(dot);
      if (thread % 32 == 0) weights[j] = dot;
    }
    __syncthreads();
    float top = most;
    for (int j = 0; j < count; ++j) top = fmaxf(top, weights[j]);
    const float kept = most == -INFINITY ? 0.0F : fast_exp(most - top);
    sum *= kept;
    float weight[kTile];
#pragma unroll
    for (int j = 0; j < kTile; ++j) {
      weight[j] = j < count ? fast_exp(weights[j] - top) : 0.0F;
      sum += weight[j];
    }
    for (std::int64_t c = thread; c < dim; c += kThreads) {
      float value = values[c] * kept;
#pragma unroll
      for (int j = 0; j < kTile; ++j) {
        if (j < count) value = __fmaf_rn(weight[j], __ldcg(run.bank + (first + j) * dim + c), value);
      }
      values[c] = value;
    }
    most = top;
    __syncthreads();
  }
  float* const part = part_of(p, blockIdx.y, blockIdx.z, static_cast<int>(blockIdx.x));
  for (std::int64_t c = thread; c < dim; c += kThreads) part[c] = values[c];
  if (thread == 0) {
    part[dim] = sum;
    part[dim + 1] = most;
  }
}

/// Widths that are multiples of 4, up to kHeldDim kGroups: a thread has 4 kGroups channels, and for these it holds a
/// tile's rows, so that the bank is read once.
constexpr std::int64_t kHeldDim = std::int64_t{kGroup} * kThreads;
constexpr int kMostGroups = 4;
template <class A, int kGroups>
__global__ void __launch_bounds__(kThreads) bank_split_held_kernel(const __grid_constant__ SplitParams<A> p) {
  constexpr int kRows = kTile / kGroups;
  __shared__ float of_warp[2][kWarps][kRows];
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const SplitPlace place(p);
  if (!place.exists) return;
  const auto& [run, row, exists, begin, end] = place;
  const std::int64_t dim = p.op.q.cols;
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32;
  float q[kGroups][kGroup];
  float values[kGroups][kGroup] = {};
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    load_group<true>(p.op.q.row(run.first + row), thread + g * kThreads, dim, q[g]);
#pragma unroll
    for (float& value : q[g]) value *= p.op.scale;
  }
  float most = -INFINITY;
  float sum = 0.0F;
  for (int first = begin, buffer = 0; first < end; first += kRows, buffer ^= 1) {
    const int count = min(kRows, end - first);
    float held[kRows][kGroups][kGroup];
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const float* const slot = run.bank + (first + min(j, count - 1)) * dim;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) load_group<true>(slot, thread + g * kThreads, dim, held[j][g]);
    }
    float dots[kRows];
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      dots[j] = 0.0F;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int i = 0; i < kGroup; ++i) dots[j] = __fmaf_rn(q[g][i], held[j][g][i], dots[j]);
      }
    }
    const float dot = warp_sums(dots);
    if (thread % (32 / kRows) == 0) of_warp[buffer][warp][thread % 32 * kRows / 32] = dot;
    __syncthreads();  // the other buffer is written next, when all have come from reading it
    float scores[kRows];
    float top = most;
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      scores[j] = 0.0F;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) scores[j] += of_warp[buffer][w][j];
      if (j < count) top = fmaxf(top, scores[j]);
    }
    const float kept = most == -INFINITY ? 0.0F : fast_exp(most - top);
    sum *= kept;
#pragma unroll
    for (auto& group : values) {
#pragma unroll
      for (float& value : group) value *= kept;
    }
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const float weight = j < count ? fast_exp(scores[j] - top) : 0.0F;
      sum += weight;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
#pragma unroll
        for (int i = 0; i < kGroup; ++i) values[g][i] = __fmaf_rn(weight, held[j][g][i], values[g][i]);
      }
    }
    most = top;
  }
  float* const part = part_of(p, blockIdx.y, blockIdx.z, static_cast<int>(blockIdx.x));
#pragma unroll
  for (int g = 0; g < kGroups; ++g) store_group<false>(part, thread + g * kThreads, dim, values[g]);
  if (thread == 0) {
    part[dim] = sum;
    part[dim + 1] = most;
  }
}

/// A thread has a channel of a row of q. All that a thread reads is asked for at once: a lane has a part's sum of
/// weights and largest score, which are few, and the values follow in a loop without branches.
template <class A>
__global__ void __launch_bounds__(kThreads) bank_merge_kernel(const __grid_constant__ SplitParams<A> p) {
  static_assert(kMostSplits == 32);
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const BankRun run = p.op.runs.list[p.first_run + blockIdx.y];
  const std::int64_t row = p.first_row + blockIdx.z;
  const std::int64_t dim = p.op.q.cols;
  if (row >= run.rows || run.rows > p.most_rows) return;
  const std::int64_t c = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const float* const parts = part_of(p, blockIdx.y, blockIdx.z, 0);
  const std::int64_t pitch = dim + 2;
  float values[kMostSplits];
#pragma unroll
  for (int i = 0; i < kMostSplits; ++i) {
    values[i] = i < p.splits && c < dim ? __ldcg(parts + i * pitch + c) : 0.0F;
  }
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool has_part = lane < p.splits;
  const float own_most = has_part ? __ldcg(parts + lane * pitch + dim + 1) : -INFINITY;
  const float own_sum = has_part ? __ldcg(parts + lane * pitch + dim) : 0.0F;
  const auto zeros = static_cast<float>(p.op.slots - run.used_before(p.op.layer, p.op.slots));
  const float most = fmaxf(warp_max(own_most), zeros > 0.0F ? 0.0F : -INFINITY);
  const float factor = has_part ? fast_exp(own_most - most) : 0.0F;
  const float sum = warp_sum(own_sum * factor) + (zeros > 0.0F ? zeros * fast_exp(-most) : 0.0F);
  float value = 0.0F;
#pragma unroll
  for (int i = 0; i < kMostSplits; ++i) value = __fmaf_rn(values[i], __shfl_sync(0xffffffffU, factor, i), value);
  if (c < dim) p.op.out.row(run.first + row)[c] = narrow<A>(value / sum);
}

/// The kernel for the op's width and alignment. Null: the kernel of any width must run.
template <class A>
auto held_kernel(const BankAttention<Device, A>& op) {
  using Kernel = void (*)(SplitParams<A>);
  const std::int64_t dim = op.q.cols;
  const auto element = static_cast<std::int64_t>(sizeof(A));
  if (dim % kGroup != 0 || dim > kMostGroups * kHeldDim || !takes_16_bytes(op.q.data, op.q.stride * element)) {
    return Kernel{nullptr};
  }
  if (dim <= kHeldDim) return Kernel{bank_split_held_kernel<A, 1>};
  if (dim <= 2 * kHeldDim) return Kernel{bank_split_held_kernel<A, 2>};
  return Kernel{bank_split_held_kernel<A, kMostGroups>};
}

/// All rows of runs with at most `most_rows` rows.
template <class A>
void by_splits(Cuda& cuda, const BankAttention<Device, A>& op, std::int64_t most_rows) {
  std::int64_t longest = 0;
  for (std::int64_t i = 0; i < op.runs.count; ++i) {
    const std::int64_t rows = op.runs.on_host[i].rows;
    if (rows <= most_rows) longest = std::max(longest, rows);
  }
  if (longest == 0) return;
  const std::int64_t dim = op.q.cols;
  const std::size_t shared = (2 * static_cast<std::size_t>(dim) + kTile) * sizeof(float);
  const auto held = held_kernel(op);
  if (held == nullptr && shared > cuda.shared_memory_per_block())
    throw std::length_error("bank_attention: a row does not fit shared memory");
  const std::int64_t rows = std::min(longest, kLeastProductRows);
  const std::int64_t splits = std::clamp<std::int64_t>(ceil_div(op.slots, kTile), 1, kMostSplits);
  const std::int64_t bytes = rows * splits * (dim + 2) * static_cast<std::int64_t>(sizeof(float));
  const std::int64_t runs =
      std::min({op.runs.count, kMostGrid, static_cast<std::int64_t>(Cuda::kScratchBytes) / bytes});
  if (runs == 0) throw std::length_error("bank_attention: a row's parts do not fit the scratch memory");
  for (std::int64_t first_run = 0; first_run < op.runs.count; first_run += runs) {
    for (std::int64_t first_row = 0; first_row < longest; first_row += rows) {
      const SplitParams<A> p{.op = op,
                             .parts = static_cast<float*>(cuda.scratch()),
                             .splits = static_cast<int>(splits),
                             .first_run = first_run,
                             .first_row = first_row,
                             .most_rows = most_rows};
      const std::int64_t across = std::min(runs, op.runs.count - first_run);
      const std::int64_t down = std::min(rows, longest - first_row);
      LaunchConfig splitting = overlapping(cuda, dims(splits, across, down), dim3(kThreads));
      if (held != nullptr) {
        launch(cuda.stream(), splitting, held, p);
      } else {
        splitting.shared_bytes = shared;
        launch(cuda.stream(), splitting, bank_split_kernel<A>, p);
      }
      launch(cuda.stream(), overlapping(cuda, dims(ceil_div(dim, kThreads), across, down), dim3(kThreads)),
             bank_merge_kernel<A>, p);
    }
  }
}

// --- kProducts ------------------------------------------------------------------------------------------------------

constexpr std::int64_t round_up(std::int64_t n, std::int64_t to) { return ceil_div(n, to) * to; }

/// A run's memory: its bank rounded to A, [S, D], and transposed, [D, S]; scores [rows, S] and weights of A [rows, S],
/// rows of both as many elements apart as the written rows make, a multiple of 8.
struct ProductPlace {
  std::size_t transposed = 0, scores = 0, weights = 0, bytes = 0;

  ProductPlace(std::int64_t rows, std::int64_t slots, std::int64_t dim, std::size_t element) {
    constexpr std::int64_t kAlign = 256;
    const auto size = [&](std::int64_t count, std::size_t each) {
      return static_cast<std::size_t>(round_up(count * static_cast<std::int64_t>(each), kAlign));
    };
    const std::int64_t width = round_up(slots, 8);
    transposed = size(slots * dim, element);
    scores = transposed + size(width * dim, element);
    weights = scores + size(rows * width, sizeof(float));
    bytes = weights + size(rows * width, element);
  }
};

template <class A>
struct ProductParams {
  BankAttention<Device, A> op;
  ProductPlace place;
  std::array<int, kMostRuns> numbers;  // of the runs of this launch
};

constexpr int kSquare = 32;  // of the bank, transposed at once

/// The bank's written rows as A and transposed; zeros up to a multiple of 8.
template <class A>
__global__ void __launch_bounds__(kThreads) bank_round_kernel(const __grid_constant__ ProductParams<A> p) {
  __shared__ float square[kSquare][kSquare + 1];
  const BankRun run = p.op.runs.list[p.numbers[blockIdx.z]];
  const std::int64_t dim = p.op.q.cols;
  const auto used = static_cast<std::int64_t>(run.used_before(p.op.layer, p.op.slots));
  const std::int64_t width = (used + 7) / 8 * 8;
  const std::int64_t slot = std::int64_t{blockIdx.y} * kSquare;
  const std::int64_t channel = std::int64_t{blockIdx.x} * kSquare;
  std::byte* const memory = p.op.scratch + blockIdx.z * p.place.bytes;
  auto* const rounded = reinterpret_cast<A*>(memory);
  auto* const transposed = reinterpret_cast<A*>(memory + p.place.transposed);
  if (slot >= width) return;
  const int x = static_cast<int>(threadIdx.x) % kSquare;
  for (int y = static_cast<int>(threadIdx.x) / kSquare; y < kSquare; y += kThreads / kSquare) {
    const bool is_there = slot + y < used && channel + x < dim;
    square[y][x] = is_there ? __ldcg(run.bank + (slot + y) * dim + channel + x) : 0.0F;
    if (is_there) rounded[(slot + y) * dim + channel + x] = narrow<A>(square[y][x]);
  }
  __syncthreads();
  for (int y = static_cast<int>(threadIdx.x) / kSquare; y < kSquare; y += kThreads / kSquare) {
    if (slot + x < width && channel + y < dim) transposed[(channel + y) * width + slot + x] = narrow<A>(square[x][y]);
  }
}

/// A warp has a row of scores, and makes the weights of it.
template <class A>
__global__ void __launch_bounds__(kThreads) bank_softmax_kernel(const __grid_constant__ ProductParams<A> p) {
  const BankRun run = p.op.runs.list[p.numbers[blockIdx.y]];
  const std::int64_t row = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (row >= run.rows) return;
  const std::int64_t used = run.used_before(p.op.layer, p.op.slots);
  const std::int64_t width = (used + 7) / 8 * 8;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  std::byte* const memory = p.op.scratch + blockIdx.y * p.place.bytes;
  const float* const scores = reinterpret_cast<const float*>(memory + p.place.scores) + row * width;
  A* const weights = reinterpret_cast<A*>(memory + p.place.weights) + row * width;
  const auto zeros = static_cast<float>(p.op.slots - used);
  float most = zeros > 0.0F ? 0.0F : -INFINITY;
  for (std::int64_t j = lane; j < used; j += 32) most = fmaxf(most, p.op.scale * __ldcg(scores + j));
  most = warp_max(most);
  float sum = 0.0F;
  for (std::int64_t j = lane; j < used; j += 32) sum += fast_exp(p.op.scale * __ldcg(scores + j) - most);
  sum = warp_sum(sum);
  if (zeros > 0.0F) sum += zeros * fast_exp(-most);
  for (std::int64_t j = lane; j < width; j += 32) {
    weights[j] = narrow<A>(j < used ? fast_exp(p.op.scale * __ldcg(scores + j) - most) / sum : 0.0F);
  }
}

/// Rows of runs whose banks are empty.
template <class A>
__global__ void __launch_bounds__(kThreads) bank_zero_kernel(const __grid_constant__ ProductParams<A> p) {
  const BankRun run = p.op.runs.list[p.numbers[blockIdx.y]];
  const auto row = static_cast<int>(blockIdx.x);
  if (row >= run.rows) return;
  A* const out = p.op.out.row(run.first + row);
  for (std::int64_t c = threadIdx.x; c < p.op.out.cols; c += kThreads) out[c] = A{};
}

/// The runs, which fit the scratch together.
template <class A>
void by_products(Cuda& cuda, const BankAttention<Device, A>& op, const ProductPlace& place,
                 std::span<const int> numbers) {
  if (numbers.empty()) return;
  ProductParams<A> p{.op = op, .place = place, .numbers = {}};
  std::copy(numbers.begin(), numbers.end(), p.numbers.begin());
  const std::int64_t count = std::ssize(numbers);
  const std::int64_t dim = op.q.cols;
  std::array<Linear<Device, A, float>, kMostRuns> to_scores;
  std::array<Linear<Device, A, A>, kMostRuns> to_values;
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const BankRun& run = op.runs.on_host[numbers[i]];
    const std::int64_t used = run.used_before(op.layer, op.slots);
    const std::int64_t width = round_up(used, 8);
    std::byte* const memory = op.scratch + i * place.bytes;
    const MatrixView<float, Device> scores(reinterpret_cast<float*>(memory + place.scores), run.rows, used, width);
    to_scores[i] = Linear<Device, A, float>{
        .x = op.q.middle_rows(run.first, run.rows), .weight = {memory, kDTypeOf<A>, used, dim}, .y = scores};
    to_values[i] = Linear<Device, A, A>{
        .x = MatrixView<const A, Device>(reinterpret_cast<const A*>(memory + place.weights), run.rows, width),
        .weight = {memory + place.transposed, kDTypeOf<A>, dim, width},
        .y = op.out.middle_rows(run.first, run.rows)};
  }
  const dim3 squares = dims(ceil_div(dim, kSquare), ceil_div(op.slots, kSquare), count);
  launch(cuda.stream(), {.grid = squares, .block = dim3(kThreads)}, bank_round_kernel<A>, p);
  linear(cuda, std::span<const Linear<Device, A, float>>(to_scores).first(numbers.size()));
  launch(cuda.stream(), {.grid = dims(ceil_div(op.runs.most_rows, kWarps), count), .block = dim3(kThreads)},
         bank_softmax_kernel<A>, p);
  linear(cuda, std::span<const Linear<Device, A, A>>(to_values).first(numbers.size()));
}

/// Runs of more than `few` rows.
template <class A>
void by_products(Cuda& cuda, const BankAttention<Device, A>& op, std::int64_t few) {
  const ProductPlace place(op.runs.most_rows, op.slots, op.q.cols, sizeof(A));
  const auto fit = std::min<std::size_t>(op.scratch_bytes / place.bytes, kMostRuns);
  std::vector<int> empty;
  std::vector<int> written;
  const auto flush = [&] {
    by_products<A>(cuda, op, place, written);
    written.clear();
  };
  for (std::int64_t i = 0; i < op.runs.count; ++i) {
    const BankRun& run = op.runs.on_host[i];
    if (run.rows <= few || run.rows == 0) continue;
    if (run.used_before(op.layer, op.slots) == 0) {
      empty.push_back(static_cast<int>(i));
      continue;
    }
    if (fit == 0) throw std::length_error("bank_attention: the scratch is too small for a run");
    written.push_back(static_cast<int>(i));
    if (written.size() == fit) flush();
  }
  flush();
  for (std::int64_t first = 0; first < std::ssize(empty); first += kMostRuns) {
    ProductParams<A> p{.op = op, .place = place, .numbers = {}};
    const std::int64_t count = std::min(std::ssize(empty) - first, kMostRuns);
    std::copy_n(empty.begin() + first, count, p.numbers.begin());
    launch(cuda.stream(), {.grid = dims(op.runs.most_rows, count), .block = dim3(kThreads)}, bank_zero_kernel<A>, p);
  }
}

}  // namespace

template <class A>
void bank_attention(Cuda& cuda, const BankAttention<Device, A>& op, BankAlgo algo) {
  if (op.runs.count == 0 || op.q.cols == 0) return;
  const std::int64_t few = algo == BankAlgo::kSplit      ? op.runs.most_rows
                           : algo == BankAlgo::kProducts ? 0
                                                         : kLeastProductRows - 1;
  if (few > 0) by_splits(cuda, op, few);
  if (op.runs.most_rows > few) by_products(cuda, op, few);
}

std::size_t bank_scratch_bytes(const Cuda& /*cuda*/, std::int64_t runs, std::int64_t rows, std::int64_t slots,
                               std::int64_t dim, std::size_t element) {
  if (rows < kLeastProductRows) return 0;
  return ProductPlace(rows, slots, dim, element).bytes * static_cast<std::size_t>(std::min(runs, kMostRuns));
}

#define MMREC_INSTANTIATE(A) template void bank_attention(Cuda&, const BankAttention<Device, A>&, BankAlgo);
MMREC_FOR_EACH_TYPE(MMREC_INSTANTIATE)

}  // namespace mmrec::kernels
