// y = act(x Wᵀ + bias) + residual_scale residual by the algorithms of algo.h: matvec.cu, few_rows_sm90.cu,
// few_compact_sm90.cu, many_rows_sm90.cu, parts.cu, fp8_sm90.cu, and here cuBLASLt.
//
// The library. Where no activation follows, the library's product of fp32 results is the whole job: it adds bias and
// scaled residual to its sums, so nothing is moved but x, W, the residual and y. Results of 16 bits it may round before
// it adds either, so it makes them only where there is neither. Its own gelu is the tanh approximation; ours is exact.
// What it cannot do is applied, and rounded once, by a second kernel to products in fp32: in y itself if that is fp32,
// else in scratch, in chunks of rows if need be. That pass moves 4 bytes per output out and in again, plus y and the
// residual; scratch that fits L2 stays there.
//
// Independent jobs of one call share a launch of our own kernels; with the library they share the device by two
// streams.
#include <array>
#include <stdexcept>
#include <utility>

#include "kernels/cuda/gemm/algo.h"
#include "kernels/cuda/rows/rows.cuh"
#include "kernels/cuda/runtime/cublaslt.h"

namespace mmrec::kernels {
namespace {

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
struct Worker {
  Cuda* cuda;
  bool on_side;
  float* scratch;
  std::int64_t scratch_floats;

  CUstream_st* stream() const { return on_side ? cuda->side_stream() : cuda->stream(); }
  void multiply(const Matmul& product) const { matmul(*cuda, product, on_side); }
};

template <class A, class Y>
void multiply(const Worker& worker, const Linear<Device, A, Y>& job) {
  Matmul product{.x = job.x.data,
                 .x_stride = job.x.stride,
                 .w = job.weight.template as<A>(),
                 .y = job.y.data,
                 .y_stride = job.y.stride,
                 .m = job.x.rows,
                 .n = job.weight.rows,
                 .k = job.weight.cols,
                 .in = kDTypeOf<A>,
                 .out = kDTypeOf<Y>};
  const bool adds = job.bias != nullptr || job.residual.data != nullptr;
  if (job.activation == Activation::kNone && (sizeof(Y) == 4 || !adds)) {
    product.bias = job.bias;
    if (job.residual.data != nullptr) {
      product.c = job.residual.data;
      product.c_stride = job.residual.stride;
      product.beta = job.residual_scale;
    }
    return worker.multiply(product);
  }

  product.bias = job.bias;
  product.out = DType::kF32;
  const auto finish = [&](const MatrixView<const float, Device>& products, std::int64_t first) {
    const std::int64_t rows = products.rows;
    const FinishRow<Y> op{products, job.residual.middle_rows(first, rows), job.residual_scale, job.activation,
                          job.y.middle_rows(first, rows)};
    const bool vectors =
        takes_vectors(products) && takes_vectors(op.y) && (op.residual.data == nullptr || takes_vectors(op.residual));
    map_rows(*worker.cuda, worker.stream(), op, rows, products.cols, vectors);
  };
  if constexpr (sizeof(Y) == 4) {
    if (job.residual.data != job.y.data) {
      worker.multiply(product);
      return finish(job.y, 0);
    }
  }
  const std::int64_t stride = ceil_div(product.n, 4) * 4;  // rows that take vectors
  const std::int64_t fit = worker.scratch_floats / stride;
  if (fit == 0) throw std::length_error("linear: an output row does not fit the scratch memory");
  const std::int64_t chunk = fit < kRowTile ? fit : fit / kRowTile * kRowTile;
  for (std::int64_t first = 0; first < job.x.rows; first += chunk) {
    product.m = std::min(chunk, job.x.rows - first);
    product.x = job.x.row(first);
    product.y = worker.scratch;
    product.y_stride = stride;
    worker.multiply(product);
    finish({worker.scratch, product.m, product.n, stride}, first);
  }
}

/// Jobs of the library's, in turn on both streams where there are several.
template <class A, class Y>
void by_library(Cuda& cuda, std::span<const Linear<Device, A, Y>> jobs) {
  const bool two_streams = jobs.size() > 1;
  const std::int64_t floats = static_cast<std::int64_t>(Cuda::kScratchBytes / sizeof(float)) / (two_streams ? 2 : 1);
  auto* scratch = static_cast<float*>(cuda.scratch());
  const Worker workers[2] = {{&cuda, false, scratch, floats}, {&cuda, true, scratch + floats, floats}};
  if (two_streams) cuda.fork();
  for (std::size_t i = 0; i < jobs.size(); ++i) multiply(workers[i % 2], jobs[i]);
  if (two_streams) cuda.join();
}

/// A part of the job's rows, which are few.
template <class A, class Y>
Linear<Device, A, Y> rows_of(Linear<Device, A, Y> job, std::int64_t first, std::int64_t count) {
  if (count == job.x.rows) return job;
  job.x = job.x.middle_rows(first, count);
  job.y = job.y.middle_rows(first, count);
  if (job.residual.data != nullptr) job.residual = job.residual.middle_rows(first, count);
  if (job.x_squares != nullptr) job.x_squares += first * scaled_parts(job.x.cols, kFewScaledPart);
  if (job.scaled.squares != nullptr) {
    job.scaled.y = job.scaled.y.middle_rows(first, count);
    job.scaled.squares += first * scaled_parts(job.y.cols, kFewScaledPart);
  }
  return job;
}

template <class A, class Y>
void run(Cuda& cuda, LinearAlgo algo, std::span<const Linear<Device, A, Y>> jobs) {
  const int part = algo == LinearAlgo::kMatvec                                       ? kFewScaledPart
                   : algo == LinearAlgo::kFewRows || algo == LinearAlgo::kFewCompact ? kScaledPart
                                                                                     : 0;
  for (const auto& job : jobs) {
    const bool takes = job.x_squares == nullptr || part != 0;
    const bool is_fit = std::is_same_v<Y, float> && !std::is_same_v<A, Float16> && job.residual.data != nullptr &&
                        job.activation == Activation::kNone && job.weight.rows % kScaledPart == 0;
    const bool leaves = job.scaled.squares == nullptr || (job.scaled.part == part && is_fit);
    if (!takes || !leaves) throw std::invalid_argument("linear: products of so many rows pass no such norms on");
  }
  if (algo == LinearAlgo::kMatvec) return matvec(cuda, jobs);
  if constexpr (sizeof(A) == 2) {
    if (algo == LinearAlgo::kFewRows) return linear_few_rows_sm90(cuda, jobs);
    if constexpr (std::is_same_v<A, BFloat16>) {
      if (algo == LinearAlgo::kFewCompact) return linear_few_compact_sm90(cuda, jobs);
      if (algo == LinearAlgo::kFp8) return linear_fp8_sm90(cuda, jobs);
    }
    if (algo == LinearAlgo::kManyRows) return linear_many_rows_sm90(cuda, jobs);
  } else {
    if (algo == LinearAlgo::kParts) return linear_by_parts(cuda, jobs);
  }
  if (algo != LinearAlgo::kLibrary) throw std::invalid_argument("linear: no such algorithm for this type");
  by_library(cuda, jobs);
}

}  // namespace

template <class A>
bool linear_takes_rows(const Cuda& cuda, const Linear<Device, A, float>& job) {
  const LinearAlgo algo = choose_linear(cuda, job);
  const bool may_fold = cuda.batch_invariant() && job.force_row_kernel;
  if (may_fold && few_rows_slices(job.weight) > 1) return false;  // no kernel for both
  return job.residual.data == nullptr && (algo == LinearAlgo::kManyRows || algo == LinearAlgo::kFp8);
}

template <class A>
bool passes_norms(const Cuda& cuda, std::int64_t rows, std::span<const WeightView<Device>> weights) {
  const auto passes = [&](const WeightView<Device>& w) {
    const MatrixView<const A, Device> x(nullptr, rows, w.cols);
    const LinearAlgo algo = choose_linear(cuda, Linear<Device, A>{.x = x, .weight = w});
    const bool is_aligned = takes_16_bytes(w.data, w.cols * static_cast<std::int64_t>(sizeof(A)));
    return is_aligned && (algo == LinearAlgo::kMatvec || algo == LinearAlgo::kFewRows);
  };
  return !std::is_same_v<A, Float16> && !cuda.batch_invariant() && std::ranges::all_of(weights, passes);
}

template <class A, class Y>
void linear(Cuda& cuda, std::span<const Linear<Device, A, Y>> jobs, LinearAlgo algo) {
  for (const LinearAlgo each : {LinearAlgo::kMatvec, LinearAlgo::kFewRows, LinearAlgo::kFewCompact,
                                LinearAlgo::kManyRows, LinearAlgo::kParts, LinearAlgo::kFp8, LinearAlgo::kLibrary}) {
    if (algo != LinearAlgo::kAuto && algo != each) continue;
    std::array<Linear<Device, A, Y>, std::max(kMostMatvecJobs, kMostGemmJobs)> batch;
    const std::size_t most = each == LinearAlgo::kMatvec ? kMostMatvecJobs : kMostGemmJobs;
    std::size_t count = 0;
    for (const Linear<Device, A, Y>& job : jobs) {
      if (job.x.rows == 0 || job.weight.rows == 0 || (algo == LinearAlgo::kAuto && choose_linear(cuda, job) != each)) {
        continue;
      }
      const std::int64_t at_once = each == LinearAlgo::kMatvec ? kTileColumns : job.x.rows;
      for (std::int64_t first = 0; first < job.x.rows; first += at_once) {
        batch[count++] = rows_of(job, first, std::min(at_once, job.x.rows - first));
        if (count == most) run<A, Y>(cuda, each, std::span(batch).first(std::exchange(count, 0)));
      }
    }
    if (count != 0) run<A, Y>(cuda, each, std::span(batch).first(count));
  }
}

#define MMREC_INSTANTIATE(A)                                                     \
  template bool linear_takes_rows(const Cuda&, const Linear<Device, A, float>&); \
  template bool passes_norms<A>(const Cuda&, std::int64_t, std::span<const WeightView<Device>>);
MMREC_FOR_EACH_TYPE(MMREC_INSTANTIATE)
#undef MMREC_INSTANTIATE
#define MMREC_INSTANTIATE(A, Y) template void linear(Cuda&, std::span<const Linear<Device, A, Y>>, LinearAlgo);
MMREC_INSTANTIATE(float, float)
MMREC_FOR_EACH_HALF_PRODUCT(MMREC_INSTANTIATE)

}  // namespace mmrec::kernels
