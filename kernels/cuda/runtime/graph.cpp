#include "kernels/cuda/runtime/graph.h"

#include <cuda_runtime.h>

#include <utility>

#include "kernels/cuda/runtime/launch.cuh"

namespace mmrec::kernels {

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
  const cudaError_t code = cudaGraphInstantiate(&executable_, graph, 0);
  cudaGraphDestroy(graph);
  check_cuda(code, "cudaGraphInstantiate");
}

Graph::Graph(Graph&& other) noexcept : executable_(std::exchange(other.executable_, nullptr)) {}

Graph& Graph::operator=(Graph&& other) noexcept {
  std::swap(executable_, other.executable_);
  return *this;
}

Graph::~Graph() {
  if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
}

void Graph::launch(Cuda& cuda) const { check_cuda(cudaGraphLaunch(executable_, cuda.stream()), "cudaGraphLaunch"); }

}  // namespace mmrec::kernels
