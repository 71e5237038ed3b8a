// The public kernels on a GPU.
#include <fmt/format.h>

#include <stdexcept>

#include "engine/kernels/kernel_backend.h"
#include "engine/require.h"
#include "kernels/cuda/runtime/cuda.h"
#include "mmrec/errors.h"

namespace mmrec::engine {
namespace {

class CudaKernels final : public KernelsOn<kernels::Cuda> {
 public:
  using KernelsOn::KernelsOn;

  bool is_cuda() const override { return true; }
  void* stream() const override { return backend_.stream(); }
  void synchronize() override {
    begin();
    backend_.synchronize();
  }

 private:
  // The current device belongs to the thread, which the caller may have changed.
  void begin() override { backend_.make_current(); }
};

}  // namespace

bool built_with_cuda() { return true; }

std::unique_ptr<KernelBackend> make_cuda_kernels(int device, void* const* stream) {
  require(device >= 0, "kernel context: device: found {}, expected >= 0", device);
  if (const std::string reason = kernels::cuda_unusable_reason(); !reason.empty()) {
    throw DeviceUnavailable(fmt::format("no usable CUDA device ({})", reason));
  }
  if (stream == nullptr) return std::make_unique<CudaKernels>(device);
  return std::make_unique<CudaKernels>(device, static_cast<CUstream_st*>(*stream));
}

}  // namespace mmrec::engine
