// The kernels by themselves, on raw pointers: three scans over time, and token log-probs with their derivative. No
// model is needed. See docs/examples/kernels.cpp, and docs/numerics.md for what is equal to the bit.
//
//   auto context = mmrec::KernelContext::cuda(0, stream);
//   mmrec::decay_scan(context, {.shape = {.batch = 8, .time = 4096, .dim = 2048}, .log_a = a, .b = b, .h = h});
//
// Memory. Every pointer leads into the context's memory: the host's for cpu(), the GPU's for cuda() (memory that both
// see, pinned or managed, serves too). Nothing is copied, allocated or kept.
//
// Layout. A sequence operand is [batch, heads, time, dim] with dim contiguous: element (b, h, t, d) lies
// b * batch_stride + h * head_stride + t * time_stride + d elements behind the pointer. Strides are elements, >= 0, and
// all zero for contiguous memory. That of time may be negative: with the pointer at the last step a scan runs backwards
// (on a GPU without the copy engine, so slower than forwards). So [batch, time, heads, dim] is heads > 1 with
// head_stride = dim, time_stride = heads * dim. Addresses need the alignment of their elements alone; where rows and
// pointers are multiples of 16 bytes a GPU is faster.
//
// Time. On the CPU a call returns when its work is done. On a GPU it enqueues its work on the context's stream and
// returns; what it reads and writes must stay until the stream has passed it. Only checking targets waits: see
// TokenLogprobs.
//
// Aliasing. Operands do not overlap, except where a comment says "may be": then pointer and strides are equal.
//
// Arithmetic is fp32 or wider whatever the element type; results are rounded once, to nearest even. Reductions have a
// fixed order: equal inputs, shapes and device give equal bits, whatever the number of threads.
//
// Errors. std::invalid_argument naming operand, found and expected, before anything is written; std::bad_alloc;
// std::system_error where CUDA fails. Sizes of 0 are valid and do nothing, except that carry_out receives carry_in.
#pragma once

#include <cstdint>
#include <memory>

#include "mmrec/export.h"

namespace mmrec {

namespace engine {
class KernelBackend;  // what a context runs on; not part of the contract
}

/// What operands consist of. fp16 and bf16 are 16-bit words in the machine's byte order.
enum class ElementType : std::uint8_t {
  kF32,   ///< float
  kF16,   ///< IEEE half precision
  kBF16,  ///< bfloat16
};
/// What targets consist of.
enum class IndexType : std::uint8_t {
  kInt32,  ///< std::int32_t
  kInt64,  ///< std::int64_t
};

/// Where kernels run, with the scratch they share. Movable. One thread at a time; contexts are independent.
class MMREC_EXPORT KernelContext {
 public:
  /// `threads` of the CPU; 0: all the processors this process may use, >= 0. Throws std::bad_alloc.
  static KernelContext cpu(int threads = 0);
  /// GPU `device`, on a stream of the context's own. Throws DeviceUnavailable (errors.h), std::bad_alloc,
  /// std::system_error for a device that is not there.
  static KernelContext cuda(int device = 0);
  /// The same on `stream`, a cudaStream_t of that device; null is CUDA's default stream. The stream must outlive the
  /// context, and no other context may use it.
  static KernelContext cuda(int device, void* stream);

  /// The context moved from may only be assigned to or destroyed.
  KernelContext(KernelContext&&) noexcept;
  /// Gives up the stream or threads it had.
  KernelContext& operator=(KernelContext&&) noexcept;
  ~KernelContext();

  /// Whether pointers lead into a GPU's memory.
  bool is_cuda() const;
  /// The cudaStream_t that work is enqueued on; null on the CPU.
  void* stream() const;
  /// Waits until everything enqueued is done. Throws std::system_error for what has failed since.
  void synchronize();

 private:
  friend class engine::KernelBackend;
  MMREC_NO_EXPORT explicit KernelContext(std::unique_ptr<engine::KernelBackend> backend);
  std::unique_ptr<engine::KernelBackend> backend_;
};

/// Of all sequence operands of an op: [batch, heads, time, dim], each >= 0.
struct SequenceShape {
  std::int64_t batch = 1;  ///< sequences
  std::int64_t heads = 1;  ///< of each
  std::int64_t time = 0;   ///< steps that are scanned
  std::int64_t dim = 0;    ///< channels, contiguous
};

/// Of one operand, in elements; all zero: contiguous.
struct SequenceStrides {
  std::int64_t batch = 0;  ///< from sequence to sequence, >= 0
  std::int64_t head = 0;   ///< from head to head, >= 0
  std::int64_t time = 0;   ///< from step to step, of either sign
};

// The scans run over time; each (batch, head, channel) is a separate sequence. carry_in and carry_out are contiguous
// [batch, heads, dim] of fp32. Either may be null, and carry_out may be carry_in. Calls that hand the carry on give
// what one call over all times gives, within rounding. Blocks of times are scanned in parallel: O(time) work.

/// The running product of decay gates, through log space so that it underflows late:
///   L_t = Σ_{i ≤ t} clamp(log(γ_i + 1e-8), −50, 0),   y_t = exp(L_t)
/// The carry is L, its identity 0. log_y, if not null, receives L.
struct ExpProductScan {
  SequenceShape shape;                   ///< of the operands
  ElementType type = ElementType::kF32;  ///< of gamma and y
  const void* gamma = nullptr;           ///< gates
  SequenceStrides gamma_strides = {};    ///< of gamma
  void* y = nullptr;                     ///< may be gamma
  SequenceStrides y_strides = {};        ///< of y
  float* log_y = nullptr;                ///< fp32, or null
  SequenceStrides log_y_strides = {};    ///< of log_y
  const float* carry_in = nullptr;       ///< [batch, heads, dim], or null: the identity
  float* carry_out = nullptr;            ///< [batch, heads, dim], or null
};
/// Enqueues or runs the scan. Throws as said at the top of this header.
MMREC_EXPORT void exp_product_scan(KernelContext& context, const ExpProductScan& op);

/// The running log-sum-exp: y_t = log Σ_{i ≤ t} exp(x_i), by lse(a, b) = max(a, b) + log1p(exp(−|a − b|)). The carry is
/// y, its identity −∞.
struct LogSumExpScan {
  SequenceShape shape;                   ///< of the operands
  ElementType type = ElementType::kF32;  ///< of x and y
  const void* x = nullptr;               ///< what is summed
  SequenceStrides x_strides = {};        ///< of x
  void* y = nullptr;                     ///< may be x
  SequenceStrides y_strides = {};        ///< of y
  const float* carry_in = nullptr;       ///< [batch, heads, dim], or null: the identity
  float* carry_out = nullptr;            ///< [batch, heads, dim], or null
};
/// Enqueues or runs the scan. Throws as said at the top of this header.
MMREC_EXPORT void logsumexp_scan(KernelContext& context, const LogSumExpScan& op);

/// The decayed recurrence h_t = exp(log_a_t) h_{t−1} + b_t, as the scan of (log-decay, value) pairs
/// (ℓ₁, B₁) ∘ (ℓ₂, B₂) = (ℓ₁ + ℓ₂, e^{ℓ₂} B₁ + B₂). log_a may have either sign (a > 1 grows) and may be −∞ (a = 0
/// forgets); b may have either sign. Decays stay relative to the block they cover, so length costs no digits. The carry
/// is h, its identity 0.
struct DecayScan {
  SequenceShape shape;                   ///< of the operands
  ElementType type = ElementType::kF32;  ///< of log_a, b and h
  const void* log_a = nullptr;           ///< log-decays
  SequenceStrides log_a_strides = {};    ///< of log_a
  const void* b = nullptr;               ///< values
  SequenceStrides b_strides = {};        ///< of b
  void* h = nullptr;                     ///< may be b
  SequenceStrides h_strides = {};        ///< of h
  const float* carry_in = nullptr;       ///< [batch, heads, dim], or null: the identity
  float* carry_out = nullptr;            ///< [batch, heads, dim], or null
};
/// Enqueues or runs the scan. Throws as said at the top of this header.
MMREC_EXPORT void decay_scan(KernelContext& context, const DecayScan& op);

/// log p = logits[target] − logsumexp(logits) for each row, in one pass: logits [rows, vocab], targets [rows], logprobs
/// [rows] of fp32. Finite for any finite logits; −∞ masks an entry; a row of −∞ alone, or with a NaN, gives NaN.
///
/// A target outside [0, vocab) is std::invalid_argument naming row and value, and nothing is written. To know, a call
/// on a GPU waits for the stream. Without check_targets it does not: such a row's log-prob is NaN there.
struct TokenLogprobs {
  std::int64_t rows = 0;                      ///< >= 0
  std::int64_t vocab = 0;                     ///< columns
  ElementType type = ElementType::kF32;       ///< of logits
  const void* logits = nullptr;               ///< [rows, vocab]
  std::int64_t row_stride = 0;                ///< elements between rows; 0: vocab
  IndexType target_type = IndexType::kInt32;  ///< of targets
  const void* targets = nullptr;              ///< [rows]
  float* logprobs = nullptr;                  ///< [rows]
  bool check_targets = true;                  ///< the CPU checks them always: it costs nothing there
};
/// Enqueues or computes log-probs. Throws as said at the top of this header.
MMREC_EXPORT void token_logprobs(KernelContext& context, const TokenLogprobs& op);

/// Its derivative for training: d_logits = grad ⊙ (δ(target) − softmax(logits)), [rows, vocab] of the logits' type;
/// grad [rows] of fp32. Targets as above.
struct TokenLogprobsBackward {
  std::int64_t rows = 0;                      ///< >= 0
  std::int64_t vocab = 0;                     ///< columns
  ElementType type = ElementType::kF32;       ///< of logits and d_logits
  const void* logits = nullptr;               ///< [rows, vocab]
  std::int64_t row_stride = 0;                ///< of logits; 0: vocab
  IndexType target_type = IndexType::kInt32;  ///< of targets
  const void* targets = nullptr;              ///< [rows]
  const float* grad = nullptr;                ///< [rows], by the log-probs
  void* d_logits = nullptr;                   ///< may be logits
  std::int64_t d_row_stride = 0;              ///< 0: vocab
};
/// Enqueues or computes the derivative. Throws as said at the top of this header.
MMREC_EXPORT void token_logprobs_backward(KernelContext& context, const TokenLogprobsBackward& op);

}  // namespace mmrec
