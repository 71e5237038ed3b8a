// The algorithms of a scan over time (scan.cuh). choose_scan there decides; tests and benches may force one.
#pragma once

#include <cstdint>

namespace mmrec::kernels {

/// How tiles come to blocks. All algorithms compute the same bits.
enum class ScanAlgo : std::uint8_t {
  kLoad,     // any block takes any tile; its threads load the inputs
  kStaged,   // the same; the copy engine brings inputs into shared memory ahead of time (sm_90)
  kColumns,  // a column of channels belongs to a block
  kGroups,   // a column is shared by two blocks or more
};

}  // namespace mmrec::kernels
