#include "kernels/cuda/runtime/mark.h"

#include <cuda_runtime.h>

#include "kernels/cuda/runtime/launch.cuh"

namespace mmrec::kernels {

Mark::Mark() {
  CUevent_st* event = nullptr;
  check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  event_.reset(event);
}
void Mark::Destroy::operator()(CUevent_st* event) const { cudaEventDestroy(event); }
void Mark::set(const Cuda& cuda) { check_cuda(cudaEventRecord(event_.get(), cuda.stream()), "cudaEventRecord"); }
void Mark::await(const Cuda& cuda) const {
  check_cuda(cudaStreamWaitEvent(cuda.stream(), event_.get(), 0), "cudaStreamWaitEvent");
}

}  // namespace mmrec::kernels
