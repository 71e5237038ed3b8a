// γ = clamp(σ(a) ⊙ σ(c)), or clamp(σ(a)), to [1e-6, 1 − 1e-6]; NaN stays NaN.
//
// A thread owns 4 channels of one row (1 where rows are not aligned to 4). Bytes: 4 per operand and channel read, 4
// written.
#include "kernels/cuda/recurrence/equations.cuh"
#include "kernels/cuda/rows/rows.cuh"

namespace mmrec::kernels {
namespace {

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

}  // namespace

void decay_gate(Cuda& cuda, const DecayGate<Device>& op) {
  const bool vectors = takes_vectors(op.a) && takes_vectors(op.gamma) && (op.c.data == nullptr || takes_vectors(op.c));
  map_rows(cuda, cuda.stream(), DecayGateRow{op}, op.gamma.rows, op.gamma.cols, vectors);
}

}  // namespace mmrec::kernels
