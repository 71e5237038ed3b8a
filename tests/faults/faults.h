// Faults, one at a time: a shared library that stands between a program and the C library and lets the n-th call of a
// kind fail. A test links it; a program gets it by LD_PRELOAD and says what fails in the environment variable
// MMREC_FAULT, as KIND:N or KIND:N:FAILURES (faults.cpp); with
// MMREC_FAULT_TRACE set, stderr shows where the first was. MMREC_FAULT_READS=FILE lists there which variables of the
// environment the program and its libraries look up.
#pragma once

#include <cstdint>

namespace mmrec::faults {

enum class Kind : std::uint8_t {
  kNone,
  kAllocation,  // malloc and its kin, and so operator new: no memory
  kThread,      // pthread_create: EAGAIN
  kIo,          // calls on files but for stderr: Plan::error
  kShort,       // reads and writes of more than a byte: half of it
  kInterrupt,   // calls that a signal may interrupt: EINTR
};

struct Plan {
  Kind kind = Kind::kNone;
  std::int64_t nth = 0;       // from 1; 0: calls are counted and none fails
  std::int64_t failures = 1;  // how many calls fail from there on
  int error = 5;              // EIO
};

/// From now on calls of the plan's kind are counted, in all threads.
void begin(const Plan& plan);
/// Ends that; calls counted.
std::int64_t end();
/// Whether a call has failed, or was cut short, since begin().
bool has_struck();

/// Blocks of memory that were allocated and not freed.
std::int64_t live_blocks();

}  // namespace mmrec::faults
