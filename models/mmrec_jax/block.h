// The mmrec-jax block, written once, over the rows of a call's runs: the model at a glance.
//
//   u = rmsnorm(x; norm1)                                          the epsilon of all norms inside the root
//   q, k, v, z = W u + b;  γ = decay gate of (z, k)                gelu is the tanh one
//   h_t = clamp(rmsnorm(a_t ⊙ h_{t-1} + m_t ⊙ z_t), ±100)          (kernels::NormedRecurrence)
//   c = W_out attention of W_q h + ½ q to the bank                 (kernels::BankAttention)
//   y = x + h + c + 0.1 v
//   x = y + W_2 gelu(W_1 rmsnorm(y; norm2) + b_1) + b_2
//   the bank takes h                                               (kernels::BankWrite)
//
// All layers share a sequence's bank, so layer l sees what layer l - 1 has just written of the whole call. A call's
// first h_{t-1} is 0. Without a bank c = 0, there are no calls and h runs on.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/ops.h"
#include "models/mmrec_jax/mmrec_jax.h"
#include "models/mmrec_jax/workspace.h"

namespace mmrec::models::mmrec_jax {

template <class Backend, class A>
class Block {
 public:
  using Work = Workspace<Backend, A>;
  using Space = typename Work::Space;
  using Layer = LayerView<Space>;
  template <class Y>
  using Job = typename Work::template Job<Y>;
  template <class T>
  using Matrix = typename Work::template Matrix<T>;

  explicit Block(Work& work) : work_(work) {}

  /// x of the rows that work.begin() has laid out, in and out.
  void run(const Layer& w, std::int64_t layer, std::int64_t rows) {
    norm(rows, w.norm1);
    linear<A>({job(work_.u(rows), w.qkvz, w.qkvz_bias, work_.qkvz(rows))});
    // Calls of one token begin at h = 0, which is all that γ would multiply.
    const bool decays = !work_.config.bank || work_.runs().most_rows > 1;
    if (decays) decay(w, rows);
    linear<float>({job(work_.part(rows, 3), w.gate_z, w.gate_z_bias, work_.zm(rows))});
    kernels::normed_recurrence(
        work_.backend, kernels::NormedRecurrence<Space, A>{.z = work_.part(rows, 3),
                                                           .zm = work_.zm(rows),
                                                           .gamma = decays ? work_.gamma(rows) : Matrix<float>(),
                                                           .h = work_.h(rows),
                                                           .h_rounded = work_.h_rounded(rows),
                                                           .gate_weight = w.gate_h,
                                                           .gate_bias = w.gate_h_bias,
                                                           .norm = w.norm_recurrence,
                                                           .runs = work_.runs(),
                                                           .carries = !work_.config.bank,
                                                           .layer = layer});
    if (work_.config.bank) attend(w, layer, rows);
    add_residual(rows);
    if (work_.config.bank) {
      add(work_.attended(rows), w.attended, nullptr);
      kernels::bank_write(
          work_.backend,
          kernels::BankWrite<Space>{
              .h = work_.h(rows), .runs = work_.runs(), .slots = work_.config.long_mem_len, .layer = layer});
    }
    norm(rows, w.norm2);
    linear<A>({job(work_.u(rows), w.ffn_in, w.ffn_in_bias, work_.ffn(rows), kGelu)});
    add(work_.ffn(rows), w.ffn_out, w.ffn_out_bias);
  }

 private:
  static constexpr auto kGelu = kernels::Activation::kGeluTanh;

  void norm(std::int64_t rows, const float* weight) {
    kernels::rmsnorm(work_.backend, Matrix<const float>(work_.x(rows)), weight, work_.u(rows),
                     kernels::NormEpsilon::kInsideRoot);
  }

  // γ from z and k.
  void decay(const Layer& w, std::int64_t rows) {
    linear<A>({job(work_.part(rows, 3), w.gamma_in, w.gamma_in_bias, work_.gate_hidden(rows, 0), kGelu),
               job(work_.part(rows, 1), w.context_in, w.context_in_bias, work_.gate_hidden(rows, 1), kGelu)});
    linear<float>({job(work_.gate_hidden(rows, 0), w.gamma_up, w.gamma_up_bias, work_.gamma(rows)),
                   job(work_.gate_hidden(rows, 1), w.context_up, w.context_up_bias, work_.context(rows))});
    kernels::decay_gate(work_.backend, {.a = work_.gamma(rows), .c = work_.context(rows), .gamma = work_.gamma(rows)});
  }

  // The attention's output, before W_out.
  void attend(const Layer& w, std::int64_t layer, std::int64_t rows) {
    Job<A> query = job(work_.h_rounded(rows), w.query, nullptr, work_.attended(rows));
    query.residual = work_.part(rows, 0), query.residual_scale = 0.5F;
    linear<A>({query});
    const std::int64_t head_dim = work_.config.model_dim / work_.config.num_heads;
    kernels::bank_attention(
        work_.backend,
        kernels::BankAttention<Space, A>{.q = work_.attended(rows),
                                         .out = work_.attended(rows),
                                         .scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim))),
                                         .runs = work_.runs(),
                                         .slots = work_.config.long_mem_len,
                                         .layer = layer,
                                         .scratch = work_.scratch(),
                                         .scratch_bytes = work_.scratch_bytes()});
  }

  // x = x + h + 0.1 v.
  void add_residual(std::int64_t rows) {
    const Batch all{.sequences = 1, .tokens = rows};
    const std::int64_t dim = work_.dim();
    kernels::block_residual(
        work_.backend,
        kernels::BlockResidual<Space, A>{
            .x = work_.x(all), .h = work_.h(all), .v = work_.qkvz.columns(all, 2 * dim, dim), .y = work_.x(all)});
  }

  template <class Y>
  static Job<Y> job(Matrix<const A> x, const kernels::WeightView<Space>& weight, const float* bias, Matrix<Y> y,
                    kernels::Activation activation = kernels::Activation::kNone) {
    return {.x = x, .weight = weight, .bias = bias, .y = y, .activation = activation};
  }
  // x += the product and its bias.
  void add(Matrix<const A> factor, const kernels::WeightView<Space>& weight, const float* bias) {
    Job<float> sum = job(factor, weight, bias, work_.x(factor.rows));
    sum.residual = sum.y;
    linear<float>({sum});
  }
  // Independent products over all rows, piece by piece of what makes whole tiles.
  template <class Y>
  void linear(std::initializer_list<Job<Y>> jobs) {
    std::vector<Job<Y>> all;
    for (const Piece& piece : work_.pieces()) {
      for (Job<Y> job : jobs) {
        job.x = job.x.middle_rows(piece.first, piece.rows);
        job.y = job.y.middle_rows(piece.first, piece.rows);
        if (job.residual.data != nullptr) job.residual = job.residual.middle_rows(piece.first, piece.rows);
        job.force_row_kernel = piece.ragged;
        all.push_back(job);
      }
    }
    kernels::linear(work_.backend, std::span<const Job<Y>>(all));
  }

  Work& work_;
};

}  // namespace mmrec::models::mmrec_jax
