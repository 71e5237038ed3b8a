// The blocks of a decode step of one sequence of a small model, a cluster of 16: single.cuh's stages, to the
// bit, with vectors that go from block to block through distributed shared memory. Long, because all stages share the
// registers of one warp's values.
//
// Such a step is a chain of some eight exchanges a layer, and what it costs is what an exchange and the instructions
// between two of them cost: on an H200 about 1.15 us a stage; through L2 (single.cuh) 1.6 us. Weights come meanwhile
// from L2, where those of such a model stay from step to step, a sixteenth of them to each multiprocessor and as far
// ahead as its ring of some 190 KB. 1 block of 384 threads on 16 multiprocessors.
//
// plan.cuh says which models it decodes and what lies where in shared memory; through_cluster.cuh how vectors get from
// block to block, and why no use of one meets the next.
//
// Work of a warp. Products are cut along k among the 8 warps, in the order of tile_product.cuh; a stage's weights wait
// in registers for the vector. After the stage's one barrier warp u finishes the u-th unit of 8 outputs, lane l its
// output l % 8: the four octets of lanes have several parts of a channel (q, v, z, W_mz z), or the same. The values of
// a channel stay in that warp's registers for the whole step. Of every piece of 16 bytes lane l sends the copy for
// block l % 16.
#pragma once

#include "models/mmrec/cuda/decode/attention.cuh"
#include "models/mmrec/cuda/decode/stream.cuh"
#include "models/mmrec/cuda/decode/through_cluster.cuh"

namespace mmrec::kernels {

/// How a warp multiplies: a stage's weights come into registers, often before the vector is there, and are multiplied
/// with the warp's steps of it by the tensor core. Warps' sums meet in shared memory.
template <class A>
class ClusterProduct {
  /// From the sums with the first vector of a pair to those with the second one: in other banks.
  static constexpr int kSecondSums = kClusterPass / 2 * kTileWarps + 4;

 public:
  __device__ __forceinline__ ClusterProduct(const DecodeContext<A>& context, ClusterRing ring)
      : c_(context), ring_(ring), sums_(reinterpret_cast<float*>(context.shared + context.p.plan.sums)) {}

  /// Sums of one stage or pass and of the next have memory of their own.
  __device__ __forceinline__ void turn() { turn_ ^= 1; }
  /// With the second vector of a pair, if `second`.
  __device__ __forceinline__ float sum(int row, bool second = false) const {
    return total(sums() + (second ? kSecondSums : 0), row, 0, 1);
  }

  /// A warp's weights of a stage: its steps of every tile; lane 4g + t has the t-th piece of row g.
  template <int kTiles, int kSteps>
  struct Weights {
    uint4 at[kTiles][kSteps];
    int slot[kTiles];  // the numbers of the slots, at a slot's first tile
  };
  /// Loads the next `tiles` units from the ring, with at most kInSlot units in a slot. Units that the last slot lacks
  /// have any values. All others are zero, so that no register must be kept from one stage to the next.
  template <int kInSlot, int kTiles, int kSteps>
  __device__ __forceinline__ void take(Weights<kTiles, kSteps>& weights, int row_bytes, int tiles) {
    static_assert(kTiles % kInSlot == 0);
    const int mine = is_odd_row() * run_bytes(row_bytes) + (c_.lane >> 3) * row_bytes + (c_.lane & 3) * kPieceBytes +
                     c_.warp * kStepBytes;
    const int unit = 2 * run_bytes(row_bytes);
    const int steps = row_bytes / kStepBytes;
#pragma unroll
    for (int first = 0; first < kTiles; first += kInSlot) {
      const bool exists = first < tiles;
      if (exists) ring_.wait_full();
      const std::byte* pieces = ring_.slot() + mine;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        if (exists && has_step(i, steps)) {
#pragma unroll
          for (int t = 0; t < kInSlot; ++t) {
            weights.at[first + t][i] = *reinterpret_cast<const uint4*>(pieces + t * unit + i * kTileWarps * kStepBytes);
          }
        } else {
#pragma unroll
          for (int t = 0; t < kInSlot; ++t) weights.at[first + t][i] = make_uint4(0, 0, 0, 0);
        }
      }
      if (!exists) continue;
      weights.slot[first] = ring_.number();
      ring_.advance();
    }
  }
  /// Releases the slots of what take() has loaded.
  template <int kInSlot, int kTiles, int kSteps>
  __device__ __forceinline__ void release(const Weights<kTiles, kSteps>& weights, int tiles) const {
    static_assert(kTiles / kInSlot <= kLeastClusterSlots);
    std::uint32_t loaded = 0;
#pragma unroll
    for (const auto& tile : weights.at) {
#pragma unroll
      for (const uint4& step : tile) loaded |= step.x;
    }
#pragma unroll
    for (int first = 0; first < kTiles; first += kInSlot) {
      if (first < tiles) ring_.release(weights.slot[first], loaded);
    }
  }
  /// The warp's steps of one or two vectors `pitch` apart, as SingleProduct::multiply wants them.
  template <int kSteps>
  struct Steps {
    std::uint32_t words[kSteps][2];
  };
  template <int kSteps>
  __device__ __forceinline__ Steps<kSteps> read(const std::byte* vectors, int steps, int pitch) const {
    const std::byte* x = vectors + ((c_.lane >> 3) & 1) * pitch + (c_.lane & 3) * kPieceBytes +
                         ((c_.lane >> 2) & 1) * 4 + c_.warp * kStepBytes;
    Steps<kSteps> read;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      read.words[i][0] = read.words[i][1] = 0;
      if (!has_step(i, steps)) continue;
      const auto* words = reinterpret_cast<const std::uint32_t*>(x + i * kTileWarps * kStepBytes);
      read.words[i][0] = words[0];
      read.words[i][1] = words[2];
    }
    return read;
  }
  /// The warp's sums of units, to row `to` on: with one vector, or with either of a pair. between() is called after
  /// every second product, and once more.
  template <int kTiles, bool kPair, int kHeld, int kSteps, class Between, int kCount = kSteps>
  __device__ __forceinline__ void multiply(const Weights<kHeld, kSteps>& weights, const Steps<kSteps>& x, int steps,
                                           int to, Between between) const {
    if constexpr (kCount > 0) {
      if (!has_step(kCount - 1, steps)) {
        multiply<kTiles, kPair, kHeld, kSteps, Between, kCount - 1>(weights, x, steps, to, between);
        return;
      }
    }
    const int column = c_.lane & 3;
    const int row = to + is_odd_row() * (kUnit / 2) + (c_.lane >> 3);
    float* const mine = sums() + column * kSecondSums + row * kTileWarps + c_.warp;
    TileSums tile[kTiles];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const uint4 w = weights.at[t][i];
        ptx::mma_m16n8k16<A>(tile[t].chains[0], {w.x, w.y, w.z, w.w}, {x.words[i][0], x.words[i][1]});
        if (t % 2 == 1) between(false);
      }
    }
    between(true);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const auto& chains = tile[t].chains[0];
      if (column < (kPair ? 2 : 1)) mine[t * kUnit * kTileWarps] = chains[0] + chains[3];
    }
  }

 private:
  __device__ __forceinline__ bool has_step(int i, int steps) const { return c_.warp + i * kTileWarps < steps; }
  /// Row g of a tile is row g / 2 of the first half of its unit for even g, of the second half for odd g: those lie
  /// where they share no banks.
  __device__ __forceinline__ int is_odd_row() const { return (c_.lane >> 2) & 1; }

  __device__ __forceinline__ float* sums() const { return sums_ + turn_ * kClusterPass * kTileWarps; }

  const DecodeContext<A>& c_;
  ClusterRing ring_;
  float* sums_;
  int turn_ = 0;
};

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
  static constexpr bool kIsCompact = false;
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
      run_stage<Stage::kGate>(layer);
      run_stage<Stage::kHide>(layer);
      run_stage<Stage::kProject>(layer);
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
  /// The input of the first layer, which every block computes for itself.
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

  /// The most tiles that a block has of a stage.
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
    constexpr int kInSlot = in_slot(kInfo.first);
    constexpr int kSteps = kStage == Stage::kNarrow ? kClusterFfnSteps : kClusterSteps;
    c_.forget_lane();
    const int row_bytes = c_.template shape_of<kStage>().row_bytes;
    const int all = c_.template rows<kStage>();
    const int steps = row_bytes / kStepBytes;
    const Output out = cluster_.template output<kStage>(layer);
    if constexpr (kStage == Stage::kGate) put_state();
    Weights<kTiles, kSteps> weights;
    product_.template take<kInSlot>(weights, row_bytes, all / kUnit);
    const std::byte* input = operand();
    if constexpr (kStage == Stage::kGate) {
      __syncwarp();  // a warp's steps of h are its own
    } else {
      product_.template release<kInSlot>(weights, all / kUnit);  // before the wait for the vector
      input = cluster_.vector(kPoint);
      if (kPoint != Point::kOutput) cluster_.await(kPoint, layer);
      if (kStage == Stage::kHide && layer > 0) cluster_.await(kPoint, layer - 1);
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
    constexpr int kFewer = kStage == Stage::kProject ? 3 * kClusterUnits : kTiles;  // without q
    if (all <= kFewer * kUnit) {
      product_.template multiply<kFewer, is_pair(kStage)>(weights, x, steps, 0, add_squares);
    } else {
      product_.template multiply<kTiles, is_pair(kStage)>(weights, x, steps, 0, add_squares);
    }
    if constexpr (kStage == Stage::kGate) product_.template release<kInSlot>(weights, all / kUnit);
    const float scale = is_normalised(kStage) ? c_.norm_scale_of(squares.value()) : 1.0F;
    barrier();
    if (cluster_.template has_outputs<kStage>()) {
      const float y = __fmaf_rn(product_.sum(out.row, out.second), scale, out.bias);
      float other = 0.0F;
      if (kStage == Stage::kGate || (kStage == Stage::kAdvance && c_.networks() == 2)) {
        other = product_.sum(c_.channels.count + out.row, kStage == Stage::kAdvance) + out.other_bias;
      }
      epilogue<kStage, A>(cluster_, layer, out, y, other);
    }
    if constexpr (kStage != Stage::kGate && kStage != Stage::kHide) {  // project still reads hide's input
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
    product_.template release<kTiles>(now, tiles_from(0));
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
        product_.template release<kTiles>(next, tiles);
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
      const uint4 attended = piece_of_lanes(round_pair<A>(value), 0);
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
