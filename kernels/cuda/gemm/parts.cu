// Products of fp32 on tensor cores: each operand is the sum of three bf16 numbers, so a product is the sum of nine, of
// which six are added: x w = x0 w0 + (x0 w1 + x1 w0) + (x0 w2 + x1 w1 + x2 w0). Each of these is exact, sums are fp32,
// and what is left out is at most some 2^-23 of |x w|.
//
// A model's weights are split when they are loaded (models/runtime/cuda/upload.h); x is split here, before the product,
// by as many rows at a time as have room in L2: 4 bytes read and 6 written per element. The product is that of
// many_rows_sm90.cu, which goes through k six times.
#include <algorithm>
#include <array>

#include "kernels/cuda/gemm/algo.h"
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

/// The rows of a product at a time, in whole tiles.
std::int64_t rows_at_once(std::int64_t rows, std::int64_t cols) {
  constexpr std::int64_t kTile = 256;
  const auto fit = static_cast<std::int64_t>(Cuda::kPartsBytes / sizeof(BFloat16)) / (kParts * cols) / kTile * kTile;
  if (rows <= fit || fit == 0) return std::min(rows, fit);
  return ceil_div(ceil_div(rows, ceil_div(rows, fit)), kTile) * kTile;
}

bool same(const MatrixView<const float, Device>& a, const MatrixView<const float, Device>& b) {
  return a.data == b.data && a.rows == b.rows && a.cols == b.cols && a.stride == b.stride;
}

/// Jobs with the same x.
void multiply(Cuda& cuda, std::span<const Linear<Device, float, float>> jobs) {
  const MatrixView<const float, Device> all = jobs.front().x;
  const std::int64_t most = rows_at_once(all.rows, all.cols);
  for (std::int64_t first = 0; first < all.rows; first += most) {
    const std::int64_t count = std::min(most, all.rows - first);
    split(cuda, all.middle_rows(first, count), cuda.parts());
    std::array<Linear<Device, BFloat16, float>, kMostGemmJobs> products;
    for (std::size_t i = 0; i < std::min(jobs.size(), products.size()); ++i) {
      const Linear<Device, float, float>& job = jobs[i];
      Linear<Device, BFloat16, float>& product = products[i];
      product.x = {cuda.parts(), count, all.cols};
      product.weight = job.weight;
      product.weight.data = job.weight.parts;
      product.weight.format = DType::kBF16;
      product.bias = job.bias;
      product.y = job.y.middle_rows(first, count);
      product.activation = job.activation;
      if (job.residual.data != nullptr) product.residual = job.residual.middle_rows(first, count);
      product.residual_scale = job.residual_scale;
    }
    linear_many_rows_sm90<BFloat16, float>(cuda, std::span(products).first(jobs.size()), GemmTile::kAuto,
                                           count * all.cols);
  }
}

}  // namespace

void split(Cuda& cuda, MatrixView<const float, Device> x, BFloat16* parts) {
  map_rows(cuda, cuda.stream(), SplitRow{x, parts}, x.rows, x.cols, takes_vectors(x) && takes_vectors(parts, x.cols));
}

bool linear_parts_supported(const Cuda& cuda, MatrixView<const float, Device> x, const WeightView<Device>& weight) {
  if (weight.parts == nullptr || rows_at_once(x.rows, x.cols) == 0) return false;
  const WeightView<Device> part{weight.parts, DType::kBF16, weight.rows, weight.cols};
  return weight.part_stride % 8 == 0 &&
         gemm_sm90_supported(cuda, MatrixView<const BFloat16, Device>(weight.parts, x.rows, x.cols), part);
}

void linear_by_parts(Cuda& cuda, std::span<const Linear<Device, float, float>> jobs) {
  for (std::size_t first = 0, end = 0; first < jobs.size(); first = end) {
    while (end < jobs.size() && same(jobs[end].x, jobs[first].x)) ++end;
    multiply(cuda, jobs.subspan(first, end - first));
  }
}

}  // namespace mmrec::kernels
