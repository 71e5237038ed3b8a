// Drawing tokens of rows that the blocks of a cluster share (sm_90). See sample.cu.
#include "kernels/cuda/sample/algo.h"
#include "kernels/cuda/sample/few.cuh"

namespace mmrec::kernels {

void sample_tokens_by_clusters(Cuda& cuda, int blocks, const SampleTokens<Device>& op) {
  sampling::launch_sample<true>(cuda, blocks, op);
}

}  // namespace mmrec::kernels
