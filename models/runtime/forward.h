// The forward pass of a net: chunks of runs through it, the log-probs and logits that follow, and steps. Long, because
// all of these share buffers and lists.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/cpu/cpu.h"  // ops are called by their qualified names, which some backend must have declared
#include "kernels/ops.h"
#include "models/runtime/executor.h"
#include "models/runtime/schedule.h"
#include "models/runtime/tables.h"

namespace mmrec::models {

/// One thread at a time. Token ids must lie in [0, vocab_size).
template <class Net>
class Forward {
 public:
  using Backend = typename Net::Device;
  using A = typename Net::Element;
  using Space = typename Net::Space;

  /// Of a net that is made of these arguments.
  template <class... Arguments>
  explicit Forward(Arguments&&... arguments)
      : net_(std::forward<Arguments>(arguments)...),
        backend_(net_.backend()),
        tables_(backend_),
        step_tables_(backend_) {}

  /// Memory for calls of so many sequences; true if what was recorded before is void.
  bool reserve(std::int64_t sequences, bool sweeps) {
    const bool grows = net_.reserve(sequences, sweeps);
    const auto rows = static_cast<std::size_t>(most_rows());
    if (!grows && has_tokens_) return false;
    has_tokens_ = false;
    tokens_ = {}, logprobs_ = {};
    tokens_ = backend_.template allocate<int>(rows);
    logprobs_ = backend_.template allocate<float>(rows);
    tokens_host_.resize(rows);
    logprobs_host_.resize(rows);
    has_tokens_ = true;
    return true;
  }

  /// Consumes the tokens of all runs and leaves the next token's logits in their slots; see Executor::run. Requires:
  /// reserve() for so many.
  Done run(const Work& work, const RecurrenceOptions& options) {
    Done done;
    if (!work.logprobs.empty()) score_first(work);
    if (!work.is_piece && !aligns() && is_step(work.runs)) {  // the bits of a step; there is nothing left to score
      load_tokens(work.tokens);
      begin_step(work.runs, options.path);
      done.add(step());
      end_step();
      done.rows.assign(work.runs.size(), 1);
      return done;
    }
    Schedule schedule = schedule_of(work, options.sweeps);
    while (true) {
      if (schedule.is_between_rounds() && work.progress && !work.progress(schedule.rows_done())) {
        schedule.stop_after_round();
      }
      const std::span<const ChunkRun> chunk = schedule.next();
      if (chunk.empty()) break;
      ragged_ = schedule.is_ragged();
      const std::int64_t rows = chunk.back().first_row + chunk.back().rows;
      std::fill_n(tokens_host_.data(), rows, 0);  // gaps too need a token
      for (const ChunkRun& run : chunk) {
        std::copy_n(work.tokens.data() + run.call_row, run.rows, tokens_host_.data() + run.first_row);
      }
      load_tokens(std::span(tokens_host_).first(static_cast<std::size_t>(rows)));
      collect_batches(chunk, net_.slot_bytes(), schedule.packs(), batches_);
      const Path path = net_.run({.tokens = tokens(),
                                  .batches = batches_,
                                  .rows = rows,
                                  .packed = schedule.packs(),
                                  .ragged = ragged_,
                                  .options = options},
                                 done);
      done.add(path);
      if (!work.logprobs.empty()) score_chunk(work, chunk, rows);
      if (!work.wants_logits) continue;
      if (path == Path::kPacked) {
        packed_logits();
      } else {
        next_logits(false);
      }
    }
    done.rows = schedule.rows_done();
    return done;
  }

  /// Whether a call takes a step: single tokens of sequences that fit one chunk.
  bool is_step(std::span<const Run> runs) const {
    return static_cast<std::int64_t>(runs.size()) <= net_.rows() &&
           std::all_of(runs.begin(), runs.end(), [](const Run& run) { return run.rows == 1; });
  }

  // One token of every run in three parts, so that the second can be recorded and replayed.

  void load_tokens(std::span<const int> tokens) { backend_.upload(tokens.data(), tokens_.data(), tokens.size()); }
  /// Where load_tokens() puts them, for callers that have them on the device. Other calls write there too.
  int* tokens() { return tokens_.data(); }
  float* logprobs() { return logprobs_.data(); }
  /// All that decides which ops step() enqueues: of sequences side by side at one position the first slot, their number
  /// and the net's own key; of sequences apart how their rows are laid out.
  using StepKey = std::tuple<Slot, std::size_t, typename Net::StepKey>;
  /// Sends what the ops need to know of the runs. None: this step is rare, or its ops depend on more.
  std::optional<StepKey> begin_step(std::span<const Run> runs, Path forced = Path::kAny) {
    chunk_.clear();
    for (const Run& run : runs) {
      const auto row = static_cast<std::int64_t>(chunk_.size());
      chunk_.push_back({{run.slot, run.position, row, 1}, row, row, true});
    }
    collect_batches(chunk_, net_.slot_bytes(), false, batches_);
    step_ = {.tokens = tokens(),
             .batches = batches_,
             .rows = std::ssize(runs),
             .ragged = true,
             .is_step = true,
             .options = {.path = forced}};
    step_tables_.clear();
    laid_out_ = net_.lay_out(step_, step_tables_);
    if (laid_out_) {
      list_logits();
      step_tables_.send();
      return StepKey{nullptr, 0, {laid_out_->calm, laid_out_->attending, 0}};
    }
    const typename Net::StepKey key = net_.step_key(runs.front().position);
    const bool is_rare = std::get<1>(key) >= 0;  // closes a memory segment, which comes once per segment
    if (batches_.size() > 1 || is_rare) return {};
    return StepKey{runs.front().slot, runs.size(), key};
  }
  /// Whether memory that steps use has moved since this was asked before, so that what was recorded is void.
  bool take_moved() {
    const bool have_lists = step_tables_.take_moved();
    return std::exchange(moved_, false) || have_lists;
  }
  Path step() {
    ragged_ = true;
    Done none;
    const Path path = net_.run(step_, none);
    if (laid_out_) {
      step_logits();
    } else if (batches_.size() > 1 && (path == Path::kRows || !kListsRows)) {  // one product, not one a sequence
      slots_.clear();
      for (const ChunkRun& run : chunk_) slots_.push_back(run.slot);
      logits_to_slots(path == Path::kRows ? net_.hidden(step_.rows) : net_.norm({.count = step_.rows}));
    } else if (path != Path::kWholeStep) {
      next_logits(path == Path::kRows);
    }
    return path;
  }
  void end_step() {
    net_.end_step();
    laid_out_ = {};
  }

  /// [count, V] of slots side by side, in the backend's memory.
  kernels::MatrixView<float, Space> logits(Slot first, std::int64_t count) const { return net_.logits(first, count); }
  /// [slots, V] of any slots where they are, if these lie evenly spaced; else `data` is null.
  kernels::MatrixView<const float, Space> logits_in_place(std::span<const Slot> slots) const {
    if (evenly_spaced(slots) == slots.size()) return spaced_logits(slots);
    return {nullptr, static_cast<std::int64_t>(slots.size()), net_.vocab()};
  }
  /// The same, but copied if they do not, until the next call that computes logits or asks for them. Requires: a
  /// backend that packs runs.
  kernels::MatrixView<const float, Space> logits(std::span<const Slot> slots) {
    if (const auto in_place = logits_in_place(slots); in_place.data != nullptr) return in_place;
    const Matrix<float> rows = logits_scratch(static_cast<std::int64_t>(slots.size()));
    copy_between(rows, slots, false);
    return rows;
  }

  /// As Executor::piece.
  std::int64_t piece(std::int64_t position, std::int64_t rows, std::int64_t most) const {
    if constexpr (requires(const Net& net, const Work& work) { net.schedule(work); }) {
      return rows;  // its results depend on the calls
    } else {
      std::int64_t piece = 0;
      while (piece < rows) {
        const auto next = aligns() ? next_simple_chunk : next_chunk;
        const std::int64_t chunk = next(net_.plan(), position + piece, rows - piece, net_.segment());
        if (piece > 0 && piece + chunk > most) break;
        piece += chunk;
      }
      return piece;
    }
  }

  /// Computes the values that follow from a state just loaded into slots.
  void complete_state(Slot first, std::int64_t count, std::int64_t position) {
    net_.complete_state(first, count, position);
  }

 private:
  template <class T>
  using Matrix = kernels::MatrixView<T, Space>;

  /// Of a chunk.
  std::int64_t most_rows() const {
    if constexpr (requires(const Net& net) { net.plan(); }) return std::max(net_.rows(), net_.plan().alone);
    return net_.rows();
  }
  /// Whether a run's place and its bits do not depend on other runs (ChunkPlan::align).
  bool aligns() const {
    if constexpr (requires(const Net& net) { net.plan(); }) return net_.plan().align != 0;
    return false;
  }

  // Nets that cut a call otherwise when it is scored say so.
  Schedule schedule_of(const Work& work, bool sweeps) const {
    if constexpr (requires(const Net& net) { net.schedule(work); }) {
      return net_.schedule(work);
    } else {
      ChunkPlan plan = net_.plan();
      if (!sweeps) plan.alone = plan.tokens;  // exact steps take long, and the caller waits for the end of a chunk
      return Schedule(plan, net_.segment(), work.runs);
    }
  }
  using Job = kernels::Linear<Space, A, float>;
  /// Whether the backend takes lists of rows, as packed runs need them.
  static constexpr bool kListsRows = requires(Backend & backend, const kernels::CopyListed<Space, A>& op) {
    copy_listed(backend, op);
  };

  // Logits after the last tokens of the runs that end in this chunk, of hidden rows that are normed, or of x.
  void next_logits(bool is_normed) {
    for (const Batch& b : batches_) {
      if (!b.ends) continue;
      predict(is_normed ? net_.hidden(net_.rows()).middle_rows(b.first_row, b.sequences) : net_.norm({.batch = &b}),
              logits(b.slot, b.sequences));
    }
  }

  // The same of packed runs.
  void packed_logits() {
    slots_.clear();
    for (const Batch& b : batches_) {
      if (b.ends) slots_.push_back(b.slot);
    }
    if (!slots_.empty()) logits_to_slots(net_.norm({.count = std::ssize(slots_), .packed = true}));
  }

  void predict(Matrix<A> hidden, Matrix<float> logits) {
    const Job job{.x = hidden, .weight = net_.head(), .y = logits, .force_row_kernel = ragged_};
    kernels::linear(backend_, std::span<const Job>(&job, 1));
  }

  // Logits of the rows into slots_: one product for all slots that lie evenly spaced, or for all rows, copied then.
  void logits_to_slots(Matrix<A> hidden) {
    constexpr std::size_t kMostProducts = 3;
    std::size_t products = 1;
    for (std::size_t i = 2; i < slots_.size(); ++i)
      products += slots_[i] - slots_[i - 1] != slots_[i - 1] - slots_[i - 2];
    if constexpr (kListsRows) {
      if (products > kMostProducts) return copy_logits(hidden);
    }
    for (std::span<const Slot> left = slots_; !left.empty();) {
      const std::span<const Slot> some = left.first(evenly_spaced(left));
      const std::size_t first = slots_.size() - left.size();
      predict(hidden.middle_rows(static_cast<std::int64_t>(first), static_cast<std::int64_t>(some.size())),
              spaced_logits(some));
      left = left.subspan(some.size());
    }
  }
  void copy_logits(Matrix<A> hidden) {
    const Matrix<float> rows = logits_scratch(hidden.rows);
    predict(hidden, rows);
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
    Matrix<float> spaced = logits(slots[0], static_cast<std::int64_t>(slots.size()));
    if (slots.size() > 1) spaced.stride = (slots[1] - slots[0]) / static_cast<std::ptrdiff_t>(sizeof(float));
    return spaced;
  }
  // The vocabulary in whole vectors of 16 bytes, for which a row of logits has room.
  std::int64_t whole_vocab() const { return (net_.vocab() + 3) / 4 * 4; }
  // For logits of slots that do not.
  Matrix<float> logits_scratch(std::int64_t rows) {
    const std::int64_t stride = whole_vocab();
    const auto size = static_cast<std::size_t>(rows * stride);
    if (logits_.size() < size) {
      moved_ = true;
      logits_ = {};
      logits_ = backend_.template allocate<float>(size);
    }
    return {logits_.data(), rows, net_.vocab(), stride};
  }
  void copy_between(Matrix<float> rows, std::span<const Slot> slots, bool to_slots) {
    tables_.clear();
    const auto list = tables_.template place<kernels::RowCopy<A>>(slots.size());
    for (std::size_t i = 0; i < slots.size(); ++i) {
      auto* const row = reinterpret_cast<std::byte*>(rows.row(static_cast<std::int64_t>(i)));
      auto* const of_slot = reinterpret_cast<std::byte*>(logits(slots[i], 1).data);
      tables_.host(list)[i] = {to_slots ? row : of_slot, to_slots ? of_slot : row};
    }
    tables_.send();
    copy_rows_listed(tables_, list, rows.rows);
  }
  // Lists where the laid out step's logits go: those of rows of no sequence stay in the scratch. The product writes
  // them there, or a copy does where it takes no list.
  void list_logits() {
    const std::int64_t all = laid_out_->all();
    if constexpr (kListsRows)
      writes_slots_ =
          linear_takes_rows(backend_, Job{.x = net_.hidden(all), .weight = net_.head(), .force_row_kernel = true});
    const Matrix<float> scratch = logits_scratch(writes_slots_ ? all - std::ssize(chunk_) : all);
    rows_of_slots_.assign(static_cast<std::size_t>(all), nullptr);
    for (std::size_t i = 0; i < chunk_.size(); ++i) {
      rows_of_slots_[static_cast<std::size_t>(net_.row_of()[i])] = logits(chunk_[i].slot, 1).data;
    }
    if (writes_slots_) {
      listed_rows_ = step_tables_.template place<float*>(rows_of_slots_.size());
      std::int64_t spare = 0;
      for (std::size_t r = 0; r < rows_of_slots_.size(); ++r) {
        float* const at = rows_of_slots_[r];
        step_tables_.host(listed_rows_)[r] = at != nullptr ? at : scratch.row(spare++);
      }
    } else {
      listed_logits_ = step_tables_.template place<kernels::RowCopy<A>>(rows_of_slots_.size());
      for (std::size_t r = 0; r < rows_of_slots_.size(); ++r) {
        float* const from = scratch.row(static_cast<std::int64_t>(r));
        float* const to = rows_of_slots_[r] != nullptr ? rows_of_slots_[r] : from;
        step_tables_.host(listed_logits_)[r] = {reinterpret_cast<std::byte*>(from), reinterpret_cast<std::byte*>(to)};
      }
    }
  }
  void step_logits() {
    const std::int64_t all = laid_out_->all();
    if (writes_slots_) {
      const Matrix<float> shape{nullptr, all, net_.vocab()};
      const Job job{.x = net_.hidden(all),
                    .weight = net_.head(),
                    .y = shape,
                    .force_row_kernel = true,
                    .y_rows = step_tables_.device(listed_rows_)};
      return kernels::linear(backend_, std::span<const Job>(&job, 1));
    }
    const Matrix<float> rows = logits_scratch(all);
    predict(net_.hidden(all), rows);
    copy_rows_listed(step_tables_, listed_logits_, all);
  }
  void copy_rows_listed(Tables<Backend>& tables, Placed<kernels::RowCopy<A>> list, std::int64_t count) {
    if constexpr (kListsRows) {
      copy_listed(backend_,
                  kernels::CopyListed<Space, A>{.rows = tables.device(list), .count = count, .cols = whole_vocab()});
    }
  }

  // The first token of a run is predicted by the logits that the call before left.
  void score_first(const Work& work) {
    for (std::size_t done = 0; done < work.runs.size();) {
      chunk_.clear();
      for (; done < work.runs.size() && chunk_.size() < tokens_host_.size(); ++done) {
        const Run& run = work.runs[done];
        if (run.position == 0 || work.is_piece) {
          work.logprobs[static_cast<std::size_t>(run.first_row)] = 0.0F;
          continue;
        }
        const auto row = static_cast<std::int64_t>(chunk_.size());
        tokens_host_[static_cast<std::size_t>(row)] = work.tokens[static_cast<std::size_t>(run.first_row)];
        chunk_.push_back({{run.slot, 0, row, 1}, row, run.first_row, false});
      }
      if (chunk_.empty()) return;
      load_tokens(std::span(tokens_host_).first(chunk_.size()));
      collect_batches(chunk_, net_.slot_bytes(), false, batches_);
      for (const Batch& b : batches_) {
        kernels::token_logprobs(backend_, kernels::TokenLogprobs<float, int, Space>{
                                              .logits = Matrix<const float>(logits(b.slot, b.sequences)),
                                              .targets = tokens_.data() + b.first_row,
                                              .logprobs = logprobs_.data() + b.first_row});
      }
      backend_.download(logprobs_.data(), logprobs_host_.data(), chunk_.size());
      for (const ChunkRun& run : chunk_) {
        work.logprobs[static_cast<std::size_t>(run.call_row)] = logprobs_host_[static_cast<std::size_t>(run.first_row)];
      }
    }
  }

  // Log-probs of the tokens that follow each row of the chunk; a run's last row predicts the next call's first token.
  void score_chunk(const Work& work, std::span<const ChunkRun> chunk, std::int64_t rows) {
    constexpr int kSkip = -1;
    const bool piece_follows = work.is_piece && std::ssize(work.tokens) > work.runs.front().rows;
    const auto scored = [&](const ChunkRun& run) { return run.ends && !piece_follows ? run.rows - 1 : run.rows; };
    const Matrix<A> hidden = net_.norm({.count = rows});
    std::fill_n(tokens_host_.data(), rows, kSkip);
    for (const ChunkRun& run : chunk) {
      int* to = tokens_host_.data() + run.first_row;
      std::copy_n(work.tokens.data() + run.call_row + 1, scored(run), to);
    }
    load_tokens(std::span(tokens_host_).first(static_cast<std::size_t>(rows)));
    const auto score_rows = [&](std::int64_t first, std::int64_t count, bool ragged) {
      kernels::hidden_logprobs(backend_, kernels::HiddenLogprobs<Space, A>{.hidden = hidden.middle_rows(first, count),
                                                                           .head = net_.head(),
                                                                           .targets = tokens_.data() + first,
                                                                           .logprobs = logprobs_.data() + first,
                                                                           .force_row_kernel = ragged});
    };
    if constexpr (requires(Net & net) { net.pieces(); }) {  // whose whole tiles begin with runs
      for (const auto& piece : net_.pieces()) score_rows(piece.first, piece.rows, piece.ragged);
    } else {
      score_rows(0, rows, ragged_);
    }
    backend_.download(logprobs_.data(), logprobs_host_.data(), static_cast<std::size_t>(rows));
    for (const ChunkRun& run : chunk) {
      std::copy_n(logprobs_host_.data() + run.first_row, scored(run), work.logprobs.data() + run.call_row + 1);
    }
  }

  Net net_;
  Backend& backend_;
  bool ragged_ = false;  // whether the rows of the chunk at hand form no whole tiles
  typename Backend::template Buffer<int> tokens_;
  typename Backend::template Buffer<float> logprobs_;
  std::vector<ChunkRun> chunk_;
  std::vector<Batch> batches_;
  std::vector<Slot> slots_;
  Chunk step_;                        // the step at hand
  std::optional<StepRows> laid_out_;  // likewise
  bool moved_ = false;                // logits_, which recorded steps use
  Tables<Backend> tables_, step_tables_;
  bool writes_slots_ = false;  // the head's product of the step at hand
  Placed<float*> listed_rows_;
  Placed<kernels::RowCopy<A>> listed_logits_;
  std::vector<float*> rows_of_slots_;                // scratch
  typename Backend::template Buffer<float> logits_;  // where slots lie unevenly
  std::vector<int> tokens_host_;
  std::vector<float> logprobs_host_;
  bool has_tokens_ = false;  // and all of these are as long as a chunk
};

}  // namespace mmrec::models
