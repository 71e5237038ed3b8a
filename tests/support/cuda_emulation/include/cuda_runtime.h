// Stands in for CUDA's header of this name: the language of kernels and the part of the runtime API that kernels/cuda
// and its tests use. Values and meanings are CUDA's; work is done when it is enqueued.
#pragma once

#include <cstddef>
#include <tuple>
#include <utility>

#include "cuda_language.h"
#include "streams.h"

#define CUDART_VERSION 13000

/// The error codes that kernels/cuda, the emulation and their tests know, and their numbers.
#define MMREC_CUDA_ERRORS(X)                 \
  X(cudaSuccess, 0)                          \
  X(cudaErrorInvalidValue, 1)                \
  X(cudaErrorMemoryAllocation, 2)            \
  X(cudaErrorInvalidConfiguration, 9)        \
  X(cudaErrorInvalidDevice, 101)             \
  X(cudaErrorECCUncorrectable, 214)          \
  X(cudaErrorNvlinkUncorrectable, 220)       \
  X(cudaErrorSymbolNotFound, 500)            \
  X(cudaErrorNotReady, 600)                  \
  X(cudaErrorIllegalAddress, 700)            \
  X(cudaErrorLaunchTimeout, 702)             \
  X(cudaErrorAssert, 710)                    \
  X(cudaErrorHardwareStackError, 714)        \
  X(cudaErrorIllegalInstruction, 715)        \
  X(cudaErrorMisalignedAddress, 716)         \
  X(cudaErrorInvalidAddressSpace, 717)       \
  X(cudaErrorInvalidPc, 718)                 \
  X(cudaErrorLaunchFailure, 719)             \
  X(cudaErrorCooperativeLaunchTooLarge, 720) \
  X(cudaErrorStreamCaptureUnsupported, 900)  \
  X(cudaErrorStreamCaptureInvalidated, 901)  \
  X(cudaErrorStreamCaptureUnjoined, 904)     \
  X(cudaErrorUnknown, 999)
#define MMREC_ENUMERATOR(name, value) name = value,
enum cudaError_t { MMREC_CUDA_ERRORS(MMREC_ENUMERATOR) };
#undef MMREC_ENUMERATOR
const char* cudaGetErrorName(cudaError_t code);
const char* cudaGetErrorString(cudaError_t code);
cudaError_t cudaGetLastError();

// --- Devices ---------------------------------------------------------------------------------------------------------
struct cudaDeviceProp {
  char name[256];
  std::size_t sharedMemPerBlockOptin;
  std::size_t sharedMemPerMultiprocessor;
  int multiProcessorCount;
  int major;
  int minor;
  int l2CacheSize;
};
enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor = 75, cudaDevAttrComputeCapabilityMinor = 76 };
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess = 0, cudaDriverEntryPointSymbolNotFound = 1 };
enum : unsigned long long { cudaEnableDefault = 0 };
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version,
                                             unsigned long long flags, cudaDriverEntryPointQueryResult* found);

// --- Streams and events ----------------------------------------------------------------------------------------------
using cudaStream_t = CUstream_st*;
using cudaEvent_t = CUevent_st*;
enum : unsigned { cudaStreamNonBlocking = 1 };
enum : unsigned { cudaEventDefault = 0, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2 };
enum : unsigned { cudaEventWaitDefault = 0, cudaEventRecordDefault = 0 };
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr);
cudaError_t cudaEventSynchronize(cudaEvent_t event);

// --- Memory ----------------------------------------------------------------------------------------------------------
enum cudaMemcpyKind {
  cudaMemcpyHostToHost,
  cudaMemcpyHostToDevice,
  cudaMemcpyDeviceToHost,
  cudaMemcpyDeviceToDevice,
  cudaMemcpyDefault
};
cudaError_t cudaMalloc(void** data, std::size_t bytes);
template <class T>
cudaError_t cudaMalloc(T** data, std::size_t bytes) {
  return cudaMalloc(reinterpret_cast<void**>(data), bytes);
}
cudaError_t cudaFree(void* data);
cudaError_t cudaMallocHost(void** data, std::size_t bytes);
template <class T>
cudaError_t cudaMallocHost(T** data, std::size_t bytes) {
  return cudaMallocHost(reinterpret_cast<void**>(data), bytes);
}
cudaError_t cudaFreeHost(void* data);
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total);
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream = nullptr);
cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                              std::size_t width, std::size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream = nullptr);
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream = nullptr);
cudaError_t cudaMemset2DAsync(void* to, std::size_t pitch, int value, std::size_t width, std::size_t height,
                              cudaStream_t stream = nullptr);

// --- Graphs ----------------------------------------------------------------------------------------------------------
using cudaGraph_t = CUgraph_st*;
using cudaGraphExec_t = CUgraphExec_st*;
enum cudaStreamCaptureMode {
  cudaStreamCaptureModeGlobal,
  cudaStreamCaptureModeThreadLocal,
  cudaStreamCaptureModeRelaxed
};
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags = 0);
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);

// --- Launches --------------------------------------------------------------------------------------------------------
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
  cudaFuncAttributeNonPortableClusterSizeAllowed = 15
};
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value);
template <class... Parameters>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), cudaFuncAttribute attribute, int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel, int threads,
                                                          std::size_t shared_bytes);
template <class... Parameters>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void (*kernel)(Parameters...), int threads,
                                                          std::size_t shared_bytes) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, reinterpret_cast<const void*>(kernel), threads,
                                                       shared_bytes);
}

enum cudaLaunchAttributeID {
  cudaLaunchAttributeCooperative = 2,
  cudaLaunchAttributeClusterDimension = 4,
  cudaLaunchAttributeProgrammaticStreamSerialization = 6,
};
union cudaLaunchAttributeValue {
  int cooperative;
  int programmaticStreamSerializationAllowed;
  struct {
    unsigned x, y, z;
  } clusterDim;
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  cudaLaunchAttributeValue val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim;
  dim3 blockDim;
  std::size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};

/// One, if the cluster is one that launches take.
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void* kernel, const cudaLaunchConfig_t* config);
template <class... Parameters>
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, void (*kernel)(Parameters...),
                                           const cudaLaunchConfig_t* config) {
  return cudaOccupancyMaxActiveClusters(clusters, reinterpret_cast<const void*>(kernel), config);
}

namespace mmrec::cuda_emulation {
/// Returns `code`, which cudaGetLastError() then gives if it is an error.
cudaError_t set_error(cudaError_t code);
cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, std::function<void()> body);
}  // namespace mmrec::cuda_emulation

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  // Parameters are copied when the kernel is enqueued, and again for every thread by the call.
  std::tuple<Parameters...> parameters(std::forward<Arguments>(arguments)...);
  return mmrec::cuda_emulation::launch(*config, reinterpret_cast<const void*>(kernel),
                                       [kernel, parameters] { std::apply(kernel, parameters); });
}
