// One decode step of a whole model by one persistent kernel: every weight is read once, and the stream of weights never
// waits for the chain of dependent stages.
//
// A block per multiprocessor, all resident: 8 warps that multiply and one that copies. A block owns a run of channels
// in every matrix whose outputs are channels (so q, v, z, both gates, γ, h and the residual stream of a channel meet in
// the block that owns it), and runs of the hidden units and of the head's rows. The copying warp walks the block's rows
// of all matrices in the order of their use through a ring in shared memory, as far ahead as the ring is deep, across
// stages and layers: weights do not depend on activations. What crosses blocks are vectors: z and k; the decay
// networks' hidden units; y; the ffn's hidden units; x. They go through L2 as exchange.cuh describes, every element
// written once per step, into one of two sets that take turns; the other one is filled with ones again meanwhile. So
// there is no barrier of the grid. Reading a vector of which little is there would take bandwidth from the blocks that
// still wait for weights: hence a block announces, by one relaxed addition, that it is about to publish its part, and a
// reader starts when all have announced. Announcements carry no data and order nothing.
//
// Stages of a layer (rows that a block multiplies, in channels c, hidden units g and f; input):
//   gate     2c  h₋₁, known before the step: multiplied while x is still on its way
//   project  4c  u = rmsnorm(x), computed by every block for itself            -> z, k
//   hide     c + 2g  z; k                                                      -> hidden units
//   advance  2c  hidden units: γ, then h, then y = x + h + c + 0.1 v           -> y
//   (two or more memory slots: h -> query, attention by head, output: 3c rows and three exchanges more)
//   widen    f   rmsnorm(y)                                                    -> hidden units
//   narrow   c   hidden units: x = y + ...                                     -> x
//
// Bytes: all weights once, ≈ 16 D² elements a layer for F = 4 D; vectors once per block from L2, ≈ 21 D bytes a layer
// and sequence in 16 bits.
// Time, as a model: a stage costs its share of the bytes, or where that is less its latency: one trip to L2 and back, a
// barrier of the block, products at shared memory's speed (4 × the stream's), the sum over 8 warps, another trip,
// together about a microsecond. A layer has five. At D = 1024 they take about as long as the layer's 34 MB at 4 TB/s,
// and the ring, 190 KB × 132, holds two thirds of a layer: the stream stops for little. At D = 2048 a layer streams for
// 31 µs and hides them all.
//
// Occupancy: 1 block of 288 threads; latency is covered by the ring, not by warps.
//
// Bits of a sequence do not depend on the batch: tile_product.cuh; sums of squares and of the attention have a fixed
// order of their own.
#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/decode_block.cuh"
#include "kernels/cuda/launch.cuh"

namespace mmrec::kernels {
namespace {

constexpr int kThreads = 32 * (kTileWarps + 1);

template <class A>
__device__ void stream_model(const DecodeParams<A>& p, const DecodeLayer<Device, A>* layers, Ring ring) {
  const DecodeShape& shape = p.op.shape;
  const Share share(shape);
  const std::uint64_t hint = ptx::evict_first();
  for (int layer = 0; layer < shape.layers; ++layer) {
    for (int i = 0; i < static_cast<int>(Product::kCount); ++i) {
      const auto product = static_cast<Product>(i);
      const bool attends = product == Product::kMemoryQ || product == Product::kMemoryOut;
      if (attends && p.op.slots < 2) continue;
      stream(share.of(product, layers[layer], shape, p.plan.panel_bytes), ring, hint);
    }
  }
  stream(segment(p.op.head, share.vocab, 1, shape.vocab, shape.dim), ring, hint);
}

template <class A>
__global__ void __launch_bounds__(kThreads, 1) decode_kernel(const __grid_constant__ DecodeParams<A> p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  auto* shared = ptx::shared_memory<std::byte>();
  const Ring ring(shared, p.plan);
  if (threadIdx.x == 0) ring.init();
  auto* layers = reinterpret_cast<DecodeLayer<Device, A>*>(shared + p.plan.layers);
  constexpr int kWords = sizeof(DecodeLayer<Device, A>) / sizeof(std::uint64_t);
  for (int i = static_cast<int>(threadIdx.x); i < p.op.shape.layers * kWords; i += kThreads) {
    reinterpret_cast<std::uint64_t*>(layers)[i] = reinterpret_cast<const std::uint64_t*>(p.op.layers)[i];
  }
  __syncthreads();
  if (threadIdx.x / 32 == kTileWarps) {
    stream_model(p, layers, ring);
  } else {
    DecodeBlock<A>(p, shared, layers, ring).run();
  }
#endif
}

DecodePlan plan_for(const Cuda& cuda, const DecodeShape& shape, std::size_t element) {
  int shared = 0;
  check_cuda(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, cuda.device()),
             "cudaDeviceGetAttribute");
  return make_decode_plan(shape, static_cast<int>(element), cuda.processors(), shared);
}

}  // namespace

bool decode_step_supported(const Cuda& cuda, const DecodeShape& shape, std::size_t element) {
  constexpr int kLeastCapability = 90;
  if (cuda.compute_capability() < kLeastCapability || shape.batch < 1 || shape.batch > kTileColumns) return false;
  const auto whole_pieces = [&](std::int64_t size) {
    return size > 0 && size * static_cast<std::int64_t>(element) % kPieceBytes == 0;
  };
  if (!whole_pieces(shape.dim) || !whole_pieces(shape.ffn) || !whole_pieces(shape.gate_hidden)) return false;
  return plan_for(cuda, shape, element).slots >= kLeastSlots;
}

std::size_t decode_exchange_bytes(const Cuda& /*cuda*/, const DecodeShape& shape, std::size_t element) {
  DecodePlan plan;
  lay_out_exchange(plan, shape, static_cast<std::int64_t>(element));
  return static_cast<std::size_t>(plan.header_bytes + 2 * plan.set_bytes);
}

void decode_exchange_clear(Cuda& cuda, const DecodeShape& shape, std::size_t element, void* exchange) {
  DecodePlan plan;
  lay_out_exchange(plan, shape, static_cast<std::int64_t>(element));
  cuda.zero(exchange, static_cast<std::size_t>(plan.header_bytes));
  check_cuda(cudaMemsetAsync(static_cast<std::byte*>(exchange) + plan.header_bytes, 0xff,
                             static_cast<std::size_t>(2 * plan.set_bytes), cuda.stream()),
             "cudaMemsetAsync");
}

template <class A>
void decode_step(Cuda& cuda, const DecodeStep<Device, A>& op) {
  const DecodeParams<A> params = {.op = op, .plan = plan_for(cuda, op.shape, sizeof(A))};
  launch(cuda.stream(),
         {.grid = dim3(static_cast<unsigned>(cuda.processors())),
          .block = dim3(kThreads),
          .shared_bytes = static_cast<std::size_t>(params.plan.shared_bytes),
          .cooperative = true},
         decode_kernel<A>, params);
}

template void decode_step(Cuda&, const DecodeStep<Device, float>&);
template void decode_step(Cuda&, const DecodeStep<Device, BFloat16>&);
template void decode_step(Cuda&, const DecodeStep<Device, Float16>&);

}  // namespace mmrec::kernels
