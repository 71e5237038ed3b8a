// What the GPU can do, measured: the yardsticks for the engine's own rates on it.
#pragma once

#include <algorithm>

#include "mmrec/precision.h"

namespace mmrec::apps {

struct DevicePeaks {
  double copy_bytes_per_second = 0.0;  // bytes read and written by a copy far beyond L2
  double read_bytes_per_second = 0.0;  // the same buffer read and summed
  double product_flops = 0.0;          // cuBLAS on square matrices of the given precision, random values
};

/// Of GPU number `gpu`. Takes about a second and up to 3 GiB of its memory. `precision` is a ModelInfo's. Medians of a
/// few rounds; the best product of several sizes. Throws std::bad_alloc, std::system_error, and std::runtime_error in a
/// build without CUDA.
DevicePeaks measure_device(Precision precision, int gpu);

/// The better of each.
inline DevicePeaks best_of(const DevicePeaks& a, const DevicePeaks& b) {
  return {std::max(a.copy_bytes_per_second, b.copy_bytes_per_second),
          std::max(a.read_bytes_per_second, b.read_bytes_per_second), std::max(a.product_flops, b.product_flops)};
}

}  // namespace mmrec::apps
