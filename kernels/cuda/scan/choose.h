// The ways that a scan over time can go (scan.cuh). choose_scan decides; tests and benches may ask for one.
#pragma once

#include <cstdint>
#include <optional>

#include "kernels/cuda/runtime/cuda.h"

namespace mmrec::kernels {

/// How tiles come to blocks. All ways compute the same bits.
enum class ScanWay : std::uint8_t {
  kLoad,     // any block takes any tile; its threads load the inputs
  kStaged,   // the same; the copy engine brings inputs into shared memory ahead of time (sm_90)
  kColumns,  // a column of channels belongs to a block
  kGroups,   // a column is shared by two blocks or more
};

/// Enqueues the op by `way`, or by the way that choose_scan takes; returns the way. Throws std::invalid_argument where
/// the operands or the device do not allow it, and as the op does.
template <class T>
ScanWay scan_by(Cuda& cuda, const DecayScan<T, Device>& op, std::optional<ScanWay> way = {});
template <class T>
ScanWay scan_by(Cuda& cuda, const ExpProductScan<T, Device>& op, std::optional<ScanWay> way = {});
template <class T>
ScanWay scan_by(Cuda& cuda, const LogSumExpScan<T, Device>& op, std::optional<ScanWay> way = {});

}  // namespace mmrec::kernels
