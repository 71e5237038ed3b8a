// What this machine can do, measured: the yardsticks for the engine's own rates.
#pragma once

namespace mmrec::apps {

struct MachinePeaks {
  double read_bytes_per_second = 0.0;  // all processors summing a buffer far beyond the last cache level
  double sgemm_flops = 0.0;            // oneDNN, 2048^3 fp32, rows over a thread per processor
};

/// Takes a few seconds and up to 2 GiB; the best of several runs. Throws std::bad_alloc, std::system_error.
MachinePeaks measure_machine();

/// The same in a child process, which leaves this one's peak memory alone. Requires: no
/// thread of this process beyond the matrix library's own, which knows how to fork.
MachinePeaks measure_machine_apart();

/// The better of each.
MachinePeaks best_of(const MachinePeaks& a, const MachinePeaks& b);

}  // namespace mmrec::apps
