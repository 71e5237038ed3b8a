// MM-Rec between tokens and what the head multiplies: one stack of blocks and its norm. Another architecture that is
// made of stacks has a net of its own, with the same members, for the same forward pass (forward.h).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>

#include "models/mmrec/stack.h"
#include "models/mmrec/staggered.h"
#include "models/runtime/tables.h"

namespace mmrec::models {

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
        stack_(config, std::move(model), backend, plan, SlotLayout(config)),
        staggered_(config, stack_.model(), backend, plan, SlotLayout(config)) {}

  Backend& backend() { return stack_.backend(); }
  const ChunkPlan& plan() const { return stack_.work().plan; }
  std::size_t slot_bytes() const { return stack_.work().slot.bytes; }
  std::int64_t segment() const { return config_.memory_segment; }
  std::int64_t vocab() const { return config_.vocab_size; }
  const kernels::WeightView<Space>& head() const { return stack_.model().head; }

  /// See Workspace::reserve.
  bool reserve(std::int64_t sequences, bool sweeps) { return stack_.work().reserve(sequences, sweeps); }
  std::int64_t rows() const { return stack_.work().rows(); }

  /// A step that lists its rows is laid out before run(), here, and end_step() comes after it; else nothing happens.
  /// Its hidden() has the rows that this says. The caller must send the lists.
  std::optional<StepRows> lay_out(const Chunk& chunk, Tables<Device>& tables) {
    laid_out_ = {};
    if (stack_.lists_rows(chunk)) laid_out_ = stack_.lay_out(chunk, tables);
    return laid_out_;
  }
  void end_step() {
    if (laid_out_) stack_.end_rows();
    laid_out_ = {};
  }
  std::span<const std::int32_t> row_of() const { return stack_.row_of(); }

  /// A chunk, and the path that it took. By kRows hidden() has its rows, normed; by kWholeStep the logits are in the
  /// slots; by kPacked norm() has the rows that end.
  Path run(const Chunk& chunk, Done& done) {
    is_staggered_ = staggered_.takes(chunk);
    if (is_staggered_) return staggered_.run(chunk, hidden(chunk.rows), done);
    const Path path = stack_.choose(chunk, backend());
    if (path == Path::kWholeStep) {
      const Batch& b = chunk.batches.front();
      auto& whole = stack_.whole_step(chunk, backend());
      whole.op().logits = logits(b.slot, b.sequences).data;
      whole.run(backend());
      stack_.end_whole_step(chunk);
    } else {
      stack_.run(path, chunk, hidden(laid_out_ && chunk.is_step ? laid_out_->all() : chunk.rows), done);
    }
    return path;
  }
  /// The head's input of the chunk's rows, normed by run() or by norm().
  Matrix<A> hidden(std::int64_t rows) { return stack_.work().u(rows); }
  Matrix<A> norm(const HeadRows& rows) {
    if (is_staggered_) {  // the chunk's only run is normed
      return rows.batch == nullptr ? hidden(rows.count) : hidden(this->rows()).middle_rows(rows.batch->tokens - 1, 1);
    }
    const Matrix<A> to = rows.batch == nullptr
                             ? hidden(rows.count)
                             : hidden(this->rows()).middle_rows(rows.batch->first_row, rows.batch->sequences);
    stack_.norm_by(backend(), rows, to);
    return to;
  }

  using StepKey = typename Stack<Backend, A>::StepKey;
  StepKey step_key(std::int64_t position) const { return stack_.step_key(position); }
  Matrix<float> logits(Slot first, std::int64_t count) const {
    const auto& work = stack_.work();
    return work.of_slots(work.template in_slot<float>(first, work.slot.logits), count, vocab());
  }
  void complete_state(Slot first, std::int64_t count, std::int64_t position) {
    stack_.complete_state(first, count, position);
  }

 private:
  const Config& config_;
  Stack<Backend, A> stack_;
  Staggered<Backend, A> staggered_;
  bool is_staggered_ = false;         // the chunk at hand
  std::optional<StepRows> laid_out_;  // the step at hand
};

}  // namespace mmrec::models
