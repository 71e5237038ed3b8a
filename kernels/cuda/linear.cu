// y = act(x Wᵀ + bias) + residual_scale residual: up to kMatvecRows rows by kernels of our own (matvec.cu), more by
// cuBLASLt.
//
// Where no activation follows, the library's product is the whole job: it adds the bias and the scaled residual to its
// fp32 sums and rounds once, so nothing is moved but x, W, the residual and y. Its bias is of type Y, so a 16-bit y
// with a bias takes part only if the caller brings the bias rounded. The library's own gelu is the tanh approximation;
// ours is exact and is applied, with residual and rounding, by a second kernel to products in fp32: in y itself if that
// is fp32, else in scratch, in chunks of rows if need be. Rounding the products first would round twice. That pass
// moves 4 bytes per output out and in again, plus y and the residual; scratch that fits L2 stays there.
//
// Independent jobs of one call share the device by two streams.
#include <stdexcept>
#include <type_traits>

#include "kernels/cuda/cublaslt.h"
#include "kernels/cuda/matvec.h"
#include "kernels/cuda/rows.cuh"

namespace mmrec::kernels {
namespace {

template <class T>
constexpr DType kType = std::is_same_v<T, float>     ? DType::kF32
                        : std::is_same_v<T, Float16> ? DType::kF16
                                                     : DType::kBF16;

/// y = act(product) + scale residual.
template <class Y>
struct FinishRow {
  MatrixView<const float, Device> product;
  MatrixView<const Y, Device> residual;
  float residual_scale;
  Activation activation;
  MatrixView<Y, Device> y;

  template <int kWidth>
  __device__ void apply(std::int64_t row, std::int64_t col) const {
    float values[kWidth];
    float added[kWidth] = {};
    load(product.row(row) + col, values);
    if (residual.data != nullptr) load(residual.row(row) + col, added);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      values[i] = __fmaf_rn(residual_scale, added[i], activate(values[i], activation));
    }
    store(y.row(row) + col, values);
  }
};

/// A stream with its share of the scratch.
struct Lane {
  Cuda* cuda;
  bool on_side;
  float* scratch;
  std::int64_t scratch_floats;

  CUstream_st* stream() const { return on_side ? cuda->side_stream() : cuda->stream(); }
  void multiply(const Matmul& product) const {
    on_side ? matmul_on_side_stream(*cuda, product) : matmul(*cuda, product);
  }
};

template <class A, class Y>
void multiply(const Lane& lane, const Linear<Device, A, Y>& job) {
  Matmul product{.x = job.x.data,
                 .x_stride = job.x.stride,
                 .w = job.weight.data,
                 .y = job.y.data,
                 .y_stride = job.y.stride,
                 .m = job.x.rows,
                 .n = job.weight.rows,
                 .k = job.weight.cols,
                 .in = kType<A>,
                 .out = kType<Y>};
  const void* bias = job.bias;
  if constexpr (sizeof(Y) == 2) bias = job.bias_rounded;
  if (job.activation == Activation::kNone && (job.bias == nullptr || bias != nullptr)) {
    product.bias = bias;
    if (job.residual.data != nullptr) {
      product.c = job.residual.data;
      product.c_stride = job.residual.stride;
      product.beta = job.residual_scale;
    }
    return lane.multiply(product);
  }

  product.bias = job.bias;
  product.out = DType::kF32;
  const auto finish = [&](const MatrixView<const float, Device>& products, std::int64_t first) {
    const std::int64_t rows = products.rows;
    const FinishRow<Y> op{products, job.residual.middle_rows(first, rows), job.residual_scale, job.activation,
                          job.y.middle_rows(first, rows)};
    const bool vectors =
        takes_vectors(products) && takes_vectors(op.y) && (op.residual.data == nullptr || takes_vectors(op.residual));
    map_rows(*lane.cuda, lane.stream(), op, rows, products.cols, vectors);
  };
  if constexpr (sizeof(Y) == 4) {
    if (job.residual.data != job.y.data) {
      lane.multiply(product);
      return finish(job.y, 0);
    }
  }
  const std::int64_t stride = ceil_div(product.n, 4) * 4;  // rows that take vectors
  const std::int64_t fit = lane.scratch_floats / stride;
  if (fit == 0) throw std::length_error("linear: an output row does not fit the scratch memory");
  const std::int64_t chunk = fit < kRowTile ? fit : fit / kRowTile * kRowTile;
  for (std::int64_t first = 0; first < job.x.rows; first += chunk) {
    product.m = std::min(chunk, job.x.rows - first);
    product.x = job.x.row(first);
    product.y = lane.scratch;
    product.y_stride = stride;
    lane.multiply(product);
    finish({lane.scratch, product.m, product.n, stride}, first);
  }
}

template <class A, class Y>
bool takes_library(const Linear<Device, A, Y>& job) {
  return job.x.rows > kMatvecRows && job.weight.rows != 0;
}

}  // namespace

template <class A, class Y>
void linear(Cuda& cuda, std::span<const Linear<Device, A, Y>> jobs) {
  matvec(cuda, jobs);
  const auto count = std::count_if(jobs.begin(), jobs.end(), takes_library<A, Y>);
  if (count == 0) return;
  const bool two_streams = count > 1;
  const std::int64_t floats = static_cast<std::int64_t>(Cuda::kScratchBytes / sizeof(float)) / (two_streams ? 2 : 1);
  auto* scratch = static_cast<float*>(cuda.scratch());
  const Lane lanes[2] = {{&cuda, false, scratch, floats}, {&cuda, true, scratch + floats, floats}};
  if (two_streams) cuda.fork();
  std::size_t next = 0;
  for (const Linear<Device, A, Y>& job : jobs) {
    if (!takes_library(job)) continue;
    multiply(lanes[next], job);
    if (two_streams) next = 1 - next;
  }
  if (two_streams) cuda.join();
}

template void linear<float, float>(Cuda&, std::span<const Linear<Device, float, float>>);
template void linear<BFloat16, BFloat16>(Cuda&, std::span<const Linear<Device, BFloat16, BFloat16>>);
template void linear<BFloat16, float>(Cuda&, std::span<const Linear<Device, BFloat16, float>>);
template void linear<Float16, Float16>(Cuda&, std::span<const Linear<Device, Float16, Float16>>);
template void linear<Float16, float>(Cuda&, std::span<const Linear<Device, Float16, float>>);

}  // namespace mmrec::kernels
