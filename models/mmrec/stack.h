// A stack of MM-Rec blocks on one backend: chunks and steps from tokens to the last block's x, and that normed, by the
// path that choose_path() names. The net (net.h) does the rest.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <tuple>
#include <utility>

#include "models/mmrec/block.h"
#include "models/mmrec/choose_path.h"
#include "models/mmrec/paths/packed.h"
#include "models/mmrec/paths/rows.h"
#include "models/mmrec/paths/together.h"
#include "models/mmrec/paths/whole_step.h"
#include "models/mmrec/terms.h"
#include "models/runtime/executor.h"
#include "models/runtime/schedule.h"
#include "models/runtime/tables.h"

namespace mmrec::models {

/// One thread at a time. The model's embedding, norm and layers are used, its head where a step by one op makes logits.
template <class Backend, class A>
class Stack {
 public:
  using Space = typename Backend::Space;
  using Work = Workspace<Backend, A>;
  template <class T>
  using Matrix = kernels::MatrixView<T, Space>;

  Stack(const Config& config, ModelView<Space> model, Backend& backend, const ChunkPlan& plan, const SlotLayout& slot)
      : config_(config),
        model_(std::move(model)),
        backend_(backend),
        work_(config, backend, plan, slot),
        terms_(model_, work_),
        block_(terms_),
        together_(block_),
        packed_(block_),
        rows_(terms_) {}
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;

  Backend& backend() { return backend_; }
  Work& work() { return work_; }
  const Work& work() const { return work_; }
  const ModelView<Space>& model() const { return model_; }

  /// `by` and `stacks` are those of whole_step().
  Path choose(const Chunk& chunk, Backend& by, std::int64_t stacks = 1) {
    const auto whole_step_fits = [&](const Batch& b) { return whole_step_of(b.sequences, by, stacks).available(); };
    return choose_path<Backend, A>(backend_, decode_shape(config_, 1, 0), work_.plan, chunk, whole_step_fits);
  }

  /// A chunk by any path but kWholeStep. By kRows `normed`, [rows, D], receives what norm_by() would make of it.
  void run(Path path, const Chunk& chunk, Matrix<A> normed, Done& done) {
    work_.ragged = chunk.ragged;
    work_.few_rows = kernels::kTileColumns;
    using Has = PathOps<Backend, A>;
    if (path == Path::kTogether) return go<Has::kTogether>(together_, chunk, done);
    if (path == Path::kPacked) return go<Has::kPacked>(packed_, chunk, done);
    if (path == Path::kRows) return go<Has::kRows>(rows_, chunk, done, normed);
    go<true>(block_, chunk, done);
  }
  /// For callers that run its parts of a chunk by Path::kReference themselves.
  Block<Backend, A>& block() { return block_; }
  /// Begins a step by Path::kWholeStep. The caller must set the destination in op(), run it on the backend `by`, alone
  /// or with another stack's, and call end_whole_step(). `stacks`: how many run side by side.
  WholeStep<Backend, A>& whole_step(const Chunk& chunk, Backend& by, std::int64_t stacks = 1) {
    work_.ragged = chunk.ragged;
    WholeStep<Backend, A>& whole = whole_step_of(chunk.batches.front().sequences, by, stacks);
    whole.begin(terms_, chunk.tokens, chunk.batches.front());
    return whole;
  }
  void end_whole_step(const Chunk& chunk) { WholeStep<Backend, A>::end(terms_, chunk.batches.front()); }

  /// Whether a step needs lay_out(): one of several batches by kRows, or any where no bits may depend on their number.
  bool lists_rows(const Chunk& chunk) {
    return (chunk.batches.size() > 1 || work_.plan.align != 0) && choose(chunk, backend_) == Path::kRows;
  }
  /// Before and after run() of such a step; `normed` has as many rows as this says. The caller must send the lists.
  StepRows lay_out(const Chunk& chunk, Tables<Backend>& tables) {
    StepRows rows;
    if constexpr (PathOps<Backend, A>::kRows) rows = rows_.lay_out(chunk, tables);
    return rows;
  }
  void end_rows() {
    if constexpr (PathOps<Backend, A>::kRows) rows_.end();
  }
  /// Of each sequence of that step, in order.
  std::span<const std::int32_t> row_of() const { return rows_.row_of(); }

  /// rmsnorm(x; norm) of rows of the chunk, by a backend that comes after this one's work.
  void norm_by(Backend& backend, const HeadRows& rows, Matrix<A> to) {
    kernels::rmsnorm(backend, x_of(backend, rows), model_.norm, to);
  }

  /// Computes the values that follow from a state just loaded into slots.
  void complete_state(Slot first, std::int64_t count, std::int64_t position) {
    const Batch all{.slot = first, .position = position, .sequences = count, .tokens = 1};
    const std::int64_t end = position / config_.memory_segment * config_.memory_segment;
    for (std::int64_t i = 0; i < config_.num_layers; ++i) terms_.set_context(terms_.layer(i), i, all, end);
  }

  /// Everything but slots and tokens that decides which ops a step at a position consists of: slots of memory that are
  /// filled, the one that the step closes a segment into, or -1, and whether the state restarts.
  using StepKey = std::tuple<std::int64_t, std::int64_t, std::int64_t>;
  StepKey step_key(std::int64_t position) const {
    const std::int64_t end = position + 1;
    return {work_.filled_slots(position), end % config_.memory_segment == 0 ? work_.ring_slot(end) : -1,
            work_.restarts(position)};
  }

 private:
  Matrix<const float> x_of(Backend& backend, const HeadRows& rows) {
    if (rows.batch != nullptr) return Work::row_of(work_.x(*rows.batch), rows.batch->tokens - 1);
    if constexpr (PathOps<Backend, A>::kPacked) {
      if (rows.packed) return packed_.last_rows(backend);
    }
    return work_.x(rows.count);
  }
  template <bool backend_has_it, class Taken, class... Rest>
  void go(Taken& path, const Chunk& chunk, Done& done, const Rest&... rest) {
    if constexpr (backend_has_it) {
      path.begin(chunk, rest...);
      for (std::int64_t layer = 0; layer < config_.num_layers; ++layer) path.layer(layer, chunk, done);
    }
  }
  WholeStep<Backend, A>& whole_step_of(std::int64_t sequences, Backend& by, std::int64_t stacks) {
    return whole_steps_.try_emplace(sequences, terms_, by, sequences, stacks).first->second;
  }

  const Config& config_;
  ModelView<Space> model_;
  Backend& backend_;
  Work work_;
  BlockTerms<Backend, A> terms_;
  Block<Backend, A> block_;
  Together<Backend, A> together_;
  Packed<Backend, A> packed_;
  Rows<Backend, A> rows_;
  std::map<std::int64_t, WholeStep<Backend, A>> whole_steps_;  // by their number of sequences
};

}  // namespace mmrec::models
