// A decode step of one sequence of a small model in bf16 by one cluster of blocks.
#pragma once

#include "models/mmrec/cuda/decode/plan.cuh"
#include "models/mmrec/cuda/ops.h"

namespace mmrec::kernels {

/// Whether the device holds such a cluster of blocks with all the shared memory that there is.
bool holds_decode_cluster(const Cuda& cuda);
/// To the bit the same as decode_step's other kernels. Leaves op.exchange alone. Of choose_decode's plan.
void decode_cluster(Cuda& cuda, const DecodeStep<Device, BFloat16>& op, const DecodePlan& plan);

}  // namespace mmrec::kernels
