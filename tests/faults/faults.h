// Faults, one at a time: a shared library between a program and the C library, which makes the n-th call of a kind
// fail. A test links it; a program gets it by LD_PRELOAD. Environment variables:
//   MMREC_FAULT=KIND:N or KIND:N:FAILURES   the calls that fail (kinds: faults.cpp)
//   MMREC_FAULT_TRACE=1                     stderr shows where the first one was
//   MMREC_FAULT_COUNT=FILE                  gets the number of calls of the kind
//   MMREC_FAULT_READS=FILE                  gets the variables that the program and its libraries look up
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

/// Counts calls of the plan's kind from now on, in all threads.
void begin(const Plan& plan);
/// Ends the plan. Returns the number of calls.
std::int64_t end();
/// Whether a call has failed, or was cut short, since begin().
bool has_struck();

/// Blocks of memory that were allocated and not freed.
std::int64_t live_blocks();

}  // namespace mmrec::faults
