// The blocks of a decode step of one sequence of a small model, a cluster of 16: single.cuh's stages, to the
// bit, with vectors that go from block to block through distributed shared memory.
//
// Such a step is a chain of some eight exchanges a layer, and what it costs is what an exchange and the instructions
// between two of them cost: on an H200 about 1.15 us a stage; through L2 (single.cuh) 1.6 us.
//
// Besides the course of a step and the attention, which are here:
//   cluster_plan.cuh      which models, and what lies where in shared memory
//   cluster_stream.cuh    the ring of weights, and the warps that fill it
//   cluster_exchange.cuh  vectors on their way from block to block, and why no use of one meets the next
//   cluster_product.cuh   a warp's weights times a vector
//   cluster_stages.cuh    what each stage multiplies, and what becomes of its sums
//
// Work of a warp. Products are cut along k among the 8 warps, in the order of tile_product.cuh; a stage's weights wait
// in registers for the vector. After the stage's one barrier warp u finishes the u-th unit of 8 outputs, lane l its
// output l % 8: the four octets of lanes have several parts of a channel (q, v, z, k), or the same. What is known of a
// channel stays in that warp's registers for the whole step. Of every piece of 16 bytes lane l sends the copy for block
// l % 16. `gate`, whose input is known before the step, is multiplied while hidden units are on their way.
#pragma once

#include "models/mmrec/cuda/decode/cluster_stages.cuh"

namespace mmrec::kernels {

template <class A>
class ClusterBlock : protected ClusterStages<A> {
  using Base = ClusterStages<A>;
  using Base::await, Base::barrier, Base::expect, Base::has_networks, Base::has_unit, Base::lane_, Base::most_steps,
      Base::most_tiles, Base::piece, Base::place_of, Base::point_of, Base::round_pair, Base::send, Base::sends_first,
      Base::squares_at, Base::squares_of, Base::sum, Base::there_, Base::thread, Base::unit_row, Base::vector,
      Base::kVector, Base::channels_, Base::dim_, Base::layers_, Base::p_, Base::query_block_, Base::query_place_,
      Base::residual_, Base::shared_, Base::turn_of_sums_, Base::warp_;
  using typename Base::Prepared, typename Base::SquareSum;
  template <int kSteps>
  using Steps = typename Base::template Steps<kSteps>;
  template <int kTiles, int kSteps>
  using Weights = typename Base::template Weights<kTiles, kSteps>;

 public:
  using Base::init;

  __device__ __forceinline__ ClusterBlock(const DecodeParams<A>& p, std::byte* shared, ClusterRing ring)
      : Base(p, shared, ring), vocab_(p.plan.splits[static_cast<int>(Owned::kVocab)].mine()) {}

  __device__ __forceinline__ void run() {
    const auto layers = static_cast<int>(p_.op.shape.layers);
    if (thread() < static_cast<int>(Point::kCount)) expect(static_cast<Point>(thread()));
    const int unit = channels_.first + warp_ * kUnit;
    const int head = min(unit / p_.plan.head_width, kClusterBlocks - 1);  // of warps that have such a unit
    query_block_ = ptx::place_in_cluster(shared_, static_cast<unsigned>(head));
    query_place_ = place_of(Point::kQuery, unit - head * p_.plan.head_width);
    ask_state(0);
    embed();
#pragma unroll 1
    for (int layer = 0; layer < layers; ++layer) {
      run_stage<Stage::kProject>(layer);
      run_stage<Stage::kHide>(layer);
      run_stage<Stage::kGate>(layer);
      run_stage<Stage::kAdvance>(layer);
      if (p_.op.slots > 1) {
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
    predict(layers);
  }

 private:
  static constexpr int kHeldSlots = kClusterMemory / kTileWarps;  // of a warp
  static constexpr int kHeldChannels = kClusterHead / 32;         // of a lane

  // --- Before the first stage ----------------------------------------------------------------------------------------

  /// h₋₁ of the layer: a lane's four channels.
  __device__ __forceinline__ void ask_state(int layer) {
    const int vector = this->first_vector();
    state_ = vector * kVector < dim_ ? this->state_vector(layer, 0, vector) : make_float4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void put_state() const {
    const int at = this->first_vector() * kVector;
    if (at >= dim_) return;
    this->store_vector(shared_ + p_.plan.operand + at * int{sizeof(A)}, make_float4(1, 1, 1, 1), 1.0F, state_);
  }
  /// The input of the first layer: every block's own doing.
  __device__ __forceinline__ void embed() {
    const int vector = thread();
    const A* row = this->embedding_row(0);
    if (vector * kVector < dim_) {
      const float4 x = this->embedding_vector(0, vector);
      const float4 w = this->norm_weight(layers_[0].norm1, vector);
      this->store_vector(this->vector(Point::kOutput) + vector * kVector * int{sizeof(A)}, w, 1.0F, x);
      squares_at(p_.plan, shared_, Point::kOutput)[vector] = Base::squares(x);
    }
    if (has_unit(channels_)) residual_ = widen(row[channels_.first + unit_row()]);
    barrier();
  }

  // --- A stage -------------------------------------------------------------------------------------------------------

  template <Stage kStage>
  __device__ __forceinline__ void run_stage(int layer) {
    constexpr int kTiles = most_tiles(kStage);
    constexpr int kSteps = most_steps(kStage);
    constexpr Point kPoint = point_of(kStage);
    lane_ = ptx::opaque(lane_);  // what follows from it is worked out for this stage, and not kept for the next one
    const ProductShape& shape = Base::template shape_of<kStage>();
    const int all = Base::template rows<kStage>();
    const int steps = shape.row_bytes / kStepBytes;
    const Prepared out = Base::template prepare<kStage>(layer);
    if constexpr (kStage == Stage::kProject) put_state();  // before the block says that it has read h
    Weights<kTiles, kSteps> weights;
    Base::template take<in_slot(product_of(kStage))>(weights, shape.row_bytes, all / kUnit);
    const std::byte* input = shared_ + p_.plan.operand;
    if constexpr (kStage == Stage::kGate) {
      __syncwarp();  // a warp's steps of h are its own
    } else {
      input = vector(kPoint);
      if (kStage != Stage::kProject) await(kPoint, layer);
      if (kStage == Stage::kProject && layer > 0) await(kPoint, layer - 1);
    }
    const Steps<kSteps> x =
        Base::template read<kSteps>(input, steps, is_pair(kStage) && has_networks() ? padded_row(shape.row_bytes) : 0);
    SquareSum squares = {};
    if constexpr (is_normalised(kStage)) squares = squares_of(kPoint);
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
      Base::template multiply<kFewer, is_pair(kStage)>(weights, x, steps, 0, add_squares);
    } else {
      Base::template multiply<kTiles, is_pair(kStage)>(weights, x, steps, 0, add_squares);
    }
    const float scale = is_normalised(kStage) ? this->norm_scale_of(squares.value()) : 1.0F;
    barrier();
    Base::template finish<kStage>(layer, out, scale);
    if constexpr (kStage != Stage::kGate) {
      if (thread() == kConsumers - 1 && (kStage != Stage::kProject || layer > 0)) expect(kPoint);
    }
    turn_of_sums_ ^= 1;
  }

  /// The head: slot after slot, the next one on its way into registers while one is multiplied.
  __device__ __forceinline__ void predict(int layers) {
    constexpr int kSteps = kClusterSteps;
    lane_ = ptx::opaque(lane_);
    const ProductShape& shape = Base::template shape_of<Stage::kPredict>();
    const int all = vocab_.count;
    const int steps = shape.row_bytes / kStepBytes;
    constexpr int kTiles = in_slot(Product::kHead);
    const auto tiles_from = [&](int row) { return min((all - row + kUnit - 1) / kUnit, kTiles); };
    Weights<kTiles, kSteps> now;
    Weights<kTiles, kSteps> next;
    Base::template take<kTiles>(now, shape.row_bytes, tiles_from(0));
    await(Point::kOutput, layers - 1);
    const Steps<kSteps> x = Base::template read<kSteps>(vector(Point::kOutput), steps, 0);
    SquareSum squares = squares_of(Point::kOutput);
#pragma unroll
    while (!squares.is_done()) squares.add();
    const float scale = this->norm_scale_of(squares.value());
    float* const logits = p_.op.logits + vocab_.first;
#pragma unroll 1
    for (int first = 0; first < all; first += p_.plan.sums_rows) {
      const int count = min(p_.plan.sums_rows, all - first);
#pragma unroll 1
      for (int row = 0; row < count; row += kTiles * kUnit) {
        Base::template take<kTiles>(next, shape.row_bytes,
                                    tiles_from(first + row + kTiles * kUnit));  // which may be none
        Base::template multiply<kTiles, false>(now, x, steps, row, [](bool) {});
        now = next;
      }
      barrier();
      if (thread() < count) logits[first + thread()] = __fmaf_rn(sum(thread()), scale, 0.0F);
      turn_of_sums_ ^= 1;
    }
  }

  // --- Attention -----------------------------------------------------------------------------------------------------

  __device__ __forceinline__ bool has_head() const {
    return static_cast<int>(blockIdx.x) < static_cast<int>(p_.op.shape.heads);
  }
  /// A warp's slots of the block's head.
  __device__ __forceinline__ void ask_memory(int layer, float (&memory)[kHeldSlots][kHeldChannels]) const {
    if (!has_head()) return;
    const auto slots = static_cast<int>(p_.op.slots);
    const int width = p_.plan.head_width;
    const float* from = p_.op.memory + std::int64_t{layer} * p_.op.shape.memory_slots * dim_ +
                        static_cast<int>(blockIdx.x) * width + lane_;
#pragma unroll
    for (int j = 0; j < kHeldSlots; ++j) {
      const int slot = warp_ + j * kTileWarps;
#pragma unroll
      for (int i = 0; i < kHeldChannels; ++i) {
        memory[j][i] = slot < slots && lane_ + i * 32 < width ? __ldg(from + slot * dim_ + i * 32) : 0.0F;
      }
    }
  }
  /// DecodeBase::attend_heads, to the bit, of one head and of slots that the warps hold at once.
  __device__ __forceinline__ void attend(int layer, const float (&memory)[kHeldSlots][kHeldChannels]) {
    if (!has_head()) return;
    lane_ = ptx::opaque(lane_);
    const auto slots = static_cast<int>(p_.op.slots);
    const int width = p_.plan.head_width;
    const int head = static_cast<int>(blockIdx.x) * width;
    auto* const sums_of_warps = reinterpret_cast<float*>(shared_ + p_.plan.local);  // [warp][channel]
    float* const largest_of_warps = sums_of_warps + kTileWarps * kClusterHead;
    float* const weights_of_warps = largest_of_warps + kTileWarps;
    await(Point::kQuery, layer);
    const auto* query = reinterpret_cast<const A*>(vector(Point::kQuery)) + lane_;
    float score[kHeldSlots] = {};
#pragma unroll
    for (int i = 0; i < kHeldChannels; ++i) {
      const float q = lane_ + i * 32 < width ? widen(query[i * 32]) : 0.0F;
#pragma unroll
      for (int j = 0; j < kHeldSlots; ++j) score[j] = __fmaf_rn(q, memory[j][i], score[j]);
    }
    Base::sum_each(score);
    float largest = -INFINITY;
#pragma unroll
    for (int j = 0; j < kHeldSlots; ++j) {
      score[j] = warp_ + j * kTileWarps < slots ? p_.plan.attention_scale * score[j] : -INFINITY;
      largest = fmaxf(largest, score[j]);
    }
    float weights = 0.0F;
    float sum[kHeldChannels] = {};
    if (warp_ < slots) {
#pragma unroll
      for (int j = 0; j < kHeldSlots; ++j) {
        const float weight = fast_exp(score[j] - largest);
        weights += weight;
#pragma unroll
        for (int i = 0; i < kHeldChannels; ++i) sum[i] = __fmaf_rn(weight, memory[j][i], sum[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kHeldChannels; ++i) sums_of_warps[warp_ * kClusterHead + lane_ + i * 32] = sum[i];
    if (lane_ == 0) {
      largest_of_warps[warp_] = largest;
      weights_of_warps[warp_] = weights;
    }
    barrier();
    if (has_unit({head, width})) {
      float all_largest = -INFINITY;
#pragma unroll
      for (int w = 0; w < kTileWarps; ++w) all_largest = fmaxf(all_largest, largest_of_warps[w]);
      float all_weights = 0.0F;
      float value = 0.0F;
#pragma unroll
      for (int w = 0; w < kTileWarps; ++w) {
        const float factor = fast_exp(largest_of_warps[w] - all_largest);
        all_weights = __fmaf_rn(factor, weights_of_warps[w], all_weights);
        value = __fmaf_rn(factor, sums_of_warps[w * kClusterHead + unit_row()], value);
      }
      const uint4 attended = piece(round_pair(__fdividef(value, all_weights)), 0);
      if (sends_first()) send(there_, Point::kAttended, place_of(Point::kAttended, head + warp_ * kUnit), attended);
    }
    if (thread() == kConsumers - 1) expect(Point::kQuery);
  }

  Range vocab_;
  float4 state_;  // h of the next layer to come
};

}  // namespace mmrec::kernels
