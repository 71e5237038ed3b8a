// Weights in device memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/runtime/cuda.h"
#include "models/mmrec/executors.h"
#include "models/mmrec/weights.h"

namespace mmrec::models {

/// All matrices in one type, vectors in fp32, in one allocation.
class CudaWeights {
 public:
  CudaWeights(const HostWeights& weights, Precision precision, int gpu);

  const ModelView<kernels::Device>& view() const { return view_; }
  kernels::DType type() const { return type_; }
  int gpu() const { return gpu_; }
  std::uint64_t bytes() const { return memory_.size(); }

 private:
  kernels::DType type_;
  int gpu_;
  kernels::DeviceBuffer<std::byte> memory_;
  ModelView<kernels::Device> view_;
};

}  // namespace mmrec::models
