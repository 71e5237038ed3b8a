// y = x + h + 0.1 v + bias, where bias may be absent, one row for all sequences, or a row per sequence.
//
// A thread owns 4 channels of one row (1 where rows are not aligned to 4). Bytes per channel: x and h 4 each, v the
// size of A, y 4; the bias comes from L2.
#include "kernels/cuda/rows.cuh"

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
    for (int i = 0; i < kWidth; ++i) y[i] = __fmaf_rn(0.1F, v[i], x[i] + h[i]) + bias[i];
    store(op.y.at(b, 0, t) + col, y);
  }
};

}  // namespace

template <class A>
void block_residual(Cuda& cuda, const BlockResidual<Device, A>& op) {
  const bool vectors = takes_vectors(op.x) && takes_vectors(op.h) && takes_vectors(op.v) && takes_vectors(op.y) &&
                       takes_vectors(op.bias, op.bias_stride);
  map_rows(cuda, cuda.stream(), BlockResidualRow<A>{op}, op.y.batch * op.y.time, op.y.dim, vectors);
}

template void block_residual<float>(Cuda&, const BlockResidual<Device, float>&);
template void block_residual<BFloat16>(Cuda&, const BlockResidual<Device, BFloat16>&);
template void block_residual<Float16>(Cuda&, const BlockResidual<Device, Float16>&);

}  // namespace mmrec::kernels
