// Kernels ask the CUDA runtime once for shared memory and for clusters.
#include "kernels/cuda/runtime/launch.cuh"

#include <map>
#include <mutex>
#include <tuple>
#include <utility>

namespace mmrec::kernels {

cudaError_t allow_launch(const LaunchConfig& config, const void* kernel) {
  constexpr std::size_t kDefaultShared = std::size_t{48} << 10;
  constexpr unsigned kPortableCluster = 8;
  if (config.shared_bytes <= kDefaultShared && config.cluster <= kPortableCluster) return cudaSuccess;
  struct Allowed {
    std::size_t shared_bytes = kDefaultShared;
    unsigned cluster = kPortableCluster;
  };
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, Allowed> allowed;  // by device and kernel
  int device = 0;
  if (const cudaError_t code = cudaGetDevice(&device); code != cudaSuccess) return code;
  const std::lock_guard lock(mutex);
  Allowed& before = allowed[{device, kernel}];
  if (config.shared_bytes > before.shared_bytes) {
    const cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                  static_cast<int>(config.shared_bytes));
    if (code != cudaSuccess) return code;
    before.shared_bytes = config.shared_bytes;
  }
  if (config.cluster > before.cluster) {
    const cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (code != cudaSuccess) return code;
    before.cluster = config.cluster;
  }
  return cudaSuccess;
}

bool holds_cluster(const LaunchConfig& config, const void* kernel) {
  static std::mutex mutex;
  static std::map<std::tuple<int, const void*, std::size_t>, int> clusters;  // by device, kernel and shared memory
  int device = 0;
  if (cudaGetDevice(&device) == cudaSuccess && allow_launch(config, kernel) == cudaSuccess) {
    const std::lock_guard lock(mutex);
    const auto [held, is_new] = clusters.try_emplace({device, kernel, config.shared_bytes});
    if (!is_new) return held->second > 0;
    const RuntimeLaunch as_runtime(nullptr, config);
    if (cudaOccupancyMaxActiveClusters(&held->second, kernel, &as_runtime.config) == cudaSuccess) {
      return held->second > 0;
    }
    held->second = 0;
  }
  cudaGetLastError();  // must not show at the next launch
  return false;
}

}  // namespace mmrec::kernels
