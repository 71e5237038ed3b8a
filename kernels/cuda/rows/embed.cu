// x[r] = table[tokens[r]], widened to fp32.
//
// A thread owns 4 channels of one row (1 where rows are not aligned to 4). Bytes: one row of the table read, one fp32
// row written per token. No arithmetic: the result is exact.
#include "kernels/cuda/rows/rows.cuh"

namespace mmrec::kernels {
namespace {

template <class T>
struct EmbedRow {
  const T* table;
  const int* tokens;
  MatrixView<float, Device> x;

  template <int kWidth>
  __device__ void apply(std::int64_t row, std::int64_t col) const {
    float values[kWidth];
    load(table + __ldcg(tokens + row) * x.cols + col, values);
    store(x.row(row) + col, values);
  }
};

template <class T>
void embed_from(Cuda& cuda, const WeightView<Device>& table, const int* tokens, const MatrixView<float, Device>& x) {
  const EmbedRow<T> op{static_cast<const T*>(table.data), tokens, x};
  map_rows(cuda, cuda.stream(), op, x.rows, x.cols, takes_vectors(op.table, table.cols) && takes_vectors(x));
}

}  // namespace

void embed(Cuda& cuda, const WeightView<Device>& table, const int* tokens, MatrixView<float, Device> x) {
  switch (table.format.code) {
    case DType::kF32:
      return embed_from<float>(cuda, table, tokens, x);
    case DType::kF16:
      return embed_from<Float16>(cuda, table, tokens, x);
    case DType::kBF16:
      return embed_from<BFloat16>(cuda, table, tokens, x);
  }
}

}  // namespace mmrec::kernels
