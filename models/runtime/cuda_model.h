// A model's weights on a GPU, and executors there. Declared in every build: in one without CUDA the members say why it
// cannot (models/cuda_absent.cpp).
#pragma once

#include <cstdint>
#include <memory>

#include "mmrec/precision.h"
#include "models/runtime/cuda_device.h"
#include "models/runtime/executor.h"
#include "models/weights/model_weights.h"

namespace mmrec::models {

template <class Arch>
class DeviceWeights;

/// Weights in a GPU's memory, in one precision. Immutable, and cheap to copy: copies share the weights.
template <class Arch>
class CudaModel {
 public:
  /// Copies `weights` through page-locked staging memory, rounding where the precision is narrower than the stored
  /// type; kAuto is the stored matrices' type where all agree on a 16-bit one, fp32 otherwise. Throws std::bad_alloc
  /// whose what() names needed and free bytes, std::system_error. Requires: cuda_unusable_reason(gpu) was "".
  CudaModel(const WeightsOf<Arch>& weights, Precision precision, int gpu = 0);
  /// Resident bytes on the device.
  std::uint64_t bytes() const;
  /// What kAuto became.
  Precision precision() const;
  /// All sessions of an executor share one stream: calls of several threads take turns. It keeps the weights.
  std::shared_ptr<Executor> executor(const typename Arch::Config& config) const;

 private:
  std::shared_ptr<const DeviceWeights<Arch>> weights_;
};

}  // namespace mmrec::models
