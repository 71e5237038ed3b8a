// Executors of MM-Rec, by backend. Those on a GPU are declared in every build; one without CUDA answers why it cannot
// (cuda_absent.cpp).
#pragma once

#include <cstdint>
#include <memory>

#include "mmrec/precision.h"
#include "models/mmrec/config.h"
#include "models/mmrec/weights.h"
#include "models/runtime/cuda_device.h"
#include "models/runtime/executor.h"

namespace mmrec::models {

/// On the CPU. Calls of several threads run side by side, each on threads and activations of its own, which are kept
/// for later calls while any slot is in use.
std::shared_ptr<Executor> make_cpu_executor(const Config& config, std::shared_ptr<const HostWeights> weights);

/// A model's weights in a GPU's memory, in one precision. Immutable; shared between executors.
class CudaWeights;

/// Copies `weights` to a GPU through page-locked staging memory, rounding where the precision is narrower than the
/// stored type; kAuto is the stored matrices' type where all agree on a 16-bit one, fp32 otherwise. Throws
/// std::bad_alloc whose what() names needed and free bytes, std::system_error. Requires: cuda_unusable_reason(gpu)
/// was "".
std::shared_ptr<const CudaWeights> upload_weights(const HostWeights& weights, Precision precision, int gpu = 0);
/// Resident bytes on the device, and the precision that kAuto became.
std::uint64_t device_bytes(const CudaWeights& weights);
Precision precision_of(const CudaWeights& weights);

/// On the weights' GPU. All sessions share one stream: calls of several threads take turns.
std::shared_ptr<Executor> make_cuda_executor(const Config& config, std::shared_ptr<const CudaWeights> weights);

}  // namespace mmrec::models
