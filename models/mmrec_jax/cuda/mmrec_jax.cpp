// mmrec-jax on a GPU.
#include <algorithm>
#include <cstdint>

#include "kernels/cuda/runtime/cuda.h"  // before the net, whose calls of ops are qualified
#include "models/mmrec_jax/mmrec_jax.h"
#include "models/mmrec_jax/net.h"
#include "models/runtime/cuda/executor.h"

namespace mmrec::models::mmrec_jax {

static Config padded(const Config& config) { return config; }

/// Rows of 64 prompts of 512 tokens where D = 1,024, so that their recurrences go side by side: 8 clusters of 16
/// multiprocessors; fewer where activations are wider.
static ChunkPlan chunk_plan(const Config& config, const kernels::Cuda& /*cuda*/) {
  constexpr std::int64_t kElements = std::int64_t{32} << 20;
  return {.tokens = 4096, .tile = 1, .rows = std::clamp<std::int64_t>(kElements / config.model_dim, 4096, 32768)};
}

}  // namespace mmrec::models::mmrec_jax

template mmrec::models::CudaModel mmrec::models::make_cuda_executor(const mmrec_jax::Config&,
                                                                    const mmrec_jax::HostWeights&, Precision, int,
                                                                    bool);
