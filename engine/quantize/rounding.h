// Numbers of few bits, scales for them, and how a row of weights becomes both.
//
// Must stay true: a weight is its number times its scale in fp32. A row depends on its weights, the scheme and the
// inputs alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/quantize/calibration.h"
#include "kernels/tensor.h"
#include "mmrec/quantize.h"

namespace mmrec::engine {

/// How a matrix is quantised.
struct Scheme {
  QuantizedType type = QuantizedType::kInt8;
  std::int64_t group = 0;  // inputs that share a scale; 0: all of a row

  std::int64_t scales(std::int64_t cols) const { return group == 0 ? 1 : cols / group; }
  /// Bytes of the numbers of a row: words of 32 bits of kInt4.
  std::int64_t row_bytes(std::int64_t cols) const { return type == QuantizedType::kInt4 ? (cols + 7) / 8 * 4 : cols; }
};

/// Sums of squares over weights.
struct Squares {
  double error = 0.0;  // of the differences
  double weight = 0.0;

  Squares& operator+=(const Squares& other) {
    error += other.error;
    weight += other.weight;
    return *this;
  }
};

/// Rounds rows [rows, cols] to numbers [rows, row_bytes] with searched scales [rows, scales], rounded to bf16: each to
/// the nearest, or so that the error of products with such inputs is small, of which all columns have some. `weights`
/// must be finite, and `cols` a whole number of groups.
Squares round_rows(const Scheme& scheme, std::span<const float> weights, std::size_t cols,
                   std::span<const ColumnInputs> inputs, std::byte* numbers, kernels::BFloat16* scales);

}  // namespace mmrec::engine
