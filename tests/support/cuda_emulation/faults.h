// Faults of the device, one at a time: the n-th call of the runtime fails. Calls that give something back never do but
// after an error that destroys the context, with which every later call fails, as on a device.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace mmrec::cuda_emulation {

/// Counts calls from now on, in all threads; the nth, from 1, fails with `code`. 0: none does.
void begin_faults(std::int64_t nth, cudaError_t code = cudaErrorUnknown);
/// Ends that, and mends the device; calls counted.
std::int64_t end_faults();
/// For a call that begins: what it fails with, or cudaSuccess.
cudaError_t next_fault();
/// For a call that gives something back, and has: what it says.
cudaError_t lasting_fault();

/// Allocations, streams, events and graphs that were made and not destroyed.
std::int64_t live_objects();
void count_object(std::int64_t made);

}  // namespace mmrec::cuda_emulation

/// Ends the calling function where its call is to fail.
#define MMREC_FAULT_POINT()                                                                \
  if (const cudaError_t fault = mmrec::cuda_emulation::next_fault(); fault != cudaSuccess) \
  return mmrec::cuda_emulation::set_error(fault)
