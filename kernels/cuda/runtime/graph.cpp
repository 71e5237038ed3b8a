#include "kernels/cuda/runtime/graph.h"

#include <cuda_runtime.h>

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

}  // namespace mmrec::kernels
