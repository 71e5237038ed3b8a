// Stands in for kernels/cuda/runtime/cublaslt.cpp: the same products without the library, summed in fp64.
#include "kernels/cuda/runtime/cublaslt.h"

#include <cstddef>
#include <stdexcept>
#include <vector>

#include "faults.h"
#include "kernels/cuda/runtime/cuda.h"
#include "kernels/cuda/runtime/launch.cuh"
#include "sanitizer.h"
#include "streams.h"

namespace mmrec::kernels {
namespace {

/// f(T{}) for the type of the elements.
template <class F>
auto with_type(DType type, const F& f) {
  switch (type) {
    case DType::kF16:
      return f(Float16{});
    case DType::kBF16:
      return f(BFloat16{});
    default:
      return f(0.0F);
  }
}
float load(const void* data, DType type, std::int64_t i) {
  return with_type(type, [=](auto zero) { return to_float(static_cast<const decltype(zero)*>(data)[i]); });
}
void store(void* data, DType type, std::int64_t i, float v) {
  with_type(type, [=](auto zero) { static_cast<decltype(zero)*>(data)[i] = from_float<decltype(zero)>(v); });
}

/// [rows, cols] as contiguous floats; every read is checked here.
std::vector<float> widen(const void* data, DType type, std::int64_t rows, std::int64_t cols, std::int64_t stride) {
  std::vector<float> wide(static_cast<std::size_t>(rows * cols));
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t i = 0; i < cols; ++i)
      wide[static_cast<std::size_t>(r * cols + i)] = load(data, type, r * stride + i);
  }
  return wide;
}

/// Always in one order, so that an entry depends on its row and column alone.
MMREC_NOT_INSTRUMENTED double dot(const float* a, const float* b, std::size_t count) {
  double sum[8] = {};
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (std::size_t j = 0; j < 8; ++j) sum[j] += static_cast<double>(a[i + j]) * static_cast<double>(b[i + j]);
  }
  for (; i < count; ++i) sum[0] += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]));
}

void multiply(const Matmul& job) {
  const std::vector<float> x = widen(job.x, job.in, job.m, job.k, job.x_stride);
  const std::vector<float> w = widen(job.w, job.in, job.n, job.k, job.k);
  const void* c = job.c == nullptr ? job.y : job.c;
  const std::int64_t c_stride = job.c == nullptr ? job.y_stride : job.c_stride;
  for (std::int64_t row = 0; row < job.m; ++row) {
    for (std::int64_t col = 0; col < job.n; ++col) {
      double sum = dot(x.data() + row * job.k, w.data() + col * job.k, static_cast<std::size_t>(job.k));
      if (job.beta != 0.0F) {  // otherwise c is not read
        sum += static_cast<double>(job.beta) * static_cast<double>(load(c, job.out, row * c_stride + col));
      }
      if (job.bias != nullptr) sum += static_cast<double>(load(job.bias, job.out, col));
      store(job.y, job.out, row * job.y_stride + col, static_cast<float>(sum));
    }
  }
}

}  // namespace

struct CublasLt::Impl {};

CublasLt::CublasLt() { check_cuda(cuda_emulation::next_fault(), "cublasLtCreate"); }
CublasLt::~CublasLt() = default;

void CublasLt::run(const Matmul& job, CUstream_st* stream, void* workspace) {
  if (job.in != job.out && job.out != DType::kF32) throw std::runtime_error("matmul: out must be of type in or kF32");
  if (workspace == nullptr) throw std::runtime_error("matmul: no workspace");
  if (job.m == 0 || job.n == 0) throw std::runtime_error("matmul: the library takes no empty product");
  check_cuda(cuda_emulation::next_fault(), "cublasLtMatmul");
  cuda_emulation::enqueue(stream, [job] { multiply(job); });
}

void matmul(Cuda& cuda, const Matmul& job, bool on_side_stream) {
  CublasLt& blas = cuda.blas();
  blas.run(job, on_side_stream ? cuda.side_stream() : cuda.stream(),
           on_side_stream ? cuda.side_blas_workspace() : cuda.blas_workspace());
}

}  // namespace mmrec::kernels
