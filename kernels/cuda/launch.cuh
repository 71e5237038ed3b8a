// Kernel launches and error checks. Every kernel of this backend is started through launch(), so that launch errors are
// never lost and attributes are set in one place.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/cuda.h"

namespace mmrec::kernels {

/// Throws for any code but cudaSuccess: OutOfDeviceMemory or std::system_error of cuda_category() naming `call`.
void check_cuda(cudaError_t code, const char* call);

struct LaunchConfig {
  dim3 grid;
  dim3 block;
  std::size_t shared_bytes = 0;  // dynamic shared memory
  bool cooperative = false;      // all blocks are resident at once, so they may wait for each other
  unsigned cluster = 1;          // so many consecutive blocks along x are resident at once and share memory (sm_90)
  /// The kernel may start while its predecessor on the stream drains; it must call wait_for_predecessor() (ptx.cuh)
  /// before it reads what the predecessor wrote.
  bool overlap_predecessor = false;
};

/// kernel<<<...>>>(arguments...). Arguments convert to the kernel's parameter types.
template <class... Parameters, class... Arguments>
void launch(cudaStream_t stream, const LaunchConfig& config, void (*kernel)(Parameters...), Arguments... arguments) {
  if (config.grid.x == 0 || config.grid.y == 0 || config.grid.z == 0) return;
  constexpr std::size_t kDefaultShared = std::size_t{48} << 10;
  if (config.shared_bytes > kDefaultShared) {
    check_cuda(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(config.shared_bytes)),
               "cudaFuncSetAttribute");
  }
  cudaLaunchAttribute attributes[3] = {};
  unsigned count = 0;
  if (config.cooperative) {
    attributes[count].id = cudaLaunchAttributeCooperative;
    attributes[count++].val.cooperative = 1;
  }
  if (config.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = config.cluster;
    attributes[count].val.clusterDim.y = 1;
    attributes[count++].val.clusterDim.z = 1;
  }
  if (config.overlap_predecessor) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t launch_config = {};
  launch_config.gridDim = config.grid;
  launch_config.blockDim = config.block;
  launch_config.dynamicSmemBytes = config.shared_bytes;
  launch_config.stream = stream;
  launch_config.attrs = attributes;
  launch_config.numAttrs = count;
  check_cuda(cudaLaunchKernelEx(&launch_config, kernel, static_cast<Parameters>(arguments)...), "cudaLaunchKernelEx");
}

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace mmrec::kernels
