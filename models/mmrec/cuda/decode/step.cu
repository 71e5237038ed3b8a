// One decode step of a whole model by one persistent kernel: every weight is read once, and the stream of weights never
// waits for the chain of dependent stages.
//
// A block for almost every multiprocessor, all resident: 8 warps that multiply and one that copies. A block owns a run
// of channels in every matrix whose outputs are channels (so q, v, z, both gates, γ, h and the residual stream of a
// channel meet in the block that owns it), and runs of the hidden units and of the head's rows. The copying warp walks
// the block's rows of all matrices in the order of their use through a ring in shared memory, as far ahead as the ring
// is deep, across stages and layers: weights do not depend on activations. What crosses blocks are vectors: the
// decay networks' hidden units; y; the ffn's hidden units; x. They go through L2 as element.cuh describes, every
// element written once per step, into one of two sets that take turns; the other one is filled with ones again
// meanwhile. So there is no barrier of the grid.
//
// Stages of a layer (rows that a block multiplies, in channels c, hidden units g and f; input):
//   gate     2c  h₋₁, known before the step: multiplied while x is still on its way
//   hide     2g  u = rmsnorm(x), computed by every block for itself            -> hidden units
//   project  4c  u again, while hidden units are on their way: q, v, z, W_mz z
//            (3c, without q, where there is nothing to attend to)
//   advance  2c  hidden units: γ, then h, then y = x + h + c + 0.1 v           -> y
//   (two or more memory slots: h -> query, attention by head, output: 2c rows and three exchanges more)
//   widen    f   rmsnorm(y)                                                    -> hidden units
//   narrow   c   hidden units: x = y + ...                                     -> x
//
// There are three algorithms (choose_decode() says when each runs): BatchBlock for several sequences and SingleBlock
// for one, of a plain or a quantised model, and ClusterBlock for one sequence of a small model, in one cluster of
// blocks.
// These files serve all three:
//   stages.cuh       the table of stages
//   plan.cuh         which block owns which rows, and where data lies; of a cluster cluster_plan.cuh
//   stream.cuh       the ring of weights, and the warps that fill it
//   context.cuh      what a warp has at hand, and epilogues, from sums to what other blocks read
// and what they differ in: the transport, through_l2.cuh with l2_inputs.cuh or through_cluster.cuh, and the product.
//
// Bytes: all weights once, ≈ 16 D² elements a layer for F = 4 D; vectors once per block from L2, ≈ 21 D bytes a layer
// and sequence in 16 bits.
// Time: a stage costs its share of the bytes, or where that is less its latency: some 1,000 clocks from a block's store
// to the others' registers, through L2, and the instructions from the input to the outputs, each of which waits for the
// one before: together about 1.6 us on an H200 where D = 384. A layer has five such stages. The ring holds some 200 KB
// × 132, of D = 1024 two thirds of a layer.
//
// Occupancy: 1 block of 288 threads; latency is covered by the ring, not by warps.
//
// Bits of a sequence do not depend on the batch: tile_product.cuh; sums of squares and of the attention have a fixed
// order of their own.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <type_traits>

#include "kernels/cuda/runtime/launch.cuh"
#include "models/mmrec/cuda/decode/batch.cuh"
#include "models/mmrec/cuda/decode/cluster.cuh"
#include "models/mmrec/cuda/decode/single.cuh"
#include "models/mmrec/cuda/ops.h"

namespace mmrec::kernels {
namespace {

struct DecodeChoice {
  DecodeAlgo algo = DecodeAlgo::kNone;
  int blocks = 0;
  DecodePlan plan;
};

/// The one function that decides which algorithm a step takes. Figures are of an H200 (docs/performance.md), in bf16.
/// For steps that attend to memory slots, or do not: the choice is the same. kNone, too, where shape.algo asks for one
/// that does not serve the shape.
template <class A>
DecodeChoice choose_decode(const Cuda& cuda, const DecodeShape& s, bool attends) {
  const DecodeChoice none;
  constexpr auto kElement = static_cast<int>(sizeof(A));
  constexpr int kLeastCapability = 90;
  const auto may_be = [&](DecodeAlgo algo) { return s.algo == DecodeAlgo::kAuto || s.algo == algo; };
  const auto whole = [](std::int64_t size, int bytes) { return size > 0 && size * kElement % bytes == 0; };
  const auto all_whole = [&](int bytes) {
    return whole(s.dim, bytes) && whole(s.gate_hidden, bytes) && whole(s.ffn, bytes);
  };
  if (cuda.compute_capability() < kLeastCapability || s.stacks > cuda.processors() || s.batch < 1 ||
      s.batch > kTileColumns || !all_whole(kPieceBytes)) {
    return none;
  }
  const auto shared = static_cast<int>(cuda.shared_memory_per_block());

  // A small model's step is a chain of exchanges: 1.15 us a stage within a cluster, 1.6 us through L2. The bundled
  // model makes 18,590 tokens/s.
  if (std::is_same_v<A, BFloat16> && may_be(DecodeAlgo::kCluster) && is_for_cluster(s)) {
    const DecodePlan plan = make_cluster_plan(s, attends, shared);
    if (plan.slots >= kLeastClusterSlots && holds_decode_cluster(cuda))
      return {DecodeAlgo::kCluster, kClusterBlocks, plan};
  }
  // As few blocks as own no more channels each than one on every multiprocessor of the step's share would: each waits
  // for all others.
  const std::int64_t channels = ceil_div(s.dim, std::max<std::int64_t>(cuda.processors() / s.stacks, 1));
  const auto blocks = static_cast<int>(ceil_div(s.dim, channels));
  // A step of a quantised model reads int8 and int4 numbers: half of the bytes of bf16, or fewer. That pays from so
  // many bytes of a plain layer on; with fewer, stages take their latency. Both networks' hidden units have one scale
  // (l2_inputs.cuh), which is so up to kMostHidden.
  constexpr std::int64_t kLeastBytes = std::int64_t{48} << 20;
  constexpr std::int64_t kMostHidden = 2048;
  const bool compact_pays =
      s.algo == DecodeAlgo::kCompact || (may_be(DecodeAlgo::kCompact) && layer_bytes(s, kElement) >= kLeastBytes);
  if (std::is_same_v<A, BFloat16> && s.formats.are_compact() && compact_pays && s.gate_hidden <= kMostHidden &&
      s.stacks == 1 && all_whole(kStepBytes)) {
    const DecodePlan plan =
        make_decode_plan(s, attends, kElement, blocks, shared, s.batch == 1, kSlotRowBytes[0], s.formats);
    if (plan.slots >= kLeastSlots) return {DecodeAlgo::kCompact, blocks, plan};
  }
  // One sequence is too little work to hide a stage's chain of instructions, so every stage has code of its own, which
  // takes 16 bits and whole steps of the product alone. 93 % of a copy where D = 2048, 64 % where D = 1024.
  if (sizeof(A) == 2 && s.batch == 1 && may_be(DecodeAlgo::kSingle) && all_whole(kStepBytes)) {
    const DecodePlan plan = make_decode_plan(s, attends, kElement, blocks, shared, true);
    if (plan.slots >= kLeastSlots) return {DecodeAlgo::kSingle, blocks, plan};
  }
  // Several share the reading of the weights: where D = 2048 at 90, 86 and 75 % of a copy for 2, 4 and 8 on an H100.
  if (may_be(DecodeAlgo::kBatch)) {
    const DecodePlan plan = make_decode_plan(s, attends, kElement, blocks, shared, false);
    if (plan.slots >= kLeastSlots) return {DecodeAlgo::kBatch, blocks, plan};
  }
  return none;
}

/// Computes once, by all threads, which rows of each layer's matrices belong to the block.
template <bool kCompact, class A>
__device__ void find_shares(const DecodeParams<A>& p, LayerShare* layers) {
  const DecodeStep<Device, A>& op = p.op;
  const auto owned = [&](Owned what) { return p.plan.splits[what].mine(); };
  const auto count = static_cast<int>(op.shape.layers);
  for (auto layer = static_cast<int>(threadIdx.x); layer <= count; layer += static_cast<int>(blockDim.x)) {
    LayerShare& share = layers[layer];
    const auto rows = [&](Product product, const void* weight, int skipped = 0) {  // slices
      const ProductShape& shape = p.plan.products[product];
      if (weight == nullptr) return;
      share.rows[product] = static_cast<const std::byte*>(weight) + skipped * shape.slice_bytes +
                            std::int64_t{owned(shape.owned).first} * shape.row_bytes;
    };
    const auto of_layer = [&](const auto& m) {
      const void* const in_order[] = {m.gate,       m.gamma_in, m.context_in, m.qvzk,   m.gamma_up,
                                      m.context_up, m.memory_q, m.memory_out, m.ffn_in, m.ffn_out};
#pragma unroll
      for (int i = 0; i < static_cast<int>(Product::kHead); ++i) {
        const auto product = static_cast<Product>(i);
        rows(product, in_order[i], product == Product::kQvzk ? p.plan.first_part : 0);
      }
    };
    if (layer == count) {
      rows(Product::kHead, kCompact ? static_cast<const void*>(op.compact_head) : op.head);
      share.norm1 = op.norm;
      return;
    }
    const DecodeLayer<Device, A> w = op.layers[layer];
    if constexpr (kCompact) {
      of_layer(op.compact_layers[layer]);
    } else {
      of_layer(w);
    }
    int next = 0;
    const auto bias = [&](const float* values, Owned what, std::int64_t more = 0) {
      share.bias[next++] = values == nullptr ? nullptr : values + owned(what).first + more;
    };
    bias(w.gate_bias, Owned::kChannels);
    bias(nullptr, Owned::kChannels);  // of W_mh
    bias(w.gamma_in_bias, Owned::kHidden);
    bias(w.context_in_bias, Owned::kHidden);
    for (int part = 0; part < 4; ++part) bias(w.qvzk_bias, Owned::kChannels, part * op.shape.dim);
    bias(w.gamma_up_bias, Owned::kChannels);
    bias(w.context_up_bias, Owned::kChannels);
    bias(w.memory_q_bias, Owned::kChannels);
    bias(w.memory_out_bias, Owned::kChannels);
    bias(w.ffn_in_bias, Owned::kFfn);
    bias(w.ffn_out_bias, Owned::kChannels);
    share.norm1 = w.norm1;
    share.norm2 = w.norm2;
  }
}

/// The last block to come here leaves the exchange as the next step wants it: the other set's turn. By one warp of a
/// block all of whose threads know whose turn it is now.
template <class A>
__device__ void take_turns(const DecodeParams<A>& p, std::uint32_t turn) {
  auto* header = static_cast<std::uint32_t*>(p.op.exchange);
  if (threadIdx.x % 32 != 0) return;
  if (ptx::add_acq_rel(header + 1, 1) != gridDim.x - 1) return;
  header[0] = 1 - turn;
  header[1] = 0;
}

template <class Block>
constexpr int kThreadsOf = 32 * (kTileWarps + Block::Stream::kWarps);

/// Steps side by side, of as many blocks each: blockIdx.y is the step's.
template <class A, int kStacks>
struct DecodeStacks {
  DecodeParams<A> of[kStacks];
};

/// Block: SingleBlock, BatchBlock or ClusterBlock, of A.
template <class Block, class A, int kStacks>
__global__ void __launch_bounds__(kThreadsOf<Block>, 1)
    decode_kernel(const __grid_constant__ DecodeStacks<A, kStacks> stacks) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  const DecodeParams<A>& p = stacks.of[kStacks == 1 ? 0 : blockIdx.y];
  auto* shared = ptx::shared_memory<std::byte>();
  const typename Block::Ring ring(shared, p.plan);
  const std::uint32_t turn = Block::kIsCluster ? 0 : __ldcg(static_cast<const std::uint32_t*>(p.op.exchange));
  ring.init();
  if constexpr (Block::kIsCluster) ThroughCluster<A>::init(p.plan, shared);
  ptx::mbarrier_init_fence();
  find_shares<Block::kIsCompact>(p, reinterpret_cast<LayerShare*>(shared + p.plan.layers));
  __syncthreads();
  if constexpr (Block::kIsCluster) ptx::cluster_sync();  // barriers have been made everywhere
  DecodeContext<A> context(p, shared);
  if (context.warp >= kTileWarps) {
    stream_model(typename Block::Stream(ring), context);
    if constexpr (!Block::kIsCluster) take_turns(p, turn);
  } else {
    Block(context, ring, turn).run();
  }
#endif
}

LaunchConfig cluster_config(std::size_t shared_bytes, int stacks) {
  return {.grid = dims(kClusterBlocks, stacks),
          .block = dim3(kThreadsOf<ClusterBlock<BFloat16>>),
          .shared_bytes = shared_bytes,
          .cluster = kClusterBlocks};
}

/// Launches kStacks steps. All blocks are resident at once; of clusters, only the blocks of each cluster.
template <class A, int kStacks>
void launch_steps(Cuda& cuda, const DecodeStacks<A, kStacks>& stacks, const DecodeChoice& choice) {
  const auto shared_bytes = static_cast<std::size_t>(choice.plan.shared_bytes);
  const auto launch_blocks = [&]<class Block>() {
    launch(cuda.stream(),
           {.grid = dims(choice.blocks, kStacks),
            .block = dim3(kThreadsOf<Block>),
            .shared_bytes = shared_bytes,
            .cooperative = true},
           decode_kernel<Block, A, kStacks>, stacks);
  };
  if constexpr (std::is_same_v<A, BFloat16>) {
    if (choice.algo == DecodeAlgo::kCluster) {
      return launch(cuda.stream(), cluster_config(shared_bytes, kStacks), decode_kernel<ClusterBlock<A>, A, kStacks>,
                    stacks);
    }
    if constexpr (kStacks == 1) {
      if (choice.algo == DecodeAlgo::kCompact) {
        return choice.plan.single ? launch_blocks.template operator()<SingleBlock<A, true>>()
                                  : launch_blocks.template operator()<BatchBlock<A, true>>();
      }
    }
  }
  if constexpr (sizeof(A) == 2) {
    if (choice.algo == DecodeAlgo::kSingle) return launch_blocks.template operator()<SingleBlock<A>>();
  }
  launch_blocks.template operator()<BatchBlock<A>>();
}

template <class A>
DecodeChoice choice_for(const Cuda& cuda, const DecodeStep<Device, A>& op) {
  DecodeChoice choice = choose_decode<A>(cuda, op.shape, op.slots > 1);
  if (choice.algo == DecodeAlgo::kNone) throw std::invalid_argument("decode_step: unsupported shape");
  return choice;
}

}  // namespace

bool holds_decode_cluster(const Cuda& cuda) {
  return holds_cluster(cluster_config(cuda.shared_memory_per_block(), 1),
                       reinterpret_cast<const void*>(decode_kernel<ClusterBlock<BFloat16>, BFloat16, 1>));
}

bool decode_step_supported(const Cuda& cuda, const DecodeShape& shape, std::size_t element) {
  // What Float16 has an algorithm for, BFloat16 has too.
  const DecodeAlgo algo =
      element == sizeof(float) ? decode_algo<float>(cuda, shape) : decode_algo<Float16>(cuda, shape);
  return algo != DecodeAlgo::kNone;
}

template <class A>
DecodeAlgo decode_algo(const Cuda& cuda, const DecodeShape& shape) {
  return choose_decode<A>(cuda, shape, true).algo;
}

std::size_t decode_exchange_bytes(const Cuda& /*cuda*/, const DecodeShape& shape, std::size_t element) {
  DecodePlan plan;
  lay_out_exchange(plan, shape, static_cast<std::int64_t>(element));
  return static_cast<std::size_t>(DecodePlan::kHeaderBytes + 2 * plan.set_bytes);
}

void decode_exchange_clear(Cuda& cuda, const DecodeShape& shape, std::size_t element, void* exchange) {
  DecodePlan plan;
  lay_out_exchange(plan, shape, static_cast<std::int64_t>(element));
  cuda.zero(exchange, static_cast<std::size_t>(DecodePlan::kHeaderBytes));
  check_cuda(cudaMemsetAsync(static_cast<std::byte*>(exchange) + DecodePlan::kHeaderBytes, 0xff,
                             static_cast<std::size_t>(2 * plan.set_bytes), cuda.stream()),
             "cudaMemsetAsync");
}

template <class A>
void decode_step(Cuda& cuda, const DecodeStep<Device, A>& op) {
  const DecodeChoice choice = choice_for(cuda, op);
  launch_steps<A, 1>(cuda, {{{.op = op, .plan = choice.plan}}}, choice);
}

template <class A>
void decode_steps(Cuda& cuda, const DecodeStep<Device, A>& first, const DecodeStep<Device, A>& second) {
  const DecodeChoice choice = choice_for(cuda, first);
  launch_steps<A, 2>(cuda, {{{.op = first, .plan = choice.plan}, {.op = second, .plan = choice.plan}}}, choice);
}

#define MMREC_INSTANTIATE(A)                                           \
  template DecodeAlgo decode_algo<A>(const Cuda&, const DecodeShape&); \
  template void decode_step(Cuda&, const DecodeStep<Device, A>&);      \
  template void decode_steps(Cuda&, const DecodeStep<Device, A>&, const DecodeStep<Device, A>&);
MMREC_FOR_EACH_TYPE(MMREC_INSTANTIATE)

}  // namespace mmrec::kernels
