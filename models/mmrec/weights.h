// Named tensors bound to the model: host weights in their stored type, laid out for the forward pass.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "kernels/cpu/cpu.h"
#include "kernels/tensor.h"
#include "models/files/checkpoint.h"
#include "models/mmrec/config.h"

namespace mmrec::models {

/// A matrix that owns its bytes in host memory. Parts stacked into one matrix share its dtype: the parts' own where
/// they agree, fp32 otherwise.
struct HostMatrix {
  kernels::HostBuffer<std::byte> bytes;
  kernels::DType dtype = kernels::DType::kF32;
  std::int64_t rows = 0;
  std::int64_t cols = 0;

  kernels::WeightView<kernels::Host> view() const { return {bytes.data(), dtype, rows, cols}; }
};

/// Biases and norm weights, widened to fp32.
using HostVector = kernels::HostBuffer<float>;

/// One block. Parts that are read together are stacked into one matrix:
///   qvzk       [4D, D] on u: rows of W_q, W_v, W_z, W_k ([3D, D] without W_k for DPG, which does not use k)
///   gate       [2D, D] on h_{t-1}: rows of W_g, then columns D..2D of mdi.W_g
///   gate_z     [D, D] on z: columns 0..D of mdi.W_g
///   gamma_in, gamma_up      mdi.W_gamma.0 [G, D] on z, mdi.W_gamma.2 [D, G] (DPG: W_gamma_down [R, D], W_gamma_up [D,
///   R]) context_in, context_up  mdi.W_context.0 [G, D] on k, mdi.W_context.2 [D, G]; empty for DPG memory_q,
///   memory_out    multi_mem_attention.W_q, W_o [D, D] ffn_in [F, D], ffn_out [D, F]   ffn.0, ffn.3
/// Biases follow their matrices; gate_bias is b_g [D], gate_z_bias is b_m [D].
struct LayerWeights {
  HostMatrix qvzk, gate, gate_z, gamma_in, gamma_up, context_in, context_up, memory_q, memory_out, ffn_in, ffn_out;
  HostVector qvzk_bias, gate_bias, gate_z_bias, gamma_in_bias, gamma_up_bias, context_in_bias, context_up_bias,
      memory_q_bias, memory_out_bias, ffn_in_bias, ffn_out_bias, norm1, norm2;
};

/// A whole model in host memory. Immutable after load; shared between sessions.
struct HostWeights {
  HostMatrix embedding;  // [V, D]
  HostMatrix head;       // [V, D]; rows == 0 where it is tied to the embedding
  HostVector norm;       // [D]
  std::vector<LayerWeights> layers;
  std::uint64_t bytes = 0;        // resident size of all of the above
  std::uint64_t parameters = 0;   // elements of the tensors bound (tied head counted once)
  std::uint64_t fingerprint = 0;  // identity of configuration, tensor names, shapes and sampled bytes

  kernels::WeightView<kernels::Host> head_view() const { return head.rows == 0 ? embedding.view() : head.view(); }
};

struct WeightOptions {
  bool allow_nonfinite = false;  // load NaN and infinite weights instead of refusing them
  int threads = 0;               // readers; <= 0: all processors
};

/// Checks every tensor's presence and shape against the configuration before allocating anything, then reads.
/// Missing, unexpected (except mdi.W_planning_*, reported) and mis-shaped tensors and non-finite values are refused
/// with std::runtime_error naming file, tensor, found and expected; std::bad_alloc if memory does not suffice (the
/// weights exceed the machine's, or an allocation failed).
HostWeights load_weights(const Checkpoint& checkpoint, const Config& config, const WeightOptions& options = {},
                         const WarningSink& warn = {});

}  // namespace mmrec::models
