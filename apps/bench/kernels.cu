#include "apps/bench/kernels.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/cuda/isa/ptx.cuh"
#include "kernels/cuda/runtime/launch.cuh"

namespace mmrec::apps {
namespace {

using kernels::check_cuda;
using kernels::Cuda;
using kernels::launch;

constexpr int kThreads = 256;
constexpr int kBlocksPerProcessor = 8;  // 2,048 threads: a multiprocessor full

dim3 grid_of(const Cuda& cuda) { return dim3(static_cast<unsigned>(cuda.processors() * kBlocksPerProcessor)); }

__device__ std::int64_t first_index() { return std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ std::int64_t index_stride() { return std::int64_t{gridDim.x} * blockDim.x; }

__global__ void __launch_bounds__(kThreads) copy_kernel(const uint4* from, uint4* to, std::int64_t count) {
  constexpr int kInFlight = 4;
  const std::int64_t stride = index_stride();
  std::int64_t i = first_index();
  for (; i + (kInFlight - 1) * stride < count; i += kInFlight * stride) {
    uint4 x[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) x[k] = __ldcs(from + i + k * stride);
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) __stcs(to + i + k * stride, x[k]);
  }
  for (; i < count; i += stride) to[i] = from[i];
}

__device__ std::uint32_t bits_of(uint4 x) { return x.x | x.y | x.z | x.w; }

/// The write depends on everything read, so none of it can be left out.
__global__ void __launch_bounds__(kThreads) read_kernel(const uint4* from, std::int64_t count, std::uint32_t* sink) {
  constexpr int kInFlight = 8;
  const std::int64_t stride = index_stride();
  std::uint32_t bits = 0;
  std::int64_t i = first_index();
  for (; i + (kInFlight - 1) * stride < count; i += kInFlight * stride) {
    uint4 x[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) x[k] = __ldcs(from + i + k * stride);
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) bits |= bits_of(x[k]);
  }
  for (; i < count; i += stride) bits |= bits_of(from[i]);
  if (first_index() < count && bits == 0) *sink = 1;
}

__global__ void nothing_kernel() { kernels::ptx::wait_for_predecessor(); }

template <class T>
__global__ void __launch_bounds__(kThreads)
    random_kernel(T* to, std::int64_t count, float low, float high, std::uint32_t seed) {
  for (std::int64_t i = first_index(); i < count; i += index_stride()) {
    // The mixer of splitmix64.
    std::uint64_t x = (static_cast<std::uint64_t>(i) + 1) * 0x9e3779b97f4a7c15ULL + seed;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    to[i] = kernels::from_float<T>(low + (high - low) * static_cast<float>(x >> 40) * 0x1p-24F);
  }
}

}  // namespace

void fill_random(Cuda& cuda, kernels::DType type, void* to, std::int64_t count, float low, float high,
                 std::uint32_t seed) {
  const auto fill = [&](auto* data) {
    launch(cuda.stream(), {.grid = grid_of(cuda), .block = dim3(kThreads)},
           random_kernel<std::remove_pointer_t<decltype(data)>>, data, count, low, high, seed);
  };
  switch (type) {
    case kernels::DType::kF32:
      return fill(static_cast<float*>(to));
    case kernels::DType::kF16:
      return fill(static_cast<kernels::Float16*>(to));
    case kernels::DType::kBF16:
      return fill(static_cast<kernels::BFloat16*>(to));
    default:
      return;
  }
}

void copy_by_kernel(Cuda& cuda, const void* from, void* to, std::size_t bytes) {
  launch(cuda.stream(), {.grid = grid_of(cuda), .block = dim3(kThreads)}, copy_kernel, static_cast<const uint4*>(from),
         static_cast<uint4*>(to), static_cast<std::int64_t>(bytes / sizeof(uint4)));
}

void copy_by_runtime(Cuda& cuda, const void* from, void* to, std::size_t bytes) {
  check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, cuda.stream()), "cudaMemcpyAsync");
}

void read_by_kernel(Cuda& cuda, const void* from, std::size_t bytes) {
  launch(cuda.stream(), {.grid = grid_of(cuda), .block = dim3(kThreads)}, read_kernel, static_cast<const uint4*>(from),
         static_cast<std::int64_t>(bytes / sizeof(uint4)), static_cast<std::uint32_t*>(cuda.scratch()));
}

void empty_kernel(Cuda& cuda) {
  launch(cuda.stream(), {.grid = dim3(1), .block = dim3(512), .overlap_predecessor = true}, nothing_kernel);
}

DeviceTimer::DeviceTimer(Cuda& cuda) : cuda_(cuda) {
  check_cuda(cudaEventCreate(&begin_), "cudaEventCreate");
  check_cuda(cudaEventCreate(&end_), "cudaEventCreate");
}

DeviceTimer::~DeviceTimer() {
  cudaEventDestroy(begin_);
  cudaEventDestroy(end_);
}

double DeviceTimer::seconds(int calls, const std::function<void()>& work) {
  check_cuda(cudaEventRecord(begin_, cuda_.stream()), "cudaEventRecord");
  for (int i = 0; i < calls; ++i) work();
  check_cuda(cudaEventRecord(end_, cuda_.stream()), "cudaEventRecord");
  check_cuda(cudaEventSynchronize(end_), "cudaEventSynchronize");
  float milliseconds = 0.0F;
  check_cuda(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime");
  return static_cast<double>(milliseconds) * 1e-3 / calls;
}

double median_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace mmrec::apps
