#include "kernels/cuda/runtime/mark.h"

#include <cuda_runtime.h>

#include "kernels/cuda/runtime/launch.cuh"

namespace mmrec::kernels {

void DestroyStream::operator()(CUstream_st* stream) const { cudaStreamDestroy(stream); }
OwnedStream new_stream(int device) {
  make_current(device);
  CUstream_st* stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  return OwnedStream(stream);
}

Mark::Mark() {
  CUevent_st* event = nullptr;
  check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  event_.reset(event);
}
void Mark::Destroy::operator()(CUevent_st* event) const { cudaEventDestroy(event); }
void Mark::set(CUstream_st* stream) { check_cuda(cudaEventRecord(event_.get(), stream), "cudaEventRecord"); }
void Mark::await(CUstream_st* stream) const {
  check_cuda(cudaStreamWaitEvent(stream, event_.get(), 0), "cudaStreamWaitEvent");
}
void Mark::await() const { check_cuda(cudaEventSynchronize(event_.get()), "cudaEventSynchronize"); }

}  // namespace mmrec::kernels
