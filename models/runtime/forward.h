// The forward pass of a net: chunks of runs through it, the log-probs and logits that follow, and steps.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
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

/// How a call's runs go through a net.
enum class CallKind : std::uint8_t {
  kChunks,        // as the schedule cuts them
  kStep,          // single tokens that fit one chunk, as they stand
  kSortedStep,    // the same, sorted first: sequences that attend to two slots or more come last
  kRepeatedStep,  // of sequences side by side at one position, which mostly take the same step again: worth recording.
                  // Not a step that closes a memory segment, which comes once per segment
};

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
      : net_(std::forward<Arguments>(arguments)...), backend_(net_.backend()), tables_(backend_) {}

  /// Memory for calls of so many sequences; true if what was recorded before is void.
  bool reserve(std::int64_t sequences, bool sweeps) {
    const bool grows = net_.reserve(sequences, sweeps);
    const auto rows = static_cast<std::size_t>(net_.rows());
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
    const CallKind kind = choose_call(work.runs);
    if (kind != CallKind::kChunks) {  // the bits of a step; there is nothing left to score
      done.add(step(work.tokens, work.runs, kind, options.path));
      done.rows.assign(work.runs.size(), 1);
      return done;
    }
    Schedule schedule = schedule_of(work);
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
        next_logits(path == Path::kRows && work.logprobs.empty());
      }
    }
    done.rows = schedule.rows_done();
    return done;
  }

  /// How a call goes: the one place that decides.
  CallKind choose_call(std::span<const Run> runs) const {
    const bool are_single_tokens = static_cast<std::int64_t>(runs.size()) <= net_.rows() &&
                                   std::all_of(runs.begin(), runs.end(), [](const Run& run) { return run.rows == 1; });
    if (!are_single_tokens) return CallKind::kChunks;
    const auto in_order = [&](const Run& a, const Run& b) { return comes_before(a, b); };
    if (!std::is_sorted(runs.begin(), runs.end(), in_order)) return CallKind::kSortedStep;
    for (std::size_t i = 1; i < runs.size(); ++i) {
      const bool is_beside =
          runs[i].position == runs[0].position && runs[i].slot == runs[0].slot + i * net_.slot_bytes();
      if (!is_beside) return CallKind::kStep;
    }
    return std::get<1>(step_key(runs[0].position)) < 0 ? CallKind::kRepeatedStep : CallKind::kStep;
  }

  // One token of every run in two parts, so that the second can be recorded and replayed: the ops that step() enqueues
  // for one batch depend on its slot, its size and step_key() alone.

  void load_tokens(std::span<const int> tokens) { backend_.upload(tokens.data(), tokens_.data(), tokens.size()); }
  /// Where load_tokens() puts them, for callers that have them on the device. Other calls write there too.
  int* tokens() { return tokens_.data(); }
  float* logprobs() { return logprobs_.data(); }
  /// Everything but slots and tokens that decides which ops a step at a position consists of; its second is not
  /// negative where such a step is rare.
  using StepKey = typename Net::StepKey;
  StepKey step_key(std::int64_t position) const { return net_.step_key(position); }
  Path step(std::span<const Run> runs, Path forced = Path::kAny) {
    chunk_.clear();
    for (const Run& run : runs) {
      const auto row = static_cast<std::int64_t>(chunk_.size());
      chunk_.push_back({{run.slot, run.position, row, 1}, row, row, true});
    }
    collect_batches(chunk_, net_.slot_bytes(), false, batches_);
    ragged_ = true;
    const Chunk chunk{.tokens = tokens(),
                      .batches = batches_,
                      .rows = static_cast<std::int64_t>(runs.size()),
                      .ragged = true,
                      .is_step = true,
                      .options = {.path = forced}};
    Done none;
    const Path path = net_.run(chunk, none);
    if (path == Path::kRows && batches_.size() > 1) {
      slots_.clear();
      for (const Run& run : runs) slots_.push_back(run.slot);
      logits_to_slots(net_.hidden(chunk.rows));
    } else if (path != Path::kWholeStep) {
      next_logits(path == Path::kRows);
    }
    return path;
  }
  /// The step of tokens on the host, in any order.
  Path step(std::span<const int> tokens, std::span<const Run> runs, CallKind kind, Path forced) {
    if (kind != CallKind::kSortedStep) {
      load_tokens(tokens);
      return step(runs, forced);
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
    return step(ordered, forced);
  }

  /// [count, V] of slots side by side, in the backend's memory.
  kernels::MatrixView<float, Space> logits(Slot first, std::int64_t count) const { return net_.logits(first, count); }
  /// [slots, V] of any slots: where they are if these lie evenly spaced, else copied, until the next call that computes
  /// logits or asks for them. Requires: a backend that packs runs.
  kernels::MatrixView<const float, Space> logits(std::span<const Slot> slots) {
    if (evenly_spaced(slots) == slots.size()) return spaced_logits(slots);
    const Matrix<float> rows = logits_scratch(static_cast<std::int64_t>(slots.size()));
    copy_between(rows, slots, false);
    return rows;
  }

  /// Computes the values that follow from a state just loaded into slots.
  void complete_state(Slot first, std::int64_t count, std::int64_t position) {
    net_.complete_state(first, count, position);
  }

 private:
  template <class T>
  using Matrix = kernels::MatrixView<T, Space>;

  // Nets that cut a call otherwise when it is scored say so.
  Schedule schedule_of(const Work& work) const {
    if constexpr (requires(const Net& net) { net.schedule(work); }) {
      return net_.schedule(work);
    } else {
      return Schedule(net_.plan(), net_.segment(), work.runs);
    }
  }
  using Job = kernels::Linear<Space, A, float>;
  /// Whether the backend takes lists of rows, as packed runs need them.
  static constexpr bool kListsRows = requires(Backend & backend, const kernels::CopyListed<Space, A>& op) {
    copy_listed(backend, op);
  };

  bool comes_before(const Run& a, const Run& b) const {
    return !net_.comes_last(a.position) && net_.comes_last(b.position);
  }

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
  // For logits of slots that do not.
  Matrix<float> logits_scratch(std::int64_t rows) {
    const auto size = static_cast<std::size_t>(rows * net_.vocab());
    if (logits_.size() < size) {
      logits_ = {};
      logits_ = backend_.template allocate<float>(size);
    }
    return {logits_.data(), rows, net_.vocab()};
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
    copy_listed(backend_,
                kernels::CopyListed<Space, A>{.rows = tables_.device(list), .count = rows.rows, .cols = net_.vocab()});
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
    const auto scored = [](const ChunkRun& run) { return run.ends ? run.rows - 1 : run.rows; };
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
  Tables<Backend> tables_;
  typename Backend::template Buffer<float> logits_;  // where slots lie unevenly
  std::vector<int> tokens_host_;
  std::vector<float> logprobs_host_;
  bool has_tokens_ = false;  // and all of these are as long as a chunk
};

}  // namespace mmrec::models
