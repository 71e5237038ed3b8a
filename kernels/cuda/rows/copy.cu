// Row copies between state and activations, rounded to the type of the destination, and zero fill.
//
// A thread owns 4 columns of one row (1 where rows are not aligned to 4). Bytes: each element read once, written once.
#include "kernels/cuda/rows/rows.cuh"

namespace mmrec::kernels {
namespace {

template <class A>
struct CopyRow {
  MatrixView<const float, Device> from;
  MatrixView<A, Device> to;

  template <int kWidth>
  __device__ void apply(std::int64_t row, std::int64_t col) const {
    float values[kWidth];
    load(from.row(row) + col, values);
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

}  // namespace

template <class A>
void copy_rows(Cuda& cuda, MatrixView<const float, Device> from, MatrixView<A, Device> to) {
  map_rows(cuda, cuda.stream(), CopyRow<A>{from, to}, to.rows, to.cols, takes_vectors(from) && takes_vectors(to));
}

void fill_zero(Cuda& cuda, MatrixView<float, Device> to) {
  map_rows(cuda, cuda.stream(), ZeroRow{to}, to.rows, to.cols, takes_vectors(to));
}

template void copy_rows<float>(Cuda&, MatrixView<const float, Device>, MatrixView<float, Device>);
template void copy_rows<BFloat16>(Cuda&, MatrixView<const float, Device>, MatrixView<BFloat16, Device>);
template void copy_rows<Float16>(Cuda&, MatrixView<const float, Device>, MatrixView<Float16, Device>);

}  // namespace mmrec::kernels
