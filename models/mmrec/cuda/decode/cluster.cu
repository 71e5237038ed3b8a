// One decode step of one sequence of a small model in bf16: the stages of step.cu by one cluster of 16 blocks
// (cluster.cuh).
//
// Bytes: all weights once, from L2, where those of such a model stay from step to step; vectors stay in the cluster.
// Time: a step is a chain of 8 exchanges a layer (5 with fewer than two memory slots), on an H200 about 1.15 us a
// stage. Weights come meanwhile, a sixteenth of them to each multiprocessor, as far ahead as its ring of some 190 KB.
//
// Occupancy: 1 block of 384 threads on 16 of the device's multiprocessors; latency is covered by the ring, not by
// warps.
//
// Bits are those of decode_step's other kernels for up to 8 sequences: sums have the order of tile_product.cuh, which
// does not know of blocks.
#include "models/mmrec/cuda/decode/cluster.h"

#include <cuda_runtime.h>

#include "kernels/cuda/runtime/launch.cuh"
#include "models/mmrec/cuda/decode/cluster.cuh"

namespace mmrec::kernels {
namespace {

template <class A>
__device__ void stream_model(const DecodeParams<A>& p, const LayerShare* layers, const Segment* segments,
                             ClusterRing ring) {
  ClusterStream stream(ring);
  const auto copy = [&](Product product, int layer) {
    const int i = static_cast<int>(product);
    stream.copy(segments[i], layers[layer].rows + i);
  };
  const auto count = static_cast<int>(p.op.shape.layers);
#pragma unroll 1
  for (int layer = 0; layer < count; ++layer) {
#pragma unroll 1
    for (int i = static_cast<int>(Product::kQvzk); i < static_cast<int>(Product::kHead); ++i) {
      // One sequence has no product context_in, which gate_z takes in: its turn is gate's.
      const auto product = static_cast<Product>(i) == Product::kContextIn ? Product::kGate : static_cast<Product>(i);
      const bool attends = product == Product::kMemoryQ || product == Product::kMemoryOut;
      if (!attends || p.op.slots > 1) copy(product, layer);
    }
  }
  copy(Product::kHead, count);
  stream.drain();
}

template <class A>
__global__ void __launch_bounds__(kClusterThreads, 1) cluster_kernel(const __grid_constant__ DecodeParams<A> p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  auto* shared = ptx::shared_memory<std::byte>();
  const ClusterRing ring(shared, p.plan);
  ring.init();
  ClusterBlock<A>::init(p.plan, shared);
  ptx::mbarrier_init_fence();
  auto* layers = reinterpret_cast<LayerShare*>(shared + p.plan.layers);
  auto* segments = reinterpret_cast<Segment*>(shared + p.plan.segments);
  find_shares(p, layers, segments, reinterpret_cast<StageShare*>(shared + p.plan.stage_shares));
  __syncthreads();
  ptx::cluster_sync();  // barriers have been made everywhere
  if (threadIdx.x / 32 >= kTileWarps) {
    stream_model(p, layers, segments, ring);
  } else {
    ClusterBlock<A>(p, shared, ring).run();
  }
#endif
}

LaunchConfig config_for(int shared_bytes) {
  return {.grid = dim3(kClusterBlocks),
          .block = dim3(kClusterThreads),
          .shared_bytes = static_cast<std::size_t>(shared_bytes),
          .cluster = kClusterBlocks};
}

}  // namespace

bool holds_decode_cluster(const Cuda& cuda) {
  return holds_cluster(config_for(static_cast<int>(cuda.shared_memory_per_block())), cluster_kernel<BFloat16>);
}

void decode_cluster(Cuda& cuda, const DecodeStep<Device, BFloat16>& op, const DecodePlan& plan) {
  const DecodeParams<BFloat16> params = {.op = op, .plan = plan};
  launch(cuda.stream(), config_for(plan.shared_bytes), cluster_kernel<BFloat16>, params);
}

}  // namespace mmrec::kernels
