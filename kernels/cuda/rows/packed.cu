// Ops over the rows of packed runs (PackedRuns), whose sequences' states lie anywhere: rows to and from states, the
// residual stream with a context for each run, and the sums of their outputs.
//
// copy_listed: a thread owns 4 channels of a row; each read once, written once and once more rounded.
// packed_residual_norm: rmsnorm.cuh's kernel; bytes per channel: x and h 4 each, v the size of A, y 4, u the size of A;
// contexts come from L2.
// packed_segment_sum: a thread owns a channel of a run and adds up tiles of 16 rows, all of a tile under way at once;
// runs and groups of channels fill the device. Bytes: 4 per element, 16 per run and channel.
#include "kernels/cuda/rows/rmsnorm.cuh"

namespace mmrec::kernels {
namespace {

template <class T>
__device__ inline T* bytes_behind(T* from, std::int64_t bytes) {
  using Byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(from) + bytes);
}

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

constexpr int kHeld = 2;  // as rmsnorm

template <class A, bool kInVectors>
struct PackedNormRow {
  static constexpr bool kVectors = kInVectors;
  PackedResidualNorm<Device, A> op;

  struct Operands {
    float x[kGroup], h[kGroup], v[kGroup], c[kGroup];
  };
  __device__ Operands fetch(std::int64_t row, std::int64_t group, std::int64_t cols) const {
    const int run = __ldg(op.of_row + row);
    const std::byte* const context = run < 0 ? nullptr : op.context[run];
    const float* const c =
        context == nullptr ? op.bias : reinterpret_cast<const float*>(bytes_behind(context, op.offset));
    Operands o = {};
    load_group<kVectors>(op.x.row(row), group, cols, o.x);
    load_group<kVectors>(op.h.row(row), group, cols, o.h);
    load_group<kVectors>(op.v.row(row), group, cols, o.v);
    if (c != nullptr) load_group<kVectors>(c, group, cols, o.c);
    return o;
  }
  __device__ void apply(std::int64_t row, std::int64_t group, std::int64_t cols, const Operands& o,
                        float (&y)[kGroup]) const {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) y[i] = residual_sum(o.x[i], o.h[i], o.v[i]) + o.c[i];
    store_group<kVectors>(op.x.row(row), group, cols, y);
  }
  __device__ void again(std::int64_t row, std::int64_t group, std::int64_t cols, float (&y)[kGroup]) const {
    load_group<kVectors>(op.x.row(row), group, cols, y);
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

template <class A>
void packed_residual_norm(Cuda& cuda, const PackedResidualNorm<Device, A>& op) {
  const bool vectors = takes_vectors(op.x) && takes_vectors(op.h) && takes_vectors(op.v) && takes_vectors(op.u) &&
                       takes_vectors(op.bias, 0) && takes_vectors(op.norm, 0);
  if (vectors) {
    norm_rows<kHeld>(cuda, PackedNormRow<A, true>{op}, op.norm, op.u);
  } else {
    norm_rows<kHeld>(cuda, PackedNormRow<A, false>{op}, op.norm, op.u);
  }
}

void packed_segment_sum(Cuda& cuda, const PackedSegmentSum<Device>& op) {
  map_rows_by<1>(cuda, cuda.stream(), SumRun{op}, op.count, op.x.cols);
}

#define MMREC_INSTANTIATE(A)                                      \
  template void copy_listed(Cuda&, const CopyListed<Device, A>&); \
  template void packed_residual_norm(Cuda&, const PackedResidualNorm<Device, A>&);
MMREC_INSTANTIATE(float)
MMREC_INSTANTIATE(BFloat16)
MMREC_INSTANTIATE(Float16)
#undef MMREC_INSTANTIATE

}  // namespace mmrec::kernels
