// Kernels of one element each: rows copied between state and activations, rounded to the type of the destination, or
// picked out of an embedding table; zero fill; the decay gate.
//
// A thread owns 4 columns of one row (1 where rows are not aligned to 4). Bytes: each element read once, written once.
#include "kernels/cuda/recurrence/equations.cuh"
#include "kernels/cuda/rows/rows.cuh"

namespace mmrec::kernels {
namespace {

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

}  // namespace

template <class A>
void copy_rows(Cuda& cuda, MatrixView<const float, Device> from, MatrixView<A, Device> to) {
  copy(cuda, CopyRow<false, float, A>{from, to});
}
template void copy_rows(Cuda&, MatrixView<const float, Device>, MatrixView<float, Device>);
template void copy_rows(Cuda&, MatrixView<const float, Device>, MatrixView<BFloat16, Device>);
template void copy_rows(Cuda&, MatrixView<const float, Device>, MatrixView<Float16, Device>);

void fill_zero(Cuda& cuda, MatrixView<float, Device> to) {
  map_rows(cuda, cuda.stream(), ZeroRow{to}, to.rows, to.cols, takes_vectors(to));
}

void embed(Cuda& cuda, const WeightView<Device>& table, const int* tokens, MatrixView<float, Device> x) {
  const auto from = [&]<class T>(T) {
    copy(cuda, CopyRow<true, T, float>{{static_cast<const T*>(table.data), table.rows, table.cols}, x, tokens});
  };
  switch (table.format.code) {
    case DType::kF32:
      return from(float{});
    case DType::kF16:
      return from(Float16{});
    case DType::kBF16:
      return from(BFloat16{});
  }
}

void decay_gate(Cuda& cuda, const DecayGate<Device>& op) {
  const bool vectors = takes_vectors(op.a) && takes_vectors(op.gamma) && (op.c.data == nullptr || takes_vectors(op.c));
  map_rows(cuda, cuda.stream(), DecayGateRow{op}, op.gamma.rows, op.gamma.cols, vectors);
}

}  // namespace mmrec::kernels
