// The exchange among the blocks of a cluster (cluster.cuh): what a block sends of a vector, where it lies in the
// others, and which warps wait for it.
//
// An exchange is a store from registers into the other blocks' shared memory, which counts its bytes at a barrier there
// (st.async). A warp that has waited for that barrier reads the vector in place, in the tensor core's order. A vector
// that a stage normalises is sent as the stage wants it, multiplied by the norm's weights and rounded, with the sums of
// squares of every four channels; so all add them up in one order.
//
// A vector's place and barrier are used once per layer, and use n + 1 cannot meet use n:
// - A block sends its part of a vector after the barrier that follows its warps' last reading of the vector before.
// - All blocks own channels. So each sends a part of `mixed` and of `output` in every layer, and waits for all parts.
// - So before a block sends a part of a vector P again, it has waited for all of `mixed` or of `output`. Every block
//   sent these after it read P. Hence no block overwrites a vector that is still read, bytes of use n + 1 find their
//   barrier in phase n + 1, and no warp waits for a parity that has passed twice.
// - `output` is read twice, by hide and by project, and announced anew after the second.
// - A block waits for everything that is sent to it. So it may exit at any time after that.
//
// Outputs are finished by whole warps: warp u has the u-th unit of 8 outputs, lane l its output l % 8; the four octets
// of lanes have several parts of a channel, or the same. What is kept of a channel stays in registers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "models/mmrec/cuda/decode/cluster_plan.cuh"
#include "models/mmrec/cuda/decode/context.cuh"

namespace mmrec::kernels {

template <class A>
class ThroughCluster {
  static_assert(sizeof(A) == 2 && DecodeContext<A>::kScalesSums);
  static constexpr int kVector = DecodeContext<A>::kVector;

 public:
  /// Barriers, and squares of no channels. By all warps, before a barrier of the cluster.
  __device__ static void init(const DecodePlan& plan, std::byte* shared) {
    auto* points = reinterpret_cast<std::uint64_t*>(shared + plan.points);
    const auto thread = static_cast<int>(threadIdx.x);
    if (thread == 0) {
      for (int i = 0; i < kCountOf<Point>; ++i) ptx::mbarrier_init(points + i, 1);
    }
    const int missing = plan.products[Product::kQvzk].row_bytes / int{sizeof(A)} / kVector + thread;
    if (missing >= kSquares) return;
    squares_at(plan, shared, Point::kMixed)[missing] = 0.0F;
    squares_at(plan, shared, Point::kOutput)[missing] = 0.0F;
  }

  __device__ __forceinline__ explicit ThroughCluster(const DecodeContext<A>& context)
      : c_(context),
        there_(ptx::place_in_cluster(context.shared, static_cast<unsigned>(context.lane % kClusterBlocks))) {
    const int unit = c_.channels.first + c_.warp * kUnit;
    const int head = min(unit / c_.p.plan.head_width, kClusterBlocks - 1);  // of warps that have such a unit
    query_block_ = ptx::place_in_cluster(c_.shared, static_cast<unsigned>(head));
    query_place_ = place_of(Point::kQuery, unit - head * c_.p.plan.head_width);
  }

  /// A lane's row of what warp u has of owned rows: the u-th unit.
  __device__ __forceinline__ int unit_row() const { return c_.warp * kUnit + (c_.lane & 7); }
  __device__ __forceinline__ bool has_unit(Range owned) const { return c_.warp * kUnit < owned.count; }
  template <Stage kStage>
  __device__ __forceinline__ bool has_outputs() const {
    return has_unit(c_.owned(stage_info(kStage).owned)) || has_unit(c_.owned(stage_info(kStage).others));
  }
  /// The residual stream of the block's channels begins.
  __device__ __forceinline__ void embed() {
    if (has_unit(c_.channels)) residual_ = widen(c_.embedding_row(0)[c_.channels.first + unit_row()]);
  }

  /// And ends, as the step's output, without a head.
  __device__ __forceinline__ void store_output() const {
    if (has_unit(c_.channels) && octet() == 0) c_.p.op.x[channel_of_lane()] = residual_;
  }

  // --- Places and arrivals -------------------------------------------------------------------------------------------

  __device__ __forceinline__ std::byte* vector(Point point) const { return c_.shared + c_.p.plan.at[point]; }
  __device__ static float* squares_at(const DecodePlan& plan, std::byte* shared, Point point) {
    const int row_bytes = plan.products[Product::kQvzk].row_bytes;
    return reinterpret_cast<float*>(shared + plan.at[point] + row_bytes);
  }
  __device__ __forceinline__ std::uint64_t* arrival(Point point) const {
    return reinterpret_cast<std::uint64_t*>(c_.shared + c_.p.plan.points) + static_cast<int>(point);
  }
  /// Announces the vector's next use. By one thread, after this one has been waited for.
  __device__ __forceinline__ void expect(Point point) const {
    ptx::mbarrier_arrive_expect(arrival(point), static_cast<unsigned>(c_.p.plan.point_bytes[point]));
  }
  __device__ __forceinline__ void await(Point point, int use) const {
    ptx::mbarrier_wait(arrival(point), static_cast<std::uint32_t>(use & 1));
  }
  /// Where channel or unit `first` of a vector lies, as bytes from the begin of shared memory.
  __device__ __forceinline__ int place_of(Point point, int first) const {
    return static_cast<int>(c_.p.plan.at[point]) + first * int{sizeof(A)};
  }
  /// Sends a part of a vector to its place in a block; or in the block that is the lane's.
  template <class V>
  __device__ __forceinline__ void send(Point point, int place, V value) const {
    send(there_, point, place, value);
  }
  template <class V>
  __device__ __forceinline__ void send(ptx::ClusterPlace block, Point point, int place, V value) const {
    ptx::store_async(block + place, value,
                     block + (c_.p.plan.points + static_cast<int>(point) * int{sizeof(std::uint64_t)}));
  }
  /// Lanes 0 to 15 send a piece; lanes 16 to 31 another one, or what belongs to it.
  __device__ __forceinline__ bool sends_first() const { return c_.lane < kClusterBlocks; }

  // --- Vectors to be normalised --------------------------------------------------------------------------------------

  /// The norm's weights of the warp's unit.
  struct NormWeights {
    float4 low, high;
  };
  __device__ __forceinline__ NormWeights ask_norm(const float* weight) const {
    const int first = (c_.channels.first + c_.warp * kUnit) / kVector;
    return {c_.norm_weight(weight, first), c_.norm_weight(weight, first + 1)};
  }
  __device__ __forceinline__ int normalised_place(Point point) const {
    const int channel = c_.channels.first + c_.warp * kUnit;
    return sends_first() ? place_of(point, channel) : place_of(point, c_.dim) + channel / kVector * int{sizeof(float)};
  }
  /// weights ⊙ the unit's x, lane r's for channel r, and its squares, to all blocks.
  __device__ __forceinline__ void send_normalised(Point point, int place, float x, const NormWeights& w) const {
    float all[kUnit];
#pragma unroll
    for (int i = 0; i < kUnit; ++i) all[i] = __shfl_sync(0xffffffffU, x, i);
    if (sends_first()) {
      send(point, place,
           make_uint4(ptx::to_pair<A>(w.low.x * all[0], w.low.y * all[1]),
                      ptx::to_pair<A>(w.low.z * all[2], w.low.w * all[3]),
                      ptx::to_pair<A>(w.high.x * all[4], w.high.y * all[5]),
                      ptx::to_pair<A>(w.high.z * all[6], w.high.w * all[7])));
    } else {
      const float low = squares(make_float4(all[0], all[1], all[2], all[3]));
      const float high = squares(make_float4(all[4], all[5], all[6], all[7]));
      send(point, place, make_uint2(__float_as_uint(low), __float_as_uint(high)));
    }
  }
  /// The sum of a vector's squares as single.cuh has it, in which warp w adds up the vectors of its steps: by
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
    static_assert(kClusterSteps == 2 && DecodeContext<A>::kStepVectors == 8);
    const float* of_vectors = squares_at(c_.p.plan, c_.shared, point) + c_.lane;
    return {of_vectors[0] + of_vectors[64], of_vectors[32] + of_vectors[96]};
  }

  // --- Outputs -------------------------------------------------------------------------------------------------------

  /// The operands of a lane's output from memory and other lanes, and its destination. Known before the input comes.
  struct Output {
    int row, part, place;
    bool second;  // its sum is with the second vector
    float bias, other_bias, q;
    Channel channel;
    NormWeights norm;
    double sum;
  };
  template <Stage kStage>
  __device__ __forceinline__ Output output(int layer) const {
    Output out = {};
    const DecodeStep<Device, A>& op = c_.p.op;
    const int channel = c_.channels.first + c_.warp * kUnit;
    out.row = unit_row();
    if constexpr (kStage == Stage::kHide) {
      // Octets have a hidden unit of each network.
      const bool exists = has_unit(c_.hidden);
      out.part = min(octet(), c_.networks() - 1);
      out.row = exists ? out.part * c_.hidden.count + unit_row() : 0;
      out.bias = bias<kStage>(layer, out.part, exists);
      const int of_context = padded_row(c_.template shape_of<Stage::kAdvance>().row_bytes);
      out.place = place_of(Point::kHidden, c_.hidden.first + c_.warp * kUnit) + (sends_first() ? 0 : of_context);
    } else if constexpr (kStage == Stage::kWiden) {
      out.bias = bias<kStage>(layer, 0, has_unit(c_.ffn));
      out.place = place_of(Point::kFfn, c_.ffn.first + c_.warp * kUnit);
    } else {
      if (!has_unit(c_.channels)) return out;
      if constexpr (kStage == Stage::kProject) {
        // Octets have q, v, z and W_mz z; where q is not multiplied, v twice.
        out.part = min(max(octet() - c_.p.plan.first_part, 0), c_.template parts<kStage>() - 1);
        out.row = out.part * c_.channels.count + unit_row();
        out.part += c_.p.plan.first_part;
      }
      out.bias = bias<kStage>(layer, out.part);
      if constexpr (kStage == Stage::kGate || kStage == Stage::kAdvance) out.other_bias = bias<kStage>(layer, 1);
      if constexpr (kStage == Stage::kAdvance) {
        Channel& in = out.channel;
        in.h = __ldcg(c_.h(layer, 0) + channel_of_lane());
        if (op.slots == 0) in.c = bias<Stage::kRecall>(layer, 0);
        if (op.slots == 1) in.c = __ldg(c_.state_of(op.context, layer, 0) + channel_of_lane());
        if (op.slots <= 1) out.norm = ask_norm(c_.layers[layer].norm2);
        in.v = __shfl_sync(0xffffffffU, projected_, 8 + (c_.lane & 7));
        in.z = __shfl_sync(0xffffffffU, projected_, 16 + (c_.lane & 7));
        in.mdi = __shfl_sync(0xffffffffU, projected_, 24 + (c_.lane & 7)) + mdi_gate_;
        out.place = op.slots > 1 ? place_of(Point::kState, channel) : normalised_place(Point::kMixed);
      } else if constexpr (kStage == Stage::kQuery) {
        out.q = __shfl_sync(0xffffffffU, projected_, c_.lane & 7);
        out.place = query_place_;
      } else if constexpr (kStage == Stage::kRecall) {
        out.norm = ask_norm(c_.layers[layer].norm2);
        out.place = normalised_place(Point::kMixed);
      } else if constexpr (kStage == Stage::kNarrow) {
        out.norm = ask_norm(c_.layers[layer + 1].norm1);
        out.sum = __ldcg(c_.state_of(op.segment_sum, layer, 0) + channel_of_lane());
        out.place = normalised_place(Point::kOutput);
      }
    }
    out.place = ptx::opaque(out.place);  // worked out here
    return out;
  }

  // --- The epilogue's words ------------------------------------------------------------------------------------------

  __device__ __forceinline__ const DecodeStep<Device, A>& op() const { return c_.p.op; }
  template <Point kPoint>
  __device__ __forceinline__ void send(const Output& out, float y) const {
    constexpr bool kTwo = kPoint == Point::kHidden;
    const uint4 values = piece_of_lanes(round_pair<A>(y), kTwo && !sends_first() ? 8 : 0);
    if constexpr (kPoint == Point::kQuery) {
      if (c_.lane == 0) send(query_block_, kPoint, out.place, values);
    } else if (sends_first() || (kTwo && c_.networks() == 2)) {
      send(kPoint, out.place, values);
    }
  }
  template <Point kPoint>
  __device__ __forceinline__ void send_sum(const Output& out, float x) const {
    send_normalised(kPoint, out.place, x, out.norm);
  }
  __device__ __forceinline__ void keep_gate(const Output&, float state_gate, float mdi_gate) {
    state_gate_ = state_gate;
    mdi_gate_ = mdi_gate;
  }
  __device__ __forceinline__ void keep_projection(const Output&, float y) { projected_ = y; }
  __device__ __forceinline__ void keep_h(const Output&, float h) { h_ = h; }
  __device__ __forceinline__ float& residual(const Output&) { return residual_; }
  __device__ __forceinline__ float query(const Output& out) const { return out.q; }
  __device__ __forceinline__ Channel channel(const Output& out) const {
    Channel in = out.channel;
    in.state_gate = state_gate_;
    return in;
  }
  __device__ __forceinline__ void store_state(int layer, const Output&, double sum) const {
    if (octet() != 0) return;
    c_.h(layer, 0)[channel_of_lane()] = h_;
    c_.state_of(c_.p.op.segment_sum, layer, 0)[channel_of_lane()] = sum;
  }

 private:
  __device__ __forceinline__ int octet() const { return c_.lane >> 3; }
  __device__ __forceinline__ int channel_of_lane() const { return c_.channels.first + unit_row(); }
  template <Stage kStage>
  __device__ __forceinline__ float bias(int layer, int part, bool exists = true) const {
    const float* biases = c_.layers[layer].bias[stage_info(kStage).bias + part];
    return exists && biases != nullptr ? __ldg(biases + unit_row()) : 0.0F;
  }

  const DecodeContext<A>& c_;
  ptx::ClusterPlace there_;        // block lane % 16's shared memory
  ptx::ClusterPlace query_block_;  // where the warp's unit of a query goes
  int query_place_;
  // Of a lane's channel, or of that part which its octet has:
  float residual_ = 0.0F;
  float projected_ = 0.0F;  // q, v, z, W_mz z
  float h_ = 0.0F;
  float state_gate_ = 0.0F, mdi_gate_ = 0.0F;
};

}  // namespace mmrec::kernels
