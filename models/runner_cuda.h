// Models on a CUDA device. Declared in every build; one without CUDA answers why it cannot (runner_cuda_absent.cpp).
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "mmrec/precision.h"
#include "models/mmrec/config.h"
#include "models/mmrec/weights.h"
#include "models/runner.h"

namespace mmrec::models {

/// Why no CUDA device can run models here, or "" if one can. Creates no context where it says no.
std::string cuda_unusable_reason();

/// What is known of device 0. Requires: cuda_unusable_reason() is "".
struct CudaDeviceInfo {
  std::string name;  // "NVIDIA H200"
  std::uint64_t total_bytes = 0;
  std::uint64_t free_bytes = 0;
};
CudaDeviceInfo cuda_device_info();

/// A model's weights in device memory, in one precision. Immutable; shared between runners.
class CudaWeights;

/// Copies `weights` to device 0 through page-locked staging memory, rounding where the precision is narrower than the
/// stored type. Throws std::bad_alloc whose what() names needed and free bytes, std::system_error, std::runtime_error
/// where cuda_unusable_reason() says so.
std::shared_ptr<const CudaWeights> upload_weights(const HostWeights& weights, Precision precision);
/// Resident bytes on the device, and the precision that kAuto became.
std::uint64_t device_bytes(const CudaWeights& weights);
Precision precision_of(const CudaWeights& weights);

/// A runner on the device. Keeps `weights` alive. `threads` of the options has no meaning here.
std::unique_ptr<Runner> make_cuda_runner(const Config& config, std::shared_ptr<const CudaWeights> weights, int batch,
                                         const RunnerOptions& options);

}  // namespace mmrec::models
