// A matrix as a checkpoint stores it: plain numbers, or quantised ones with their scales as compressed-tensors writes
// them (docs/file-formats.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "kernels/tensor.h"
#include "models/files/checkpoint.h"
#include "models/weights/quantization_config.h"

namespace mmrec::models {

struct StoredMatrix {
  const TensorInfo* numbers = nullptr;  // null: the checkpoint has no such matrix
  const TensorInfo* scales = nullptr;   // null of plain numbers
  const TensorInfo* shape = nullptr;    // of packed numbers
  kernels::WeightFormat format;
  std::vector<std::int64_t> dims;  // as the matrix has them

  /// Scales of a row in the file, which all rows have in common where there is one for the matrix.
  std::int64_t row_scales() const { return scales->shape.size() < 2 ? 1 : scales->shape[1]; }
  bool has_common_scale() const { return scales->shape.empty() || (scales->shape[0] == 1 && dims[0] != 1); }
  /// The bits of a byte that the file has inverted: packed numbers have 128 added.
  std::byte flips() const { return std::byte{shape != nullptr ? std::uint8_t{0x80} : std::uint8_t{0}}; }
  /// Bytes of a row's numbers in the file.
  std::int64_t row_bytes() const;
};

/// The matrix whose plain tensor would be `name`, NAME.weight. Throws std::runtime_error naming file, tensor, found and
/// expected where its tensors do not belong to each other, or to none of the schemes.
StoredMatrix find_matrix(const Checkpoint& checkpoint, std::string_view name, const QuantSchemes& schemes);

/// Row `row`, columns [col, col + cols), of quantised numbers: `numbers` are the file's of that row, `scales` all of
/// its scales. Written as `to` has them: the matrix's own format, where its groups are not cut; of integers kI8 with
/// groups that divide its own; or dequantised as fp32.
void write_row(const StoredMatrix& from, const std::byte* numbers, const float* scales, std::int64_t col,
               std::int64_t cols, kernels::WeightFormat to, std::byte* row);

}  // namespace mmrec::models
