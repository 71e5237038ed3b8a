// How the work of a call is cut into chunks: runs over packed rows that go through all blocks at once.
//
// Inner boundaries of a sequence's chunks lie on a fixed grid of its positions, so the caller's splits and the
// other runs decide at most which rows share a matrix product (docs/numerics.md), never what is computed.
// This is the one place that knows a grid.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "models/runtime/executor.h"

namespace mmrec::models {

/// The chunks that suit a backend.
struct ChunkPlan {
  std::int64_t tokens = 0;       // of a sequence in one chunk at most; chunks begin on multiples of it where they can
  std::int64_t tile = 1;         // whole tiles of rows come before what is left, in chunks of their own
  std::int64_t rows = 0;         // of all sequences in one chunk at most, unless one sequence's tokens are more
  std::int64_t window = 0;       // tokens of one window of gated_sweeps
  bool spans_segments = false;   // a chunk may run past the end of a memory segment
  bool packs = false;            // runs of a chunk go together, with a row between two; short ones keep to segments
  bool begins_with_run = false;  // positions of the grid count from a run's first token
  std::int64_t part = 0;   // if not 0: a long run goes in parts, which end on multiples of it, in chunks of its own
  std::int64_t alone = 0;  // tokens of such a chunk
  std::int64_t align = 0;  // if not 0, no run's bits may depend on others: runs are packed even alone, go segment
                           // by segment and begin on rows that are multiples of it, and windows cut none of them
                           // that fits one

  /// Where the part ends that a position lies in.
  std::int64_t part_end(std::int64_t position) const { return (position / part + 1) * part; }
  /// Rows of the largest chunk of so many sequences.
  std::int64_t most_rows(std::int64_t sequences) const { return std::max(tokens, std::min(rows, sequences * tokens)); }
};

/// Tokens of the next chunk from `position` with `remaining` tokens at hand: up to the next tile boundary, else whole
/// tiles up to the end of the grid's cell, else what is left. Where chunks keep to segments the grid starts anew with
/// each.
inline std::int64_t next_chunk(const ChunkPlan& plan, std::int64_t position, std::int64_t remaining,
                               std::int64_t segment) {
  const std::int64_t offset = plan.spans_segments ? position : position % segment;
  const std::int64_t available = plan.spans_segments ? remaining : std::min(remaining, segment - offset);
  const std::int64_t into_tile = offset % plan.tile;
  if (into_tile != 0) return std::min(available, plan.tile - into_tile);
  const std::int64_t whole_tiles = available / plan.tile * plan.tile;
  return whole_tiles == 0 ? available : std::min(whole_tiles, plan.tokens - offset % plan.tokens);
}

/// The same where runs are packed and go segment by segment, so that their parts are simple (mmrec/paths/packed.h). The
/// grid starts anew with each segment.
inline std::int64_t next_simple_chunk(const ChunkPlan& plan, std::int64_t position, std::int64_t remaining,
                                      std::int64_t segment) {
  const std::int64_t offset = position % segment;
  return std::min({remaining, segment - offset, plan.tokens - offset % plan.tokens});
}

/// A part of a call's run in a chunk; its first_row counts the chunk's rows.
struct ChunkRun : Run {
  std::int64_t number = 0;    // of the call's run
  std::int64_t call_row = 0;  // of its first token among the call's
  bool ends = false;          // the call's run ends here
};

/// The chunks of a call. Runs take turns: in every round each run that has tokens left goes through one chunk. A run's
/// part of a chunk does not depend on the others.
class Schedule {
 public:
  Schedule(const ChunkPlan& plan, std::int64_t segment, std::span<const Run> runs)
      : plan_(plan),
        segment_(segment),
        runs_(runs),
        most_rows_(plan.most_rows(static_cast<std::int64_t>(runs.size()))),
        done_(runs.size()),
        turn_(runs.size()),
        alone_(runs.size()),
        packs_(plan.packs && (plan.align != 0 || (runs.size() > 1 && !is_small_batch(runs)))) {
    // Sequences in lock-step that have few parts go together, part by part: they fill the device as well.
    constexpr std::int64_t kFewParts = 4;
    if (plan.part != 0 && !packs_ && runs.size() > 1 && runs.front().rows <= kFewParts * plan.part) {
      plan_.tokens = std::exchange(plan_.part, 0);
    }
    begin_round();
  }

  /// Whether the runs of the last chunk are packed, with a row between two.
  bool packs() const { return packs_ && !is_alone_; }

  /// Whether the rows of the last chunk form no whole tiles, however many there are.
  bool is_ragged() const { return ragged_; }

  /// The next chunk's runs, until the next call; none when all is done.
  std::span<const ChunkRun> next() {
    chunk_.clear();
    if (next_ == runs_.size()) begin_round();
    if (next_ == runs_.size()) return {};
    // Ragged parts have chunks of their own, so that no row lies in a whole tile because of its neighbours.
    ragged_ = turn_[next_] % plan_.tile != 0;
    if (plan_.align != 0) return take_aligned();
    is_alone_ = alone_[next_];
    if (is_alone_) {
      take_turn(next_, 0);
      skip_done();
      return chunk_;
    }
    std::int64_t rows = 0;
    for (std::size_t i = next_; i < runs_.size(); ++i) {
      std::int64_t& turn = turn_[i];
      if (turn == 0 || alone_[i] || (turn % plan_.tile != 0) != ragged_) continue;
      const std::int64_t gap = packs_ && rows != 0 ? 1 : 0;
      if (rows != 0 && rows + gap + turn > most_rows_) break;
      rows += gap;
      rows = take_turn(i, rows);
    }
    skip_done();
    if (packs_) put_simple_first();
    return chunk_;
  }

  /// Whether all runs have had their turn in the last round and some have tokens left.
  bool is_between_rounds() const {
    return next_ == runs_.size() && !stops_ && std::any_of(runs_.begin(), runs_.end(), [&](const Run& run) {
             return done_[static_cast<std::size_t>(&run - runs_.data())] < run.rows;
           });
  }
  /// Makes the round that comes next the last.
  void stop_after_round() {
    begin_round();
    stops_ = true;
  }
  /// Of each run.
  const std::vector<std::int64_t>& rows_done() const { return done_; }

 private:
  // Puts run i's part into the chunk, from row `first` on; returns where it ends.
  std::int64_t take_turn(std::size_t i, std::int64_t first) {
    const Run& run = runs_[i];
    std::int64_t &done = done_[i], &turn = turn_[i];
    const bool ends = stops_ || done + turn == run.rows;
    chunk_.push_back(
        {{run.slot, run.position + done, first, turn}, static_cast<std::int64_t>(i), run.first_row + done, ends});
    done += turn;
    return first + std::exchange(turn, 0);
  }
  // Whether two slots can be filled there.
  bool attends_at(std::int64_t position) const { return position >= 2 * segment_; }
  void skip_done() {
    while (next_ < runs_.size() && turn_[next_] == 0) ++next_;
  }
  // In the order of put_simple_first(). The row before a run stays free for its carry.
  std::span<const ChunkRun> take_aligned() {
    const auto up_to_multiple = [](std::int64_t row, std::int64_t of) { return (row + of - 1) / of * of; };
    std::int64_t end = -1;
    for (const bool attends : {false, true}) {
      for (std::size_t i = next_; i < runs_.size(); ++i) {
        const std::int64_t turn = turn_[i];
        if (turn == 0 || attends != attends_at(runs_[i].position + done_[i])) continue;
        std::int64_t first = up_to_multiple(end + 1, plan_.align);
        if (first / plan_.window != (first + turn - 1) / plan_.window) first = up_to_multiple(first, plan_.window);
        if (first != 0 && first + turn > most_rows_) break;
        end = take_turn(i, first);
      }
    }
    skip_done();
    return chunk_;
  }

  void begin_round() {
    if (stops_) return;
    next_ = runs_.size();
    // Alone, a run of few parts pays for their beginning and end, so then less is enough.
    const bool fills = packs_ && (plan_.align != 0 || simple_rows() >= most_rows_ / (plan_.part != 0 ? 4 : 2));
    for (std::size_t i = runs_.size(); i-- > 0;) {
      const Run& run = runs_[i];
      const std::int64_t left = run.rows - done_[i];
      if (left == 0) continue;
      const bool simple = packs_ && (fills || left < kFewSegments * segment_);
      const std::int64_t position = (plan_.begins_with_run ? 0 : run.position) + done_[i];
      alone_[i] = plan_.part != 0 && !simple && position + left > plan_.part_end(position);
      turn_[i] = alone_[i] ? std::min(left, plan_.alone - position % plan_.alone)
                           : (simple ? next_simple_chunk : next_chunk)(plan_, position, left, segment_);
      next_ = i;
    }
  }
  // Packed runs go segment by segment where together they fill chunks, and those that have not many segments left.
  static constexpr std::int64_t kFewSegments = 4;
  std::int64_t simple_rows() const {
    std::int64_t rows = 0;
    for (std::size_t i = 0; i < runs_.size(); ++i) {
      if (done_[i] == runs_[i].rows) continue;
      rows += next_simple_chunk(plan_, runs_[i].position + done_[i], runs_[i].rows - done_[i], segment_);
    }
    return rows;
  }
  // Few sequences in lock-step have the bits that each has alone (docs/numerics.md).
  static bool is_small_batch(std::span<const Run> runs) {
    constexpr std::size_t kMost = 8;
    const Run& first = runs.front();
    return runs.size() <= kMost && std::all_of(runs.begin(), runs.end(), [&](const Run& run) {
             return run.position == first.position && run.rows == first.rows;
           });
  }
  // Parts within a segment, and of these first what no two slots can be filled for.
  void put_simple_first() {
    std::stable_sort(chunk_.begin(), chunk_.end(), [&](const ChunkRun& a, const ChunkRun& b) {
      const auto rank = [&](const ChunkRun& run) {
        if (run.position % segment_ + run.rows > segment_) return 2;
        return attends_at(run.position) ? 1 : 0;
      };
      return rank(a) < rank(b);
    });
    std::int64_t row = 0;
    for (ChunkRun& run : chunk_) {
      run.first_row = row;
      row += run.rows + 1;
    }
  }

  ChunkPlan plan_;
  std::int64_t segment_;
  std::span<const Run> runs_;
  std::int64_t most_rows_;
  std::vector<std::int64_t> done_, turn_;  // of each run: rows done, and in this round's chunk, 0 once it has been
  std::vector<bool> alone_;                // of each run: its turn is a chunk of its own
  std::vector<ChunkRun> chunk_;
  std::size_t next_ = 0;  // the first run that waits for its turn
  bool packs_ = false;
  bool is_alone_ = false;  // the last chunk is
  bool ragged_ = false;
  bool stops_ = false;
};

/// Runs of a chunk that ops take as one [sequences, tokens, D]: in slots side by side, at one position, with as many
/// rows.
struct Batch {
  Slot slot = nullptr;  // the first sequence's
  std::int64_t position = 0;
  std::int64_t first_row = 0;  // among the chunk's rows
  std::int64_t first_run = 0;  // among the chunk's runs, 0 where these are packed: a gap has room for the carry
  std::int64_t sequences = 0;
  std::int64_t tokens = 0;  // of each
  bool ends = false;        // the call's runs end here
  std::int64_t rows() const { return sequences * tokens; }
};

/// Batches that go through a net together.
struct Chunk {
  const int* tokens = nullptr;  // [rows], in the backend's memory
  std::span<const Batch> batches = {};
  std::int64_t rows = 0;  // gaps too
  bool packed = false;    // there is a row between two runs
  bool ragged = false;    // the rows form no whole tiles
  bool is_step = false;   // one token of each sequence, whose logits are wanted and nothing else
  RecurrenceOptions options;
};

/// The rows of a step of sequences apart, laid out so that its ops depend on these numbers alone: those that attend to
/// their memories come last. Both parts may have rows of no sequence.
struct StepRows {
  std::int64_t calm = 0;
  std::int64_t attending = 0;
  std::int64_t all() const { return calm + attending; }
};

/// Rows of the chunk at hand that the head takes: its first `count`; or of a batch the last token of each sequence; or
/// the last tokens of the `count` packed runs that end.
struct HeadRows {
  std::int64_t count = 0;
  const Batch* batch = nullptr;
  bool packed = false;
  std::int64_t size() const { return batch == nullptr ? count : batch->sequences; }
};

/// The chunk's runs as the fewest batches; one batch for each run if they are `packed`.
inline void collect_batches(std::span<const ChunkRun> chunk, std::size_t slot_bytes, bool packed,
                            std::vector<Batch>& batches) {
  batches.clear();
  for (std::size_t i = 0; i < chunk.size(); ++i) {
    const ChunkRun& run = chunk[i];
    if (packed) {
      batches.push_back({run.slot, run.position, run.first_row, 0, 1, run.rows, run.ends});
      continue;
    }
    if (!batches.empty()) {
      Batch& last = batches.back();
      if (run.rows == last.tokens && run.position == last.position && run.ends == last.ends &&
          run.slot == last.slot + static_cast<std::size_t>(last.sequences) * slot_bytes) {
        ++last.sequences;
        continue;
      }
    }
    batches.push_back({run.slot, run.position, run.first_row, static_cast<std::int64_t>(i), 1, run.rows, run.ends});
  }
}

}  // namespace mmrec::models
