// What a session is made of: slots of an executor, and what the host knows of the sequences in them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <utility>
#include <vector>

#include "engine/generate/drawer.h"
#include "engine/require.h"
#include "engine/session/access.h"
#include "engine/session/callback.h"
#include "engine/session/state_format.h"
#include "mmrec/session.h"
#include "models/runtime/executor.h"

namespace mmrec {
namespace engine {

/// The last tokens of sequences in lock-step. Memory is fixed when it is made; a token costs a store, and now and then
/// the last ones move to the front.
class RecentTokens {
 public:
  /// Remembers `most` tokens of each of `batch` sequences.
  RecentTokens(int batch, int most)
      : most_(static_cast<std::size_t>(most)), tokens_(static_cast<std::size_t>(batch) * 2 * most_) {}

  /// Appends the first `count` of each row of tokens [batch, row_size].
  void push(std::span<const int> tokens, std::size_t row_size, std::size_t count) {
    const std::size_t used = std::min(count, most_);  // of the row's `count`, the last
    const std::size_t kept = size_ + used <= 2 * most_ ? size_ : most_ - used;
    for (std::size_t b = 0; b * 2 * most_ < tokens_.size(); ++b) {
      int* row = &tokens_[b * 2 * most_];
      if (kept < size_) std::copy(row + size_ - kept, row + size_, row);
      const int* from = &tokens[b * row_size + count - used];
      std::copy(from, from + used, row + kept);
    }
    size_ = kept + used;
  }

  /// Oldest first.
  std::span<const int> of(int sequence) const {
    const std::size_t shown = std::min(size_, most_);
    return std::span(tokens_).subspan(static_cast<std::size_t>(sequence) * 2 * most_ + size_ - shown, shown);
  }

  void clear() { size_ = 0; }

 private:
  std::size_t most_;
  std::vector<int> tokens_;  // [B, 2 most_], of which the first size_ of each row are used
  std::size_t size_ = 0;
};

}  // namespace engine

struct Session::Impl {
  Impl(models::Slots own_slots, engine::StateShape its_shape, std::int64_t its_vocab_size,
       const models::ExecutionOptions& its_options)
      : slots(std::move(own_slots)),
        shape(std::move(its_shape)),
        vocab_size(its_vocab_size),
        options(its_options),
        recent(slots.count(), kRecentTokens),
        runs(static_cast<std::size_t>(slots.count())) {}

  models::Slots slots;
  engine::StateShape shape;
  std::int64_t vocab_size;
  models::ExecutionOptions options;
  std::int64_t position = 0;
  engine::RecentTokens recent;
  PrefillStats stats = {};
  std::vector<float> logits = {};  // [B, V] once fetched
  bool has_logits = false;         // they are those of `position`
  engine::Drawer drawer = {};
  std::vector<models::Draw> draws = {};  // [B], scratch
  std::vector<models::Run> runs;         // [B], scratch

  models::Executor& executor() const { return *slots.executor(); }
  std::size_t batch() const { return runs.size(); }

  /// One run of `rows` tokens for every sequence.
  std::span<const models::Run> runs_of(std::int64_t rows) {
    for (std::size_t b = 0; b < runs.size(); ++b) {
      runs[b] = {slots[static_cast<int>(b)], position, static_cast<std::int64_t>(b) * rows, rows};
    }
    return runs;
  }

  /// Tokens [batch, T], and log-probs [batch, T] unless empty.
  void consume(std::span<const int> tokens, std::span<float> logprobs, const CallOptions& call) {
    const auto total = static_cast<std::int64_t>(tokens.size() / batch());
    models::Work work{tokens, runs_of(total), logprobs};
    engine::CallbackFault fault;
    if (call.on_progress) {
      work.progress = [&](std::span<const std::int64_t> rows_done) {
        const std::int64_t done = *std::ranges::min_element(rows_done);
        if (done == 0 || done == total) return true;
        return fault.guard([&] { return call.on_progress(done, total); });
      };
    }
    has_logits = false;
    const models::Done result = executor().run(work, options);
    stats += result.stats;
    const std::int64_t done = *std::ranges::max_element(result.rows);
    // A call that was ended leaves its sequences at one position: those that lag behind catch up.
    for (std::size_t b = 0; b < batch(); ++b) {
      const std::int64_t has = result.rows[b];
      if (has == done) continue;
      const std::size_t first = b * static_cast<std::size_t>(total) + static_cast<std::size_t>(has);
      const auto rest = static_cast<std::size_t>(done - has);
      const models::Run run{slots[static_cast<int>(b)], position + has, 0, done - has};
      const auto rest_of = [&](auto all) { return all.empty() ? all : all.subspan(first, rest); };
      stats += executor().run({rest_of(tokens), {&run, 1}, rest_of(logprobs)}, options).stats;
    }
    recent.push(tokens, static_cast<std::size_t>(total), static_cast<std::size_t>(done));
    position += done;
    fault.rethrow();
  }

  std::span<const float> fetched_logits() {
    if (position == 0) return {};
    if (!has_logits) {
      logits.resize(batch() * static_cast<std::size_t>(vocab_size));
      executor().logits(slots.first(), slots.count(), logits);
      has_logits = true;
    }
    return logits;
  }

  /// One draw of each sequence.
  void draw(std::span<const models::Draw> of_each, bool logprobs, std::span<Sample> samples) {
    const auto vocab = static_cast<std::size_t>(vocab_size);
    drawer.draw(
        executor(), options, of_each, logprobs, samples,
        [&](std::size_t first, std::size_t count) { return fetched_logits().subspan(first * vocab, count * vocab); },
        [](std::size_t, const std::exception&) { throw; });
  }

  void check_one_each(std::size_t count, const char* what) const {
    engine::require(count == batch(), "found {} {}, expected one per sequence: {}", count, what, batch());
  }
  void check_tokens(std::span<const int> tokens) const {
    engine::require(!tokens.empty() && tokens.size() % batch() == 0,
                    "found {} tokens, expected a positive multiple of the batch of {}", tokens.size(), batch());
    engine::check_ids(tokens, vocab_size, "");
  }
};

}  // namespace mmrec
