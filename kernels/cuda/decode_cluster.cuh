// The blocks of a decode step of one sequence of a small model, a cluster of 16: decode_single.cuh's stages, to the
// bit, with vectors that go from block to block through distributed shared memory.
//
// Such a step is a chain of some eight exchanges a layer, and what it costs is what an exchange and the instructions
// between two of them cost. Here an exchange is a store from registers into the other blocks' shared memory, which
// counts its bytes at a barrier there (st.async); who waits for that barrier reads the vector where it is, in the
// tensor core's order. A vector that a stage normalises is sent as the stage wants it, multiplied by the norm's weights
// and rounded, with the sums of squares of every four channels; so all add them up in one order.
//
// Work of a warp. Products are cut along k among the 8 warps, in the order of tile_product.cuh; a stage's weights wait
// in registers for the vector. After the stage's one barrier warp u finishes the u-th unit of 8 outputs, lane l its
// output l % 8: the four octets of lanes have several parts of a channel (q, v, z, k), or the same. What is known of a
// channel stays in that warp's registers for the whole step. Of every piece of 16 bytes lane l sends the copy for block
// l % 16. `gate`, whose input is known before the step, is multiplied while hidden units are on their way.
//
// A vector's place and barrier are used once per layer, and use n + 1 cannot meet use n:
// - A block sends its part of a vector after the barrier that follows its warps' last reading of the vector before.
// - All blocks own channels. So each sends a part of `mixed` and of `output` in every layer, and waits for all parts.
// - Whoever sends a part of any vector P again has thus since P's last use waited for all of `mixed` or of `output`,
//   which every block has sent after it read P. So nobody writes to what is still read, bytes of use n + 1 find their
//   barrier in phase n + 1, and nobody waits for a parity that has passed twice.
// - h of a layer is read by all blocks before they send z, and written by its owners after they got hidden units, which
//   follow from all of z.
// - What is sent to a block it waits for: it may exit without regard to others.
#pragma once

#include "kernels/cuda/decode_base.cuh"
#include "kernels/cuda/decode_cluster_plan.cuh"

namespace mmrec::kernels {

/// Warps that copy weights into the ring, a slot each in turn: one alone takes longer for a slot's instructions than
/// the bytes take.
inline constexpr int kCopyWarps = 4;
inline constexpr int kClusterThreads = 32 * (kTileWarps + kCopyWarps);

/// Slots of weights: `full` completes when a slot's bytes have come; a named barrier for each lets the warp that fills
/// it know that all others have read it. Producers and consumers walk the slots in the same order.
class ClusterRing {
 public:
  __device__ ClusterRing(std::byte* shared, const DecodePlan& plan)
      : data_(shared + plan.ring),
        full_(reinterpret_cast<std::uint64_t*>(shared + plan.barriers)),
        slots_(plan.slots),
        slot_bytes_(plan.slot_bytes) {}

  __device__ void init() const {
    if (threadIdx.x % 32 == 0) {
      for (int i = static_cast<int>(threadIdx.x) / 32; i < slots_; i += kClusterThreads / 32) {
        ptx::mbarrier_init(full_ + i, 32);
      }
    }
  }
  __device__ std::byte* slot() const { return data_ + slot_ * slot_bytes_; }
  __device__ std::uint64_t* full() const { return full_ + slot_; }
  __device__ void wait_full() const { ptx::mbarrier_wait(full(), round_ & 1U); }
  __device__ void wait_empty() const {
    if (round_ > 0) ptx::named_barrier_sync(kFirstBarrier + slot_, kConsumers + 32);
  }
  __device__ void release() const { ptx::named_barrier_arrive(kFirstBarrier + slot_, kConsumers + 32); }
  __device__ void advance() {
    if (++slot_ < slots_) return;
    slot_ = 0;
    ++round_;
  }
  __device__ int slots() const { return slots_; }

 private:
  static constexpr int kFirstBarrier = 2;
  static_assert(kFirstBarrier + kClusterSlots <= 16);
  std::byte* data_;
  std::uint64_t* full_;
  int slots_, slot_bytes_;
  int slot_ = 0;
  std::uint32_t round_ = 0;
};

/// One of the warps that copy.
class ClusterStream {
 public:
  __device__ explicit ClusterStream(ClusterRing ring)
      : ring_(ring), hint_(ptx::evict_first()), turn_(static_cast<int>(threadIdx.x) / 32 - kTileWarps) {}

  /// Copies the block's rows of a product, half a unit a lane.
  __device__ void copy(const Segment s, const std::byte* const* products) {
    constexpr int kRun = kUnit / 2;
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
    for (int first = 0; first < s.rows; first += s.tile_rows) {
      if (turn_ == 0) {
        const int in_slot = min(s.tile_rows, s.rows - first);
        const bool copies = lane * kRun < in_slot;
        int row = copies ? first + lane * kRun : first;
        int slice = 0;
        for (int count = s.count; row >= count; count = s.others) {
          row -= count;
          ++slice;
        }
        const std::byte* from = products[s.slice_bytes == 0 ? slice : 0] + slice * s.slice_bytes +
                                static_cast<std::int64_t>(row) * s.row_bytes;
        const int bytes = copies ? min(kRun, in_slot - lane * kRun) * s.row_bytes : 0;
        ring_.wait_empty();
        ptx::mbarrier_arrive_expect(ring_.full(), static_cast<unsigned>(bytes));
        if (copies) {
          ptx::bulk_copy(ring_.slot() + lane * run_bytes(s.row_bytes), from, static_cast<unsigned>(bytes), ring_.full(),
                         hint_);
        }
      }
      advance();
    }
  }
  /// Waits until the slots have been read for the last time, so that no barrier is left half full.
  __device__ void drain() {
    for (int i = 0; i < ring_.slots(); ++i) {
      if (turn_ == 0) ring_.wait_empty();
      advance();
    }
  }

 private:
  __device__ void advance() {
    ring_.advance();
    turn_ = turn_ == 0 ? kCopyWarps - 1 : turn_ - 1;
  }

  ClusterRing ring_;
  std::uint64_t hint_;
  int turn_;  // slots until the warp's next one
};

template <class A>
class ClusterBlock : protected DecodeMath<A> {
  static_assert(sizeof(A) == 2 && DecodeMath<A>::kScalesSums);
  using Base = DecodeMath<A>;
  using Base::barrier, Base::thread, Base::kVector, Base::channels_, Base::dim_, Base::layers_, Base::p_, Base::warp_;

 public:
  __device__ __forceinline__ ClusterBlock(const DecodeParams<A>& p, std::byte* shared, ClusterRing ring)
      : Base(p, shared),
        ring_(ring),
        shared_(shared),
        sums_(reinterpret_cast<float*>(shared + p.plan.sums)),
        hidden_(p.plan.splits[static_cast<int>(Owned::kHidden)].mine()),
        ffn_(p.plan.splits[static_cast<int>(Owned::kFfn)].mine()),
        vocab_(p.plan.splits[static_cast<int>(Owned::kVocab)].mine()) {}

  /// By all warps, before a barrier of the cluster.
  __device__ static void init(const DecodePlan& plan, std::byte* shared) {
    auto* points = reinterpret_cast<std::uint64_t*>(shared + plan.points);
    if (thread() == 0) {
      for (int i = 0; i < static_cast<int>(Point::kCount); ++i) ptx::mbarrier_init(points + i, 1);
    }
    const int missing = plan.products[static_cast<int>(Product::kQvzk)].row_bytes / int{sizeof(A)} / kVector + thread();
    if (missing >= kSquares) return;  // squares of no channels stay 0
    squares_at(plan, shared, Point::kMixed)[missing] = 0.0F;
    squares_at(plan, shared, Point::kOutput)[missing] = 0.0F;
  }

  __device__ __forceinline__ void run() {
    const auto layers = static_cast<int>(p_.op.shape.layers);
    there_ = ptx::place_in_cluster(shared_, static_cast<unsigned>(lane_ % kClusterBlocks));
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
  /// From the sums with the first vector of a pair to those with the second one: in other banks.
  static constexpr int kSecondSums = kClusterPass / 2 * kTileWarps + 4;

  // --- What a stage is -----------------------------------------------------------------------------------------------

  static constexpr Product product_of(Stage stage) {
    constexpr Product kProducts[] = {Product::kGate,    Product::kQvzk,    Product::kGateZ,
                                     Product::kGammaUp, Product::kMemoryQ, Product::kMemoryOut,
                                     Product::kFfnIn,   Product::kFfnOut,  Product::kHead};
    return kProducts[static_cast<int>(stage)];
  }
  /// Where its input comes from.
  static constexpr Point point_of(Stage stage) {
    constexpr Point kPoints[] = {Point::kCount,    Point::kOutput, Point::kProjected, Point::kHidden, Point::kState,
                                 Point::kAttended, Point::kMixed,  Point::kFfn,       Point::kOutput};
    return kPoints[static_cast<int>(stage)];
  }
  static constexpr bool is_normalised(Stage stage) {
    return stage == Stage::kProject || stage == Stage::kWiden || stage == Stage::kPredict;
  }
  /// Its input may be two vectors, one for the first part of the outputs.
  static constexpr bool is_pair(Stage stage) { return stage == Stage::kHide || stage == Stage::kAdvance; }
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
  static constexpr int most_steps(Stage stage) { return stage == Stage::kNarrow ? kClusterFfnSteps : kClusterSteps; }
  template <Stage kStage>
  __device__ __forceinline__ const ProductShape& shape_of() const {
    return p_.plan.products[static_cast<int>(product_of(kStage))];
  }
  __device__ __forceinline__ bool has_networks() const { return !p_.op.shape.dpg; }
  /// Rows that the block multiplies.
  template <Stage kStage>
  __device__ __forceinline__ int rows() const {
    switch (kStage) {
      case Stage::kGate:
      case Stage::kProject:
        return shape_of<kStage>().slices * channels_.count;
      case Stage::kHide:
        return channels_.count + (has_networks() ? 2 : 1) * hidden_.count;
      case Stage::kAdvance:
        return (has_networks() ? 2 : 1) * channels_.count;
      case Stage::kWiden:
        return ffn_.count;
      default:
        return channels_.count;
    }
  }

  // --- Exchange ------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ std::byte* vector(Point point) const {
    return shared_ + p_.plan.at[static_cast<int>(point)];
  }
  __device__ static float* squares_at(const DecodePlan& plan, std::byte* shared, Point point) {
    const int row_bytes = plan.products[static_cast<int>(Product::kQvzk)].row_bytes;
    return reinterpret_cast<float*>(shared + plan.at[static_cast<int>(point)] + row_bytes);
  }
  __device__ __forceinline__ std::uint64_t* arrival(Point point) const {
    return reinterpret_cast<std::uint64_t*>(shared_ + p_.plan.points) + static_cast<int>(point);
  }
  /// Announces the vector's next use. By one thread, after this one has been waited for.
  __device__ __forceinline__ void expect(Point point) const {
    ptx::mbarrier_arrive_expect(arrival(point), static_cast<unsigned>(p_.plan.point_bytes[static_cast<int>(point)]));
  }
  __device__ __forceinline__ void await(Point point, int use) const {
    ptx::mbarrier_wait(arrival(point), static_cast<std::uint32_t>(use & 1));
  }
  /// Where channel or unit `first` of a vector lies, as bytes from the begin of shared memory.
  __device__ __forceinline__ int place_of(Point point, int first) const {
    return static_cast<int>(p_.plan.at[static_cast<int>(point)]) + first * int{sizeof(A)};
  }
  /// Sends a part of a vector to its place in a block.
  template <class V>
  __device__ __forceinline__ void send(ptx::ClusterPlace block, Point point, int place, V value) const {
    ptx::store_async(block + place, value,
                     block + (p_.plan.points + static_cast<int>(point) * int{sizeof(std::uint64_t)}));
  }
  /// Lanes 0 to 15 send a piece; lanes 16 to 31 another one, or what belongs to it.
  __device__ __forceinline__ bool sends_first() const { return lane_ < kClusterBlocks; }

  /// The lane's value and the next lane's, rounded to A.
  __device__ __forceinline__ static std::uint32_t round_pair(float x) {
    return ptx::to_pair<A>(x, __shfl_down_sync(0xffffffffU, x, 1));
  }
  __device__ __forceinline__ static float rounded(std::uint32_t pair) {
    return widen(A{static_cast<std::uint16_t>(pair)});
  }
  /// The values of lanes first .. first + 7 side by side.
  __device__ __forceinline__ static uint4 piece(std::uint32_t pair, int first) {
    uint4 words;
    words.x = __shfl_sync(0xffffffffU, pair, first);
    words.y = __shfl_sync(0xffffffffU, pair, first + 2);
    words.z = __shfl_sync(0xffffffffU, pair, first + 4);
    words.w = __shfl_sync(0xffffffffU, pair, first + 6);
    return words;
  }
  /// weights ⊙ the unit's x, lane r's for channel r, and its squares, to all blocks.
  struct NormWeights {
    float4 low, high;
  };
  __device__ __forceinline__ NormWeights ask_norm(const float* weight) const {
    const int first = (channels_.first + warp_ * kUnit) / kVector;
    return {this->norm_weight(weight, first), this->norm_weight(weight, first + 1)};
  }
  __device__ __forceinline__ int normalised_place(Point point) const {
    const int channel = channels_.first + warp_ * kUnit;
    return sends_first() ? place_of(point, channel) : place_of(point, dim_) + channel / kVector * int{sizeof(float)};
  }
  __device__ __forceinline__ void send_normalised(Point point, int place, float x, const NormWeights& w) const {
    float all[kUnit];
#pragma unroll
    for (int i = 0; i < kUnit; ++i) all[i] = __shfl_sync(0xffffffffU, x, i);
    if (sends_first()) {
      send(there_, point, place,
           make_uint4(ptx::to_pair<A>(w.low.x * all[0], w.low.y * all[1]),
                      ptx::to_pair<A>(w.low.z * all[2], w.low.w * all[3]),
                      ptx::to_pair<A>(w.high.x * all[4], w.high.y * all[5]),
                      ptx::to_pair<A>(w.high.z * all[6], w.high.w * all[7])));
    } else {
      const float low = Base::squares(make_float4(all[0], all[1], all[2], all[3]));
      const float high = Base::squares(make_float4(all[4], all[5], all[6], all[7]));
      send(there_, point, place, make_uint2(__float_as_uint(low), __float_as_uint(high)));
    }
  }
  /// The sum of a vector's squares as decode_single.cuh has it, in which warp w adds up the vectors of its steps: by
  /// every warp for itself, stage by stage between the products, which do not wait for it.
  struct SquareSum {
    float low, high;  // of warps lane / 8 and lane / 8 + 4
    int stages = 0;   // that are done
    __device__ __forceinline__ void add() {
      constexpr int kMasks[] = {4, 2, 1, 8, 16};
      low += __shfl_xor_sync(0xffffffffU, low, kMasks[stages]);
      high += __shfl_xor_sync(0xffffffffU, high, kMasks[stages]);
      ++stages;
    }
    __device__ __forceinline__ bool is_done() const { return stages == 5; }
    __device__ __forceinline__ float value() const { return low + high; }
  };
  __device__ __forceinline__ SquareSum squares_of(Point point) const {
    static_assert(kClusterSteps == 2 && Base::kStepVectors == 8);
    const float* squares = squares_at(p_.plan, shared_, point) + lane_;
    return {squares[0] + squares[64], squares[32] + squares[96]};
  }

  // --- Before the first stage ----------------------------------------------------------------------------------------

  /// h₋₁ of the layer: a lane's four channels.
  __device__ __forceinline__ void ask_state(int layer) {
    const int vector = this->first_vector();
    state_ = vector * kVector < dim_ ? this->state_vector(layer, 0, 1, vector) : make_float4(0, 0, 0, 0);
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

  // --- Product -------------------------------------------------------------------------------------------------------

  /// A warp's weights of a stage: its steps of every tile; lane 4g + t has the t-th piece of row g.
  template <int kTiles, int kSteps>
  struct Weights {
    uint4 at[kTiles][kSteps];
  };
  __device__ __forceinline__ bool has_step(int i, int steps) const { return warp_ + i * kTileWarps < steps; }
  /// Row g of a tile is row g / 2 of the first half of its unit for even g, of the second half for odd g: those lie
  /// where they share no banks.
  __device__ __forceinline__ int is_odd_row() const { return (lane_ >> 2) & 1; }

  /// Takes the next `tiles` units from the ring, at most kInSlot of which are in a slot; what a slot lacks is as it may
  /// be. What is not taken is zero, so that nothing has to be kept in registers from one stage to the next.
  template <int kInSlot, int kTiles, int kSteps>
  __device__ __forceinline__ void take(Weights<kTiles, kSteps>& weights, int row_bytes, int tiles) {
    static_assert(kTiles % kInSlot == 0);
    const int mine =
        is_odd_row() * run_bytes(row_bytes) + (lane_ >> 3) * row_bytes + (lane_ & 3) * kPieceBytes + warp_ * kStepBytes;
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
      ring_.release();
      ring_.advance();
    }
  }
  /// The warp's steps of one or two vectors `pitch` apart, as SingleProduct::multiply wants them.
  template <int kSteps>
  struct Steps {
    std::uint32_t words[kSteps][2];
  };
  template <int kSteps>
  __device__ __forceinline__ Steps<kSteps> read(const std::byte* vectors, int steps, int pitch) const {
    const std::byte* x =
        vectors + ((lane_ >> 3) & 1) * pitch + (lane_ & 3) * kPieceBytes + ((lane_ >> 2) & 1) * 4 + warp_ * kStepBytes;
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
  __device__ __forceinline__ float* sums() const { return sums_ + turn_of_sums_ * kClusterPass * kTileWarps; }
  /// With the second vector of a pair, if `second`.
  __device__ __forceinline__ float sum(int row, bool second = false) const {
    return total(sums() + (second ? kSecondSums : 0), row, 0, 1);
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
    const int column = lane_ & 3;
    const int row = to + is_odd_row() * (kUnit / 2) + (lane_ >> 3);
    float* const mine = sums() + column * kSecondSums + row * kTileWarps + warp_;
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

  // --- Outputs -------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ int octet() const { return lane_ >> 3; }
  /// A lane's row of what warp u has of owned rows: the u-th unit.
  __device__ __forceinline__ int unit_row() const { return warp_ * kUnit + (lane_ & 7); }
  __device__ __forceinline__ bool has_unit(Range owned) const { return warp_ * kUnit < owned.count; }
  __device__ __forceinline__ std::int64_t channel_of(int layer) const {
    return std::int64_t{layer} * dim_ + channels_.first + unit_row();
  }
  template <Stage kStage>
  __device__ __forceinline__ float bias(int layer, int part, bool exists = true) const {
    const float* biases = layers_[layer].bias[p_.plan.stages[static_cast<int>(kStage)].bias + part];
    return exists && biases != nullptr ? __ldg(biases + unit_row()) : 0.0F;
  }

  /// What a lane's output takes from memory and from other lanes, and where it goes: before the input has come.
  struct Prepared {
    float bias, other_bias, h, c, z, v, mdi, q;
    int row, place;
    bool second;
    NormWeights norm;
    double sum;
  };
  template <Stage kStage>
  __device__ __forceinline__ Prepared prepare(int layer) const {
    Prepared out = {};
    const DecodeStep<Device, A>& op = p_.op;
    const int channel = channels_.first + warp_ * kUnit;
    if constexpr (kStage == Stage::kProject) {
      if (!has_unit(channels_)) return out;
      // Octets have q, v, z, k; where one of these is not multiplied, another one again.
      const int part = min(max(octet() - p_.plan.first_part, 0), shape_of<kStage>().slices - 1);
      out.row = part * channels_.count + unit_row();
      out.bias = bias<kStage>(layer, part + p_.plan.first_part);
      const int k = padded_row(shape_of<kStage>().row_bytes);
      out.place = place_of(Point::kProjected, channel) + (sends_first() ? 0 : k);
    } else if constexpr (kStage == Stage::kHide) {
      // Octet 0 has W_mh's, then a hidden unit of each network.
      const int part = min(octet(), has_networks() ? 2 : 1);
      const bool exists = has_unit(part == 0 ? channels_ : hidden_);
      out.row = exists ? unit_row() + (part == 0 ? 0 : channels_.count + (part - 1) * hidden_.count) : 0;
      out.second = part == 2;
      out.bias = bias<kStage>(layer, part, exists);
      const int of_context = padded_row(shape_of<Stage::kAdvance>().row_bytes);
      out.place = place_of(Point::kHidden, hidden_.first + warp_ * kUnit) + (sends_first() ? 0 : of_context);
    } else if constexpr (kStage == Stage::kWiden) {
      out.bias = bias<kStage>(layer, 0, has_unit(ffn_));
      out.place = place_of(Point::kFfn, ffn_.first + warp_ * kUnit);
    } else {
      if (!has_unit(channels_)) return out;
      out.bias = bias<kStage>(layer, 0);
      if constexpr (kStage == Stage::kGate) {
        out.other_bias = bias<kStage>(layer, 1);
      } else if constexpr (kStage == Stage::kAdvance) {
        out.other_bias = bias<kStage>(layer, 1);
        out.h = __ldcg(op.h + channel_of(layer));
        if (op.slots == 0) out.c = bias<Stage::kRecall>(layer, 0);
        if (op.slots == 1) out.c = __ldg(op.context + channel_of(layer));
        if (op.slots <= 1) out.norm = ask_norm(layers_[layer].norm2);
        out.v = __shfl_sync(0xffffffffU, projected_, 8 + (lane_ & 7));
        out.z = __shfl_sync(0xffffffffU, projected_, 16 + (lane_ & 7));
        out.mdi = __shfl_sync(0xffffffffU, mdi_input_, lane_ & 7) + mdi_gate_;
        out.place = op.slots > 1 ? place_of(Point::kState, channel) : normalised_place(Point::kMixed);
      } else if constexpr (kStage == Stage::kQuery) {
        out.q = __shfl_sync(0xffffffffU, projected_, lane_ & 7);
        out.place = query_place_;
      } else if constexpr (kStage == Stage::kRecall) {
        out.norm = ask_norm(layers_[layer].norm2);
        out.place = normalised_place(Point::kMixed);
      } else if constexpr (kStage == Stage::kNarrow) {
        out.norm = ask_norm(layers_[layer + 1].norm1);
        out.sum = __ldcg(op.segment_sum + channel_of(layer));
        out.place = normalised_place(Point::kOutput);
      }
    }
    out.place = ptx::opaque(out.place);  // worked out here
    return out;
  }

  /// From the sums to what the blocks or this warp read. By whole warps.
  template <Stage kStage>
  __device__ __forceinline__ void finish(int layer, const Prepared& out, float scale) {
    const DecodeStep<Device, A>& op = p_.op;
    const int other_row = channels_.count + unit_row();
    if constexpr (kStage == Stage::kProject) {
      if (!has_unit(channels_)) return;
      const std::uint32_t pair = round_pair(__fmaf_rn(sum(out.row), scale, out.bias));
      projected_ = rounded(pair);
      const uint4 z_or_k = piece(pair, sends_first() ? 16 : 24);
      if (sends_first() || has_networks()) send(there_, Point::kProjected, out.place, z_or_k);
    } else if constexpr (kStage == Stage::kHide) {
      if (!has_unit(channels_) && !has_unit(hidden_)) return;
      const float y = sum(out.row, out.second) + out.bias;
      const float active = has_networks() ? gelu(y) : (y < 0.0F ? 0.0F : y);  // NaN stays
      const std::uint32_t pair = round_pair(octet() == 0 ? y : active);
      mdi_input_ = rounded(pair);
      if (!has_unit(hidden_)) return;
      const uint4 units = piece(pair, sends_first() ? 8 : 16);
      if (sends_first() || has_networks()) send(there_, Point::kHidden, out.place, units);
    } else if constexpr (kStage == Stage::kWiden) {
      if (!has_unit(ffn_)) return;
      const uint4 units = piece(round_pair(gelu(__fmaf_rn(sum(unit_row()), scale, out.bias))), 0);
      if (sends_first()) send(there_, Point::kFfn, out.place, units);
    } else {
      if (!has_unit(channels_)) return;
      const float y = sum(unit_row()) + out.bias;
      if constexpr (kStage == Stage::kGate) {
        state_gate_ = y;
        mdi_gate_ = sum(other_row) + out.other_bias;
      } else if constexpr (kStage == Stage::kAdvance) {
        const float context = has_networks() ? sum(other_row, true) + out.other_bias : 0.0F;
        const typename Base::Advanced next = this->advance({.h = out.h,
                                                            .c = out.c,
                                                            .state_gate = state_gate_,
                                                            .mdi = out.mdi,
                                                            .z = out.z,
                                                            .v = out.v,
                                                            .residual = residual_},
                                                           y, context);
        residual_ = next.x;
        if (op.slots > 1) {
          const uint4 units = piece(round_pair(next.h), 0);
          if (sends_first()) send(there_, Point::kState, out.place, units);
        } else {
          send_normalised(Point::kMixed, out.place, next.x, out.norm);
        }
        if (octet() == 0) op.h[channel_of(layer)] = next.h;
      } else if constexpr (kStage == Stage::kQuery) {
        const uint4 units = piece(round_pair(__fmaf_rn(0.5F, out.q, y)), 0);
        if (lane_ == 0) send(query_block_, Point::kQuery, out.place, units);
      } else {
        residual_ += y;
        send_normalised(kStage == Stage::kRecall ? Point::kMixed : Point::kOutput, out.place, residual_, out.norm);
        if (kStage == Stage::kNarrow && octet() == 0) {
          op.segment_sum[channel_of(layer)] = out.sum + static_cast<double>(residual_);
        }
      }
    }
  }

  // --- A stage -------------------------------------------------------------------------------------------------------

  template <Stage kStage>
  __device__ __forceinline__ void run_stage(int layer) {
    constexpr int kTiles = most_tiles(kStage);
    constexpr int kSteps = most_steps(kStage);
    constexpr Point kPoint = point_of(kStage);
    lane_ = ptx::opaque(lane_);  // what follows from it is worked out for this stage, and not kept for the next one
    const ProductShape& shape = shape_of<kStage>();
    const int all = rows<kStage>();
    const int steps = shape.row_bytes / kStepBytes;
    const Prepared out = prepare<kStage>(layer);
    if constexpr (kStage == Stage::kProject) put_state();  // before the block says that it has read h
    Weights<kTiles, kSteps> weights;
    take<in_slot(product_of(kStage))>(weights, shape.row_bytes, all / kUnit);
    const std::byte* input = shared_ + p_.plan.operand;
    if constexpr (kStage == Stage::kGate) {
      __syncwarp();  // a warp's steps of h are its own
    } else {
      input = vector(kPoint);
      if (kStage != Stage::kProject) await(kPoint, layer);
      if (kStage == Stage::kProject && layer > 0) await(kPoint, layer - 1);
    }
    const Steps<kSteps> x =
        read<kSteps>(input, steps, is_pair(kStage) && has_networks() ? padded_row(shape.row_bytes) : 0);
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
      multiply<kFewer, is_pair(kStage)>(weights, x, steps, 0, add_squares);
    } else {
      multiply<kTiles, is_pair(kStage)>(weights, x, steps, 0, add_squares);
    }
    const float scale = is_normalised(kStage) ? this->norm_scale_of(squares.value()) : 1.0F;
    barrier();
    finish<kStage>(layer, out, scale);
    if constexpr (kStage != Stage::kGate) {
      if (thread() == kConsumers - 1 && (kStage != Stage::kProject || layer > 0)) expect(kPoint);
    }
    turn_of_sums_ ^= 1;
  }

  /// The head: slot after slot, the next one on its way into registers while one is multiplied.
  __device__ __forceinline__ void predict(int layers) {
    constexpr int kSteps = kClusterSteps;
    lane_ = ptx::opaque(lane_);
    const ProductShape& shape = shape_of<Stage::kPredict>();
    const int all = vocab_.count;
    const int steps = shape.row_bytes / kStepBytes;
    constexpr int kTiles = in_slot(Product::kHead);
    const auto tiles_from = [&](int row) { return min((all - row + kUnit - 1) / kUnit, kTiles); };
    Weights<kTiles, kSteps> now;
    Weights<kTiles, kSteps> next;
    take<kTiles>(now, shape.row_bytes, tiles_from(0));
    await(Point::kOutput, layers - 1);
    const Steps<kSteps> x = read<kSteps>(vector(Point::kOutput), steps, 0);
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
        take<kTiles>(next, shape.row_bytes, tiles_from(first + row + kTiles * kUnit));  // which may be none
        multiply<kTiles, false>(now, x, steps, row, [](bool) {});
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

  ClusterRing ring_;
  std::byte* shared_;
  float* sums_;
  Range hidden_, ffn_, vocab_;
  int lane_ = static_cast<int>(threadIdx.x) % 32;
  int turn_of_sums_ = 0;
  ptx::ClusterPlace there_;        // block lane_ % 16's shared memory
  ptx::ClusterPlace query_block_;  // where the warp's unit of a query goes
  int query_place_ = 0;
  float4 state_;  // h of the next layer to come
  // Of a lane's channel, or of that part which its octet has:
  float residual_ = 0.0F;
  float projected_ = 0.0F;  // q, v, z, k
  float mdi_input_ = 0.0F;  // octet 0
  float state_gate_ = 0.0F, mdi_gate_ = 0.0F;
};

}  // namespace mmrec::kernels
