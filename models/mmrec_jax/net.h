// mmrec-jax between tokens and what the head multiplies, for the forward pass of models/runtime/forward.h; and how a
// call is cut into calls of the model.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <tuple>
#include <utility>

#include "models/mmrec_jax/block.h"
#include "models/mmrec_jax/mmrec_jax.h"
#include "models/mmrec_jax/workspace.h"
#include "models/runtime/executor.h"
#include "models/runtime/schedule.h"
#include "models/runtime/tables.h"

namespace mmrec::models::mmrec_jax {

template <class Backend, class A>
class Net {
 public:
  using Device = Backend;
  using Element = A;
  using Space = typename Backend::Space;
  template <class T>
  using Matrix = kernels::MatrixView<T, Space>;

  Net(const Config& config, ModelView<Space> model, Backend& backend, const ChunkPlan& plan)
      : config_(config),
        model_(std::move(model)),
        work_(config, backend, plan.tile),
        block_(work_),
        calls_(plan_of(config, config.calls, plan)),
        single_(plan_of(config, Calls::kStepwise, plan)),
        whole_(plan_of(config, Calls::kWhole, plan)) {}

  Backend& backend() { return work_.backend; }
  std::size_t slot_bytes() const { return work_.slot.bytes; }
  std::int64_t vocab() const { return config_.vocab_size; }
  const kernels::WeightView<Space>& head() const { return model_.embedding; }

  /// A call's runs, each as calls of the model. What is scored goes token by token unless whole calls are asked for:
  /// a token's log-prob is given those before it alone.
  Schedule schedule(const Work& work) const {
    const bool scores = !work.logprobs.empty();
    return {!scores ? calls_ : work.whole_calls ? whole_ : single_, kNoSegment, work.runs};
  }

  bool reserve(std::int64_t sequences, bool /*sweeps*/) {
    return work_.reserve(whole_.most_rows(sequences), whole_.tokens);
  }
  std::int64_t rows() const { return work_.rows(); }

  /// As models/mmrec/net.h has it. Steps of sequences apart are not laid out: what the bank's ops are depends on its
  /// rows.
  std::optional<StepRows> lay_out(const Chunk& /*chunk*/, Tables<Device>& /*tables*/) { return {}; }
  void end_step() {}
  std::span<const std::int32_t> row_of() const { return {}; }

  /// Single tokens are normed, and all else goes in order.
  Path run(const Chunk& chunk, Done& /*done*/) {
    work_.begin(chunk.batches);
    kernels::embed(work_.backend, model_.embedding, chunk.tokens, work_.x(chunk.rows));
    for (std::size_t layer = 0; layer < model_.layers.size(); ++layer) {
      block_.run(model_.layers[layer], static_cast<std::int64_t>(layer), chunk.rows);
    }
    if (work_.runs().most_rows != 1) return Path::kReference;
    norm({.count = chunk.rows});
    return Path::kRows;
  }
  /// The last block's output.
  Matrix<float> x(std::int64_t rows) { return work_.x(rows); }
  Matrix<A> hidden(std::int64_t rows) { return work_.u(rows); }
  Matrix<A> norm(const HeadRows& rows) {  // no runs are packed with gaps
    Matrix<float> from = work_.x(rows.count);
    Matrix<A> to = hidden(rows.count);
    if (const Batch* const b = rows.batch) {
      const Matrix<float> all = work_.x(this->rows());
      from = {all.row(b->first_row + b->tokens - 1), b->sequences, all.cols, b->tokens * all.stride};
      to = hidden(this->rows()).middle_rows(b->first_row, b->sequences);
    }
    kernels::rmsnorm(work_.backend, Matrix<const float>(from), model_.norm, to, kernels::NormEpsilon::kInsideRoot);
    return to;
  }
  /// Rows of the chunk that products take together.
  std::span<const Piece> pieces() const { return work_.pieces(); }

  /// Rows of the bank that are written; and -1 where these change no more, or without a bank.
  using StepKey = std::tuple<std::int64_t, std::int64_t, std::int64_t>;
  StepKey step_key(std::int64_t position) const {
    if (!config_.bank) return {0, -1, 0};
    const std::int64_t used = used_rows(config_, position);
    return {used, used == config_.long_mem_len ? -1 : 0, 0};
  }
  Matrix<float> logits(Slot first, std::int64_t count) const { return work_.logits(first, count); }
  void complete_state(Slot /*first*/, std::int64_t /*count*/, std::int64_t /*position*/) {}

 private:
  static constexpr std::int64_t kNoSegment = std::numeric_limits<std::int64_t>::max() / 2;

  static ChunkPlan plan_of(const Config& config, Calls calls, const ChunkPlan& plan) {
    if (!config.bank) {
      return {.tokens = plan.tokens, .tile = plan.tile, .rows = plan.rows, .spans_segments = true};
    }
    return {.tokens = calls == Calls::kStepwise ? 1 : config.long_mem_len,
            .tile = 1,
            .rows = plan.rows,
            .spans_segments = true,
            .begins_with_run = calls == Calls::kPrompt};
  }

  const Config& config_;
  ModelView<Space> model_;
  Workspace<Backend, A> work_;
  Block<Backend, A> block_;
  ChunkPlan calls_, single_, whole_;
};

}  // namespace mmrec::models::mmrec_jax
