// A stack of MM-Rec blocks on one backend: chunks and steps from tokens to the last block's x, and that normed. What
// becomes of it is the net's (net.h).
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <tuple>
#include <utility>

#include "models/mmrec/block.h"
#include "models/mmrec/config.h"
#include "models/mmrec/mmrec.h"
#include "models/mmrec/whole_step.h"
#include "models/mmrec/workspace.h"
#include "models/runtime/executor.h"
#include "models/runtime/schedule.h"

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
        block_(model_, work_) {}
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;

  Backend& backend() { return backend_; }
  Work& work() { return work_; }
  const Work& work() const { return work_; }
  const ModelView<Space>& model() const { return model_; }

  /// A chunk; see Block::run. True if `normed`, [rows, D], is what norm_by() would make of it.
  bool run(const int* tokens, std::span<const Batch> batches, std::int64_t rows, bool packed,
           const RecurrenceOptions& options, Matrix<A> normed, PrefillStats& stats) {
    return block_.run(tokens, batches, rows, packed, options, normed, stats);
  }
  // rmsnorm(x; norm), by a backend that comes after this one's work, of
  /// all rows of the chunk,
  void norm_by(Backend& backend, std::int64_t rows, Matrix<A> to) { norm(backend, work_.x(rows), to); }
  /// the last token of each sequence of a batch,
  void norm_last_by(Backend& backend, const Batch& b, Matrix<A> to) {
    norm(backend, Work::row_of(work_.x(b), b.tokens - 1), to);
  }
  /// the last rows of the packed runs that end in the chunk; they are as many as `to` has.
  void norm_packed_by(Backend& backend, Matrix<A> to) {
    if constexpr (Block<Backend, A>::kPacks) norm(backend, block_.packed().last_rows(backend), to);
  }

  /// All of a step by one op, for backends and models that have it, which is set but for what this sets: state and
  /// tokens. Null where there is none. To be run by the backend `by`, alone or with another stack's,
  /// and followed by close().
  WholeStep<Backend, A>* whole_step(Backend& by, const int* tokens, const Batch& b, std::int64_t stacks = 1) {
    auto at = whole_steps_.find(b.sequences);
    if (at == whole_steps_.end()) {
      at = whole_steps_.try_emplace(b.sequences, config_, model_, by, b.sequences, stacks).first;
    }
    WholeStep<Backend, A>& whole = at->second;
    if (!whole.available()) return nullptr;
    work_.restart(b);
    auto& op = whole.op();
    op.tokens = tokens + b.first_row;
    op.h = work_.state(b, 0).data;
    op.memory = work_.memory(b, 0, 0).data;
    op.slots = work_.filled_slots(b.position);
    op.context = work_.segment_context(b, 0).data;
    op.segment_sum = work_.segment_sum(b, 0).data;
    op.slot_bytes = static_cast<std::int64_t>(work_.slot.bytes);
    return &whole;
  }
  /// The segment that a step ends, if it does.
  void close(const Batch& b) {
    for_each_layer([&](const auto& w, std::int64_t layer) { block_.memory().close(w, layer, b, b.position + 1); });
  }

  /// What follows from a state that has just been put into slots.
  void complete_state(Slot first, std::int64_t count, std::int64_t position) {
    const Batch all{.slot = first, .position = position, .sequences = count, .tokens = 1};
    const std::int64_t end = position / config_.memory_segment * config_.memory_segment;
    for_each_layer([&](const auto& w, std::int64_t layer) { block_.memory().set_context(w, layer, all, end); });
  }

  /// Everything but slots and tokens that decides which ops a step at a position consists of: slots of memory that are
  /// filled, the one that the step closes a segment into, or -1, and whether the state restarts.
  using StepKey = std::tuple<std::int64_t, std::int64_t, bool>;
  StepKey step_key(std::int64_t position) const {
    const std::int64_t end = position + 1;
    return {work_.filled_slots(position), end % config_.memory_segment == 0 ? work_.ring_slot(end) : -1,
            work_.restarts(position)};
  }

 private:
  void norm(Backend& backend, Matrix<const float> x, Matrix<A> to) { kernels::rmsnorm(backend, x, model_.norm, to); }
  template <class Visit>
  void for_each_layer(const Visit& visit) {
    for (std::int64_t layer = 0; layer < config_.num_layers; ++layer) {
      visit(model_.layers[static_cast<std::size_t>(layer)], layer);
    }
  }

  const Config& config_;
  ModelView<Space> model_;
  Backend& backend_;
  Work work_;
  Block<Backend, A> block_;
  std::map<std::int64_t, WholeStep<Backend, A>> whole_steps_;  // by their number of sequences
};

}  // namespace mmrec::models
