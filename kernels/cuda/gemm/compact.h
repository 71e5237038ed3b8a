// Compact rows: a quantised matrix as a GPU's kernels stream it, with numbers where a lane of the tensor core wants
// them and scales behind the numbers that they multiply.
//
// A row is cut into chunks of 32 groups, and the last one may have fewer. A chunk is the groups' numbers, then its fp32
// scales, one for each group or one for all, filled up to 16 bytes. A group is 64 inputs, for lanes t = 0..3 of a row,
// each of which multiplies inputs 32 m + 8 t + 4 i + b: m (of two halves), i (of two words), b (of four bytes).
//   8 bits: 16 bytes a lane, byte b of word 2 i + m. Integers, or fp8 as it is stored.
//   4 bits: 8 bytes a lane, byte b of word i: m = 0 in its upper half, m = 1 in its lower one, as a signed number. The
//           scale is for 16 times the number, which is the byte without the other half.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/runtime/cuda.h"
#include "kernels/tensor.h"

namespace mmrec::kernels {

inline constexpr int kCompactGroup = 64;        // inputs
inline constexpr int kCompactChunkGroups = 32;  // most in a chunk

/// Of a row, by the groups that it has. format.group: kCompactGroup, or 0 for one scale a chunk.
MMREC_HOST_DEVICE constexpr int compact_group_bytes(WeightFormat format) {
  return kCompactGroup * bits_of(format.code) / 8;
}
MMREC_HOST_DEVICE constexpr int compact_chunk_bytes(WeightFormat format, int groups) {
  const int scales = format.group == 0 ? 1 : groups;
  return groups * compact_group_bytes(format) + (4 * scales + 15) / 16 * 16;
}
MMREC_HOST_DEVICE constexpr std::int64_t compact_row_bytes(WeightFormat format, std::int64_t cols) {
  const auto groups = static_cast<int>(cols / kCompactGroup);
  const int rest = groups % kCompactChunkGroups;
  return std::int64_t{groups / kCompactChunkGroups} * compact_chunk_bytes(format, kCompactChunkGroups) +
         (rest == 0 ? 0 : compact_chunk_bytes(format, rest));
}

/// Where a row has a group's numbers, in bytes.
MMREC_HOST_DEVICE constexpr int compact_group_at(WeightFormat format, int group) {
  return group / kCompactChunkGroups * compact_chunk_bytes(format, kCompactChunkGroups) +
         group % kCompactChunkGroups * compact_group_bytes(format);
}

/// Where a row of so many inputs has its one scale, in bytes: behind its first chunk.
MMREC_HOST_DEVICE constexpr std::int64_t compact_scale_at(std::int64_t cols) {
  const std::int64_t groups = cols / kCompactGroup;
  return (groups < kCompactChunkGroups ? groups : kCompactChunkGroups) * compact_group_bytes(DType::kI8);
}

/// The format of compact rows that hold the numbers of a quantised matrix: with scales for each group, or for all of a
/// row. A plain format if the matrix is plain or fp8 with several scales a row, or if its rows or its scales do not
/// divide into groups.
constexpr WeightFormat compact_format(WeightFormat stored, std::int64_t cols) {
  const bool has_one_scale = stored.group == 0 && bits_of(stored.code) == 8;
  if (!is_quantized(stored.code) || cols % kCompactGroup != 0 || stored.group % kCompactGroup != 0) return {};
  if (stored.code == DType::kF8 && !has_one_scale) return {};
  return {stored.code, has_one_scale ? 0 : kCompactGroup};
}

/// Compact rows of a matrix with these inputs at `data`, which is 16-byte aligned.
constexpr CompactView compact_view(const std::byte* data, WeightFormat format, std::int64_t own_rows,
                                   std::int64_t cols) {
  return {data, format, compact_row_bytes(format, cols), own_rows};
}

/// Writes the rows of a matrix whose numbers are known, but for rounding to its type, to be multiples of scales.
struct CompactRows {
  WeightView<Device> from;        // bf16, numbers times scales, each rounded
  const float* scales = nullptr;  // [rows, scales_of({code, group}, cols)] in device memory; 0: what suits the numbers
  std::int64_t group = 0;         // inputs of one of these scales, or 0 for a row
  CompactView rows;               // in compact_format() of {code, group}, or a wider one; own_rows: those with scales
  std::byte* to = nullptr;        // rows.data
};
void compact_rows(Cuda& cuda, const CompactRows& op);

}  // namespace mmrec::kernels
