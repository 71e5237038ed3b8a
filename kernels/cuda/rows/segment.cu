// The mean of a block's outputs over a memory segment: sum += x over time, in fp64 and in an order that follows from
// the number of times alone; and its close, slot = sum / segment.
//
// Long runs: a block owns 8 channels of one sequence, whole sectors. A quarter of a warp adds up tiles of 16 times, a
// lane per channel, all values of a tile under way at once: tile i goes to partial sum i % 128, in order of i, and the
// partial sums are added in a fixed order at the end. So a chain of dependent fp64 additions is a small part of the
// run, and 64 KB of a block are in flight. Short runs, as in decoding, give every channel a thread and add in order of
// time. Bytes: 4 per element read, 16 per channel for the sum.
#include "kernels/cuda/rows/rows.cuh"

namespace mmrec::kernels {
namespace {

constexpr int kTile = 16;     // times
constexpr int kChannels = 8;  // of a block
constexpr int kPartials = 128;
constexpr int kThreads = kPartials * kChannels;
constexpr int kGroups = 16;  // of partial sums
constexpr std::int64_t kShortRun = kTile;

/// A thread per channel.
struct AddShortRun {
  SegmentSum<Device> op;

  template <int kWidth>
  __device__ void apply(std::int64_t b, std::int64_t channel) const {
    static_assert(kWidth == 1);
    double sum = __ldcg(op.sum.row(b) + channel);
    for (std::int64_t t = 0; t < op.x.time; ++t) {
      float x[1];
      load(op.x.at(b, 0, t) + channel, x);
      sum += static_cast<double>(x[0]);
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

__global__ void __launch_bounds__(kThreads) segment_sum_kernel(const __grid_constant__ SegmentSum<Device> op) {
  __shared__ double partials[kPartials][kChannels];
  __shared__ double groups[kGroups][kChannels];
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const std::int64_t time = op.x.time;
  const std::int64_t b = blockIdx.y;
  const int lane = static_cast<int>(threadIdx.x) % kChannels;
  const int partial = static_cast<int>(threadIdx.x) / kChannels;
  const std::int64_t channel = std::int64_t{blockIdx.x} * kChannels + lane;
  const bool exists = channel < op.x.dim;

  double sum = 0.0;
  for (std::int64_t first = partial * kTile; exists && first < time; first += kPartials * kTile) {
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
  if (partial < kGroups) {
    double group = 0.0;
    for (int i = 0; i < kPartials / kGroups; ++i) group += partials[partial * (kPartials / kGroups) + i][lane];
    groups[partial][lane] = group;
  }
  __syncthreads();
  if (partial != 0 || !exists) return;
  double* to = op.sum.row(b) + channel;
  double all = __ldcg(to);
  for (int i = 0; i < kGroups; ++i) all += groups[i][lane];
  *to = all;
}

}  // namespace

void segment_sum(Cuda& cuda, const SegmentSum<Device>& op) {
  const SequenceView<const float, Device>& x = op.x;
  if (x.time <= kShortRun) return map_rows_by<1>(cuda, cuda.stream(), AddShortRun{op}, x.batch, x.dim);
  constexpr std::int64_t kMostSequences = 65535;  // of a launch
  for (std::int64_t b = 0; b < x.batch; b += kMostSequences) {
    SegmentSum<Device> part = op;
    part.x.data = x.at(b, 0, 0);
    part.x.batch = std::min(x.batch - b, kMostSequences);
    part.sum = op.sum.middle_rows(b, part.x.batch);
    const dim3 grid(static_cast<unsigned>(ceil_div(x.dim, kChannels)), static_cast<unsigned>(part.x.batch));
    launch(cuda.stream(), overlapping(cuda, grid, dim3(kThreads)), segment_sum_kernel, part);
  }
}

void segment_close(Cuda& cuda, MatrixView<double, Device> sum, std::int64_t segment, MatrixView<float, Device> slot) {
  map_rows_by<1>(cuda, cuda.stream(), Close{sum, static_cast<double>(segment), slot}, slot.rows, slot.cols);
}

}  // namespace mmrec::kernels
