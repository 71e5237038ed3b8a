// Kernels ask the CUDA runtime once for shared memory and for clusters.
#include "kernels/cuda/runtime/launch.cuh"

#include <map>
#include <mutex>
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

}  // namespace mmrec::kernels
