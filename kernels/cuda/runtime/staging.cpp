#include "kernels/cuda/runtime/staging.h"

#include <cuda_runtime.h>

#include "kernels/cuda/runtime/launch.cuh"

namespace mmrec::kernels {

Staging::Staging() : Staging(nullptr) {
  for (Block& block : blocks_) block.memory = PinnedBuffer<std::byte>(kBlockBytes);
  check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  for (Block& block : blocks_) {
    check_cuda(cudaEventCreateWithFlags(&block.sent, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  }
}

Staging::~Staging() {
  if (stream_ != nullptr) cudaStreamSynchronize(stream_);  // the blocks must not go while a copy reads them
  for (Block& block : blocks_) {
    if (block.sent != nullptr) cudaEventDestroy(block.sent);
  }
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

std::byte* Staging::block() {
  Block& block = blocks_[current_];
  check_cuda(cudaEventSynchronize(block.sent), "cudaEventSynchronize");
  return block.memory.data();
}

void Staging::send(void* to, std::size_t bytes) {
  Block& block = blocks_[current_];
  check_cuda(cudaMemcpyAsync(to, block.memory.data(), bytes, cudaMemcpyHostToDevice, stream_), "cudaMemcpyAsync");
  check_cuda(cudaEventRecord(block.sent, stream_), "cudaEventRecord");
  current_ = 1 - current_;
}

void Staging::finish() { check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

}  // namespace mmrec::kernels
