// The algorithms of the recurrences and the functions that choose: of a gate-frozen sweep, and of the recurrence that
// is normed at every token. Then what kernels of a sweep report at its end.
#pragma once

#include <cstdint>

#include "kernels/cuda/runtime/cuda.h"

namespace mmrec::kernels {

enum class NormedAlgo : std::uint8_t {
  kAuto,
  /// First tokens without a state: nothing is multiplied, a block norms a row.
  kRows,
  /// A cluster's 16 blocks hold the gate matrix in registers. They exchange a token's state through their shared
  /// memory, 8 runs at a time; other runs go to other clusters (normed_sm90.cu).
  kCluster,
  /// Any operands: blocks that hold the matrix in shared memory as far as it fits and exchange through L2.
  kGang,
};

template <class A>
NormedAlgo choose_normed(const Cuda& cuda, const NormedRecurrence<Device, A>& op);

/// Whether kCluster takes the op: A of 16 bits, compute capability 9.0 and a cluster of 16 blocks, D a multiple of 256
/// up to 1,024, 16-byte aligned weights.
template <class A>
bool normed_cluster_supported(const Cuda& cuda, const NormedRecurrence<Device, A>& op);
template <class A>
void normed_by_clusters(Cuda& cuda, const NormedRecurrence<Device, A>& op);

enum class SweepAlgo : std::uint8_t {
  kProductAndScan,  // wherever D is even: the gates' product, then the scan
  kNarrowTiles,     // one kernel (sm_90), by tiles of 64 channels
  kWideTiles,       // the same, of 128
};

/// The algorithm of a sweep; it looks at sizes and addresses alone. One kernel wherever it can be: compute capability
/// 9.0 (every build has code for it), 16 bits, D a multiple of 8, rows of all views and gate_weight 16-byte aligned,
/// gate_bias null or 8-byte aligned, times first..T not empty, and few enough tiles that their words have room in
/// Cuda::flags(): batch x ⌈(T − first) / 128⌉ x D up to about 500,000. Then the [T, 2D] matrix of gates, 16 bytes
/// written and read for an element of [T, D], does not exist, and the host need not wait for every sweep. Narrow tiles
/// while they all run at once, in one wave; wide ones read operands less often.
template <class A>
SweepAlgo choose_sweep(const Cuda& cuda, const GatedSweep<Device, A>& op);

/// Times of a window that a sweep leaves out together.
inline constexpr int kGatedSweepStep = 256;

/// The packed runs of a window (PackedRuns). Rows are numbered as there; a sweep's times count from row `base`.
struct GatedRuns {
  const std::int32_t* of_row = nullptr;  // of the sweep's times; null: they are one run's
  const std::int32_t* end = nullptr;
  std::int32_t* settled = nullptr;
  std::uint32_t* moving = nullptr;
  int first = 0;  // of `count` runs with rows in the window
  int count = 0;
  int base = 0;
  int window_begin = 0, window_end = 0;  // rows
};

/// The end of a sweep in a loop of sweeps: how much of the window has settled. A time is at rest if its magnitude is
/// finite and its change at most `tolerance` times that. Settled are the window's times before the first that is not at
/// rest; and at least one time more than before, because the first unsettled time has seen a settled state. Of packed
/// runs each settles for itself in runs.settled; *settled and *report then receive a word in which bit i says that
/// something moves in times [i, i + 1) * kGatedSweepStep of the window. The sweep's maxima are left 0 for the next.
struct GatedCheck {
  int first = 0;
  int times = 0;
  float tolerance = 0.0F;
  bool begins = true;                // `first` times were settled before; else as many as *settled says
  std::uint32_t* settled = nullptr;  // on the device; null: nobody there asks
  std::uint32_t* report = nullptr;   // page-locked; null: no check
  GatedRuns runs = {};
};

/// A sweep (GatedScan) of a product without its bias, [D] or null; change and magnitude are raised to the maxima
/// instead of set. D is even and pairs of channels are aligned in all operands. Checks at its end what has settled, if
/// check.report is not null.
template <class A>
void gated_scan_raising(Cuda& cuda, const GatedScan<Device, A>& op, const float* gate_bias,
                        const GatedCheck& check = {});

/// The sweep by one kernel, which neither waits nor allocates and can be captured; by the tiles of `algo`, which
/// choose_sweep must have chosen. Its product is summed in fp32, in an order that depends on D alone, so the bits of a
/// time's gates do not depend on `first`. Checks at its end what has settled, if check.report is not null; check.first
/// is op.first. If it does not begin a window it leaves out what the work before this on the stream has left in
/// *check.settled: times before it in whole steps of kGatedSweepStep from op.first on, and everything where it is
/// check.times. So sweeps can be enqueued before it is known whether they are needed. (h_rounded_next is complete from
/// the last time left out on.) One that finds everything settled rounds all states but the carry into `settled`, [B, T
/// + 1, D] like h, if that is given.
/// Of packed runs, check.first being 0, it leaves out the steps whose bit in *check.settled is clear, and rounds their
/// states into h_rounded_next.
template <class A>
void gated_sweep_sm90(Cuda& cuda, const GatedSweep<Device, A>& op, SweepAlgo algo, const GatedCheck& check = {},
                      const SequenceView<A, Device>& settled = {});

}  // namespace mmrec::kernels
