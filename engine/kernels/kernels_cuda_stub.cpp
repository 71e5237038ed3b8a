// A build without CUDA: what asks for a GPU is told so.
#include "engine/kernels/kernel_backend.h"
#include "mmrec/errors.h"
#include "models/runtime/cuda_device.h"

namespace mmrec::engine {

bool built_with_cuda() { return false; }

std::unique_ptr<KernelBackend> make_cuda_kernels(int /*device*/, void* const* /*stream*/) {
  throw DeviceUnavailable("no usable CUDA device (" + models::cuda_unusable_reason() + ")");
}

}  // namespace mmrec::engine
