// How many blocks draw a row's token, and the function that chooses. Tokens do not depend on it.
#pragma once

#include "kernels/cuda/runtime/cuda.h"

namespace mmrec::kernels {

/// Most blocks that share a row: a cluster.
inline constexpr int kMostSampleBlocks = 8;

/// One for rows that a block holds in half its registers, or where there is no cluster. Otherwise as many as hold the
/// row so, 8 at most, while all rows have their blocks at once.
int choose_sample_blocks(const Cuda& cuda, const SampleTokens<Device>& op);

/// sample_tokens by clusters of 2, 4 or 8 blocks, on a device of compute capability 9.0.
void sample_tokens_by_clusters(Cuda& cuda, int blocks, const SampleTokens<Device>& op);

}  // namespace mmrec::kernels
