// What a block of a decode step works out once, before it starts: which rows of which matrices are its own.
#pragma once

#include "models/mmrec/cuda/decode/plan.cuh"

namespace mmrec::kernels {

/// A block's shares of products and layers, by its threads.
template <class A>
__device__ void find_shares(const DecodeParams<A>& p, LayerShare* layers, Segment* segments) {
  const DecodeStep<Device, A>& op = p.op;
  const DecodePlan& plan = p.plan;
  const auto thread = static_cast<int>(threadIdx.x);
  const auto owned = [&](Owned what) { return plan.splits[what].mine(); };
  if (thread < kCountOf<Product>) {
    const ProductShape& s = plan.products.of[thread];
    const int count = s.slices > 0 ? owned(s.owned).count : 0;
    const int others = s.slices > 1 ? owned(s.others).count : 0;
    const int rows = count + (s.slices - 1) * others;
    segments[thread] = {rows,    s.row_bytes, s.slot_bytes, s.tile_rows,  s.panel_bytes,
                        s.tiles, count,       others,       s.slice_bytes};
  }
  const auto count = static_cast<int>(op.shape.layers);
  for (int layer = thread; layer <= count; layer += static_cast<int>(blockDim.x)) {
    LayerShare& share = layers[layer];
    const auto rows = [&](Product product, const A* weight) {
      const ProductShape& shape = plan.products[product];
      share.rows[product] =
          reinterpret_cast<const std::byte*>(weight) + std::int64_t{owned(shape.owned).first} * shape.row_bytes;
    };
    if (layer == count) {
      rows(Product::kHead, op.head);
      share.norm1 = op.norm;
      return;
    }
    const DecodeLayer<Device, A> w = op.layers[layer];
    rows(Product::kGate, w.gate);
    rows(Product::kQvzk, w.qvzk + plan.first_part * op.shape.dim * op.shape.dim);
    rows(Product::kGateZ, w.gate_z);
    rows(Product::kGammaIn, w.gamma_in);
    rows(Product::kGammaUp, w.gamma_up);
    rows(Product::kMemoryQ, w.memory_q);
    rows(Product::kMemoryOut, w.memory_out);
    rows(Product::kFfnIn, w.ffn_in);
    rows(Product::kFfnOut, w.ffn_out);
    if (!op.shape.dpg) {
      rows(Product::kContextIn, w.context_in);
      rows(Product::kContextUp, w.context_up);
    }
    int next = 0;
    const auto bias = [&](const float* values, Owned what, std::int64_t more = 0) {
      share.bias[next++] = values == nullptr ? nullptr : values + owned(what).first + more;
    };
    bias(w.gate_bias, Owned::kChannels);
    bias(nullptr, Owned::kChannels);  // of W_mh
    for (int part = 0; part < 4; ++part) bias(w.qvzk_bias, Owned::kChannels, part * op.shape.dim);
    bias(w.gate_z_bias, Owned::kChannels);
    bias(w.gamma_in_bias, Owned::kHidden);
    bias(w.context_in_bias, Owned::kHidden);
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

}  // namespace mmrec::kernels
