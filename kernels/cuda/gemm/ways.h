// linear's ways (choose.h), each for as many jobs as one launch takes. Jobs have rows and outputs.
#pragma once

#include <span>

#include "kernels/cuda/gemm/choose.h"

namespace mmrec::kernels {

inline constexpr std::size_t kMostMatvecJobs = 8;
inline constexpr std::size_t kMostGemmJobs = 4;

/// Up to kTileColumns rows. A row's bits depend on the row and the weights alone: not on how many rows or jobs there
/// are, nor on alignment.
template <class A, class Y>
void matvec(Cuda& cuda, std::span<const Linear<Device, A, Y>> jobs);

/// Up to kFewRows rows, where gemm_sm90_supported(cuda, job.x, job.weight) holds.
template <class A, class Y>
void linear_few_rows_sm90(Cuda& cuda, std::span<const Linear<Device, A, Y>> jobs);
/// Any number of rows, where it holds.
template <class A, class Y>
void linear_many_rows_sm90(Cuda& cuda, std::span<const Linear<Device, A, Y>> jobs, GemmTile tile = GemmTile::kAuto);

}  // namespace mmrec::kernels
