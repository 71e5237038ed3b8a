// Rows copied, rounded, zeroed or picked out of a table; the decay gate; writes to banks; and sums over segments.
//
// Copies and gates: a thread owns 4 columns of one row (1 where rows are not aligned to 4). Bytes: each element read
// once and written once, and once more where it is rounded too. Rows of a bank are read and written once.
//
// Sums over a segment, sum += x over time, are in fp64 and in an order that follows from the number of times alone. All
// values of a tile of 16 times are under way at once, so a chain of dependent fp64 additions is a small part of the
// run.
//  * segment_sum, long runs: a block owns 8 channels of one sequence, whole sectors. A quarter of a warp adds up tiles,
//    a lane per channel: tile i goes to partial sum i % 128, in order of i. The partial sums are added in a fixed order
//    at the end. So 64 KB of a block are in flight.
//  * segment_sum, short runs as in decoding: a thread per channel, in order of time.
//  * packed_segment_sum: a block has 32 channels of a run. Tile i goes to partial sum i % 32, in order of i. Runs and
//    groups of channels fill the device.
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

constexpr int kSumChannels = 8;  // of a block
constexpr int kSumPartials = 128;
constexpr int kSumThreads = kSumPartials * kSumChannels;
constexpr int kSumGroups = 16;  // of partial sums

__global__ void __launch_bounds__(kSumThreads) segment_sum_kernel(const __grid_constant__ SegmentSum<Device> op) {
  __shared__ double partials[kSumPartials][kSumChannels];
  __shared__ double groups[kSumGroups][kSumChannels];
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const std::int64_t time = op.x.time;
  const std::int64_t b = blockIdx.y;
  const int lane = static_cast<int>(threadIdx.x) % kSumChannels;
  const int partial = static_cast<int>(threadIdx.x) / kSumChannels;
  const std::int64_t channel = std::int64_t{blockIdx.x} * kSumChannels + lane;
  const bool exists = channel < op.x.dim;

  double sum = 0.0;
  for (std::int64_t first = partial * kTile; exists && first < time; first += kSumPartials * kTile) {
    const float* from = op.x.at(b, 0, first) + channel;
    const int count = static_cast<int>(time - first < kTile ? time - first : kTile);
    float values[kTile];
#pragma unroll
    for (int i = 0; i < kTile; ++i) values[i] = i < count ? __ldcg(from + i * op.x.time_stride) : 0.0F;
    double tile = 0.0;
#pragma unroll
    for (const float value : values) tile += static_cast<double>(value);
    sum += tile;
  }
  partials[partial][lane] = sum;
  __syncthreads();
  if (partial < kSumGroups) {
    constexpr int kEach = kSumPartials / kSumGroups;
    double group = 0.0;
    for (int i = 0; i < kEach; ++i) group += partials[partial * kEach + i][lane];
    groups[partial][lane] = group;
  }
  __syncthreads();
  if (partial != 0 || !exists) return;
  double* to = op.sum.row(b) + channel;
  double all = __ldcg(to);
  for (int i = 0; i < kSumGroups; ++i) all += groups[i][lane];
  *to = all;
}

constexpr int kPackedChannels = 32;  // of a block
constexpr int kPackedPartials = 32;  // at most

__global__ void __launch_bounds__(kPackedChannels* kPackedPartials)
    packed_segment_sum_kernel(const __grid_constant__ PackedSegmentSum<Device> op) {
  __shared__ double partials[kPackedPartials][kPackedChannels];
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const SummedRun run = op.runs[blockIdx.y];
  const std::int64_t dim = op.x.cols;
  const std::int64_t channel = std::int64_t{blockIdx.x} * kPackedChannels + threadIdx.x;
  const int partial = static_cast<int>(threadIdx.y);
  const int together = static_cast<int>(blockDim.y);
  double sum = 0.0;
  for (int first = partial * kTile; channel < dim && first < run.rows; first += kPackedPartials * kTile) {
    const float* from = op.x.row(run.first + first) + channel;
    float values[kTile];
#pragma unroll
    for (int i = 0; i < kTile; ++i) values[i] = first + i < run.rows ? __ldcg(from + i * op.x.stride) : 0.0F;
    double tile = 0.0;
#pragma unroll
    for (const float value : values) tile += static_cast<double>(value);
    sum += tile;
  }
  partials[partial][threadIdx.x] = sum;
  __syncthreads();
  if (partial != 0 || channel >= dim) return;
  double* const to = run.sum + op.layer * dim + channel;
  double all = __ldcg(to);
  for (int i = 0; i < together; ++i) all += partials[i][threadIdx.x];
  if (run.closes >= 0) {
    run.memory[(op.layer * op.memory_slots + run.closes) * dim + channel] =
        static_cast<float>(all / static_cast<double>(op.segment));
    all = 0.0;
  }
  *to = all;
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
  const dim3 grid(static_cast<unsigned>(ceil_div(op.count, kThreads)));
  launch(cuda.stream(), {.grid = grid, .block = dim3(kThreads)}, space_runs_kernel, op);
}

void bank_write(Cuda& cuda, const BankWrite<Device>& op) {
  if (op.runs.count == 0 || op.runs.most_rows == 0) return;
  const dim3 grid(static_cast<unsigned>(op.runs.count),
                  static_cast<unsigned>(std::min<std::int64_t>(op.runs.most_rows, kMostGrid)));
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
    const dim3 grid(static_cast<unsigned>(ceil_div(x.dim, kSumChannels)), static_cast<unsigned>(part.x.batch));
    launch(cuda.stream(), overlapping(cuda, grid, dim3(kSumThreads)), segment_sum_kernel, part);
  }
}

void segment_close(Cuda& cuda, MatrixView<double, Device> sum, std::int64_t segment, MatrixView<float, Device> slot) {
  map_rows_by<1>(cuda, cuda.stream(), Close{sum, static_cast<double>(segment), slot}, slot.rows, slot.cols);
}

void packed_segment_sum(Cuda& cuda, const PackedSegmentSum<Device>& op) {
  if (op.count == 0 || op.x.cols == 0) return;
  // Fewer partial sums where no run has as many tiles: the others would add 0.
  const std::int64_t partials = std::min<std::int64_t>(ceil_div(op.most_rows, kTile), kPackedPartials);
  for (std::int64_t first = 0; first < op.count; first += kMostGrid) {
    PackedSegmentSum<Device> part = op;
    part.runs += first;
    const auto runs = static_cast<unsigned>(std::min(op.count - first, kMostGrid));
    const dim3 grid(static_cast<unsigned>(ceil_div(op.x.cols, kPackedChannels)), runs);
    launch(cuda.stream(), overlapping(cuda, grid, dim3(kPackedChannels, static_cast<unsigned>(partials))),
           packed_segment_sum_kernel, part);
  }
}

#define MMREC_INSTANTIATE(A)                                                              \
  template void copy_rows(Cuda&, MatrixView<const float, Device>, MatrixView<A, Device>); \
  template void copy_listed(Cuda&, const CopyListed<Device, A>&);
MMREC_FOR_EACH_TYPE(MMREC_INSTANTIATE)

}  // namespace mmrec::kernels
