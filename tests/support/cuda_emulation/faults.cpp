#include "faults.h"

#include <atomic>
#include <cstdlib>

namespace mmrec::cuda_emulation {
namespace {

std::atomic<bool> counts{false};
std::atomic<std::int64_t> at{0}, calls{0}, objects{0};
std::atomic<cudaError_t> with{cudaSuccess}, lasting{cudaSuccess};

bool destroys_context(cudaError_t code) {
  return code == cudaErrorECCUncorrectable || code == cudaErrorIllegalAddress || code == cudaErrorLaunchFailure;
}

/// A process that its tests cannot reach into says by its environment which call is an illegal access.
[[maybe_unused]] const bool from_environment = [] {
  const char* nth = std::getenv("MMREC_CUDA_EMULATION_ILLEGAL_ACCESS");
  if (nth != nullptr) begin_faults(std::atoll(nth), cudaErrorIllegalAddress);
  return nth != nullptr;
}();

}  // namespace

void begin_faults(std::int64_t nth, cudaError_t code) {
  at = nth;
  with = code;
  calls = 0;
  lasting = cudaSuccess;
  counts = true;
}
std::int64_t end_faults() {
  counts = false;
  lasting = cudaSuccess;
  return calls;
}
cudaError_t next_fault() {
  if (!counts.load(std::memory_order_relaxed)) return cudaSuccess;
  if (lasting.load() != cudaSuccess) return lasting.load();
  if (calls.fetch_add(1) + 1 != at.load()) return cudaSuccess;
  if (destroys_context(with)) lasting = with.load();
  return with;
}
cudaError_t lasting_fault() { return set_error(lasting.load()); }

std::int64_t live_objects() { return objects; }
void count_object(std::int64_t made) { objects += made; }

}  // namespace mmrec::cuda_emulation
