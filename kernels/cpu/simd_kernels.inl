// All vector kernels, assembled into `kKernels`: included last by each instruction set's file, after its `Vec`.
#include "kernels/cpu/simd_math.inl"
// Above: the vocabulary. Below: one file per section of the table.
#include "kernels/cpu/attention.inl"
#include "kernels/cpu/bytes.inl"
#include "kernels/cpu/logprobs.inl"
#include "kernels/cpu/matvec.inl"
#include "kernels/cpu/pointwise.inl"
#include "kernels/cpu/recurrence.inl"
#include "kernels/cpu/scan.inl"

namespace mmrec::kernels {
namespace {

constexpr SimdKernels make_kernels(const char* name) {
  return {name,
          kLanes,
          kMathKernels,
          kMatvecKernels,
          kPointwiseKernels,
          kRecurrenceKernels,
          kAttentionKernels,
          kScanKernels,
          kLogprobKernels,
          kByteKernels};
}

}  // namespace
}  // namespace mmrec::kernels
