// Which slice of which tensor goes where: the checkpoint's tensors checked against the configuration, before any memory
// is allocated for them.
#pragma once

#include <cstdint>
#include <vector>

#include "models/files/checked.h"
#include "models/files/checkpoint.h"
#include "models/mmrec/config.h"
#include "models/mmrec/weights.h"

namespace mmrec::models {

/// Rows [row, row + rows) and columns [col, col + cols) of a tensor with `row_elements` elements per row. The elements
/// of a vector are rows of one.
struct Part {
  const TensorInfo* tensor = nullptr;
  std::int64_t row = 0;
  std::int64_t rows = 0;
  std::int64_t col = 0;
  std::int64_t cols = 0;
  std::int64_t row_elements = 0;

  std::uint64_t elements() const { return static_cast<std::uint64_t>(rows * cols); }
  std::uint64_t row_bytes() const { return static_cast<std::uint64_t>(row_elements) * kernels::size_of(tensor->dtype); }
};

/// A buffer to be filled with parts one below the other.
struct Target {
  HostMatrix* matrix = nullptr;  // exactly one of the two
  HostVector* vector = nullptr;
  std::vector<Part> parts;

  /// The parts' own type where they agree, fp32 otherwise and for vectors.
  kernels::DType dtype() const;
  CheckedSize bytes() const;
};

struct WeightPlan {
  std::vector<Target> targets;
  Target head;  // no parts if the checkpoint has none
};

/// Checks every tensor's presence and shape, then says what fills `weights`, whose layers are made (empty). The plan
/// points into both arguments. Throws std::runtime_error naming file, tensor, found and expected.
WeightPlan plan_weights(const Checkpoint& checkpoint, const Config& config, const WarningSink& warn,
                        HostWeights& weights);

}  // namespace mmrec::models
