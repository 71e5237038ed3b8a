// Kernel launches and error checks. Every kernel of this backend is started through launch(), so that launch errors are
// never lost and attributes are set in one place.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/runtime/cuda.h"

namespace mmrec::kernels {

/// Throws for any code but cudaSuccess: OutOfDeviceMemory or std::system_error of cuda_category() naming `call`.
void check_cuda(cudaError_t code, const char* call);

/// Of grids and blocks, from sizes of operands.
inline dim3 dims(std::int64_t x, std::int64_t y = 1, std::int64_t z = 1) {
  return {static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z)};
}

struct LaunchConfig {
  dim3 grid;
  dim3 block;
  std::size_t shared_bytes = 0;  // dynamic shared memory
  bool cooperative = false;      // all blocks are resident at once, so they may wait for each other
  unsigned cluster = 1;          // this many consecutive blocks along x are resident at once and share memory (sm_90)
  /// The kernel may start while its predecessor on the stream drains; it must call wait_for_predecessor() (ptx.cuh)
  /// before it reads what the predecessor wrote.
  bool overlap_predecessor = false;
};

/// A launch as the runtime wants it. Must stay where it is.
struct RuntimeLaunch {
  cudaLaunchAttribute attributes[3] = {};
  cudaLaunchConfig_t config = {};

  RuntimeLaunch(cudaStream_t stream, const LaunchConfig& from) {
    unsigned count = 0;
    if (from.cooperative) {
      attributes[count].id = cudaLaunchAttributeCooperative;
      attributes[count++].val.cooperative = 1;
    }
    if (from.cluster > 1) {
      attributes[count].id = cudaLaunchAttributeClusterDimension;
      attributes[count].val.clusterDim.x = from.cluster;
      attributes[count].val.clusterDim.y = 1;
      attributes[count++].val.clusterDim.z = 1;
    }
    if (from.overlap_predecessor) {
      attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[count++].val.programmaticStreamSerializationAllowed = 1;
    }
    config.gridDim = from.grid;
    config.blockDim = from.block;
    config.dynamicSmemBytes = from.shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = count;
  }
  RuntimeLaunch(const RuntimeLaunch&) = delete;
  RuntimeLaunch& operator=(const RuntimeLaunch&) = delete;
};

/// Lets the kernel have the shared memory and the cluster of the configuration, on the current device. Asks the runtime
/// for what was not allowed before: to ask takes as long as a third of a launch.
cudaError_t allow_launch(const LaunchConfig& config, const void* kernel);

/// kernel<<<...>>>(arguments...). Arguments convert to the kernel's parameter types.
template <class... Parameters, class... Arguments>
void launch(cudaStream_t stream, const LaunchConfig& config, void (*kernel)(Parameters...), Arguments... arguments) {
  if (config.grid.x == 0 || config.grid.y == 0 || config.grid.z == 0) return;
  check_cuda(allow_launch(config, reinterpret_cast<const void*>(kernel)), "cudaFuncSetAttribute");
  const RuntimeLaunch as_runtime(stream, config);
  check_cuda(cudaLaunchKernelEx(&as_runtime.config, kernel, static_cast<Parameters>(arguments)...),
             "cudaLaunchKernelEx");
}

/// Whether the current device holds a cluster of the configuration, whatever its grid; no if it refuses to say. Asks
/// the runtime once: it takes its time.
bool holds_cluster(const LaunchConfig& config, const void* kernel);

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace mmrec::kernels
