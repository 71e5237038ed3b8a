// A decode step of one sequence of a small model in bf16 by one cluster of blocks.
#pragma once

#include "models/mmrec/cuda/ops.h"

namespace mmrec::kernels {

/// Whether decode_cluster takes the shape, and the device holds such a cluster. To the bit the same as decode_step's
/// other kernels for up to 8 sequences.
bool decode_cluster_serves(const Cuda& cuda, const DecodeShape& shape);
/// Leaves op.exchange alone.
void decode_cluster(Cuda& cuda, const DecodeStep<Device, BFloat16>& op);

}  // namespace mmrec::kernels
