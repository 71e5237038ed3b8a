// What becomes of the sums of a stage, once for every algorithm: the equations of a block between its products.
//
// An algorithm says how values cross blocks and what it remembers of a channel where; its functions may be a lane's own
// work or that of a whole warp:
//   send<point>(out, y)        rounds y to A for other blocks, if it is meant for them; returns it rounded
//   send_sum<point>(out, x)    the residual stream, for other blocks
//   keep_gate, keep_projection, keep_mdi_input, residual    a channel's values for later stages
//   channel, query                                          what earlier stages and memory have of it
#pragma once

#include "models/mmrec/cuda/decode/context.cuh"

namespace mmrec::kernels {

/// What the recurrence and the residual stream want of a channel, from memory or from earlier stages.
struct Channel {
  float h, c;
  float state_gate, mdi, z, v;
};

/// Output `out` of a stage, of value y with its bias; other: of the second network in `advance`, where there is one.
template <Stage kStage, class Algo, class Output>
__device__ __forceinline__ void epilogue(Algo& algo, int layer, const Output& out, float y, float other) {
  constexpr Point kTo = stage_info(kStage).output;
  const auto& op = algo.op();
  if constexpr (kStage == Stage::kGate) {
    algo.keep_gate(out, y, other);
  } else if constexpr (kStage == Stage::kProject) {
    algo.keep_projection(out, algo.template send<kTo>(out, y));
  } else if constexpr (kStage == Stage::kHide) {
    const float active = op.shape.dpg ? relu(y) : gelu(y);
    algo.keep_mdi_input(out, algo.template send<kTo>(out, out.part == 0 ? y : active));
  } else if constexpr (kStage == Stage::kAdvance) {
    const Channel in = algo.channel(out);
    const float gamma = decay_of(y, !op.shape.dpg, other);
    const float h = gated_step(in.state_gate, in.mdi, in.z, gamma, op.mdi_mix)(in.h);
    const float x = residual_sum(algo.residual(out), h, in.v) + in.c;
    if (op.slots > 1) {
      algo.template send<kTo>(out, h);
    } else {
      algo.template send_sum<Point::kMixed>(out, x);
    }
    algo.residual(out) = x;
    algo.store_h(layer, out, h);
  } else if constexpr (kStage == Stage::kQuery) {
    algo.template send<kTo>(out, __fmaf_rn(0.5F, algo.query(out), y));
  } else if constexpr (kStage == Stage::kRecall || kStage == Stage::kNarrow) {
    const float x = algo.residual(out) + y;
    algo.template send_sum<kTo>(out, x);
    algo.residual(out) = x;
    if constexpr (kStage == Stage::kNarrow) algo.store_sum(layer, out, out.sum + static_cast<double>(x));
  } else if constexpr (kStage == Stage::kWiden) {
    algo.template send<kTo>(out, gelu(y));
  } else {
    *static_cast<float*>(out.to) = y;
  }
}

}  // namespace mmrec::kernels
