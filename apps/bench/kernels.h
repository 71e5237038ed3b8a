// What benchmarks on a GPU need besides the engine's own kernels: random operands, a copy, a read, and a clock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/cuda/runtime/cuda.h"
#include "kernels/tensor.h"

struct CUevent_st;

namespace mmrec::apps {

/// Uniform in [low, high), rounded to `type`; a function of index and seed alone.
void fill_random(kernels::Cuda& cuda, kernels::DType type, void* to, std::int64_t count, float low, float high,
                 std::uint32_t seed);

/// `bytes` a multiple of 16, addresses too. By a kernel that streams 16 bytes a thread, and by the CUDA runtime.
void copy_by_kernel(kernels::Cuda& cuda, const void* from, void* to, std::size_t bytes);
void copy_by_runtime(kernels::Cuda& cuda, const void* from, void* to, std::size_t bytes);
/// Reads everything. Not for memory that is all zero bits, for which it writes a word of scratch.
void read_by_kernel(kernels::Cuda& cuda, const void* from, std::size_t bytes);

/// A kernel of one block of 512 threads that does nothing: what any launch takes.
void empty_kernel(kernels::Cuda& cuda);

/// Times work on a backend's stream by a pair of events.
class DeviceTimer {
 public:
  explicit DeviceTimer(kernels::Cuda& cuda);
  DeviceTimer(const DeviceTimer&) = delete;
  DeviceTimer& operator=(const DeviceTimer&) = delete;
  ~DeviceTimer();

  /// Seconds that each of `calls` calls of `work` takes on the device; waits for them.
  double seconds(int calls, const std::function<void()>& work);

 private:
  kernels::Cuda& cuda_;
  CUevent_st* begin_ = nullptr;
  CUevent_st* end_ = nullptr;
};

double median_of(std::vector<double> values);

}  // namespace mmrec::apps
