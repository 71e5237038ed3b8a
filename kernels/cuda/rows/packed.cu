// Ops over the rows of packed runs (PackedRuns), whose sequences' states lie anywhere: rows to and from states, and the
// sums of their outputs.
//
// copy_listed: a thread owns 4 channels of a row; each read once, written once and once more rounded.
// packed_segment_sum: a warp adds up tiles of 16 rows of 32 channels of a run, all of a tile under way at once; warps
// divide the tiles, and runs and groups of channels fill the device. Bytes: 4 per element, 16 per run and channel.
#include "kernels/cuda/rows/rows.cuh"

namespace mmrec::kernels {
namespace {

template <class A>
struct CopyListedRow {
  CopyListed<Device, A> op;

  template <int kWidth>
  __device__ void apply(std::int64_t row, std::int64_t col) const {
    const RowCopy<A> copy = op.rows[row];
    float values[kWidth] = {};
    if (copy.from != nullptr) load(reinterpret_cast<const float*>(copy.from + op.from_offset) + col, values);
    store(reinterpret_cast<float*>(copy.to + op.to_offset) + col, values);
    if constexpr (sizeof(A) == 2) {
      if (copy.rounded != nullptr) store(copy.rounded + col, values);
    }
  }
};

constexpr int kTile = 16;      // rows that a thread adds up at once
constexpr int kChannels = 32;  // of a block
constexpr int kPartials = 32;  // sums over time, at most

/// A block has kChannels channels of a run; tile i of its rows goes to partial sum i % kPartials, in order of i, and
/// these are added up in order.
__global__ void __launch_bounds__(kChannels* kPartials)
    packed_segment_sum_kernel(const __grid_constant__ PackedSegmentSum<Device> op) {
  __shared__ double partials[kPartials][kChannels];
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const SummedRun run = op.runs[blockIdx.y];
  const std::int64_t dim = op.x.cols;
  const std::int64_t channel = std::int64_t{blockIdx.x} * kChannels + threadIdx.x;
  const int partial = static_cast<int>(threadIdx.y);
  const int together = static_cast<int>(blockDim.y);
  double sum = 0.0;
  for (int first = partial * kTile; channel < dim && first < run.rows; first += kPartials * kTile) {
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
void copy_listed(Cuda& cuda, const CopyListed<Device, A>& op) {
  map_rows(cuda, cuda.stream(), CopyListedRow<A>{op}, op.count, op.cols, op.cols % 4 == 0);
}

void packed_segment_sum(Cuda& cuda, const PackedSegmentSum<Device>& op) {
  if (op.count == 0 || op.x.cols == 0) return;
  // Fewer partial sums where no run has as many tiles: the others would add 0.
  const std::int64_t partials = std::min<std::int64_t>(ceil_div(op.most_rows, kTile), kPartials);
  constexpr std::int64_t kMostRuns = 65535;  // of a launch
  for (std::int64_t first = 0; first < op.count; first += kMostRuns) {
    PackedSegmentSum<Device> part = op;
    part.runs += first;
    const auto runs = static_cast<unsigned>(std::min(op.count - first, kMostRuns));
    const dim3 grid(static_cast<unsigned>(ceil_div(op.x.cols, kChannels)), runs);
    launch(cuda.stream(), overlapping(cuda, grid, dim3(kChannels, static_cast<unsigned>(partials))),
           packed_segment_sum_kernel, part);
  }
}

template void copy_listed(Cuda&, const CopyListed<Device, float>&);
template void copy_listed(Cuda&, const CopyListed<Device, BFloat16>&);
template void copy_listed(Cuda&, const CopyListed<Device, Float16>&);

}  // namespace mmrec::kernels
