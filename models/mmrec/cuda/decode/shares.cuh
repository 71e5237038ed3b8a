// What a block of a decode step works out once, before it starts: which rows of which matrices are its own.
#pragma once

#include "models/mmrec/cuda/decode/plan.cuh"

namespace mmrec::kernels {

/// A block's share of every layer, by its threads.
template <class A>
__device__ void find_shares(const DecodeParams<A>& p, LayerShare* layers) {
  const DecodeStep<Device, A>& op = p.op;
  const auto owned = [&](Owned what) { return p.plan.splits[what].mine(); };
  const auto count = static_cast<int>(op.shape.layers);
  for (auto layer = static_cast<int>(threadIdx.x); layer <= count; layer += static_cast<int>(blockDim.x)) {
    LayerShare& share = layers[layer];
    const auto rows = [&](Product product, const A* weight) {
      const ProductShape& shape = p.plan.products[product];
      if (weight == nullptr) return;
      share.rows[product] =
          reinterpret_cast<const std::byte*>(weight) + std::int64_t{owned(shape.owned).first} * shape.row_bytes;
    };
    if (layer == count) {
      rows(Product::kHead, op.head);
      share.norm1 = op.norm;
      return;
    }
    const DecodeLayer<Device, A> w = op.layers[layer];
    const A* const qvzk = w.qvzk + p.plan.first_part * op.shape.dim * op.shape.dim;
    const A* const in_order[] = {w.gate,       qvzk,       w.gate_z,     w.gamma_in, w.context_in, w.gamma_up,
                                 w.context_up, w.memory_q, w.memory_out, w.ffn_in,   w.ffn_out};
#pragma unroll
    for (int i = 0; i < static_cast<int>(Product::kHead); ++i) rows(static_cast<Product>(i), in_order[i]);
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
