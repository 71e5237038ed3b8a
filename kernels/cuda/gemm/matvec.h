// Products of a few rows with weight matrices, by kernels that stream the weights once.
#pragma once

#include <span>

#include "kernels/cuda/runtime/cuda.h"

namespace mmrec::kernels {

/// The jobs that have at most kMatvecRows rows, side by side; the others are left alone. A row's bits depend on the row
/// and the weights alone: not on how many rows or jobs there are, nor on alignment.
template <class A, class Y>
void matvec(Cuda& cuda, std::span<const Linear<Device, A, Y>> jobs);

}  // namespace mmrec::kernels
