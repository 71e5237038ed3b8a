// Rows copied, rounded, zeroed or picked out of a table; the decay gate; writes to banks; and sums over segments.
//
// Copies and gates: a thread owns 4 columns of one row (1 where rows are not aligned to 4). Bytes: each element read
// once and written once, and once more where it is rounded too. Rows of a bank are read and written once.
//
// Sums over a segment, sum += x over time, are in fp64 and in an order that follows from the number of times alone. All
// values of a tile of 16 times are under way at once, so a chain of dependent fp64 additions is a small part of the
// run.
//  * runs of up to a tile, as in decoding: a thread per channel, in order of time.
//  * longer ones, and those of a list: a block has 32 channels of a run. Tile i goes to partial sum i % 32, in order of
//    i. Runs and groups of channels fill the device.
// Bytes: 4 per element read, 16 per sequence and channel for the sum.
#include <algorithm>

#include "kernels/cuda/recurrence/equations.cuh"
#include "kernels/cuda/rows/rows.cuh"

namespace mmrec::kernels {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMostGrid = 65535;

/// to[r] = from[r], or from[index[r]].
template <bool kIndexed, class T, class A>
struct CopyRow {
  MatrixView<const T, Device> from;
  MatrixView<A, Device> to;
  const int* index = nullptr;

  template <int kWidth>
  __device__ void apply(std::int64_t row, std::int64_t col) const {
    float values[kWidth];
    load(from.row(kIndexed ? __ldcg(index + row) : row) + col, values);
    store(to.row(row) + col, values);
  }
};

template <class A>
struct CopyListedRow {
  CopyListed<Device, A> op;

  template <int kWidth>
  __device__ void apply(std::int64_t row, std::int64_t col) const {
    const RowCopy<A> copy = op.rows[row];
    float values[kWidth] = {};
    if (copy.from != nullptr) load(reinterpret_cast<const float*>(copy.from + op.from_offset) + col, values);
    store(reinterpret_cast<float*>(copy.to + op.to_offset) + col, values);
    if (copy.rounded != nullptr) store(copy.rounded + col, values);
  }
};

struct ZeroRow {
  MatrixView<float, Device> to;

  template <int kWidth>
  __device__ void apply(std::int64_t row, std::int64_t col) const {
    const float zeros[kWidth] = {};
    store(to.row(row) + col, zeros);
  }
};

/// γ = clamp(σ(a) ⊙ σ(c)), or clamp(σ(a)), to [1e-6, 1 − 1e-6]; NaN stays NaN.
struct DecayGateRow {
  DecayGate<Device> op;

  template <int kWidth>
  __device__ void apply(std::int64_t row, std::int64_t col) const {
    const bool both = op.c.data != nullptr;
    float gamma[kWidth];
    float c[kWidth] = {};
    load(op.a.row(row) + col, gamma);
    if (both) load(op.c.row(row) + col, c);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) gamma[i] = decay_of(gamma[i], both, c[i]);
    store(op.gamma.row(row) + col, gamma);
  }
};

template <bool kIndexed, class T, class A>
void copy(Cuda& cuda, const CopyRow<kIndexed, T, A>& op) {
  map_rows(cuda, cuda.stream(), op, op.to.rows, op.to.cols, takes_vectors(op.from) && takes_vectors(op.to));
}

/// A block a row of a run.
__global__ void __launch_bounds__(kThreads) bank_write_kernel(const __grid_constant__ BankWrite<Device> op) {
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const BankRun run = op.runs.list[blockIdx.x];
  const std::int64_t dim = op.h.cols;
  const std::int64_t used = run.used_before(op.layer, op.slots);
  for (std::int64_t i = blockIdx.y; i < run.rows; i += gridDim.y) {
    const std::int64_t slot = used + i < op.slots ? used + i : used + i - op.slots;
    for (std::int64_t c = threadIdx.x; c < dim; c += kThreads) {
      run.bank[slot * dim + c] = __ldcg(op.h.row(run.first + i) + c);
    }
  }
}

__global__ void __launch_bounds__(kThreads) space_runs_kernel(const __grid_constant__ SpacedRuns<Device> op) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= op.count) return;
  BankRun run = op.first;
  run.first += static_cast<std::int32_t>(i) * run.rows;
  if (run.state != nullptr) run.state = bytes_further(run.state, i * op.apart);
  if (run.bank != nullptr) run.bank = bytes_further(run.bank, i * op.apart);
  op.list[i] = run;
}

// --- Sums over segments ----------------------------------------------------------------------------------------------

constexpr int kTile = 16;  // times that a thread adds up at once

/// A thread per channel.
struct AddShortRun {
  SegmentSum<Device> op;

  template <int kWidth>
  __device__ void apply(std::int64_t b, std::int64_t channel) const {
    static_assert(kWidth == 1);
    double sum = __ldcg(op.sum.row(b) + channel);
    for (std::int64_t t = 0; t < op.x.time; ++t) {
      sum += static_cast<double>(read(op.x.at(b, 0, t) + channel));
    }
    op.sum.row(b)[channel] = sum;
  }
};

struct Close {
  MatrixView<double, Device> sum;
  double segment;
  MatrixView<float, Device> slot;

  template <int kWidth>
  __device__ void apply(std::int64_t b, std::int64_t channel) const {
    static_assert(kWidth == 1);
    double* from = sum.row(b) + channel;
    slot.row(b)[channel] = static_cast<float>(__ldcg(from) / segment);
    *from = 0.0;
  }
};

constexpr int kSumChannels = 32;  // of a block
constexpr int kSumPartials = 32;  // at most

/// Runs of a list, or where that is null the sequences of `even`.
struct SummedRuns {
  PackedSegmentSum<Device> listed = {};
  SegmentSum<Device> even = {};
};

__global__ void __launch_bounds__(kSumChannels* kSumPartials)
    segment_sum_kernel(const __grid_constant__ SummedRuns op) {
  __shared__ double partials[kSumPartials][kSumChannels];
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const bool is_listed = op.listed.runs != nullptr;
  const std::int64_t channel = std::int64_t{blockIdx.x} * kSumChannels + threadIdx.x;
  const int partial = static_cast<int>(threadIdx.y);
  const int together = static_cast<int>(blockDim.y);
  SummedRun run;
  if (is_listed) run = op.listed.runs[blockIdx.y];
  const std::int64_t dim = is_listed ? op.listed.x.cols : op.even.x.dim;
  const std::int64_t rows = is_listed ? run.rows : op.even.x.time;
  const std::int64_t stride = is_listed ? op.listed.x.stride : op.even.x.time_stride;
  const float* const x = (is_listed ? op.listed.x.row(run.first) : op.even.x.at(blockIdx.y, 0, 0)) + channel;
  double sum = 0.0;
  for (std::int64_t first = partial * kTile; channel < dim && first < rows; first += kSumPartials * kTile) {
    float values[kTile];
#pragma unroll
    for (int i = 0; i < kTile; ++i) values[i] = first + i < rows ? __ldcg(x + (first + i) * stride) : 0.0F;
    double tile = 0.0;
#pragma unroll
    for (const float value : values) tile += static_cast<double>(value);
    sum += tile;
  }
  partials[partial][threadIdx.x] = sum;
  __syncthreads();
  if (partial != 0 || channel >= dim) return;
  const std::int64_t layer = op.listed.layer;
  double* const to = (is_listed ? run.sum + layer * dim : op.even.sum.row(blockIdx.y)) + channel;
  double all = __ldcg(to);
  for (int i = 0; i < together; ++i) all += partials[i][threadIdx.x];
  if (run.closes >= 0) {
    run.memory[(layer * op.listed.memory_slots + run.closes) * dim + channel] =
        static_cast<float>(all / static_cast<double>(op.listed.segment));
    all = 0.0;
  }
  *to = all;
}

/// Of `count` runs with at most so many rows.
void launch_sums(Cuda& cuda, const SummedRuns& op, std::int64_t dim, std::int64_t count, std::int64_t most_rows) {
  // Fewer partial sums where no run has as many tiles: the others would add 0.
  const std::int64_t partials = std::min<std::int64_t>(ceil_div(most_rows, kTile), kSumPartials);
  launch(cuda.stream(), overlapping(cuda, dims(ceil_div(dim, kSumChannels), count), dims(kSumChannels, partials)),
         segment_sum_kernel, op);
}

}  // namespace

template <class A>
void copy_rows(Cuda& cuda, MatrixView<const float, Device> from, MatrixView<A, Device> to) {
  copy(cuda, CopyRow<false, float, A>{from, to});
}

template <class A>
void copy_listed(Cuda& cuda, const CopyListed<Device, A>& op) {
  map_rows(cuda, cuda.stream(), CopyListedRow<A>{op}, op.count, op.cols, op.cols % 4 == 0);
}

void fill_zero(Cuda& cuda, MatrixView<float, Device> to) {
  map_rows(cuda, cuda.stream(), ZeroRow{to}, to.rows, to.cols, takes_vectors(to));
}

void embed(Cuda& cuda, const WeightView<Device>& table, const int* tokens, MatrixView<float, Device> x) {
  const auto from = [&]<class T>(T) {
    copy(cuda, CopyRow<true, T, float>{{static_cast<const T*>(table.data), table.rows, table.cols}, x, tokens});
  };
#define MMREC_FROM(T) \
  if (table.format == kDTypeOf<T>) return from(T{});
  MMREC_FOR_EACH_TYPE(MMREC_FROM)
#undef MMREC_FROM
}

void decay_gate(Cuda& cuda, const DecayGate<Device>& op) {
  const bool vectors = takes_vectors(op.a) && takes_vectors(op.gamma) && (op.c.data == nullptr || takes_vectors(op.c));
  map_rows(cuda, cuda.stream(), DecayGateRow{op}, op.gamma.rows, op.gamma.cols, vectors);
}

void space_runs(Cuda& cuda, const SpacedRuns<Device>& op) {
  launch(cuda.stream(), {.grid = dims(ceil_div(op.count, kThreads)), .block = dim3(kThreads)}, space_runs_kernel, op);
}

void bank_write(Cuda& cuda, const BankWrite<Device>& op) {
  if (op.runs.count == 0 || op.runs.most_rows == 0) return;
  const dim3 grid = dims(op.runs.count, std::min<std::int64_t>(op.runs.most_rows, kMostGrid));
  launch(cuda.stream(), overlapping(cuda, grid, dim3(kThreads)), bank_write_kernel, op);
}

void segment_sum(Cuda& cuda, const SegmentSum<Device>& op) {
  const SequenceView<const float, Device>& x = op.x;
  if (x.time <= kTile) return map_rows_by<1>(cuda, cuda.stream(), AddShortRun{op}, x.batch, x.dim);
  for (std::int64_t b = 0; b < x.batch; b += kMostGrid) {
    SegmentSum<Device> part = op;
    part.x.data = x.at(b, 0, 0);
    part.x.batch = std::min(x.batch - b, kMostGrid);
    part.sum = op.sum.middle_rows(b, part.x.batch);
    launch_sums(cuda, {.even = part}, x.dim, part.x.batch, x.time);
  }
}

void segment_close(Cuda& cuda, MatrixView<double, Device> sum, std::int64_t segment, MatrixView<float, Device> slot) {
  map_rows_by<1>(cuda, cuda.stream(), Close{sum, static_cast<double>(segment), slot}, slot.rows, slot.cols);
}

void packed_segment_sum(Cuda& cuda, const PackedSegmentSum<Device>& op) {
  if (op.x.cols == 0) return;
  for (std::int64_t first = 0; first < op.count; first += kMostGrid) {
    PackedSegmentSum<Device> part = op;
    part.runs += first;
    launch_sums(cuda, {.listed = part}, op.x.cols, std::min(op.count - first, kMostGrid), op.most_rows);
  }
}

#define MMREC_INSTANTIATE(A)                                                              \
  template void copy_rows(Cuda&, MatrixView<const float, Device>, MatrixView<A, Device>); \
  template void copy_listed(Cuda&, const CopyListed<Device, A>&);
MMREC_FOR_EACH_TYPE(MMREC_INSTANTIATE)

}  // namespace mmrec::kernels
