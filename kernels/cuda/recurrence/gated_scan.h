// The scan of a sweep as gated_sweeps uses it.
#pragma once

#include "kernels/cuda/recurrence/gated_check.h"
#include "kernels/cuda/runtime/cuda.h"

namespace mmrec::kernels {

/// gated_scan of a product without its bias, [D] or null; change and magnitude are raised to the maxima instead of set.
/// Checks at its end what has settled, if check.report is not null.
template <class A>
void gated_scan_raising(Cuda& cuda, const GatedScan<Device, A>& op, const float* gate_bias,
                        const GatedCheck& check = {});

/// A sweep that needs no product, as the first of a window: its gates see 0 instead of h_{t-1}, the carry included, so
/// it settles nothing. Neither `gate` nor previous states are read. Sets change and magnitude to 0.
template <class A>
void gated_scan_first(Cuda& cuda, const GatedScan<Device, A>& op, const float* gate_bias);

}  // namespace mmrec::kernels
