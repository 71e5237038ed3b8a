// One gate-frozen sweep in one kernel (GatedSweep), for devices of compute capability 9.0. Its twin everywhere is the
// product and gated_scan.
#pragma once

#include "kernels/cuda/recurrence/gated_check.h"
#include "kernels/cuda/runtime/cuda.h"

namespace mmrec::kernels {

/// True where gated_sweep_sm90 takes the op: compute capability 9.0 (every build has code for it), gate_weight of type
/// A, D a multiple of 8, views and gate_weight 16-byte aligned with strides that are multiples of 8, gate_bias null or
/// 8-byte aligned, times first..T not empty, and few enough tiles that their words have room in Cuda::flags(): batch x
/// ⌈(T − first) / 128⌉ x D up to about 500,000. Looks at sizes and addresses alone.
template <class A>
bool gated_sweep_sm90_supported(const Cuda& cuda, const GatedSweep<Device, A>& op);

/// The sweep, by one kernel that neither waits nor allocates and can be captured. Its product is summed in fp32, in an
/// order that depends on D alone, so the bits of a time's gates do not depend on `first`.
/// Checks at its end what has settled, if check.report is not null; check.first is op.first. If it does not begin a
/// window it leaves out what the work before this on the stream has left in *check.settled: times before it in whole
/// steps of kGatedSweepStep from op.first on, and everything where it is check.times. So sweeps can be enqueued before
/// it is known whether they are needed. (h_rounded_next is complete from the last time left out on.) One that finds
/// everything settled rounds all states but the carry into `settled`, [B, T + 1, D] like h, if that is given.
inline constexpr int kGatedSweepStep = 256;
template <class A>
void gated_sweep_sm90(Cuda& cuda, const GatedSweep<Device, A>& op, const GatedCheck& check = {},
                      const SequenceView<A, Device>& settled = {});

}  // namespace mmrec::kernels
