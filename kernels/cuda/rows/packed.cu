// Ops over the rows of packed runs (PackedRuns), whose sequences' states lie anywhere: rows to and from states, and the
// sums of their outputs.
//
// copy_listed: a thread owns 4 channels of a row; each read once, written once and once more rounded.
// packed_segment_sum: a thread owns a channel of a run and adds up tiles of 16 rows, all of a tile under way at once;
// runs and groups of channels fill the device. Bytes: 4 per element, 16 per run and channel.
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

struct SumRun {
  PackedSegmentSum<Device> op;

  template <int kWidth>
  __device__ void apply(std::int64_t number, std::int64_t channel) const {
    static_assert(kWidth == 1);
    constexpr int kTile = 16;
    const SummedRun run = op.runs[number];
    const std::int64_t dim = op.x.cols;
    double* const to = run.sum + op.layer * dim + channel;
    const float* from = op.x.row(run.first) + channel;
    double sum = __ldcg(to);
    for (int first = 0; first < run.rows; first += kTile, from += kTile * op.x.stride) {
      float values[kTile];
#pragma unroll
      for (int i = 0; i < kTile; ++i) values[i] = first + i < run.rows ? __ldcg(from + i * op.x.stride) : 0.0F;
      double tile = 0.0;
#pragma unroll
      for (const float value : values) tile += static_cast<double>(value);
      sum += tile;
    }
    if (run.closes >= 0) {
      run.memory[(op.layer * op.memory_slots + run.closes) * dim + channel] =
          static_cast<float>(sum / static_cast<double>(op.segment));
      sum = 0.0;
    }
    *to = sum;
  }
};

}  // namespace

template <class A>
void copy_listed(Cuda& cuda, const CopyListed<Device, A>& op) {
  map_rows(cuda, cuda.stream(), CopyListedRow<A>{op}, op.count, op.cols, op.cols % 4 == 0);
}

void packed_segment_sum(Cuda& cuda, const PackedSegmentSum<Device>& op) {
  map_rows_by<1>(cuda, cuda.stream(), SumRun{op}, op.count, op.x.cols);
}

template void copy_listed(Cuda&, const CopyListed<Device, float>&);
template void copy_listed(Cuda&, const CopyListed<Device, BFloat16>&);
template void copy_listed(Cuda&, const CopyListed<Device, Float16>&);

}  // namespace mmrec::kernels
