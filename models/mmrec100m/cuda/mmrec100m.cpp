// MMRec100M on a GPU.
#include "models/mmrec/cuda/chunk_plan.h"
#include "models/mmrec/cuda/ops.h"
#include "models/mmrec100m/net.h"
#include "models/runtime/cuda/executor.h"
#include "models/runtime/cuda/padding.h"
#include "models/runtime/cuda/sides.h"

namespace mmrec::models::mmrec100m {

static Config padded(Config config) {
  config.num_heads = 1;  // without effect
  config.padding = head_padding(config.expert_dim, config.num_heads);
  config.expert_dim += config.padding;
  config.ffn_dim = padded_size(config.ffn_dim);
  return config;
}

static ChunkPlan chunk_plan(const Config& config, const kernels::Cuda& cuda) {
  ChunkPlan plan = chunk_plan(config.stack(), cuda);
  plan.part = plan.alone = 0;  // two stacks side by side are enough
  return plan;
}

}  // namespace mmrec::models::mmrec100m

template mmrec::models::CudaModel mmrec::models::make_cuda_executor(const mmrec100m::Config&,
                                                                    const mmrec100m::HostWeights&, Precision, int,
                                                                    bool);
