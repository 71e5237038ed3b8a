// The mean of a block's outputs over a memory segment: sum += x over time, in fp64 and in order of time, so that how
// the segment was cut into calls leaves no trace in the bits; and its close, slot = sum / segment.
//
// Long runs: a block owns 32 channels of one sequence. Its 8 warps fetch tiles of 128 times into shared memory, by 16
// bytes where rows are aligned to them, while warp 0 adds up the tile before, a lane per channel. The chain of
// dependent fp64 additions, one per time, sets the pace; the other warps are there to keep memory out of it. Short
// runs, as in decoding, give every channel a thread and no tile. Bytes: 4 per element read, 16 per channel for the sum.
#include "kernels/cuda/rows.cuh"

namespace mmrec::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kChannels = 32;  // of a block
constexpr int kTimes = 128;    // of a tile
constexpr std::int64_t kShortRun = 16;

/// A thread per channel.
struct AddShortRun {
  SegmentSum<Device> op;

  template <int kWidth>
  __device__ void apply(std::int64_t b, std::int64_t channel) const {
    static_assert(kWidth == 1);
    double sum = __ldcg(op.sum + b * op.x.dim + channel);
    for (std::int64_t t = 0; t < op.x.time; ++t) {
      float x[1];
      load(op.x.at(b, 0, t) + channel, x);
      sum += static_cast<double>(x[0]);
    }
    op.sum[b * op.x.dim + channel] = sum;
  }
};

struct Close {
  double* sum;
  double segment;
  MatrixView<float, Device> slot;

  template <int kWidth>
  __device__ void apply(std::int64_t b, std::int64_t channel) const {
    static_assert(kWidth == 1);
    double* from = sum + b * slot.cols + channel;
    slot.row(b)[channel] = static_cast<float>(__ldcg(from) / segment);
    *from = 0.0;
  }
};

/// A thread's share of a tile: every (256 / lanes per row)-th time, kWidth channels of it.
template <int kWidth>
struct TileShare {
  static constexpr int kLanes = kChannels / kWidth;  // of one time
  static constexpr int kRows = kThreads / kLanes;    // times that are fetched at once
  static constexpr int kCount = kTimes / kRows;
  float values[kCount][kWidth];

  /// Times first..first + kTimes of 32 channels, as far as they exist.
  __device__ void fetch(const SequenceView<const float, Device>& x, std::int64_t b, std::int64_t first,
                        std::int64_t channel) {
    const std::int64_t c = channel + threadIdx.x % kLanes * kWidth;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const std::int64_t t = first + i * kRows + threadIdx.x / kLanes;
      if (t < x.time && c < x.dim) load(x.at(b, 0, t) + c, values[i]);
    }
  }
  __device__ void put(float (*tile)[kChannels]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float* to = &tile[i * kRows + threadIdx.x / kLanes][threadIdx.x % kLanes * kWidth];
      if constexpr (kWidth == 4) {
        *reinterpret_cast<float4*>(to) = make_float4(values[i][0], values[i][1], values[i][2], values[i][3]);
      } else {
        *to = values[i][0];
      }
    }
  }
};

template <int kWidth>
__global__ void __launch_bounds__(kThreads) segment_sum_kernel(const __grid_constant__ SegmentSum<Device> op) {
  __shared__ __align__(16) float tiles[2][kTimes][kChannels];
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const std::int64_t time = op.x.time;
  const std::int64_t b = blockIdx.y;
  const std::int64_t first_channel = std::int64_t{blockIdx.x} * kChannels;
  const std::int64_t channel = first_channel + threadIdx.x;
  const bool adds = threadIdx.x < kChannels && channel < op.x.dim;
  double sum = adds ? __ldcg(op.sum + b * op.x.dim + channel) : 0.0;

  TileShare<kWidth> share;
  share.fetch(op.x, b, 0, first_channel);
  for (std::int64_t t = 0, round = 0; t < time; t += kTimes, ++round) {
    float(*tile)[kChannels] = tiles[round % 2];
    share.put(tile);
    __syncthreads();  // also: warp 0 is done with the tile that the next round overwrites
    if (t + kTimes < time) share.fetch(op.x, b, t + kTimes, first_channel);
    if (!adds) continue;
    const int count = static_cast<int>(time - t < kTimes ? time - t : kTimes);
    if (count == kTimes) {
#pragma unroll 16
      for (int i = 0; i < kTimes; ++i) sum += static_cast<double>(tile[i][threadIdx.x]);
    } else {
      for (int i = 0; i < count; ++i) sum += static_cast<double>(tile[i][threadIdx.x]);
    }
  }
  if (adds) op.sum[b * op.x.dim + channel] = sum;
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
    part.sum = op.sum + b * x.dim;
    const dim3 grid(static_cast<unsigned>(ceil_div(x.dim, kChannels)), static_cast<unsigned>(part.x.batch));
    launch(cuda.stream(), overlapping(cuda, grid, dim3(kThreads)),
           takes_vectors(part.x) ? segment_sum_kernel<4> : segment_sum_kernel<1>, part);
  }
}

void segment_close(Cuda& cuda, double* sum, std::int64_t segment, MatrixView<float, Device> slot) {
  map_rows_by<1>(cuda, cuda.stream(), Close{sum, static_cast<double>(segment), slot}, slot.rows, slot.cols);
}

}  // namespace mmrec::kernels
