// A model's weights in host memory, in their stored type and laid out for the forward pass; views of weights anywhere.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "kernels/cpu/cpu.h"
#include "kernels/tensor.h"
#include "mmrec/precision.h"
#include "models/files/checkpoint.h"
#include "models/mmrec/config.h"
#include "models/mmrec/weight_table.h"

namespace mmrec::models {

/// A matrix that owns its bytes in host memory. Parts stacked into one matrix share its format: the parts' own where
/// they agree, fp32 otherwise.
struct HostMatrix {
  kernels::HostBuffer<std::byte> bytes;
  kernels::WeightFormat format;
  std::int64_t rows = 0;
  std::int64_t cols = 0;

  kernels::WeightView<kernels::Host> view() const { return {bytes.data(), format, rows, cols}; }
};

/// Biases and norm weights, widened to fp32.
using HostVector = kernels::HostBuffer<float>;

/// A whole model in host memory; head.rows == 0 where it is tied to the embedding. Immutable after load; shared between
/// sessions.
struct HostWeights : ModelFields<HostMatrix, HostVector> {
  std::uint64_t bytes = 0;        // resident size of all fields
  std::uint64_t parameters = 0;   // elements of the tensors bound (tied head counted once)
  std::uint64_t fingerprint = 0;  // identity of configuration, tensor names, shapes and sampled bytes
};

/// Weights as the forward pass sees them, in a backend's memory space. Null data where the model has no such field.
template <class Space>
using LayerView = LayerFields<kernels::WeightView<Space>, const float*>;
template <class Space>
using ModelView = ModelFields<kernels::WeightView<Space>, const float*>;

/// Views of `weights`, which must outlive them. A tied head is the embedding.
ModelView<kernels::Host> view_of(const HostWeights& weights);

/// The type of matrices that a precision asks for, fp32 where it asks for none; and the precision of products with
/// them.
constexpr kernels::DType type_of(Precision precision) {
  using enum Precision;
  return precision == kF16 ? kernels::DType::kF16 : precision == kBF16 ? kernels::DType::kBF16 : kernels::DType::kF32;
}
constexpr Precision precision_of(kernels::DType type) {
  using enum kernels::DType;
  return type == kF16 ? Precision::kF16 : type == kBF16 ? Precision::kBF16 : Precision::kF32;
}

/// The type of all matrices where they agree, fp32 otherwise.
kernels::DType common_dtype(const HostWeights& weights);

struct WeightOptions {
  bool allow_nonfinite = false;  // load NaN and infinite weights instead of refusing them
  int threads = 0;               // readers; <= 0: all processors
};

/// Checks every tensor's presence and shape against the configuration before allocating anything, then reads.
/// Missing, unexpected (except mdi.W_planning_*, reported) and mis-shaped tensors and non-finite values are refused
/// with std::runtime_error naming file, tensor, found and expected; std::bad_alloc if memory does not suffice (the
/// weights exceed the machine's, or an allocation failed).
HostWeights load_weights(const Checkpoint& checkpoint, const Config& config, const WeightOptions& options = {},
                         const WarningSink& warn = {});

}  // namespace mmrec::models
