// Device, streams, memory, graphs, staged copies and errors.
#include "kernels/cuda/runtime/cuda.h"

#include <cuda_runtime.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>

#include "kernels/cuda/runtime/cublaslt.h"
#include "kernels/cuda/runtime/launch.cuh"

namespace mmrec::kernels {
namespace {

/// The oldest device that the kernels are compiled for.
constexpr int kLeastComputeCapability = 80;

/// Errors after which a context does nothing any more: only a new process has another.
bool destroys_context(cudaError_t code) {
  switch (code) {
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
      return true;
    default:
      return false;
  }
}

class CudaCategory final : public std::error_category {
 public:
  const char* name() const noexcept override { return "cuda"; }
  std::string message(int code) const override { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
  std::error_condition default_error_condition(int code) const noexcept override {
    if (destroys_context(static_cast<cudaError_t>(code))) return std::errc::no_such_device;
    if (code == static_cast<int>(cudaErrorMemoryAllocation)) return std::errc::not_enough_memory;
    return {code, *this};
  }
};

/// The devices whose context an error has destroyed, of the process as contexts are.
class LostDevices {
 public:
  struct Loss {
    cudaError_t code = cudaSuccess;
    std::string reason;  // "call: message"
  };
  /// Keeps the first of a device's.
  void add(int device, cudaError_t code, const char* call) {
    const std::lock_guard lock(mutex_);
    const auto [at, is_first] = losses_.try_emplace(device);
    if (!is_first) return;
    at->second = {code, std::string(call) + ": " + cudaGetErrorString(code)};
    any_.store(true, std::memory_order_release);
  }
  std::optional<Loss> find(int device) const {
    if (!any_.load(std::memory_order_acquire)) return std::nullopt;
    const std::lock_guard lock(mutex_);
    const auto at = losses_.find(device);
    return at == losses_.end() ? std::nullopt : std::optional(at->second);
  }

 private:
  mutable std::mutex mutex_;
  std::map<int, Loss> losses_;
  std::atomic<bool> any_{false};
};

LostDevices& lost_devices() {
  static auto* const devices = new LostDevices;  // outlives objects that go when the process ends
  return *devices;
}

std::string why_lost(int device, const LostDevices::Loss& loss) {
  return "GPU " + std::to_string(device) + " cannot be used since an earlier error (" + loss.reason +
         "); start the process again";
}

/// Throws where the device is lost, whatever a call on it says.
void check_not_lost(int device) {
  if (const auto loss = lost_devices().find(device)) {
    throw std::system_error(std::error_code(static_cast<int>(loss->code), cuda_category()), why_lost(device, *loss));
  }
}

/// The calling thread's device; a lost one does not answer, and the first is as likely as any.
int current_device() {
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) cudaGetLastError();
  return device;
}

}  // namespace

const std::error_category& cuda_category() {
  static const CudaCategory category;
  return category;
}

OutOfDeviceMemory::OutOfDeviceMemory(std::size_t needed, std::size_t free)
    : message_("out of GPU memory (needed " + std::to_string(needed) + " bytes, free " + std::to_string(free) + ")") {}

void check_cuda(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  cudaGetLastError();  // an error that can be recovered from must not show again at the next launch
  const int device = current_device();
  check_not_lost(device);
  if (destroys_context(code)) lost_devices().add(device, code, call);
  throw std::system_error(static_cast<int>(code), cuda_category(), call);
}

int cuda_device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
}

bool has_code_for(std::string_view architectures, int compute_capability) {
  std::istringstream names{std::string(architectures)};
  for (std::string name; names >> name;) {
    const int code = std::atoi(name.c_str());
    if (code == 0) return true;  // "all", "native"
    if (code > compute_capability) continue;
    if (!name.ends_with("-real") || code / 10 == compute_capability / 10) return true;
  }
  return false;
}

std::string cuda_unusable_reason(int device) {
  const auto failed = [&](cudaError_t code, const char* call) {
    cudaGetLastError();
    if (destroys_context(code)) lost_devices().add(device, code, call);
    const auto loss = lost_devices().find(device);
    return loss ? why_lost(device, *loss) : std::string(cudaGetErrorString(code));
  };
  if (const auto loss = lost_devices().find(device)) return why_lost(device, *loss);
  int count = 0;
  if (const cudaError_t code = cudaGetDeviceCount(&count); code != cudaSuccess) {
    return failed(code, "cudaGetDeviceCount");
  }
  if (count == 0) return "no CUDA device";
  if (device < 0 || device >= count) {
    return "found device " + std::to_string(device) + ", expected 0.." + std::to_string(count - 1);
  }
  int major = 0;
  int minor = 0;
  cudaError_t code = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (code == cudaSuccess) code = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (code != cudaSuccess) return failed(code, "cudaDeviceGetAttribute");
  const std::string found = "the device has compute capability " + std::to_string(major) + "." + std::to_string(minor);
  if (10 * major + minor < kLeastComputeCapability) return found + ", expected 8.0 or newer";
  if (!has_code_for(MMREC_CUDA_CODE, 10 * major + minor)) return found + ", this build has code for " MMREC_CUDA_CODE;
  return {};
}

DeviceMemory device_memory(int device) {
  DeviceMemory memory;
  make_current(device);
  check_cuda(cudaMemGetInfo(&memory.free, &memory.total), "cudaMemGetInfo");
  return memory;
}

void make_current(int device) {
  check_not_lost(device);
  if (const cudaError_t code = cudaSetDevice(device); code != cudaSuccess) {
    check_cuda(code, ("GPU " + std::to_string(device) + " gives no context (cudaSetDevice)").c_str());
  }
}

std::string device_name(int device) {
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  return properties.name;
}

void* device_allocate(std::size_t bytes) {
  void* data = nullptr;
  const cudaError_t code = cudaMalloc(&data, bytes);
  if (code == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    check_not_lost(current_device());
    std::size_t free = 0;
    std::size_t total = 0;
    if (cudaMemGetInfo(&free, &total) != cudaSuccess) cudaGetLastError();
    throw OutOfDeviceMemory(bytes, free);
  }
  check_cuda(code, "cudaMalloc");
  return data;
}

void device_free(void* data) noexcept {
  if (data != nullptr) cudaFree(data);
}

void* pinned_allocate(std::size_t bytes) {
  void* data = nullptr;
  const cudaError_t code = cudaMallocHost(&data, bytes);
  if (code == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    throw std::bad_alloc();
  }
  check_cuda(code, "cudaMallocHost");
  return data;
}

void pinned_free(void* data) noexcept {
  if (data != nullptr) cudaFreeHost(data);
}

Cuda::Cuda(int device) : Cuda(device, Streams(device)) {}

Cuda::Cuda(int device, CUstream_st* stream) : Cuda(device, Streams(device, stream)) {}

Cuda::Cuda(int device, Streams streams) : device_(device), streams_(std::move(streams)) {
  cudaDeviceProp properties{};
  check_cuda(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  name_ = properties.name;
  processors_ = properties.multiProcessorCount;
  compute_capability_ = 10 * properties.major + properties.minor;
  l2_bytes_ = static_cast<std::size_t>(properties.l2CacheSize);
  shared_memory_per_block_ = properties.sharedMemPerBlockOptin;
  shared_memory_per_processor_ = properties.sharedMemPerMultiprocessor;
  flags_ = DeviceBuffer<std::uint32_t>(kFlagWords);
  report_ = PinnedBuffer<std::uint32_t>(kReportWords);
  zero(flags_.data(), flags_.size_bytes());
  synchronize();
}

CublasLt& Cuda::blas() {
  if (blas_ == nullptr) {
    blas_workspace_ = DeviceBuffer<std::byte>(CublasLt::kWorkspaceBytes);
    side_blas_workspace_ = DeviceBuffer<std::byte>(CublasLt::kWorkspaceBytes);
    blas_ = std::make_unique<CublasLt>();
  }
  return *blas_;
}

// The current device belongs to the thread, and a session may move between threads.
void Cuda::make_current() const { kernels::make_current(device_); }

Cuda::~Cuda() {
  if (cudaSetDevice(device_) == cudaSuccess) cudaStreamSynchronize(stream());
}

void Cuda::fork() {
  streams_.fork.set(stream());
  streams_.fork.await(side_stream());
}

void Cuda::join() {
  streams_.join.set(side_stream());
  streams_.join.await(stream());
}

void Cuda::follow(Cuda& other) {
  other.streams_.followed.set(other.stream());
  other.streams_.followed.await(stream());
}

void Cuda::transfer(const void* from, void* to, std::size_t bytes, std::size_t count, std::size_t from_stride,
                    std::size_t to_stride, Direction direction) const {
  const cudaMemcpyKind kind = direction == Direction::kIn    ? cudaMemcpyHostToDevice
                              : direction == Direction::kOut ? cudaMemcpyDeviceToHost
                                                             : cudaMemcpyDeviceToDevice;
  if (bytes != 0 && count == 1) {
    check_cuda(cudaMemcpyAsync(to, from, bytes, kind, stream()), "cudaMemcpyAsync");
  } else if (bytes != 0 && count != 0) {
    check_cuda(cudaMemcpy2DAsync(to, to_stride, from, from_stride, bytes, count, kind, stream()), "cudaMemcpy2DAsync");
  }
  if (direction == Direction::kOut) check_cuda(cudaStreamSynchronize(stream()), "cudaStreamSynchronize");
}

void Cuda::zero(std::byte* to, std::size_t stride, std::size_t bytes, std::size_t count) {
  if (bytes == 0 || count == 0) return;
  if (count == 1) return check_cuda(cudaMemsetAsync(to, 0, bytes, stream()), "cudaMemsetAsync");
  check_cuda(cudaMemset2DAsync(to, stride, 0, bytes, count, stream()), "cudaMemset2DAsync");
}

bool Cuda::is_idle() const {
  const cudaError_t code = cudaStreamQuery(stream());
  if (code != cudaErrorNotReady) check_cuda(code, "cudaStreamQuery");
  return code == cudaSuccess;
}

void Cuda::synchronize() { check_cuda(cudaStreamSynchronize(stream()), "cudaStreamSynchronize"); }

Graph::Graph(Cuda& cuda, const std::function<void()>& ops) {
  check_cuda(cudaStreamBeginCapture(cuda.stream(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  cudaGraph_t graph = nullptr;
  try {
    ops();
  } catch (...) {
    if (cudaStreamEndCapture(cuda.stream(), &graph) == cudaSuccess) cudaGraphDestroy(graph);
    cudaGetLastError();
    throw;
  }
  check_cuda(cudaStreamEndCapture(cuda.stream(), &graph), "cudaStreamEndCapture");
  CUgraphExec_st* executable = nullptr;
  const cudaError_t code = cudaGraphInstantiate(&executable, graph, 0);
  cudaGraphDestroy(graph);
  check_cuda(code, "cudaGraphInstantiate");
  executable_.reset(executable);
}

void Graph::Destroy::operator()(CUgraphExec_st* executable) const { cudaGraphExecDestroy(executable); }

void Graph::launch(Cuda& cuda) const {
  check_cuda(cudaGraphLaunch(executable_.get(), cuda.stream()), "cudaGraphLaunch");
}

Staging::Staging() : stream_(new_stream(current_device())) {}

Staging::~Staging() { cudaStreamSynchronize(stream_.get()); }  // the blocks must not go while a copy reads them

std::byte* Staging::block() {
  Block& block = blocks_[current_];
  block.sent.await();
  return block.memory.data();
}

void Staging::send(void* to, std::size_t bytes) {
  Block& block = blocks_[current_];
  check_cuda(cudaMemcpyAsync(to, block.memory.data(), bytes, cudaMemcpyHostToDevice, stream_.get()), "cudaMemcpyAsync");
  block.sent.set(stream_.get());
  current_ = 1 - current_;
}

void Staging::finish() { check_cuda(cudaStreamSynchronize(stream_.get()), "cudaStreamSynchronize"); }

}  // namespace mmrec::kernels
