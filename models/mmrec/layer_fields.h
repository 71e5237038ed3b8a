// The fields of one block's weights, whatever they are: tensors that own their bytes, views of them in a memory space,
// or bare pointers for a kernel. models/mmrec/mmrec.h says which tensors of a checkpoint fill each field and
// goes through the fields of several instances side by side; no other list of them exists.
#pragma once

namespace mmrec::models {

/// Parts that are read together are stacked into one matrix [out, in], rows of one below those of the other. D, F, G
/// and R are Config's. Biases follow their matrices. Empty (or null) is what a configuration has not: the context
/// matrices with DPG.
///
/// On a device what is linear in z or k is composed with W_z or W_k (models/mmrec/cuda/compose.cpp), so that all of it
/// is multiplied by u: qvzk has W_mz W_z in place of W_k, gamma_in is W W_z, context_in is W W_k, and gate_z is empty.
template <class Matrix, class Vector>
struct LayerFields {
  Matrix gate{};        // [2D, D] on h_{t-1}: W_g, below it columns D..2D of mdi.W_g
  Matrix qvzk{};        // [4D, D] on u: W_q, W_v, W_z, W_k; in a host's memory [3D, D] with DPG, which does not use k
  Matrix gate_z{};      // [D, D] on z: columns 0..D of mdi.W_g
  Matrix gamma_in{};    // [G, D] on z; DPG: [R, D]
  Matrix gamma_up{};    // [D, G]; DPG: [D, R]
  Matrix context_in{};  // [G, D] on k; none with DPG
  Matrix context_up{};  // [D, G]; none with DPG
  Matrix memory_q{};    // [D, D]
  Matrix memory_out{};  // [D, D]
  Matrix ffn_in{};      // [F, D]
  Matrix ffn_out{};     // [D, F]

  Vector gate_bias{};  // [D]: that of W_g alone
  Vector qvzk_bias{};
  Vector gate_z_bias{};  // [D]: that of mdi.W_g
  Vector gamma_in_bias{}, gamma_up_bias{}, context_in_bias{}, context_up_bias{};
  Vector memory_q_bias{}, memory_out_bias{}, ffn_in_bias{}, ffn_out_bias{};
  Vector norm1{}, norm2{};  // [D]
};

}  // namespace mmrec::models
