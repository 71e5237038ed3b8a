// The blocks of a decode step of one sequence of a small model, a cluster of 16: single.cuh's stages, to the
// bit, with vectors that go from block to block through distributed shared memory.
//
// Such a step is a chain of some eight exchanges a layer, and what it costs is what an exchange and the instructions
// between two of them cost: on an H200 about 1.15 us a stage; through L2 (single.cuh) 1.6 us. Weights come meanwhile
// from L2, where those of such a model stay from step to step, a sixteenth of them to each multiprocessor and as far
// ahead as its ring of some 190 KB. 1 block of 384 threads on 16 multiprocessors.
//
// Besides the course of a step and the attention, which are here:
//   cluster_plan.cuh      which models, and what lies where in shared memory
//   cluster_product.cuh   a warp's weights times a vector
//   through_cluster.cuh   vectors on their way from block to block, and why no use of one meets the next
//
// Work of a warp. Products are cut along k among the 8 warps, in the order of tile_product.cuh; a stage's weights wait
// in registers for the vector. After the stage's one barrier warp u finishes the u-th unit of 8 outputs, lane l its
// output l % 8: the four octets of lanes have several parts of a channel (q, v, z, k), or the same. What is known of a
// channel stays in that warp's registers for the whole step. Of every piece of 16 bytes lane l sends the copy for block
// l % 16. `gate`, whose input is known before the step, is multiplied while hidden units are on their way.
#pragma once

#include "models/mmrec/cuda/decode/attention.cuh"
#include "models/mmrec/cuda/decode/cluster_product.cuh"
#include "models/mmrec/cuda/decode/through_cluster.cuh"

namespace mmrec::kernels {

template <class A>
class ClusterBlock {
  using Through = ThroughCluster<A>;
  using Output = typename Through::Output;
  template <int kSteps>
  using Steps = typename ClusterProduct<A>::template Steps<kSteps>;
  template <int kTiles, int kSteps>
  using Weights = typename ClusterProduct<A>::template Weights<kTiles, kSteps>;
  static constexpr int kVector = DecodeContext<A>::kVector;

 public:
  static constexpr bool kIsCluster = true;
  using Ring = ClusterRing;
  using Stream = ClusterStream;

  __device__ __forceinline__ ClusterBlock(DecodeContext<A>& context, Ring ring, std::uint32_t /*turn*/)
      : c_(context), cluster_(context), product_(context, ring) {}

  __device__ __forceinline__ void run() {
    const auto layers = static_cast<int>(c_.p.op.shape.layers);
    if (c_.thread() < kCountOf<Point>) cluster_.expect(static_cast<Point>(c_.thread()));
    ask_state(0);
    embed();
#pragma unroll 1
    for (int layer = 0; layer < layers; ++layer) {
      run_stage<Stage::kProject>(layer);
      run_stage<Stage::kHide>(layer);
      run_stage<Stage::kGate>(layer);
      run_stage<Stage::kAdvance>(layer);
      if (c_.p.op.slots > 1) {
        float memory[kHeldSlots][kHeldChannels];
        ask_memory(layer, memory);
        run_stage<Stage::kQuery>(layer);
        attend(layer, memory);
        run_stage<Stage::kRecall>(layer);
      }
      run_stage<Stage::kWiden>(layer);
      if (layer + 1 < layers) ask_state(layer + 1);
      run_stage<Stage::kNarrow>(layer);
    }
    if (c_.predicts()) {
      predict(layers);
    } else {
      cluster_.await(Point::kOutput, layers - 1);  // which others send
      cluster_.store_output();
    }
  }

 private:
  static constexpr int kHeldSlots = kClusterMemory / kTileWarps;  // of a warp
  static constexpr int kHeldChannels = kClusterHead / 32;         // of a lane
  using Attention = WarpAttention<kHeldSlots, kHeldChannels>;

  // --- Before the first stage ----------------------------------------------------------------------------------------

  /// h₋₁ of the layer: a lane's four channels.
  __device__ __forceinline__ void ask_state(int layer) {
    const int vector = c_.first_vector();
    state_ = vector * kVector < c_.dim ? c_.state_vector(layer, 0, vector) : make_float4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void put_state() const {
    const int vector = c_.first_vector();
    if (vector * kVector >= c_.dim) return;
    c_.store_vector(operand(), vector, make_float4(1, 1, 1, 1), 1.0F, state_);
  }
  /// The input of the first layer: every block's own doing.
  __device__ __forceinline__ void embed() {
    const int vector = c_.thread();
    if (vector * kVector < c_.dim) {
      const float4 x = c_.embedding_vector(0, vector);
      const float4 w = c_.norm_weight(c_.layers[0].norm1, vector);
      c_.store_vector(cluster_.vector(Point::kOutput), vector, w, 1.0F, x);
      Through::squares_at(c_.p.plan, c_.shared, Point::kOutput)[vector] = squares(x);
    }
    cluster_.embed();
    barrier();
  }
  __device__ __forceinline__ std::byte* operand() const { return c_.shared + c_.p.plan.operand; }

  // --- A stage -------------------------------------------------------------------------------------------------------

  /// The most that a block has of a stage.
  static constexpr int most_tiles(Stage stage) {
    switch (stage) {
      case Stage::kProject:
        return 4 * kClusterUnits;
      case Stage::kHide:
      case Stage::kGate:
      case Stage::kAdvance:
        return 2 * kClusterUnits;
      case Stage::kWiden:
        return kClusterFfnUnits;
      default:
        return kClusterUnits;
    }
  }
  template <Stage kStage>
  __device__ __forceinline__ void run_stage(int layer) {
    constexpr StageInfo kInfo = stage_info(kStage);
    constexpr Point kPoint = kInfo.input;
    constexpr int kTiles = most_tiles(kStage);
    constexpr int kSteps = kStage == Stage::kNarrow ? kClusterFfnSteps : kClusterSteps;
    c_.forget_lane();
    const int row_bytes = c_.template shape_of<kStage>().row_bytes;
    const int all = c_.template rows<kStage>();
    const int steps = row_bytes / kStepBytes;
    const Output out = cluster_.template output<kStage>(layer);
    if constexpr (kStage == Stage::kProject) put_state();  // before the block says that it has read h
    Weights<kTiles, kSteps> weights;
    product_.template take<in_slot(kInfo.first)>(weights, row_bytes, all / kUnit);
    const std::byte* input = operand();
    if constexpr (kStage == Stage::kGate) {
      __syncwarp();  // a warp's steps of h are its own
    } else {
      input = cluster_.vector(kPoint);
      if (kStage != Stage::kProject) cluster_.await(kPoint, layer);
      if (kStage == Stage::kProject && layer > 0) cluster_.await(kPoint, layer - 1);
    }
    const Steps<kSteps> x =
        product_.template read<kSteps>(input, steps, is_pair(kStage) && c_.networks() == 2 ? padded_row(row_bytes) : 0);
    typename Through::SquareSum squares = {};
    if constexpr (is_normalised(kStage)) squares = cluster_.squares_of(kPoint);
    const auto add_squares = [&](bool all_of_them) {
      if constexpr (is_normalised(kStage)) {
#pragma unroll
        for (int i = 0; i < (all_of_them ? 5 : 1); ++i) {
          if (!squares.is_done()) squares.add();
        }
      }
    };
    constexpr int kFewer = kStage == Stage::kProject ? 3 * kClusterUnits : kTiles;  // without q, or without k
    if (all <= kFewer * kUnit) {
      product_.template multiply<kFewer, is_pair(kStage)>(weights, x, steps, 0, add_squares);
    } else {
      product_.template multiply<kTiles, is_pair(kStage)>(weights, x, steps, 0, add_squares);
    }
    const float scale = is_normalised(kStage) ? c_.norm_scale_of(squares.value()) : 1.0F;
    barrier();
    if (cluster_.template has_outputs<kStage>()) {
      const float y = __fmaf_rn(product_.sum(out.row, out.second), scale, out.bias);
      float other = 0.0F;
      if (kStage == Stage::kGate || (kStage == Stage::kAdvance && c_.networks() == 2)) {
        other = product_.sum(c_.channels.count + out.row, kStage == Stage::kAdvance) + out.other_bias;
      }
      epilogue<kStage>(cluster_, layer, out, y, other);
    }
    if constexpr (kStage != Stage::kGate) {
      if (c_.thread() == kConsumers - 1 && (kStage != Stage::kProject || layer > 0)) cluster_.expect(kPoint);
    }
    product_.turn();
  }

  /// The head: slot after slot, the next one on its way into registers while one is multiplied.
  __device__ __forceinline__ void predict(int layers) {
    constexpr int kSteps = kClusterSteps;
    c_.forget_lane();
    const int row_bytes = c_.template shape_of<Stage::kPredict>().row_bytes;
    const int all = c_.vocab.count;
    const int steps = row_bytes / kStepBytes;
    constexpr int kTiles = in_slot(Product::kHead);
    const auto tiles_from = [&](int row) { return min((all - row + kUnit - 1) / kUnit, kTiles); };
    Weights<kTiles, kSteps> now;
    Weights<kTiles, kSteps> next;
    product_.template take<kTiles>(now, row_bytes, tiles_from(0));
    cluster_.await(Point::kOutput, layers - 1);
    const Steps<kSteps> x = product_.template read<kSteps>(cluster_.vector(Point::kOutput), steps, 0);
    typename Through::SquareSum squares = cluster_.squares_of(Point::kOutput);
#pragma unroll
    while (!squares.is_done()) squares.add();
    const float scale = c_.norm_scale_of(squares.value());
    float* const logits = c_.p.op.logits + c_.vocab.first;
#pragma unroll 1
    for (int first = 0; first < all; first += c_.p.plan.sums_rows) {
      const int count = min(c_.p.plan.sums_rows, all - first);
#pragma unroll 1
      for (int row = 0; row < count; row += kTiles * kUnit) {
        const int tiles = tiles_from(first + row + kTiles * kUnit);  // which may be none
        product_.template take<kTiles>(next, row_bytes, tiles);
        product_.template multiply<kTiles, false>(now, x, steps, row, [](bool) {});
        now = next;
      }
      barrier();
      if (c_.thread() < count) logits[first + c_.thread()] = product_.sum(c_.thread()) * scale;
      product_.turn();
    }
  }

  // --- Attention -----------------------------------------------------------------------------------------------------

  __device__ __forceinline__ bool has_head() const {
    return static_cast<int>(blockIdx.x) < static_cast<int>(c_.p.op.shape.heads);
  }
  /// A warp's slots of the block's head.
  __device__ __forceinline__ void ask_memory(int layer, float (&memory)[kHeldSlots][kHeldChannels]) const {
    if (!has_head()) return;
    const auto slots = static_cast<int>(c_.p.op.slots);
    const int width = c_.p.plan.head_width;
    const float* from = c_.memory(layer, 0) + static_cast<int>(blockIdx.x) * width + c_.lane;
#pragma unroll
    for (int j = 0; j < kHeldSlots; ++j) {
      const int slot = c_.warp + j * kTileWarps;
#pragma unroll
      for (int i = 0; i < kHeldChannels; ++i) {
        memory[j][i] = slot < slots && c_.lane + i * 32 < width ? __ldg(from + slot * c_.dim + i * 32) : 0.0F;
      }
    }
  }
  /// attend_heads, to the bit, of one head and of slots that the warps hold at once.
  __device__ __forceinline__ void attend(int layer, const float (&memory)[kHeldSlots][kHeldChannels]) {
    if (!has_head()) return;
    c_.forget_lane();
    const auto slots = static_cast<int>(c_.p.op.slots);
    const int width = c_.p.plan.head_width;
    const int head = static_cast<int>(blockIdx.x) * width;
    auto* const rows = reinterpret_cast<float*>(c_.shared + c_.p.plan.local);
    cluster_.await(Point::kQuery, layer);
    const auto* query = reinterpret_cast<const A*>(cluster_.vector(Point::kQuery)) + c_.lane;
    float score[kHeldSlots] = {};
#pragma unroll
    for (int i = 0; i < kHeldChannels; ++i) {
      const float q = c_.lane + i * 32 < width ? widen(query[i * 32]) : 0.0F;
#pragma unroll
      for (int j = 0; j < kHeldSlots; ++j) score[j] = __fmaf_rn(q, memory[j][i], score[j]);
    }
    Attention part;
    if (c_.warp < slots) part.add(score, memory, c_.warp, slots, c_.p.plan.attention_scale, true);
    part.store(rows, c_.warp, c_.lane);
    barrier();
    if (cluster_.has_unit({head, width})) {
      const float value = Attention::join(rows, cluster_.unit_row());
      const uint4 attended = Through::piece(Through::round_pair(value), 0);
      const int place = cluster_.place_of(Point::kAttended, head + c_.warp * kUnit);
      if (cluster_.sends_first()) cluster_.send(Point::kAttended, place, attended);
    }
    if (c_.thread() == kConsumers - 1) cluster_.expect(Point::kQuery);
  }

  DecodeContext<A>& c_;
  Through cluster_;
  ClusterProduct<A> product_;
  float4 state_;  // h of the next layer to come
};

}  // namespace mmrec::kernels
