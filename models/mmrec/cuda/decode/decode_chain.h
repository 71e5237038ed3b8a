// A decode step of many sequences, kernel after kernel: decode_step beyond the batches of its one kernel.
#pragma once

#include "models/mmrec/cuda/ops.h"

namespace mmrec::kernels {

/// Batches of more than 8 sequences in 16 bits, of shapes and on devices whose products choose_linear takes.
bool decode_chain_supported(const Cuda& cuda, const DecodeShape& shape, std::size_t element);
/// Size of DecodeStep::exchange: the step's activations. It needs no preparation.
std::size_t decode_chain_bytes(const DecodeShape& shape);
/// Looks at op.layers_on_host alone. A sequence's bits do not depend on its batch within linear's classes of rows.
template <class A>
void decode_chain(Cuda& cuda, const DecodeStep<Device, A>& op);

}  // namespace mmrec::kernels
