// Ops of the CUDA backend that know the model: what models/mmrec/paths/ call beside the list of kernels/ops.h.
#pragma once

#include <cstddef>

#include "kernels/cuda/runtime/cuda.h"
#include "models/mmrec/fused_ops.h"

namespace mmrec::kernels {

/// A whole decode step (models/mmrec/fused_ops.h) by one kernel, where decode_step_supported says so: up to
/// kTileColumns sequences, devices from compute capability 9.0, D, F and the gate's hidden width whole multiples of 16
/// bytes, matrices 16-byte aligned, and vectors that fit into shared memory beside the ring of weights. `element` is
/// the size of A. It can be captured; what changes between steps without a new capture is in device memory: tokens and
/// state. A sequence's bits depend neither on the batch nor on the algo. Throws std::invalid_argument if the shape is
/// not supported.
template <class A>
void decode_step(Cuda& cuda, const DecodeStep<Device, A>& op);
/// Two steps side by side, each on half of the device: of the same shape, whose `stacks` is 2, and with as many filled
/// slots; all they write is their own.
template <class A>
void decode_steps(Cuda& cuda, const DecodeStep<Device, A>& first, const DecodeStep<Device, A>& second);
bool decode_step_supported(const Cuda& cuda, const DecodeShape& shape, std::size_t element);
/// Whether this device runs a cluster of as many blocks as a small model's step takes.
bool holds_decode_cluster(const Cuda& cuda);
/// What decode_step takes; kNone where it is not supported.
template <class A>
DecodeAlgo decode_algo(const Cuda& cuda, const DecodeShape& shape);
/// Size of DecodeStep::exchange, and how it is made ready, once.
std::size_t decode_exchange_bytes(const Cuda& cuda, const DecodeShape& shape, std::size_t element);
void decode_exchange_clear(Cuda& cuda, const DecodeShape& shape, std::size_t element, void* exchange);

}  // namespace mmrec::kernels
