// MMRec100M between tokens and what the head multiplies:
//
//   x = embedding[token];  X_e = rmsnorm(blocks of expert e applied to x; norm of e),  e = text, code
//   f = W_fusion [X_text ; X_code] + b_fusion;  hidden = rmsnorm(f; final norm)
//
// The experts are stacks of MM-Rec's (models/mmrec/stack.h), which know nothing of each other and run side by side
// (models/runtime/sides.h). Of one that does not run the fusion sees zeros.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "models/mmrec/stack.h"
#include "models/mmrec100m/mmrec100m.h"
#include "models/runtime/activation.h"
#include "models/runtime/sides.h"
#include "models/runtime/tables.h"

namespace mmrec::models::mmrec100m {

/// As Net of models/mmrec/net.h, for the forward pass there.
template <class Backend, class A>
class Net {
 public:
  using Device = Backend;
  using Element = A;
  using Space = typename Backend::Space;
  template <class T>
  using Matrix = kernels::MatrixView<T, Space>;

  Net(const Config& config, const ModelView<Space>& view, Backend& backend, const ChunkPlan& plan)
      : config_(config),
        stack_config_(config.stack()),
        view_(view),
        backend_(backend),
        sides_(backend),
        plan_(plan),
        layout_(config) {
    for (std::size_t i = 0; i < config.stacks(); ++i) {
      Backend& own = config.stacks() == 2 ? sides_.of(i) : backend;
      const auto& expert = view_.experts[config.first() + i];
      const models::ModelView<Space> stack{
          .embedding = view_.embedding, .head = {}, .norm = expert.norm, .layers = expert.layers};
      stacks_[i] = std::make_unique<Stack<Backend, A>>(stack_config_, stack, own, plan_, layout_.stacks[i]);
    }
  }
  Net(const Net&) = delete;
  Net& operator=(const Net&) = delete;

  Backend& backend() { return backend_; }
  const ChunkPlan& plan() const { return plan_; }
  std::size_t slot_bytes() const { return layout_.bytes; }
  std::int64_t segment() const { return stack_config_.memory_segment; }
  std::int64_t vocab() const { return config_.vocab_size; }
  const kernels::WeightView<Space>& head() const { return view_.head; }

  bool reserve(std::int64_t sequences, bool sweeps) {
    bool grows = false;
    for (std::size_t i = 0; i < config_.stacks(); ++i) grows = stacks_[i]->work().reserve(sequences, sweeps) || grows;
    if (!grows && is_reserved_) return false;
    is_reserved_ = false;
    const auto count = static_cast<std::size_t>(rows() * 2 * config_.expert_dim);
    joined_ = {}, fused_ = {}, hidden_ = {};
    joined_ = backend_.template allocate<A>(count);  // zeros, which the half of an expert that does not run stays
    fused_ = backend_.template allocate<float>(count);
    if constexpr (kRounds<A>) hidden_ = backend_.template allocate<A>(count);
    is_reserved_ = true;
    return true;
  }
  std::int64_t rows() const { return stacks_[0]->work().rows(); }

  std::optional<StepRows> lay_out(const Chunk& chunk, Tables<Device>& tables) {
    laid_out_ = {};
    if (stacks_[0]->lists_rows(chunk)) {
      run_stacks(false, [&](std::size_t i) { laid_out_ = stacks_[i]->lay_out(chunk, tables); });  // the same for both
    }
    return laid_out_;
  }
  void end_step() {
    if (laid_out_) run_stacks(false, [&](std::size_t i) { stacks_[i]->end_rows(); });
    laid_out_ = {};
  }
  std::span<const std::int32_t> row_of() const { return stacks_[0]->row_of(); }

  Path run(const Chunk& chunk, Done& done) {
    ragged_ = chunk.ragged;
    const auto stacks = static_cast<std::int64_t>(config_.stacks());
    const Path path = stacks_[0]->choose(chunk, backend_, stacks);  // of both: they have the same shapes
    const std::int64_t rows = laid_out_ && chunk.is_step ? laid_out_->all() : chunk.rows;
    if (path == Path::kWholeStep) {
      step_whole(chunk, stacks);
      return path;
    }
    std::array<Done, 2> of_stack;
    run_stacks(chunk.options.sweeps, [&](std::size_t i) { stacks_[i]->run(path, chunk, half(i, rows), of_stack[i]); });
    for (const Done& one : of_stack) done.stats += one.stats;
    if (path == Path::kRows) fuse(rows);
    return path;
  }
  Matrix<A> hidden(std::int64_t rows) { return {if_rounded<A>(hidden_, fused_).data(), rows, 2 * config_.expert_dim}; }
  Matrix<A> norm(const HeadRows& rows) {
    for (std::size_t i = 0; i < config_.stacks(); ++i) stacks_[i]->norm_by(backend_, rows, half(i, rows.size()));
    return fuse(rows.size());
  }

  using StepKey = typename Stack<Backend, A>::StepKey;
  StepKey step_key(std::int64_t position) const { return stacks_[0]->step_key(position); }
  Matrix<float> logits(Slot first, std::int64_t count) const {
    const auto& work = stacks_[0]->work();
    return work.of_slots(work.template in_slot<float>(first, layout_.logits), count, vocab());
  }
  void complete_state(Slot /*first*/, std::int64_t /*count*/, std::int64_t /*position*/) {}  // nothing follows from h

 private:
  template <class Run>
  void run_stacks(bool waits, const Run& run) {
    if (config_.stacks() == 1) return run(std::size_t{0});
    sides_.run(waits, run);
  }
  /// Where the normed rows of stack i go: its expert's half of the fusion's input.
  Matrix<A> half(std::size_t i, std::int64_t rows) {
    const std::int64_t dim = config_.expert_dim;
    return {joined_.data() + static_cast<std::int64_t>(config_.first() + i) * dim, rows, dim, 2 * dim};
  }
  Matrix<A> fuse(std::int64_t rows) {
    const std::int64_t dim = 2 * config_.expert_dim;
    const Matrix<float> f{fused_.data(), rows, dim};
    linear<float>(
        {.x = Matrix<A>{joined_.data(), rows, dim}, .weight = view_.fusion, .bias = view_.fusion_bias, .y = f});
    kernels::rmsnorm(backend_, Matrix<const float>(f), view_.norm, hidden(rows));
    return hidden(rows);
  }
  void step_whole(const Chunk& chunk, std::int64_t stacks) {
    const Batch& b = chunk.batches.front();
    std::array<WholeStep<Backend, A>*, 2> steps = {};
    for (std::size_t i = 0; i < config_.stacks(); ++i) {
      steps[i] = &stacks_[i]->whole_step(chunk, backend_, stacks);
      steps[i]->op().x = stacks_[i]->work().x(b.sequences).data;
    }
    steps[0]->run(backend_, steps[1]);
    const Batch all{.sequences = b.sequences, .tokens = 1};
    linear<float>({.x = norm({.batch = &all}), .weight = view_.head, .y = logits(b.slot, b.sequences)});
  }
  template <class Y>
  void linear(kernels::Linear<Space, A, Y> job) {
    job.force_row_kernel = ragged_;
    kernels::linear(backend_, std::span<const kernels::Linear<Space, A, Y>>(&job, 1));
  }

  const Config& config_;
  const models::Config stack_config_;
  const ModelView<Space> view_;
  Backend& backend_;
  Sides<Backend> sides_;
  const ChunkPlan plan_;
  const SlotLayout layout_;
  std::array<std::unique_ptr<Stack<Backend, A>>, 2> stacks_;  // the second is null where one expert runs
  std::optional<StepRows> laid_out_;                          // the step at hand
  bool ragged_ = false;
  bool is_reserved_ = false;
  typename Backend::template Buffer<A> joined_, hidden_;  // [rows, 2E]
  typename Backend::template Buffer<float> fused_;        // [rows, 2E]; in fp32 its norm takes its place
};

}  // namespace mmrec::models::mmrec100m
