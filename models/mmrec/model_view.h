// Weights as the forward pass sees them: views in a backend's memory space.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/tensor.h"
#include "models/mmrec/weights.h"

namespace mmrec::models {

/// Views of one block's weights; shapes as in LayerWeights. Null data where the configuration has no such tensor.
template <class Space>
struct LayerView {
  kernels::WeightView<Space> qvzk, gate, gate_z, gamma_in, gamma_up, context_in, context_up, memory_q, memory_out,
      ffn_in, ffn_out;
  const float *qvzk_bias = nullptr, *gate_bias = nullptr, *gate_z_bias = nullptr, *gamma_in_bias = nullptr,
              *gamma_up_bias = nullptr, *context_in_bias = nullptr, *context_up_bias = nullptr,
              *memory_q_bias = nullptr, *memory_out_bias = nullptr, *ffn_in_bias = nullptr, *ffn_out_bias = nullptr,
              *norm1 = nullptr, *norm2 = nullptr;
};

template <class Space>
struct ModelView {
  kernels::WeightView<Space> embedding;  // [V, D]
  kernels::WeightView<Space> head;       // [V, D]
  const float* norm = nullptr;           // [D]
  std::vector<LayerView<Space>> layers;
};

/// Views of `weights`, which must outlive them.
inline ModelView<kernels::Host> view_of(const HostWeights& weights) {
  ModelView<kernels::Host> model{weights.embedding.view(), weights.head_view(), weights.norm.data(), {}};
  model.layers.reserve(weights.layers.size());
  for (const LayerWeights& w : weights.layers) {
    model.layers.push_back({w.qvzk.view(),
                            w.gate.view(),
                            w.gate_z.view(),
                            w.gamma_in.view(),
                            w.gamma_up.view(),
                            w.context_in.view(),
                            w.context_up.view(),
                            w.memory_q.view(),
                            w.memory_out.view(),
                            w.ffn_in.view(),
                            w.ffn_out.view(),
                            w.qvzk_bias.data(),
                            w.gate_bias.data(),
                            w.gate_z_bias.data(),
                            w.gamma_in_bias.data(),
                            w.gamma_up_bias.data(),
                            w.context_in_bias.data(),
                            w.context_up_bias.data(),
                            w.memory_q_bias.data(),
                            w.memory_out_bias.data(),
                            w.ffn_in_bias.data(),
                            w.ffn_out_bias.data(),
                            w.norm1.data(),
                            w.norm2.data()});
  }
  return model;
}

}  // namespace mmrec::models
