// The public kernels on a GPU, without a model: a decayed recurrence over device memory, enqueued on the caller's
// stream between the caller's own copies. Nothing waits until the result is fetched.
#include <cuda_runtime.h>
#include <mmrec/errors.h>
#include <mmrec/kernels.h>

#include <cmath>
#include <cstdio>
#include <vector>

int main() try {
  cudaStream_t stream = nullptr;
  if (cudaStreamCreate(&stream) != cudaSuccess) throw mmrec::DeviceUnavailable("no stream");
  auto context = mmrec::KernelContext::cuda(0, stream);

  // h_t = 0.9 h_{t-1} + 0.1: eight sequences, [batch, time, dim], rising to 1.
  constexpr int kBatch = 8, kTime = 4096, kDim = 256;
  constexpr std::size_t kCount = std::size_t{kBatch} * kTime * kDim;
  const std::vector<float> log_a(kCount, std::log(0.9F));
  std::vector<float> h(kCount, 0.1F);  // b on entry
  float* device_log_a = nullptr;
  float* device_h = nullptr;
  if (cudaMalloc(&device_log_a, kCount * sizeof(float)) != cudaSuccess ||
      cudaMalloc(&device_h, kCount * sizeof(float)) != cudaSuccess) {
    std::fprintf(stderr, "not enough GPU memory\n");
    return 1;
  }
  cudaMemcpyAsync(device_log_a, log_a.data(), kCount * sizeof(float), cudaMemcpyHostToDevice, stream);
  cudaMemcpyAsync(device_h, h.data(), kCount * sizeof(float), cudaMemcpyHostToDevice, stream);
  mmrec::decay_scan(context, {.shape = {.batch = kBatch, .time = kTime, .dim = kDim},
                              .log_a = device_log_a,
                              .b = device_h,
                              .h = device_h});  // may be b
  cudaMemcpyAsync(h.data(), device_h, kCount * sizeof(float), cudaMemcpyDeviceToHost, stream);
  context.synchronize();

  double worst = 0.0;
  for (std::size_t i = 0; i < kCount; ++i) {
    const auto t = static_cast<double>(i / kDim % kTime);
    worst = std::fmax(worst, std::abs(h[i] - (1.0 - std::pow(0.9, t + 1.0))));
  }
  std::printf("largest error %.1e\n", worst);
  cudaFree(device_log_a);
  cudaFree(device_h);
  return worst < 1e-5 ? 0 : 1;
} catch (const mmrec::DeviceUnavailable& reason) {
  std::printf("%s: nothing done\n", reason.what());
  return 0;
}
