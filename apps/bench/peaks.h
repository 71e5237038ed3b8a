// What a device can do, measured: the yardsticks for the engine's own rates on it.
#pragma once

#include <algorithm>

#include "mmrec/precision.h"

namespace mmrec::apps {

struct Peaks {
  double read_bytes_per_second = 0.0;  // a buffer far beyond the last cache level, read and summed by all processors
  double copy_bytes_per_second = 0.0;  // of a GPU: bytes of such a buffer read and written by a copy
  double product_flops = 0.0;  // oneDNN, 2048^3 fp32, rows over a thread per processor; of a GPU cuBLAS on square
                               // matrices of the given precision, random values
};

/// Of the processors. Takes a few seconds and up to 2 GiB; the best of several runs. Throws std::bad_alloc,
/// std::system_error.
Peaks measure_machine();

/// The same in a child process, which leaves this one's peak memory alone. Requires: no
/// thread of this process beyond the matrix library's own, which knows how to fork.
Peaks measure_machine_apart();

/// Of GPU number `gpu`. Takes about a second and up to 3 GiB of its memory. `precision` is a ModelInfo's. Medians of a
/// few rounds; the best product of several sizes. Throws std::bad_alloc, std::system_error, and std::runtime_error in a
/// build without CUDA.
Peaks measure_device(Precision precision, int gpu);

/// The better of each.
inline Peaks best_of(const Peaks& a, const Peaks& b) {
  return {std::max(a.read_bytes_per_second, b.read_bytes_per_second),
          std::max(a.copy_bytes_per_second, b.copy_bytes_per_second), std::max(a.product_flops, b.product_flops)};
}

}  // namespace mmrec::apps
