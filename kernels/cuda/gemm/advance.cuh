// A token of the recurrence with the products that it needs (GatedAdvance in kernels/ops.h): how the products are
// shared out, and what becomes of their sums. few_advance_sm90.cu and matvec_advance.cu multiply.
#pragma once

#include "kernels/cuda/element.cuh"
#include "kernels/cuda/recurrence/equations.cuh"
#include "kernels/cuda/rows/rows.cuh"
#include "kernels/cuda/rows/scaled.cuh"

namespace mmrec::kernels {

/// The products of some channels in 8 shares of about as much work: three have a third of k each of the state's part of
/// the first gate, three of the second gate's, and one has each decay network's last layer, or two share the only one.
constexpr int kAdvanceShares = 8;
struct AdvanceShare {
  static constexpr int kOfGate = 3;
  int product;  // 0: the gates, 1: decay, 2: context_decay
  bool is_second_gate;
  int part, parts;  // of k

  __device__ AdvanceShare(int number, bool has_context) {
    const int decay = number - 2 * kOfGate;
    is_second_gate = decay < 0 && number >= kOfGate;
    product = decay < 0 ? 0 : has_context ? 1 + decay : 1;
    part = decay < 0 ? number % kOfGate : has_context ? 0 : decay;
    parts = decay < 0 ? kOfGate : has_context ? 1 : 2;
  }
  __device__ int begin(int steps) const { return steps * part / parts; }
  __device__ int end(int steps) const { return steps * (part + 1) / parts; }
};

/// What a thread needs to finish kWidth channels of a row, whose scaled rows have parts of kPart: everything is loaded
/// at once, from somewhere else where there is nothing, and nothing waits for a predicate.
template <class A, int kWidth, int kPart>
class AdvancedRow {
 public:
  /// Before the predecessor has ended. Where row < 0 nothing is stored.
  __device__ AdvancedRow(const GatedAdvance<Device, A>& op, std::int64_t row, int channel)
      : op_(op), row_(max(row, std::int64_t{0})), channel_(channel), exists_(row >= 0) {
    const AdvanceNorm<Device, A>& a = op.advance;
    state_ = a.h.row(row_);
    context_ = a.c.row(row_);
    if (context_ == nullptr) context_ = a.c_bias;
    sum_ = op.sum.rows == 0 ? nullptr : op.sum.row(row_);
    closed_ = op.closed.rows == 0 ? nullptr : op.closed.row(row_);
    next_ = op.next.rounded.data == nullptr ? nullptr : op.next.h.row(row_);
    load_or_zero(a.gate_bias, gate_bias_);
    load_or_zero(op.decay.bias, decay_bias_);
    load_or_zero(op.context_decay.bias, context_decay_bias_);
    kernels::load(a.norm + channel, weight_);
  }
  __device__ void load() {
    const AdvanceNorm<Device, A>& a = op_.advance;
    const float* const x = a.x.row(row_);
    kernels::load(x + channel_, x_);
    kernels::load((state_ == nullptr ? x : state_) + channel_, h_);
    kernels::load((context_ == nullptr ? x : context_) + channel_, c_);
    kernels::load((next_ == nullptr ? x : next_) + channel_, next_h_);
    kernels::load(a.z.row(row_) + channel_, z_);
    kernels::load(a.v.row(row_) + channel_, v_);
    kernels::load(a.zm.row(row_) + channel_, zm_);
    if (sum_ != nullptr) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) before_[i] = __ldcg(sum_ + channel_ + i);
    }
  }
  /// part: the sums of each share.
  __device__ void finish(const float (&part)[kAdvanceShares][kWidth]) {
    const AdvanceNorm<Device, A>& a = op_.advance;
    const bool has_context = op_.context_decay.hidden.data != nullptr;
    float state[kWidth];
    float y[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float s = part[0][i] + part[1][i] + part[2][i];
      const float g = part[3][i] + part[4][i] + part[5][i];
      const float of_context = part[7][i] + context_decay_bias_[i];
      const float decay = (has_context ? part[6][i] : part[6][i] + part[7][i]) + decay_bias_[i];
      const float gamma = decay_of(decay, has_context, of_context);
      const Step step = gated_step(s + gate_bias_[i], zm_[i] + g, z_[i], gamma, a.mdi_mix);
      state[i] = step(state_ == nullptr ? 0.0F : h_[i]);
      y[i] = residual_sum(x_[i], state[i], v_[i]) + (context_ == nullptr ? 0.0F : c_[i]);
    }
    if (exists_) {
      store(a.x.row(row_) + channel_, y);
      store(a.h_rounded.row(row_) + channel_, state);
      if (state_ != nullptr) store(state_ + channel_, state);
    }
    leave_scaled<kPart>(ScaledRows<Device, A>{a.norm, a.u, op_.squares}, exists_, row_, channel_, y, weight_);
    if (!exists_) return;
    if (op_.next.rounded.data != nullptr) {
#pragma unroll
      for (float& value : next_h_) value = next_ == nullptr ? 0.0F : value;
      store(op_.next.rounded.row(row_) + channel_, next_h_);
    }
    if (sum_ == nullptr) return;
    add_to_segment(before_, x_, static_cast<double>(op_.segment), sum_ + channel_,
                   closed_ == nullptr ? nullptr : closed_ + channel_);
  }

 private:
  __device__ void load_or_zero(const float* from, float (&to)[kWidth]) const {
#pragma unroll
    for (float& value : to) value = 0.0F;
    if (from != nullptr) kernels::load(from + channel_, to);
  }

  const GatedAdvance<Device, A>& op_;
  std::int64_t row_;
  int channel_;
  bool exists_;
  float* state_;
  const float* context_;
  const float* next_;
  double* sum_;
  float* closed_;
  float gate_bias_[kWidth], decay_bias_[kWidth], context_decay_bias_[kWidth], weight_[kWidth];
  float x_[kWidth], h_[kWidth], c_[kWidth], next_h_[kWidth], z_[kWidth], v_[kWidth], zm_[kWidth];
  double before_[kWidth];
};

}  // namespace mmrec::kernels
