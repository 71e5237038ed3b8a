// How the recurrence that is normed at every token goes: the ways, the one function that decides among them, and how to
// force one.
#pragma once

#include "kernels/cuda/runtime/cuda.h"

namespace mmrec::kernels {

enum class NormedWay : std::uint8_t {
  kAuto,
  /// First tokens without a state: nothing is multiplied, a block norms a row.
  kRows,
  /// The gate matrix in the registers of a cluster's 16 blocks, which exchange a token's state through their shared
  /// memory, 8 runs at a time; other runs go to other clusters (normed_sm90.cu).
  kCluster,
  /// Any operands: blocks that hold the matrix in shared memory as far as it fits and exchange through L2.
  kGang,
};

template <class A>
NormedWay choose_normed(const Cuda& cuda, const NormedRecurrence<Device, A>& op);

/// normed_recurrence by one way, which must be able to take the op.
template <class A>
void normed_recurrence_by(Cuda& cuda, NormedWay way, const NormedRecurrence<Device, A>& op);

/// Whether kCluster takes the op: A of 16 bits, compute capability 9.0 and a cluster of 16 blocks, D a multiple of 256
/// up to 1,024, 16-byte aligned weights.
template <class A>
bool normed_cluster_supported(const Cuda& cuda, const NormedRecurrence<Device, A>& op);
template <class A>
void normed_by_clusters(Cuda& cuda, const NormedRecurrence<Device, A>& op);

/// Runs that share a reading of the gate matrix.
inline constexpr int kNormedColumns = kTileColumns;

}  // namespace mmrec::kernels
