// What a KernelContext runs on. kernels.cpp checks arguments and makes the one for the CPU; kernels_cuda.cpp, or in a
// build without CUDA the stub kernels_cuda_stub.cpp, makes the one for a GPU.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/ops.h"
#include "kernels/tensor.h"
#include "mmrec/kernels.h"

namespace mmrec::engine {

/// Receives checked arguments.
class KernelBackend {
 public:
  virtual ~KernelBackend() = default;
  virtual void run(const ExpProductScan& op) = 0;
  virtual void run(const LogSumExpScan& op) = 0;
  virtual void run(const DecayScan& op) = 0;
  virtual void run(const TokenLogprobs& op) = 0;
  virtual void run(const TokenLogprobsBackward& op) = 0;
  virtual bool is_cuda() const { return false; }
  virtual void* stream() const { return nullptr; }
  virtual void synchronize() {}

  static KernelBackend& of(KernelContext& context) { return *context.backend_; }
};

/// The ops of kernels/ops.h on any backend: arguments without types become views with types. An op is found by its
/// arguments, so the backend need only be declared where this is used.
template <class Backend>
class KernelsOn : public KernelBackend {
 public:
  using Space = typename Backend::Space;

  template <class... Arguments>
  explicit KernelsOn(Arguments... arguments) : backend_(arguments...) {}

  void run(const ExpProductScan& op) override {
    with_type(op.type, [&]<class T>(T) {
      exp_product_scan(backend_, kernels::ExpProductScan<T, Space>{
                                     .gamma = view<const T>(op.gamma, op.shape, op.gamma_strides),
                                     .y = view<T>(op.y, op.shape, op.y_strides),
                                     .log_y = op.log_y == nullptr ? kernels::SequenceView<float, Space>{}
                                                                  : view<float>(op.log_y, op.shape, op.log_y_strides),
                                     .carry_in = op.carry_in,
                                     .carry_out = op.carry_out});
    });
  }
  void run(const LogSumExpScan& op) override {
    with_type(op.type, [&]<class T>(T) {
      logsumexp_scan(backend_, kernels::LogSumExpScan<T, Space>{.x = view<const T>(op.x, op.shape, op.x_strides),
                                                                .y = view<T>(op.y, op.shape, op.y_strides),
                                                                .carry_in = op.carry_in,
                                                                .carry_out = op.carry_out});
    });
  }
  void run(const DecayScan& op) override {
    with_type(op.type, [&]<class T>(T) {
      decay_scan(backend_, kernels::DecayScan<T, Space>{.log_a = view<const T>(op.log_a, op.shape, op.log_a_strides),
                                                        .b = view<const T>(op.b, op.shape, op.b_strides),
                                                        .h = view<T>(op.h, op.shape, op.h_strides),
                                                        .carry_in = op.carry_in,
                                                        .carry_out = op.carry_out});
    });
  }
  void run(const TokenLogprobs& op) override {
    with_types(op.type, op.target_type, [&]<class T, class Index>(T, Index) {
      const kernels::TokenLogprobs<T, Index, Space> typed{
          .logits = rows<const T>(op.logits, op.rows, op.vocab, op.row_stride),
          .targets = static_cast<const Index*>(op.targets),
          .logprobs = op.logprobs};
      if constexpr (requires { token_logprobs_unchecked(backend_, typed); }) {
        if (!op.check_targets) return token_logprobs_unchecked(backend_, typed);
      }
      token_logprobs(backend_, typed);
    });
  }
  void run(const TokenLogprobsBackward& op) override {
    with_types(op.type, op.target_type, [&]<class T, class Index>(T, Index) {
      token_logprobs_backward(backend_, kernels::TokenLogprobsBackward<T, Index, Space>{
                                            .logits = rows<const T>(op.logits, op.rows, op.vocab, op.row_stride),
                                            .targets = static_cast<const Index*>(op.targets),
                                            .grad = op.grad,
                                            .d_logits = rows<T>(op.d_logits, op.rows, op.vocab, op.d_row_stride)});
    });
  }

 protected:
  /// Before every op.
  virtual void begin() {}

  Backend backend_;

 private:
  template <class F>
  void with_type(ElementType type, F&& f) {
    begin();
    switch (type) {
      case ElementType::kF32:
        return f(float{});
      case ElementType::kF16:
        return f(kernels::Float16{});
      case ElementType::kBF16:
        return f(kernels::BFloat16{});
    }
  }
  template <class F>
  void with_types(ElementType type, IndexType index, F&& f) {
    with_type(type, [&](auto zero) { index == IndexType::kInt32 ? f(zero, std::int32_t{}) : f(zero, std::int64_t{}); });
  }

  /// T is const or not as the argument was.
  template <class T, class Void>
  static kernels::SequenceView<T, Space> view(Void* data, const SequenceShape& s, const SequenceStrides& strides) {
    kernels::SequenceView<T, Space> to(static_cast<T*>(data), s.batch, s.heads, s.time, s.dim);
    if (strides.batch == 0 && strides.head == 0 && strides.time == 0) return to;
    to.batch_stride = strides.batch;
    to.head_stride = strides.head;
    to.time_stride = strides.time;
    return to;
  }
  template <class T, class Void>
  static kernels::MatrixView<T, Space> rows(Void* data, std::int64_t rows, std::int64_t cols, std::int64_t stride) {
    return {static_cast<T*>(data), rows, cols, stride == 0 ? cols : stride};
  }
};

/// Whether this build has the CUDA backend.
bool built_with_cuda();

/// Kernels on GPU `device`, on a stream of their own or on `*stream`, a cudaStream_t. Throws DeviceUnavailable,
/// std::invalid_argument, std::bad_alloc, std::system_error.
std::unique_ptr<KernelBackend> make_cuda_kernels(int device, void* const* stream);

}  // namespace mmrec::engine
