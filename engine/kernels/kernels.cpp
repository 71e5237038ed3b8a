// The public kernels: arguments are checked here once for every backend.
#include "mmrec/kernels.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <initializer_list>
#include <limits>
#include <utility>

#include "engine/kernels/kernel_backend.h"
#include "engine/require.h"
#include "kernels/cpu/cpu.h"

namespace mmrec {
namespace {

using engine::require;

void check_size(const char* op, const char* name, std::int64_t size) {
  require(size >= 0, "{}: {}: found {}, expected >= 0", op, name, size);
}

void check_pointer(const char* op, const char* operand, const void* data) {
  require(data != nullptr, "{}: {}: found null, expected an address", op, operand);
}

void check_type(const char* op, ElementType type) {
  require(type == ElementType::kF32 || type == ElementType::kF16 || type == ElementType::kBF16,
          "{}: type: found {}, expected an ElementType", op, static_cast<int>(type));
}

/// The product of two counts >= 0, or nothing that fits.
std::int64_t times(const char* op, const char* operand, std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  require(!__builtin_mul_overflow(a, b, &product), "{}: {}: has more elements than 64 bits can count", op, operand);
  return product;
}

/// Elements of the shape; it fits.
std::int64_t check_shape(const char* op, const SequenceShape& s) {
  check_size(op, "shape.batch", s.batch);
  check_size(op, "shape.heads", s.heads);
  check_size(op, "shape.time", s.time);
  check_size(op, "shape.dim", s.dim);
  return times(op, "shape", times(op, "shape", s.batch, s.heads), times(op, "shape", s.time, s.dim));
}

struct Operand {
  const char* name = nullptr;
  const void* data = nullptr;
  SequenceStrides strides;
  bool is_written = false;  // no two of its elements may be one
  bool is_optional = false;
};

void check_sequence(const char* op, const SequenceShape& s, const Operand& checked) {
  const auto& [operand, data, strides, is_written, is_optional] = checked;
  if (data == nullptr && is_optional) return;
  check_pointer(op, operand, data);
  struct Axis {
    std::int64_t stride, count;
  };
  const auto expect_reach = [&](bool holds) {
    require(holds, "{}: {}: reaches beyond what 64 bits can address", op, checked.name);
  };
  for (const std::int64_t stride : {strides.batch, strides.head}) {
    require(stride >= 0, "{}: {}: found a stride of {}, expected >= 0", op, operand, stride);
  }
  expect_reach(strides.time != std::numeric_limits<std::int64_t>::min());
  std::array<Axis, 3> axes{{{strides.batch, s.batch}, {strides.head, s.heads}, {std::abs(strides.time), s.time}}};
  std::int64_t last = s.dim - 1;  // offset of the operand's last element in memory from its first
  for (const Axis& axis : axes) {
    const std::int64_t extent = times(op, operand, axis.stride, axis.count - 1);
    expect_reach(!__builtin_add_overflow(last, extent, &last));
  }
  if (!is_written || (strides.batch == 0 && strides.head == 0 && strides.time == 0)) return;
  std::ranges::sort(axes, {}, &Axis::stride);
  std::int64_t within = s.dim;  // elements that the axes so far span
  for (const Axis& axis : axes) {
    if (axis.count == 1) continue;
    require(axis.stride >= within, "{}: {}: found a stride of {}, with which elements overlap", op, operand,
            axis.stride);
    within = axis.stride * (axis.count - 1) + within;
  }
}

template <class Op>
void check_scan(const char* name, const Op& op, std::initializer_list<Operand> operands) {
  check_type(name, op.type);
  if (check_shape(name, op.shape) == 0) return;
  for (const Operand& operand : operands) check_sequence(name, op.shape, operand);
}

/// Rows of `cols` elements.
void check_rows(const char* op, const char* operand, const void* data, std::int64_t rows, std::int64_t cols,
                std::int64_t stride) {
  check_pointer(op, operand, data);
  require(stride == 0 || stride >= cols, "{}: {}: found a row stride of {}, expected at least {}", op, operand, stride,
          cols);
  (void)times(op, operand, rows, stride == 0 ? cols : stride);
}

template <class Op>
void check_logprobs(const char* name, const Op& op) {
  check_type(name, op.type);
  check_size(name, "rows", op.rows);
  check_size(name, "vocab", op.vocab);
  require(op.target_type == IndexType::kInt32 || op.target_type == IndexType::kInt64,
          "{}: target_type: found {}, expected an IndexType", name, static_cast<int>(op.target_type));
  if (op.rows == 0) return;
  check_rows(name, "logits", op.logits, op.rows, op.vocab, op.row_stride);
  check_pointer(name, "targets", op.targets);
}

std::unique_ptr<engine::KernelBackend> on_cpu(int threads) {
  require(threads >= 0, "kernel context: threads: found {}, expected >= 0", threads);
  return std::make_unique<engine::KernelsOn<kernels::Cpu>>(threads);
}

}  // namespace

KernelContext::KernelContext(std::unique_ptr<engine::KernelBackend> backend) : backend_(std::move(backend)) {}
KernelContext::KernelContext(KernelContext&&) noexcept = default;
KernelContext& KernelContext::operator=(KernelContext&&) noexcept = default;
KernelContext::~KernelContext() = default;

KernelContext KernelContext::cpu(int threads) { return KernelContext(on_cpu(threads)); }
KernelContext KernelContext::cuda(int device) { return KernelContext(engine::make_cuda_kernels(device, nullptr)); }
KernelContext KernelContext::cuda(int device, void* stream) {
  return KernelContext(engine::make_cuda_kernels(device, &stream));
}

bool KernelContext::is_cuda() const { return backend_->is_cuda(); }
void* KernelContext::stream() const { return backend_->stream(); }
void KernelContext::synchronize() { backend_->synchronize(); }

void exp_product_scan(KernelContext& context, const ExpProductScan& op) {
  check_scan("exp_product_scan", op,
             {{"gamma", op.gamma, op.gamma_strides},
              {"y", op.y, op.y_strides, true},
              {"log_y", op.log_y, op.log_y_strides, true, /*is_optional=*/true}});
  engine::KernelBackend::of(context).run(op);
}

void logsumexp_scan(KernelContext& context, const LogSumExpScan& op) {
  check_scan("logsumexp_scan", op, {{"x", op.x, op.x_strides}, {"y", op.y, op.y_strides, true}});
  engine::KernelBackend::of(context).run(op);
}

void decay_scan(KernelContext& context, const DecayScan& op) {
  check_scan("decay_scan", op,
             {{"log_a", op.log_a, op.log_a_strides}, {"b", op.b, op.b_strides}, {"h", op.h, op.h_strides, true}});
  engine::KernelBackend::of(context).run(op);
}

void token_logprobs(KernelContext& context, const TokenLogprobs& op) {
  constexpr const char* kName = "token_logprobs";
  check_logprobs(kName, op);
  if (op.rows == 0) return;
  check_pointer(kName, "logprobs", op.logprobs);
  engine::KernelBackend::of(context).run(op);
}

void token_logprobs_backward(KernelContext& context, const TokenLogprobsBackward& op) {
  constexpr const char* kName = "token_logprobs_backward";
  check_logprobs(kName, op);
  if (op.rows == 0) return;
  check_pointer(kName, "grad", op.grad);
  check_rows(kName, "d_logits", op.d_logits, op.rows, op.vocab, op.d_row_stride);
  engine::KernelBackend::of(context).run(op);
}

}  // namespace mmrec
