// The forward pass on one backend: chunks of runs through all blocks, the log-probs and logits that follow, and steps.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <numeric>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/packed_runs.h"
#include "models/executor.h"
#include "models/mmrec/block.h"
#include "models/mmrec/config.h"
#include "models/mmrec/schedule.h"
#include "models/mmrec/tables.h"
#include "models/mmrec/weights.h"
#include "models/mmrec/whole_step.h"
#include "models/mmrec/workspace.h"

namespace mmrec::models {

/// One thread at a time. Token ids must lie in [0, vocab_size).
template <class Backend, class A = float>
class Forward {
 public:
  using Space = typename Backend::Space;

  Forward(const Config& config, ModelView<Space> model, Backend& backend, const ChunkPlan& plan)
      : config_(config),
        model_(std::move(model)),
        backend_(backend),
        work_(config, backend, plan),
        block_(model_, work_),
        tables_(backend) {}

  /// Memory for calls of so many sequences; true if what was recorded before is void.
  bool reserve(std::int64_t sequences, bool sweeps) {
    if (!work_.reserve(sequences, sweeps)) return false;
    const auto rows = static_cast<std::size_t>(work_.rows());
    tokens_host_.resize(rows);
    logprobs_host_.resize(rows);
    return true;
  }

  /// Consumes the tokens of all runs and leaves the next token's logits in their slots; see Executor::run. Requires:
  /// reserve() for so many.
  Done run(const Work& work, const RecurrenceOptions& options) {
    Done done;
    if (!work.logprobs.empty()) score_first(work);
    if (are_single_tokens(work.runs)) {  // the bits of a step; there is nothing left to score
      step(work.tokens, work.runs);
      done.rows.assign(work.runs.size(), 1);
      return done;
    }
    Schedule schedule(work_.plan, config_.memory_segment, work.runs);
    while (true) {
      if (schedule.is_between_rounds() && work.progress && !work.progress(schedule.rows_done())) {
        schedule.stop_after_round();
      }
      const std::span<const ChunkRun> chunk = schedule.next();
      if (chunk.empty()) break;
      work_.ragged = schedule.is_ragged();
      const std::int64_t rows = chunk.back().first_row + chunk.back().rows;
      std::fill_n(tokens_host_.data(), rows, 0);  // gaps too need a token
      for (const ChunkRun& run : chunk) {
        std::copy_n(work.tokens.data() + run.call_row, run.rows, tokens_host_.data() + run.first_row);
      }
      load_tokens(std::span(tokens_host_).first(static_cast<std::size_t>(rows)));
      collect_batches(chunk, work_.slot.bytes, schedule.packs(), batches_);
      const bool packs = schedule.packs() && Block<Backend, A>::kPacks && batches_.size() > 1 && options.sweeps;
      const bool is_normed = block_.run(batches_, rows, packs, options, done.stats);
      if (!work.logprobs.empty()) score_chunk(work, chunk, rows);
      if (!work.wants_logits) continue;
      if (packs) {
        packed_logits();
      } else {
        next_logits(is_normed && work.logprobs.empty());
      }
    }
    done.rows = schedule.rows_done();
    return done;
  }

  // One token of every run in two parts, for who records the second and replays it: what step() enqueues for one batch
  // depends on its slot, its size and step_key() alone.

  /// Whether these are single tokens that fit one chunk.
  bool are_single_tokens(std::span<const Run> runs) const {
    return static_cast<std::int64_t>(runs.size()) <= work_.rows() &&
           std::all_of(runs.begin(), runs.end(), [](const Run& run) { return run.rows == 1; });
  }
  void load_tokens(std::span<const int> tokens) { backend_.upload(tokens.data(), work_.tokens(), tokens.size()); }
  /// Where load_tokens() puts them, for who has them on the device. Other calls write there too.
  int* tokens() { return work_.tokens(); }
  float* logprobs() { return work_.logprobs(); }
  /// Everything but slots and tokens that decides which ops a step at a position consists of: slots of memory that are
  /// filled, the one that the step closes a segment into, or -1, and whether the state restarts.
  using StepKey = std::tuple<std::int64_t, std::int64_t, bool>;
  StepKey step_key(std::int64_t position) const {
    const std::int64_t end = position + 1;
    return {work_.filled_slots(position), end % config_.memory_segment == 0 ? work_.ring_slot(end) : -1,
            work_.restarts(position)};
  }
  void step(std::span<const Run> runs) {
    chunk_.clear();
    for (const Run& run : runs) {
      const auto row = static_cast<std::int64_t>(chunk_.size());
      chunk_.push_back({{run.slot, run.position, row, 1}, row, row, true});
    }
    collect_batches(chunk_, work_.slot.bytes, false, batches_);
    work_.ragged = true;
    if (batches_.size() == 1 && step_at_once(batches_.front())) return;
    PrefillStats none;
    const auto rows = static_cast<std::int64_t>(runs.size());
    const bool is_normed = block_.run(batches_, rows, false, {}, none);
    if (!is_normed || batches_.size() == 1) return next_logits(is_normed);
    slots_.clear();
    for (const Run& run : runs) slots_.push_back(run.slot);
    logits_to_slots(work_.u(rows));
  }
  /// Whether the sequences stand as a step takes them all at once: those last that attend to two slots or more.
  bool are_in_order(std::span<const Run> runs) const {
    return std::is_sorted(runs.begin(), runs.end(), [&](const Run& a, const Run& b) { return comes_before(a, b); });
  }
  /// The step of tokens on the host, in any order.
  void step(std::span<const int> tokens, std::span<const Run> runs) {
    if (are_in_order(runs)) {
      load_tokens(tokens);
      return step(runs);
    }
    std::vector<std::size_t> order(runs.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return comes_before(runs[a], runs[b]); });
    std::vector<Run> ordered;
    std::vector<int> their_tokens;
    for (const std::size_t i : order) {
      ordered.push_back(runs[i]);
      their_tokens.push_back(tokens[i]);
    }
    load_tokens(their_tokens);
    step(ordered);
  }

  /// [count, V] of slots side by side, in the backend's memory.
  kernels::MatrixView<float, Space> logits(Slot first, std::int64_t count) const { return work_.logits(first, count); }
  /// [slots, V] of any slots: where they are if these lie evenly spaced, else copied, until the next call that computes
  /// logits or asks for them. Requires: a backend that packs runs.
  kernels::MatrixView<const float, Space> logits(std::span<const Slot> slots) {
    if (evenly_spaced(slots) == slots.size()) return spaced_logits(slots);
    const Matrix<float> rows = logits_scratch(static_cast<std::int64_t>(slots.size()));
    copy_between(rows, slots, false);
    return rows;
  }

  /// What follows from a state that has just been put into slots.
  void complete_state(Slot first, std::int64_t count, std::int64_t position) {
    const Batch all{.slot = first, .position = position, .sequences = count, .tokens = 1};
    const std::int64_t end = position / config_.memory_segment * config_.memory_segment;
    for (std::int64_t layer = 0; layer < config_.num_layers; ++layer) {
      block_.memory().set_context(model_.layers[static_cast<std::size_t>(layer)], layer, all, end);
    }
  }

 private:
  template <class T>
  using Matrix = kernels::MatrixView<T, Space>;
  using Views = Workspace<Backend, A>;

  bool comes_before(const Run& a, const Run& b) const {
    return work_.filled_slots(a.position) < 2 && work_.filled_slots(b.position) > 1;
  }

  // All of a step by one op, for backends and models that have it.
  bool step_at_once(const Batch& b) {
    auto at = whole_steps_.find(b.sequences);
    if (at == whole_steps_.end()) {
      at = whole_steps_.try_emplace(b.sequences, config_, model_, backend_, b.sequences).first;
    }
    WholeStep<Backend, A>& whole = at->second;
    if (!whole.available()) return false;
    work_.restart(b);
    auto& op = whole.op();
    op.tokens = work_.tokens() + b.first_row;
    op.h = work_.state(b, 0).data;
    op.memory = work_.memory(b, 0, 0).data;
    op.slots = work_.filled_slots(b.position);
    op.context = work_.segment_context(b, 0).data;
    op.segment_sum = work_.segment_sum(b, 0).data;
    op.logits = work_.logits(b.slot, 1).data;
    op.slot_bytes = static_cast<std::int64_t>(work_.slot.bytes);
    whole.run(backend_);
    for (std::int64_t layer = 0; layer < config_.num_layers; ++layer) {
      block_.memory().close(model_.layers[static_cast<std::size_t>(layer)], layer, b, b.position + 1);
    }
    return true;
  }

  // Logits after the last tokens of the runs that end in this chunk, from x, or from u if it is normed.
  void next_logits(bool is_normed) {
    for (const Batch& b : batches_) {
      if (!b.ends) continue;
      const Matrix<A> hidden = work_.u(work_.rows()).middle_rows(b.first_row, b.sequences);
      if (!is_normed) {
        kernels::rmsnorm(backend_, Matrix<const float>(Views::row_of(work_.x(b), b.tokens - 1)), model_.norm, hidden);
      }
      work_.template linear<float>({.x = hidden, .weight = model_.head, .y = work_.logits(b.slot, b.sequences)});
    }
  }

  // The same of packed runs.
  void packed_logits() {
    if constexpr (Block<Backend, A>::kPacks) {
      slots_.clear();
      for (const Batch& b : batches_) {
        if (b.ends) slots_.push_back(b.slot);
      }
      if (slots_.empty()) return;
      const Matrix<float> last = block_.packed().last_rows();
      const Matrix<A> hidden = work_.u(last.rows);
      kernels::rmsnorm(backend_, Matrix<const float>(last), model_.norm, hidden);
      logits_to_slots(hidden);
    }
  }

  // Logits of the rows into slots_: one product for all slots that lie evenly spaced, or for all rows, copied then.
  void logits_to_slots(Matrix<A> hidden) {
    constexpr std::size_t kMostProducts = 3;
    std::size_t products = 1;
    for (std::size_t i = 2; i < slots_.size(); ++i)
      products += slots_[i] - slots_[i - 1] != slots_[i - 1] - slots_[i - 2];
    if constexpr (Block<Backend, A>::kPacks) {
      if (products > kMostProducts) return copy_logits(hidden);
    }
    for (std::span<const Slot> left = slots_; !left.empty();) {
      const std::span<const Slot> some = left.first(evenly_spaced(left));
      const std::size_t first = slots_.size() - left.size();
      work_.template linear<float>(
          {.x = hidden.middle_rows(static_cast<std::int64_t>(first), static_cast<std::int64_t>(some.size())),
           .weight = model_.head,
           .y = spaced_logits(some)});
      left = left.subspan(some.size());
    }
  }
  void copy_logits(Matrix<A> hidden) {
    const Matrix<float> rows = logits_scratch(hidden.rows);
    work_.template linear<float>({.x = hidden, .weight = model_.head, .y = rows});
    copy_between(rows, slots_, true);
  }

  // How many of the first slots lie evenly spaced, rising; and their logits.
  static std::size_t evenly_spaced(std::span<const Slot> slots) {
    std::size_t end = 1;
    const std::ptrdiff_t apart = end < slots.size() ? slots[end] - slots[0] : 0;
    while (apart > 0 && end < slots.size() && slots[end] - slots[end - 1] == apart) ++end;
    return end;
  }
  Matrix<float> spaced_logits(std::span<const Slot> slots) const {
    Matrix<float> logits = work_.logits(slots[0], static_cast<std::int64_t>(slots.size()));
    if (slots.size() > 1) logits.stride = (slots[1] - slots[0]) / static_cast<std::ptrdiff_t>(sizeof(float));
    return logits;
  }
  // For logits of slots that do not.
  Matrix<float> logits_scratch(std::int64_t rows) {
    const auto size = static_cast<std::size_t>(rows * config_.vocab_size);
    if (logits_.size() < size) {
      logits_ = {};
      logits_ = backend_.template allocate<float>(size);
    }
    return {logits_.data(), rows, config_.vocab_size};
  }
  void copy_between(Matrix<float> rows, std::span<const Slot> slots, bool to_slots) {
    tables_.clear();
    const std::size_t list = tables_.template place<kernels::RowCopy<A>>(slots.size());
    for (std::size_t i = 0; i < slots.size(); ++i) {
      auto* const row = reinterpret_cast<std::byte*>(rows.row(static_cast<std::int64_t>(i)));
      auto* const of_slot = reinterpret_cast<std::byte*>(work_.logits(slots[i], 1).data);
      tables_.template host<kernels::RowCopy<A>>(list)[i] = {to_slots ? row : of_slot, to_slots ? of_slot : row};
    }
    tables_.send();
    copy_listed(backend_, kernels::CopyListed<Space, A>{.rows = tables_.template device<kernels::RowCopy<A>>(list),
                                                        .count = rows.rows,
                                                        .cols = config_.vocab_size});
  }

  // The first token of a run is predicted by the logits that the call before left.
  void score_first(const Work& work) {
    for (std::size_t done = 0; done < work.runs.size();) {
      chunk_.clear();
      for (; done < work.runs.size() && chunk_.size() < tokens_host_.size(); ++done) {
        const Run& run = work.runs[done];
        if (run.position == 0) {
          work.logprobs[static_cast<std::size_t>(run.first_row)] = 0.0F;
          continue;
        }
        const auto row = static_cast<std::int64_t>(chunk_.size());
        tokens_host_[static_cast<std::size_t>(row)] = work.tokens[static_cast<std::size_t>(run.first_row)];
        chunk_.push_back({{run.slot, 0, row, 1}, row, run.first_row, false});
      }
      if (chunk_.empty()) return;
      load_tokens(std::span(tokens_host_).first(chunk_.size()));
      collect_batches(chunk_, work_.slot.bytes, false, batches_);
      for (const Batch& b : batches_) {
        kernels::token_logprobs(backend_, kernels::TokenLogprobs<float, int, Space>{
                                              .logits = Matrix<const float>(work_.logits(b.slot, b.sequences)),
                                              .targets = work_.tokens() + b.first_row,
                                              .logprobs = work_.logprobs() + b.first_row});
      }
      backend_.download(work_.logprobs(), logprobs_host_.data(), chunk_.size());
      for (const ChunkRun& run : chunk_) {
        work.logprobs[static_cast<std::size_t>(run.call_row)] = logprobs_host_[static_cast<std::size_t>(run.first_row)];
      }
    }
  }

  // Log-probs of the tokens that follow each row of the chunk; a run's last row predicts the next call's first token.
  void score_chunk(const Work& work, std::span<const ChunkRun> chunk, std::int64_t rows) {
    constexpr int kSkip = -1;
    const auto scored = [](const ChunkRun& run) { return run.ends ? run.rows - 1 : run.rows; };
    const Matrix<A> hidden = work_.u(rows);
    kernels::rmsnorm(backend_, Matrix<const float>(work_.x(rows)), model_.norm, hidden);
    std::fill_n(tokens_host_.data(), rows, kSkip);
    for (const ChunkRun& run : chunk) {
      int* to = tokens_host_.data() + run.first_row;
      std::copy_n(work.tokens.data() + run.call_row + 1, scored(run), to);
    }
    load_tokens(std::span(tokens_host_).first(static_cast<std::size_t>(rows)));
    kernels::hidden_logprobs(backend_, kernels::HiddenLogprobs<Space, A>{.hidden = hidden,
                                                                         .head = model_.head,
                                                                         .targets = work_.tokens(),
                                                                         .logprobs = work_.logprobs(),
                                                                         .ragged = work_.ragged});
    backend_.download(work_.logprobs(), logprobs_host_.data(), static_cast<std::size_t>(rows));
    for (const ChunkRun& run : chunk) {
      std::copy_n(logprobs_host_.data() + run.first_row, scored(run), work.logprobs.data() + run.call_row + 1);
    }
  }

  const Config& config_;
  ModelView<Space> model_;
  Backend& backend_;
  Workspace<Backend, A> work_;
  Block<Backend, A> block_;
  std::map<std::int64_t, WholeStep<Backend, A>> whole_steps_;  // by their number of sequences
  std::vector<ChunkRun> chunk_;
  std::vector<Batch> batches_;
  std::vector<Slot> slots_;
  Tables<Backend> tables_;
  typename Backend::template Buffer<float> logits_;  // where slots lie unevenly
  std::vector<int> tokens_host_;
  std::vector<float> logprobs_host_;
};

}  // namespace mmrec::models
