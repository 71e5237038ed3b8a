// What a cluster's decode step does to the outputs of its stages (cluster.cuh): where each goes, by distributed shared
// memory, and what is kept of a channel, in registers. By whole warps: warp u finishes the u-th unit of 8 outputs, lane
// l its output l % 8; the four octets of lanes have several parts of a channel, or the same.
#pragma once

#include "models/mmrec/cuda/decode/cluster_exchange.cuh"
#include "models/mmrec/cuda/decode/epilogue.cuh"

namespace mmrec::kernels {

template <class A>
class ThroughCluster {
 public:
  __device__ __forceinline__ explicit ThroughCluster(const DecodeContext<A>& context) : exchange(context), c_(context) {
    const int unit = c_.channels.first + c_.warp * kUnit;
    const int head = min(unit / c_.p.plan.head_width, kClusterBlocks - 1);  // of warps that have such a unit
    query_block_ = ptx::place_in_cluster(c_.shared, static_cast<unsigned>(head));
    query_place_ = exchange.place_of(Point::kQuery, unit - head * c_.p.plan.head_width);
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

  using NormWeights = typename ClusterExchange<A>::NormWeights;
  /// What a lane's output takes from memory and from other lanes, and where it goes: before the input has come.
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
      // Octet 0 has W_mh's, then a hidden unit of each network.
      out.part = min(octet(), c_.networks());
      const bool exists = has_unit(out.part == 0 ? c_.channels : c_.hidden);
      out.row = exists ? unit_row() + (out.part == 0 ? 0 : c_.channels.count + (out.part - 1) * c_.hidden.count) : 0;
      out.second = out.part == 2;
      out.bias = bias<kStage>(layer, out.part, exists);
      const int of_context = padded_row(c_.template shape_of<Stage::kAdvance>().row_bytes);
      out.place = exchange.place_of(Point::kHidden, c_.hidden.first + c_.warp * kUnit) +
                  (exchange.sends_first() ? 0 : of_context);
    } else if constexpr (kStage == Stage::kWiden) {
      out.bias = bias<kStage>(layer, 0, has_unit(c_.ffn));
      out.place = exchange.place_of(Point::kFfn, c_.ffn.first + c_.warp * kUnit);
    } else {
      if (!has_unit(c_.channels)) return out;
      if constexpr (kStage == Stage::kProject) {
        // Octets have q, v, z, k; where one of these is not multiplied, another one again.
        out.part = min(max(octet() - c_.p.plan.first_part, 0), c_.template parts<kStage>() - 1);
        out.row = out.part * c_.channels.count + unit_row();
        out.part += c_.p.plan.first_part;
        const int k = padded_row(c_.template shape_of<kStage>().row_bytes);
        out.place = exchange.place_of(Point::kProjected, channel) + (exchange.sends_first() ? 0 : k);
      }
      out.bias = bias<kStage>(layer, out.part);
      if constexpr (kStage == Stage::kGate || kStage == Stage::kAdvance) out.other_bias = bias<kStage>(layer, 1);
      if constexpr (kStage == Stage::kAdvance) {
        Channel& in = out.channel;
        in.h = __ldcg(c_.h(layer, 0) + channel_of_lane());
        if (op.slots == 0) in.c = bias<Stage::kRecall>(layer, 0);
        if (op.slots == 1) in.c = __ldg(c_.state_of(op.context, layer, 0) + channel_of_lane());
        if (op.slots <= 1) out.norm = exchange.ask_norm(c_.layers[layer].norm2);
        in.v = __shfl_sync(0xffffffffU, projected_, 8 + (c_.lane & 7));
        in.z = __shfl_sync(0xffffffffU, projected_, 16 + (c_.lane & 7));
        in.mdi = __shfl_sync(0xffffffffU, mdi_input_, c_.lane & 7) + mdi_gate_;
        out.place = op.slots > 1 ? exchange.place_of(Point::kState, channel) : exchange.normalised_place(Point::kMixed);
      } else if constexpr (kStage == Stage::kQuery) {
        out.q = __shfl_sync(0xffffffffU, projected_, c_.lane & 7);
        out.place = query_place_;
      } else if constexpr (kStage == Stage::kRecall) {
        out.norm = exchange.ask_norm(c_.layers[layer].norm2);
        out.place = exchange.normalised_place(Point::kMixed);
      } else if constexpr (kStage == Stage::kNarrow) {
        out.norm = exchange.ask_norm(c_.layers[layer + 1].norm1);
        out.sum = __ldcg(c_.state_of(op.segment_sum, layer, 0) + channel_of_lane());
        out.place = exchange.normalised_place(Point::kOutput);
      }
    }
    out.place = ptx::opaque(out.place);  // worked out here
    return out;
  }

  // --- The epilogue's words ------------------------------------------------------------------------------------------

  __device__ __forceinline__ const DecodeStep<Device, A>& op() const { return c_.p.op; }
  template <Point kPoint>
  __device__ __forceinline__ float send(const Output& out, float y) const {
    constexpr bool kTwo = kPoint == Point::kProjected || kPoint == Point::kHidden;
    constexpr int kFirst = kPoint == Point::kProjected ? 16 : kPoint == Point::kHidden ? 8 : 0;  // lane of the first
    const std::uint32_t pair = exchange.round_pair(y);
    if (kPoint == Point::kHidden && !has_unit(c_.hidden)) return exchange.rounded(pair);
    const uint4 values = exchange.piece(pair, kTwo && !exchange.sends_first() ? kFirst + 8 : kFirst);
    if constexpr (kPoint == Point::kQuery) {
      if (c_.lane == 0) exchange.send(query_block_, kPoint, out.place, values);
    } else if (exchange.sends_first() || (kTwo && c_.networks() == 2)) {
      exchange.send(kPoint, out.place, values);
    }
    return exchange.rounded(pair);
  }
  template <Point kPoint>
  __device__ __forceinline__ void send_sum(const Output& out, float x) const {
    exchange.send_normalised(kPoint, out.place, x, out.norm);
  }
  __device__ __forceinline__ void keep_gate(const Output&, float state_gate, float mdi_gate) {
    state_gate_ = state_gate;
    mdi_gate_ = mdi_gate;
  }
  __device__ __forceinline__ void keep_projection(const Output&, float y) { projected_ = y; }
  __device__ __forceinline__ void keep_mdi_input(const Output&, float y) { mdi_input_ = y; }
  __device__ __forceinline__ float& residual(const Output&) { return residual_; }
  __device__ __forceinline__ float query(const Output& out) const { return out.q; }
  __device__ __forceinline__ Channel channel(const Output& out) const {
    Channel in = out.channel;
    in.state_gate = state_gate_;
    return in;
  }
  __device__ __forceinline__ void store_h(int layer, const Output&, float h) const {
    if (octet() == 0) c_.h(layer, 0)[channel_of_lane()] = h;
  }
  __device__ __forceinline__ void store_sum(int layer, const Output&, double sum) const {
    if (octet() == 0) c_.state_of(c_.p.op.segment_sum, layer, 0)[channel_of_lane()] = sum;
  }

  ClusterExchange<A> exchange;

 private:
  __device__ __forceinline__ int octet() const { return c_.lane >> 3; }
  __device__ __forceinline__ int channel_of_lane() const { return c_.channels.first + unit_row(); }
  template <Stage kStage>
  __device__ __forceinline__ float bias(int layer, int part, bool exists = true) const {
    const float* biases = c_.layers[layer].bias[stage_info(kStage).bias + part];
    return exists && biases != nullptr ? __ldg(biases + unit_row()) : 0.0F;
  }

  const DecodeContext<A>& c_;
  ptx::ClusterPlace query_block_;  // where the warp's unit of a query goes
  int query_place_;
  // Of a lane's channel, or of that part which its octet has:
  float residual_ = 0.0F;
  float projected_ = 0.0F;  // q, v, z, k
  float mdi_input_ = 0.0F;  // octet 0
  float state_gate_ = 0.0F, mdi_gate_ = 0.0F;
};

}  // namespace mmrec::kernels
