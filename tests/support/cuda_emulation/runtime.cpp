// The runtime API but for streams: errors, the device, its memory, which is the host's, and launches.
#include <cuda_runtime.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "faults.h"
#include "sanitizer.h"
#include "streams.h"

extern "C" void mmrec_cuda_emulation() {}  // tells tests (tests/ops/testing.h) that it is linked

namespace mmrec::cuda_emulation {
namespace {

constexpr std::size_t kDefaultShared = std::size_t{48} << 10;
constexpr std::size_t kLargestShared = std::size_t{227} << 10;
constexpr std::align_val_t kAlignment{256};
constexpr std::size_t kLarge = std::size_t{1} << 20;
#if defined(MMREC_ADDRESS_SANITIZER)
constexpr bool kMapsLarge = false;  // mapped memory would lack AddressSanitizer's borders
#else
constexpr bool kMapsLarge = true;
#endif

thread_local cudaError_t last_error = cudaSuccess;
thread_local int device_of_this_thread = 0;

/// What the devices remember, of all host threads. They share the memory.
struct DeviceState {
  struct Allocation {
    std::size_t bytes = 0;
    bool on_device = false;  // else page-locked
  };
  std::mutex mutex;
  std::map<const std::byte*, Allocation> allocations;
  std::size_t allocated = 0;                                          // bytes on the device
  std::map<std::pair<int, const void*>, std::size_t> largest_shared;  // by device and kernel
};
DeviceState& device_state() {
  static auto* state = new DeviceState;  // outlives the objects of the tests that free memory at exit
  return *state;
}

template <class Number = int>
Number from_environment(const char* name, Number otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? static_cast<Number>(std::strtoull(text, nullptr, 10)) : otherwise;
}
int compute_capability() { return from_environment("MMREC_CUDA_EMULATION_CAPABILITY", 90); }
int devices() { return from_environment("MMREC_CUDA_EMULATION_DEVICES", 1); }
int processors() { return from_environment("MMREC_CUDA_EMULATION_PROCESSORS", 4); }
std::size_t device_bytes() { return from_environment("MMREC_CUDA_EMULATION_MEMORY", std::size_t{8} << 30); }

bool is_mapped(std::size_t bytes) { return kMapsLarge && bytes >= kLarge; }
/// Memory of 0xff, NaN in every floating-point type. Large memory is mapped from a file of such bytes over and over:
/// most of it is never touched, and then costs nothing.
void* filled_memory(std::size_t bytes) {
  if (!is_mapped(bytes)) {
    void* const data = ::operator new(bytes, kAlignment, std::nothrow);
    if (data != nullptr) std::memset(data, 0xff, bytes);
    return data;
  }
  static const int file = [] {
    const int made = memfd_create("filled", MFD_CLOEXEC);
    const std::vector<char> pattern(kLarge, '\xff');
    return made >= 0 && write(made, pattern.data(), kLarge) == ssize_t{kLarge} ? made : -1;
  }();
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) return nullptr;
  for (std::size_t at = 0; at < bytes; at += kLarge) {
    void* const part = static_cast<char*>(data) + at;
    const std::size_t size = std::min(kLarge, bytes - at);
    if (mmap(part, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, file, 0) != part) {
      munmap(data, bytes);
      return nullptr;
    }
  }
  return data;
}
void free_memory(void* data, std::size_t bytes) {
  if (is_mapped(bytes)) {
    munmap(data, bytes);
  } else {
    ::operator delete(data, kAlignment);
  }
}

cudaError_t allocate(void** data, std::size_t bytes, bool on_device) {
  *data = nullptr;
  MMREC_FAULT_POINT();
  if (capture_forbids_device_calls()) return set_error(cudaErrorStreamCaptureUnsupported);
  if (bytes == 0) return cudaSuccess;
  DeviceState& state = device_state();
  const std::lock_guard lock(state.mutex);
  if (on_device && bytes > device_bytes() - state.allocated) return set_error(cudaErrorMemoryAllocation);
  *data = filled_memory(bytes);
  if (*data == nullptr) return set_error(cudaErrorMemoryAllocation);
  state.allocations[static_cast<std::byte*>(*data)] = {bytes, on_device};
  if (on_device) state.allocated += bytes;
  count_object(1);
  return cudaSuccess;
}

/// Waits for the device, as freeing memory of it does.
cudaError_t release(void* data, bool on_device) {
  if (capture_forbids_device_calls()) return set_error(cudaErrorStreamCaptureUnsupported);
  if (data == nullptr) return cudaSuccess;
  finish_all();
  DeviceState& state = device_state();
  const std::lock_guard lock(state.mutex);
  const auto found = state.allocations.find(static_cast<std::byte*>(data));
  if (found == state.allocations.end() || found->second.on_device != on_device) return set_error(cudaErrorInvalidValue);
  const std::size_t bytes = found->second.bytes;
  if (on_device) state.allocated -= bytes;
  state.allocations.erase(found);
  free_memory(data, bytes);
  count_object(-1);
  return lasting_fault();
}

/// Memory of the host that is not page-locked.
bool is_pageable(const void* data) {
  DeviceState& state = device_state();
  const std::lock_guard lock(state.mutex);
  const auto* address = static_cast<const std::byte*>(data);
  auto after = state.allocations.upper_bound(address);
  if (after == state.allocations.begin()) return true;
  --after;
  return address >= after->first + after->second.bytes;
}

void copy_rows(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch, std::size_t width,
               std::size_t height) {
  for (std::size_t row = 0; row < height; ++row) {
    std::memcpy(static_cast<std::byte*>(to) + row * to_pitch, static_cast<const std::byte*>(from) + row * from_pitch,
                width);
  }
}

}  // namespace

int current_device() { return device_of_this_thread; }

cudaError_t set_error(cudaError_t code) {
  if (code != cudaSuccess) last_error = code;
  return code;
}

cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, std::function<void()> body) {
  MMREC_FAULT_POINT();
  Grid grid;
  grid.grid = config.gridDim;
  grid.block = config.blockDim;
  grid.shared_bytes = config.dynamicSmemBytes;
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config.attrs[i];
    if (attribute.id == cudaLaunchAttributeCooperative) grid.cooperative = attribute.val.cooperative != 0;
    if (attribute.id == cudaLaunchAttributeClusterDimension) {
      grid.cluster_size = attribute.val.clusterDim.x;
      if (attribute.val.clusterDim.y != 1 || attribute.val.clusterDim.z != 1) return set_error(cudaErrorInvalidValue);
    }
  }
  const std::size_t threads = std::size_t{grid.block.x} * grid.block.y * grid.block.z;
  const std::size_t blocks = std::size_t{grid.grid.x} * grid.grid.y * grid.grid.z;
  const bool fits = threads != 0 && threads <= 1024 && grid.block.z <= 64 && blocks != 0 && grid.grid.x < 1U << 31 &&
                    grid.grid.y < 1U << 16 && grid.grid.z < 1U << 16 && grid.cluster_size != 0 &&
                    grid.cluster_size <= 16 && grid.grid.x % grid.cluster_size == 0;
  if (!fits) return set_error(cudaErrorInvalidConfiguration);
  if (device_of(config.stream) != current_device()) return set_error(cudaErrorInvalidDevice);
  DeviceState& state = device_state();
  {
    const std::lock_guard lock(state.mutex);
    const auto limit = state.largest_shared.find({current_device(), kernel});
    if (grid.shared_bytes > (limit == state.largest_shared.end() ? kDefaultShared : limit->second)) {
      return set_error(cudaErrorInvalidValue);
    }
  }
  if (grid.cooperative) {
    int per_processor = 0;
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, kernel, static_cast<int>(threads), grid.shared_bytes);
    if (blocks > static_cast<std::size_t>(per_processor * processors())) {
      return set_error(cudaErrorCooperativeLaunchTooLarge);
    }
  }
  enqueue(config.stream, [grid, body = std::move(body)] { run(grid, body); });
  return cudaSuccess;
}

}  // namespace mmrec::cuda_emulation

using namespace mmrec::cuda_emulation;

const char* cudaGetErrorName(cudaError_t code) {
#define MMREC_NAME(name, value) \
  if (code == name) return #name;
  MMREC_CUDA_ERRORS(MMREC_NAME)
#undef MMREC_NAME
  return "unrecognized error code";
}
const char* cudaGetErrorString(cudaError_t code) { return cudaGetErrorName(code); }
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

// --- Devices ---------------------------------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* count) {
  MMREC_FAULT_POINT();
  *count = devices();
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device();
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  MMREC_FAULT_POINT();
  if (device < 0 || device >= devices()) return set_error(cudaErrorInvalidDevice);
  device_of_this_thread = device;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  MMREC_FAULT_POINT();
  if (device < 0 || device >= devices()) return set_error(cudaErrorInvalidDevice);
  *properties = {};
  std::strcpy(properties->name, "emulated device");
  properties->sharedMemPerBlockOptin = kLargestShared;
  properties->sharedMemPerMultiprocessor = kLargestShared + 1024;
  properties->multiProcessorCount = processors();
  properties->major = compute_capability() / 10;
  properties->minor = compute_capability() % 10;
  properties->l2CacheSize = 4 << 20;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp properties;
  const cudaError_t code = cudaGetDeviceProperties(&properties, device);
  if (code == cudaSuccess)
    *value = attribute == cudaDevAttrComputeCapabilityMajor ? properties.major : properties.minor;
  return code;
}

// --- Memory ----------------------------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** data, std::size_t bytes) { return allocate(data, bytes, true); }
cudaError_t cudaFree(void* data) { return release(data, true); }
cudaError_t cudaMallocHost(void** data, std::size_t bytes) { return allocate(data, bytes, false); }
cudaError_t cudaFreeHost(void* data) { return release(data, false); }
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  MMREC_FAULT_POINT();
  DeviceState& state = device_state();
  const std::lock_guard lock(state.mutex);
  *total = device_bytes();
  *free = device_bytes() - state.allocated;
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  return cudaMemcpy2DAsync(to, bytes, from, bytes, bytes, 1, kind, stream);
}
cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                              std::size_t width, std::size_t height, cudaMemcpyKind, cudaStream_t stream) {
  MMREC_FAULT_POINT();
  if (width > to_pitch || width > from_pitch) return set_error(cudaErrorInvalidValue);
  if (width == 0 || height == 0) return cudaSuccess;
  const bool captured = is_capturing(stream);
  if (!captured && is_pageable(from)) {  // staged before the call returns
    const auto staged = std::make_shared<std::byte[]>(width * height);
    copy_rows(staged.get(), width, from, from_pitch, width, height);
    enqueue(stream, [=] { copy_rows(to, to_pitch, staged.get(), width, width, height); });
  } else {
    enqueue(stream, [=] { copy_rows(to, to_pitch, from, from_pitch, width, height); });
  }
  if (!captured && is_pageable(to)) finish(stream);  // the call returns when the data has arrived
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  return cudaMemset2DAsync(to, bytes, value, bytes, 1, stream);
}
cudaError_t cudaMemset2DAsync(void* to, std::size_t pitch, int value, std::size_t width, std::size_t height,
                              cudaStream_t stream) {
  MMREC_FAULT_POINT();
  if (width > pitch) return set_error(cudaErrorInvalidValue);
  if (width == 0 || height == 0) return cudaSuccess;
  enqueue(stream, [=] {
    for (std::size_t row = 0; row < height; ++row) {
      std::memset(static_cast<std::byte*>(to) + row * pitch, value, width);
    }
  });
  return cudaSuccess;
}

// --- Kernels ---------------------------------------------------------------------------------------------------------

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  MMREC_FAULT_POINT();
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || static_cast<std::size_t>(value) > kLargestShared) return set_error(cudaErrorInvalidValue);
  DeviceState& state = device_state();
  const std::lock_guard lock(state.mutex);
  state.largest_shared[{current_device(), kernel}] = std::max(kDefaultShared, static_cast<std::size_t>(value));
  return cudaSuccess;
}
/// One block of more than 512 threads or half the shared memory, four of up to 256 and a quarter, else two.
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int threads,
                                                          std::size_t shared_bytes) {
  *blocks = threads > 1024 || shared_bytes > kLargestShared      ? 0
            : threads > 512 || 2 * shared_bytes > kLargestShared ? 1
            : threads > 256 || 4 * shared_bytes > kLargestShared ? 2
                                                                 : 4;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*, const cudaLaunchConfig_t* config) {
  *clusters = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension && attribute.val.clusterDim.x > 16) *clusters = 0;
  }
  return cudaSuccess;
}
