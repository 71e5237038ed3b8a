// The algorithms of `linear`, the function that chooses among them, and each for the jobs of one launch. Tests and
// benches ask which algorithm a shape must take, and force each on shapes that it would not get.
#pragma once

#include <span>

#include "kernels/cuda/runtime/cuda.h"

namespace mmrec::kernels {

/// Shares are of an NVIDIA H200's (docs/performance.md). Within an algorithm a row's bits depend on the row, the
/// weights and the epilogue's operands alone; by the library also on the number of rows.
enum class LinearAlgo : std::uint8_t {
  kAuto,
  /// Few rows, any operands: weights streamed once for kTileColumns rows, the next product's while this one ends.
  kMatvec,
  /// Up to kFewRows rows, for sm_90a: weights streamed once, by tiles that few rows fill. A step of 64 sequences reads
  /// its weights at 2.5 TB/s, 58 % of a copy; by kManyRows most of a tile's rows would be empty.
  kFewRows,
  /// Up to kFewCompactRows rows of bf16 by a quantised matrix that has compact rows (compact.h), which are streamed in
  /// place of its bf16 numbers: x meets stored numbers, not what they are rounded to.
  kFewCompact,
  /// Any number of rows, for sm_90a: with them prefill runs at 40 % (D = 1,024) to 68 % (D = 4,096) of the device's
  /// best product rate. The epilogue works on the sums in registers, where the library needs a second pass for gelu.
  /// For steps of a batch-invariant Cuda it adds the slices of kFewRows.
  kManyRows,
  /// More than kFewRows rows in fp32, for sm_90a: by kManyRows from three bf16 parts of each operand. An H100
  /// multiplies bf16 at 13 times the rate of fp32, and this takes six products.
  kParts,
  /// More than kFewRows rows of bf16 by a matrix of fp8 that has compact rows: by kManyRows, of x rounded to fp8 with a
  /// scale for each row, at 1.6 times the rate (fp8_sm90.cu).
  kFp8,
  /// Any operands, by cuBLASLt: fp32, other devices, unaligned operands.
  kLibrary,
};

inline constexpr std::int64_t kFewCompactRows = 64;

/// Whether the tensor cores' warpgroup products can read the operands: compute capability 9.0, columns a multiple of 8,
/// x and W 16-byte aligned, x's stride a multiple of 8. A is BFloat16 or Float16.
template <class A>
bool gemm_sm90_supported(const Cuda& cuda, MatrixView<const A, Device> x, const WeightView<Device>& weight);

/// Whether kParts takes the operands: x's shape and a weight that has parts.
bool linear_parts_supported(const Cuda& cuda, MatrixView<const float, Device> x, const WeightView<Device>& weight);

/// Whether kFp8 takes the operands: compact rows all of which are fp8, columns a multiple of 128 up to 32,768, x as
/// above.
bool linear_fp8_supported(const Cuda& cuda, MatrixView<const BFloat16, Device> x, const WeightView<Device>& weight);

/// Outputs of a tile of kFewRows, and in how many slices it cuts k, whose sums are added one after another: as many as
/// run at once, each of some length.
inline constexpr int kOutputs = 64;
inline constexpr int kMostSlices = 8;
inline int few_rows_slices(const WeightView<Device>& weight) {
  constexpr std::int64_t kMostBlocks = 128;                 // one a multiprocessor, beside one of the next kernel's
  constexpr std::int64_t kDepth = 64, kLeastBlocksOfK = 4;  // of a block of k; in a slice
  const std::int64_t tiles = (weight.rows + kOutputs - 1) / kOutputs, blocks = (weight.cols + kDepth - 1) / kDepth;
  std::int64_t slices = 1;
  while (slices < kMostSlices && 2 * slices * tiles <= kMostBlocks && 2 * slices * kLeastBlocksOfK <= blocks) {
    slices *= 2;
  }
  return static_cast<int>(slices);
}

/// What a batch-invariant Cuda takes: one class of arithmetic for rows of steps (force_row_kernel), where kManyRows
/// adds slices as kFewRows does, and one for rows of prompts, which are many.
template <class A, class Y>
LinearAlgo choose_invariant_linear(const Cuda& cuda, const Linear<Device, A, Y>& job) {
  if constexpr (sizeof(A) == 2) {
    if (!gemm_sm90_supported(cuda, job.x, job.weight)) return LinearAlgo::kMatvec;
    return job.force_row_kernel && job.x.rows <= kFewRows ? LinearAlgo::kFewRows : LinearAlgo::kManyRows;
  } else {
    return linear_parts_supported(cuda, job.x, job.weight) ? LinearAlgo::kParts : LinearAlgo::kMatvec;
  }
}

/// The algorithm of a job with rows and outputs.
template <class A, class Y>
LinearAlgo choose_linear(const Cuda& cuda, const Linear<Device, A, Y>& job) {
  if (cuda.batch_invariant()) return choose_invariant_linear(cuda, job);
  if (job.x.rows <= job.few_rows) return LinearAlgo::kMatvec;
  if constexpr (sizeof(A) == 2) {
    if (gemm_sm90_supported(cuda, job.x, job.weight)) {
      if constexpr (std::is_same_v<A, BFloat16>) {
        if (job.x.rows > kFewRows && linear_fp8_supported(cuda, job.x, job.weight)) return LinearAlgo::kFp8;
      }
      if (job.x.rows > kFewRows) return LinearAlgo::kManyRows;
      const bool takes_compact = std::is_same_v<A, BFloat16> && job.x.rows <= kFewCompactRows;
      return takes_compact && job.weight.compact.data != nullptr ? LinearAlgo::kFewCompact : LinearAlgo::kFewRows;
    }
  } else if (job.x.rows > kFewRows && linear_parts_supported(cuda, job.x, job.weight)) {
    return LinearAlgo::kParts;
  }
  return LinearAlgo::kLibrary;
}

/// The tiles of kManyRows, 128 rows by 256, 128 or 64 outputs.
enum class GemmTile : std::uint8_t { kAuto, kWide, kSquare, kSlim };

/// The tiles that end first on this device, of jobs that share a launch; of products of parts if `parts`.
template <class A, class Y>
GemmTile choose_tile(const Cuda& cuda, std::span<const Linear<Device, A, Y>> jobs, bool parts = false);

/// X(A, Y) for every type of 16-bit operands and of results: explicit instantiations.
#define MMREC_FOR_EACH_HALF_PRODUCT(X) X(BFloat16, BFloat16) X(BFloat16, float) X(Float16, Float16) X(Float16, float)

// Each algorithm, for jobs with rows and outputs.
inline constexpr std::size_t kMostMatvecJobs = 8;
inline constexpr std::size_t kMostGemmJobs = 4;
/// Bits do not depend on how many rows or jobs there are, nor on alignment.
template <class A, class Y>
void matvec(Cuda& cuda, std::span<const Linear<Device, A, Y>> jobs);
/// Where gemm_sm90_supported(cuda, job.x, job.weight) holds, like the next one.
template <class A, class Y>
void linear_few_rows_sm90(Cuda& cuda, std::span<const Linear<Device, A, Y>> jobs);
/// The same, where job.weight has compact rows, for up to kFewCompactRows rows.
template <class Y>
void linear_few_compact_sm90(Cuda& cuda, std::span<const Linear<Device, BFloat16, Y>> jobs);
/// gated_advance() of parts of kScaledPart.
void few_advance_sm90(Cuda& cuda, const GatedAdvance<Device, BFloat16>& op);
/// What x stands for, if not for its own numbers. part_stride: x and the weights are the first of kParts parts each,
/// and their sums are multiplied. scales, of Float8: a row of x is multiplied by its scale, and the weights are compact
/// rows.
struct XForm {
  std::int64_t part_stride = 0;
  const float* scales = nullptr;
};
template <class A, class Y>
void linear_many_rows_sm90(Cuda& cuda, std::span<const Linear<Device, A, Y>> jobs, GemmTile tile = GemmTile::kAuto,
                           const XForm& x = {});
template <class Y>
void linear_fp8_sm90(Cuda& cuda, std::span<const Linear<Device, BFloat16, Y>> jobs);
/// Where linear_parts_supported() holds. Bits depend neither on how many rows or jobs there are.
void linear_by_parts(Cuda& cuda, std::span<const Linear<Device, float, float>> jobs);

}  // namespace mmrec::kernels
