// y = x + h + 0.1 v + bias, where bias may be absent, one row for all sequences, or a row per sequence.
//
// A thread owns 4 channels of one row (1 where rows are not aligned to 4). Bytes per channel: x and h 4 each, v the
// size of A, y 4; the bias comes from L2. block_residual_norm adds the size of A for u: rmsnorm.cuh's kernel over rows
// that it computes, which need not be read again.
#include "kernels/cuda/rows/rmsnorm.cuh"

namespace mmrec::kernels {
namespace {

template <class A>
struct BlockResidualRow {
  BlockResidual<Device, A> op;

  template <int kWidth>
  __device__ void apply(std::int64_t row, std::int64_t col) const {
    const std::int64_t b = quotient(row, op.y.time);
    const std::int64_t t = row - b * op.y.time;
    float x[kWidth];
    float h[kWidth];
    float v[kWidth];
    float bias[kWidth] = {};
    load(op.x.at(b, 0, t) + col, x);
    load(op.h.at(b, 0, t) + col, h);
    load(op.v.at(b, 0, t) + col, v);
    if (op.bias != nullptr) load(op.bias + b * op.bias_stride + col, bias);
    float y[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) y[i] = residual_sum(x[i], h[i], v[i]) + bias[i];
    store(op.y.at(b, 0, t) + col, y);
  }
};

constexpr int kHeld = 2;  // as rmsnorm

template <class A, bool kInVectors>
struct NormedRow {
  static constexpr bool kVectors = kInVectors;
  BlockResidual<Device, A> op;

  struct Operands {
    float x[kGroup], h[kGroup], v[kGroup], bias[kGroup];
  };
  __device__ Operands fetch(std::int64_t row, std::int64_t group, std::int64_t cols) const {
    const std::int64_t b = quotient(row, op.y.time);
    const std::int64_t t = row - b * op.y.time;
    Operands o = {};
    load_group<kVectors>(op.x.at(b, 0, t), group, cols, o.x);
    load_group<kVectors>(op.h.at(b, 0, t), group, cols, o.h);
    load_group<kVectors>(op.v.at(b, 0, t), group, cols, o.v);
    if (op.bias != nullptr) load_group<kVectors>(op.bias + b * op.bias_stride, group, cols, o.bias);
    return o;
  }
  __device__ void apply(std::int64_t row, std::int64_t group, std::int64_t cols, const Operands& o,
                        float (&y)[kGroup]) const {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) y[i] = residual_sum(o.x[i], o.h[i], o.v[i]) + o.bias[i];
    const std::int64_t b = quotient(row, op.y.time);
    store_group<kVectors>(op.y.at(b, 0, row - b * op.y.time), group, cols, y);
  }
  __device__ void again(std::int64_t row, std::int64_t group, std::int64_t cols, float (&y)[kGroup]) const {
    const std::int64_t b = quotient(row, op.y.time);
    load_group<kVectors>(op.y.at(b, 0, row - b * op.y.time), group, cols, y);
  }
};

template <class A>
bool in_vectors(const BlockResidual<Device, A>& op) {
  return takes_vectors(op.x) && takes_vectors(op.h) && takes_vectors(op.v) && takes_vectors(op.y) &&
         takes_vectors(op.bias, op.bias_stride);
}

}  // namespace

template <class A>
void block_residual(Cuda& cuda, const BlockResidual<Device, A>& op) {
  map_rows(cuda, cuda.stream(), BlockResidualRow<A>{op}, op.y.batch * op.y.time, op.y.dim, in_vectors(op));
}

template <class A>
void block_residual_norm(Cuda& cuda, const BlockResidual<Device, A>& op, const float* weight, MatrixView<A, Device> u) {
  if (in_vectors(op) && takes_vectors(u) && takes_vectors(weight, 0)) {
    norm_rows<kHeld>(cuda, NormedRow<A, true>{op}, weight, u);
  } else {
    norm_rows<kHeld>(cuda, NormedRow<A, false>{op}, weight, u);
  }
}

#define MMREC_INSTANTIATE(A)                                            \
  template void block_residual(Cuda&, const BlockResidual<Device, A>&); \
  template void block_residual_norm(Cuda&, const BlockResidual<Device, A>&, const float*, MatrixView<A, Device>);
MMREC_INSTANTIATE(float)
MMREC_INSTANTIATE(BFloat16)
MMREC_INSTANTIATE(Float16)
#undef MMREC_INSTANTIATE

}  // namespace mmrec::kernels
