// Products of fp32 on tensor cores: each operand is the sum of three bf16 numbers, so a product is the sum of nine, of
// which six are added: x w = x0 w0 + (x0 w1 + x1 w0) + (x0 w2 + x1 w1 + x2 w0). Each of these is exact, sums are fp32,
// and what is left out is at most some 2^-23 of |x w|.
//
// A model's weights are split when they are loaded (models/runtime/cuda/upload.h); x is split here, before the product,
// by as many rows at a time as have room in L2: 4 bytes read and 6 written per element. The product is that of
// many_rows_sm90.cu, which goes through k six times.
#include "kernels/cuda/gemm/algo.h"
#include "kernels/cuda/gemm/operands.cuh"
#include "kernels/cuda/rows/rows.cuh"

namespace mmrec::kernels {
namespace {

struct SplitRow {
  MatrixView<const float, Device> x;
  BFloat16* parts;

  template <int kWidth>
  __device__ void apply(std::int64_t row, std::int64_t col) const {
    float rest[kWidth];
    load(x.row(row) + col, rest);
#pragma unroll
    for (std::int64_t p = 0; p < kParts; ++p) {
      store(parts + (p * x.rows + row) * x.cols + col, rest);
#pragma unroll
      for (float& value : rest) value -= widen(narrow<BFloat16>(value));
    }
  }
};

constexpr std::size_t kInL2 = std::size_t{32} << 20;
constexpr std::int64_t bytes_of_row(std::int64_t cols) { return kParts * cols * std::int64_t{sizeof(BFloat16)}; }

}  // namespace

void split(Cuda& cuda, MatrixView<const float, Device> x, BFloat16* parts) {
  map_rows(cuda, cuda.stream(), SplitRow{x, parts}, x.rows, x.cols, takes_vectors(x) && takes_vectors(parts, x.cols));
}

bool linear_parts_supported(const Cuda& cuda, MatrixView<const float, Device> x, const WeightView<Device>& weight) {
  if (weight.parts == nullptr || rows_at_once(x.rows, bytes_of_row(x.cols), kInL2) == 0) return false;
  const WeightView<Device> part{weight.parts, DType::kBF16, weight.rows, weight.cols};
  return weight.part_stride % 8 == 0 &&
         gemm_sm90_supported(cuda, MatrixView<const BFloat16, Device>(weight.parts, x.rows, x.cols), part);
}

void linear_by_parts(Cuda& cuda, std::span<const Linear<Device, float, float>> jobs) {
  const auto multiply = [&](std::span<Linear<Device, BFloat16, float>> products) {
    for (Linear<Device, BFloat16, float>& product : products) {
      product.weight.data = product.weight.parts;
      product.weight.format = DType::kBF16;
    }
    const MatrixView<const BFloat16, Device>& x = products.front().x;
    linear_many_rows_sm90<BFloat16, float>(cuda, products, GemmTile::kAuto, {.part_stride = x.rows * x.cols});
  };
  by_rows_of_x(
      jobs, cuda.parts(), bytes_of_row, kInL2, [&](MatrixView<const float, Device> x) { split(cuda, x, cuda.parts()); },
      multiply);
}

}  // namespace mmrec::kernels
