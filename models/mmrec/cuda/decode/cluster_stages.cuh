// The stages of a decode step by a cluster (cluster.cuh): what each of them multiplies, and its way from sums to
// what the blocks read.
#pragma once

#include "models/mmrec/cuda/decode/cluster_product.cuh"

namespace mmrec::kernels {

template <class A>
class ClusterStages : protected ClusterProduct<A> {
  using Base = ClusterProduct<A>;

 protected:
  using Base::ask_norm, Base::lane_, Base::normalised_place, Base::piece, Base::place_of, Base::round_pair,
      Base::rounded, Base::send, Base::send_normalised, Base::sends_first, Base::sum, Base::there_, Base::channels_,
      Base::layers_, Base::dim_, Base::p_, Base::warp_;
  using typename Base::NormWeights;

  __device__ __forceinline__ ClusterStages(const DecodeParams<A>& p, std::byte* shared, ClusterRing ring)
      : Base(p, shared, ring),
        hidden_(p.plan.splits[static_cast<int>(Owned::kHidden)].mine()),
        ffn_(p.plan.splits[static_cast<int>(Owned::kFfn)].mine()) {}

  // --- What a stage is -----------------------------------------------------------------------------------------------

  /// Where its input comes from.
  static constexpr Point point_of(Stage stage) {
    constexpr Point kPoints[] = {Point::kCount,    Point::kOutput, Point::kProjected, Point::kHidden, Point::kState,
                                 Point::kAttended, Point::kMixed,  Point::kFfn,       Point::kOutput};
    return kPoints[static_cast<int>(stage)];
  }
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

  Range hidden_, ffn_;
  ptx::ClusterPlace query_block_;  // where the warp's unit of a query goes
  int query_place_ = 0;
  // Of a lane's channel, or of that part which its octet has:
  float residual_ = 0.0F;
  float projected_ = 0.0F;  // q, v, z, k
  float mdi_input_ = 0.0F;  // octet 0
  float state_gate_ = 0.0F, mdi_gate_ = 0.0F;
};

}  // namespace mmrec::kernels
