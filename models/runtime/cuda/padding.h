// Weights padded with zeros to widths that a GPU's kernels take at their full rate: multiples of 64.
//
// Zeros change nothing. A padded channel has zeros in the embedding, in the rows of all matrices and in all biases, so
// x, v, z and h stay 0 there: h' = a h + b, and b is a multiple of z. Hidden units have rows of zeros, and gelu(0) =
// relu(0) = 0. Three places know the true widths: the weights of norms, which are multiplied by the root of the true
// share of the channels, because a norm divides by all of them; the scale of the attention, whose heads have their
// zeros behind their channels; and the layout of saved states. docs/numerics.md says what becomes of a norm's 1e-6.
#pragma once

#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "models/weights/fields.h"

namespace mmrec::models {

inline constexpr std::int64_t kWholeWidth = 64;

/// The least multiple of 64 from `size` on.
constexpr std::int64_t padded_size(std::int64_t size) { return (size + kWholeWidth - 1) / kWholeWidth * kWholeWidth; }

/// The channels that each of `heads` heads of a width gets more, so that all of them are a multiple of 64; 0 if the
/// width would grow by more than a third: products cost more then than the kernels gain.
constexpr std::int64_t head_padding(std::int64_t dim, std::int64_t heads) {
  const std::int64_t step = std::lcm(kWholeWidth, heads), padded = (dim + step - 1) / step * step;
  return 3 * padded <= 4 * dim ? (padded - dim) / heads : 0;
}

/// The sizes of a model and of its padded copy. Channels are those of `heads` heads, one after another.
struct Padding {
  Sizes from, to;
  std::int64_t heads = 1;

  /// The factor of the norms' weights.
  float norm_scale() const { return std::sqrt(static_cast<float>(from.d) / static_cast<float>(to.d)); }
};

/// `count` times `from` numbers, each time filled up with zeros to `to`.
struct PaddedAxis {
  std::int64_t count = 1, from = 1, to = 1;

  std::int64_t size() const { return count * to; }
};
/// Of an extent of one kind of size.
inline PaddedAxis padded(const Extent& e, const Padding& p) {
  if (e.v != 0) return {e.v, p.from.v, p.to.v};
  if (e.d != 0) return {e.d * p.heads, p.from.d / p.heads, p.to.d / p.heads};
  if (e.f != 0) return {e.f, p.from.f, p.to.f};
  if (e.g != 0) return {e.g, p.from.g, p.to.g};
  return {e.r, p.from.r, p.to.r};
}

/// Rows and columns of numbers that lie one after another; a vector is one row.
struct PaddedRows {
  PaddedAxis rows, cols;
};
/// The parts of a field that has numbers, from top to bottom.
inline std::vector<PaddedRows> padded_parts(const Field& field, const Padding& p) {
  std::vector<PaddedRows> parts;
  for (const TensorPart& part : field.parts) {
    if (!part.used_by(p.from) || (field.kind == Field::Kind::kBias && part.col.of(p.from) != 0)) continue;
    const PaddedAxis rows = padded(part.rows, p);
    parts.push_back(field.is_matrix() ? PaddedRows{rows, padded(part.cols, p)} : PaddedRows{{}, rows});
  }
  return parts;
}

}  // namespace mmrec::models
