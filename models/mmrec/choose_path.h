// Which path a chunk takes: one function decides. Paths compute what block.h computes, faster. Figures are of
// docs/performance.md.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/ops.h"
#include "models/mmrec/fused_ops.h"
#include "models/runtime/executor.h"
#include "models/runtime/schedule.h"

namespace mmrec::models {

/// Which paths a backend has the ops for, with operands of A. Ops are named without `kernels::`, so that only those are
/// found that were declared for this backend.
template <class Backend, class A>
class PathOps {
  static Backend& on();
  template <template <class, class> class Op>
  static const Op<typename Backend::Space, A>& op();

 public:
  static constexpr bool kTogether = requires { gated_recurrences(on(), op<kernels::GatedRecurrences>()); };
  static constexpr bool kPacked = requires { packed_sweeps(on(), op<kernels::PackedSweeps>()); };
  static constexpr bool kRows = requires { advance_norm(on(), op<kernels::AdvanceNorm>()); };
  static constexpr bool kWholeStep = requires { decode_step(on(), op<kernels::DecodeStep>()); };
};

/// Shorter runs take exact steps, as many as they have tokens: a sweep would cost as much as all of them.
inline constexpr std::int64_t kMinSweepTokens = 16;
inline bool takes_sweeps(const Batch& b, const RecurrenceOptions& options) {
  return options.sweeps && b.tokens >= kMinSweepTokens;
}

/// Whether a step of up to 8 sequences at one position is faster by one kernel than by rows. Each stage of the kernel
/// waits for all blocks, so that several sequences take some 20 us a layer, however small that is; rows take 6 to 9 and
/// the reading. docs/measurements has figures. One sequence has a faster kernel in 16 bits, once it attends to memory.
inline bool one_kernel_pays(std::int64_t sequences, const kernels::DecodeShape& shape, std::int64_t element) {
  constexpr std::int64_t kMiB = 1 << 20;
  const bool is_16_bit = element < 4;
  if (sequences == 1 && is_16_bit) return true;
  const std::int64_t layer = layer_bytes(shape, 2);
  return layer >= 48 * kMiB && (sequences <= 4 || (is_16_bit && layer < 256 * kMiB));
}

/// `shape` is the model's. `whole_step_fits` says whether the kernel takes it with a batch; it is asked last, because
/// it makes or looks at more than the others.
template <class Backend, class A, class WholeStepFits>
Path choose_path(const Backend& backend, const kernels::DecodeShape& shape, const ChunkPlan& plan, const Chunk& chunk,
                 const WholeStepFits& whole_step_fits) {
  using Has = PathOps<Backend, A>;
  const RecurrenceOptions& options = chunk.options;
  const std::span<const Batch> batches = chunk.batches;
  const bool has_several = batches.size() > 1;
  const bool is_invariant = plan.align != 0;  // then one path for steps and one for prompts, whatever their number

  // A step at one position reads every weight once and waits at every stage: by one kernel the bundled model makes
  // 18,590 tokens/s, and 2048 × 16 reads at 93 % of a copy.
  const bool pays =
      options.path == Path::kWholeStep || one_kernel_pays(chunk.rows, shape, static_cast<std::int64_t>(sizeof(A)));
  if (Has::kWholeStep && !is_invariant && options.may_take(Path::kWholeStep) && chunk.is_step && !has_several && pays &&
      whole_step_fits(batches.front())) {
    return Path::kWholeStep;
  }
  // Short runs one by one pay for their launches and for the wait at the end of their sweeps. Packed, documents of 32
  // to 96 tokens are scored at 160 % of the rate of one long document (bundled model).
  if (Has::kPacked && options.may_take(Path::kPacked) && chunk.packed && (has_several || is_invariant) &&
      options.sweeps) {
    return Path::kPacked;
  }
  // A step of several sequences shares one reading of all weights, the recurrence's gates included: 64 sequences of
  // 2048 × 16 make 35 times the tokens/s of one.
  if constexpr (Has::kRows) {
    const bool shares = chunk.rows > 1 || is_invariant || !pays;
    if (options.may_take(Path::kRows) && chunk.is_step && shares && takes_token_rows(backend, shape.dim)) {
      return Path::kRows;
    }
  }
  // Runs that take exact steps share each reading of the gates: documents of 32 to 96 tokens are scored at 137 % of the
  // rate of one long document (bundled model, two cores).
  if (Has::kTogether && options.may_take(Path::kTogether) && !options.sweeps && !plan.spans_segments && has_several) {
    return Path::kTogether;
  }
  return Path::kReference;
}

}  // namespace mmrec::models
