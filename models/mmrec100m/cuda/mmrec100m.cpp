// MMRec100M on a GPU.
#include "models/mmrec/cuda/chunk_plan.h"
#include "models/mmrec/cuda/ops.h"
#include "models/mmrec100m/net.h"
#include "models/runtime/cuda/executor.h"
#include "models/runtime/cuda/sides.h"

namespace mmrec::models {

static ChunkPlan chunk_plan(const Config100m& config, const kernels::Cuda& cuda) {
  return chunk_plan(config.stack(), cuda);
}

template CudaModel make_cuda_executor(const Config100m&, const HostWeights100m&, Precision, int);

}  // namespace mmrec::models
