// Scoring documents together, on one device or several.
//
// Documents are read a block at a time. Those of a block are sorted by length, so that those of a group are alike, and
// a group is one call of an executor: one run for each document, in a slot of its own. How a call is cut and computed
// is the executor's matter. Devices take groups as they become free, each in a thread of its own, while the caller's
// reads more blocks, up to a bound. The group with the block's first document comes first, and so on. A long document
// that comes in parts is a block of its own, whose group is scored in pieces while the caller's thread adds parts.
//
// Must stay true: the groups do not depend on the number of devices; callbacks are called in the caller's thread;
// documents are handed over in their order, each when it and all before it are scored.
//
// Longer than other files: blocks, groups and the calls of executors have no other user.
#include "mmrec/scorer.h"

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <iterator>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <span>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "engine/require.h"
#include "engine/session/access.h"
#include "engine/session/callback.h"
#include "kernels/cpu/thread_pool.h"
#include "models/runtime/executor.h"

namespace mmrec {
namespace {

using Documents = std::span<const std::vector<int>>;

/// The most tokens of a group if the options do not give a number of documents. It is some thirty chunks of a GPU, so
/// the last chunk, which is not full, costs little. Groups of a block have about equal sizes, so devices finish
/// together. A longer document is a group alone whatever the options give, so it can be scored in pieces.
constexpr std::size_t kGroupTokens = std::size_t{1} << 18;

/// The most full groups of a block. With more, groups are a little more alike, and the first scores come later.
constexpr std::size_t kGroupsOfABlock = 8;

/// The fewest tokens of a piece of a document that comes in parts: several chunks of a GPU.
constexpr std::size_t kPieceTokens = std::size_t{1} << 15;

/// More rows than a run has.
constexpr std::int64_t kAnyRows = std::int64_t{1} << 40;

/// Those with a token to score, by falling length, then position.
std::vector<std::size_t> by_length(Documents documents) {
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < documents.size(); ++i) {
    if (documents[i].size() >= 2) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return documents[a].size() > documents[b].size(); });
  return order;
}

/// Documents that follow one another, and their scores.
struct Block {
  std::vector<std::vector<int>> owned;  // a stream's
  Documents documents;
  std::size_t first = 0;  // the number of the first
  std::vector<DocumentScore> scores;
  std::vector<std::size_t> order;
  std::vector<bool> is_done;  // of each document, once its group is
  std::size_t done = 0;       // documents that are done, as are all before them
  std::size_t delivered = 0;  // documents

  // Of a long document that comes in parts, the only one:
  bool comes_in_parts = false;
  bool grows = false;       // it gets more tokens
  bool is_cut = false;      // its rest will not come
  bool is_dropped = false;  // therefore, and nobody scores it
  std::size_t taken = 0;    // tokens that are scored or being scored

  /// Called when the group is scored.
  void finish(std::span<const std::size_t> members) {
    for (const std::size_t d : members) is_done[d] = true;
    while (done < is_done.size() && is_done[done]) ++done;
  }
};

/// Of documents that live as long.
std::unique_ptr<Block> make_block(Documents documents, std::size_t first = 0) {
  auto block = std::make_unique<Block>();
  block->documents = documents;
  block->first = first;
  block->scores.resize(documents.size());
  block->is_done.resize(documents.size());
  for (std::size_t d = 0; d < documents.size(); ++d) {
    block->scores[d].complete = block->is_done[d] = documents[d].size() < 2;
  }
  block->finish({});
  block->order = by_length(documents);
  return block;
}

/// Documents of one call, packed, and what has become of them.
class PackedDocuments {
 public:
  PackedDocuments(Documents documents, std::span<const std::size_t> members, const models::Slots& slots)
      : members_(members) {
    std::size_t size = 0;
    for (const std::size_t d : members) size += documents[d].size();
    tokens_.reserve(size);
    for (std::size_t i = 0; i < members.size(); ++i) {
      const std::vector<int>& document = documents[members[i]];
      runs_.push_back({slots[static_cast<int>(i)], 0, std::ssize(tokens_), static_cast<std::int64_t>(document.size())});
      tokens_.insert(tokens_.end(), document.begin(), document.end());
    }
    logprobs_.resize(size);
    reported_.assign(runs_.size(), 1);  // a document's first token is context only
  }

  models::Work work() { return {.tokens = tokens_, .runs = runs_, .logprobs = logprobs_, .wants_logits = false}; }

  /// Tells `on_progress` what is scored and was not told before; its answer, true where that is nothing.
  template <class OnProgress>
  bool report(std::span<const std::int64_t> rows_done, const OnProgress& on_progress) {
    std::int64_t tokens = 0;
    double nll = 0.0;
    for (std::size_t i = 0; i < runs_.size(); ++i) {
      for (; reported_[i] < rows_done[i]; ++reported_[i], ++tokens) {
        nll -= static_cast<double>(logprobs_[static_cast<std::size_t>(runs_[i].first_row + reported_[i])]);
      }
    }
    return tokens == 0 || on_progress(tokens, nll);
  }

  void finish(std::span<const std::int64_t> rows_done, std::vector<DocumentScore>& scores) const {
    for (std::size_t i = 0; i < runs_.size(); ++i) {
      DocumentScore& score = scores[members_[i]];
      const auto first = logprobs_.begin() + runs_[i].first_row;
      if (rows_done[i] > 1) score.logprobs.assign(first + 1, first + rows_done[i]);
      for (const float logprob : score.logprobs) score.nll -= static_cast<double>(logprob);
      score.complete = rows_done[i] == runs_[i].rows;
    }
  }

 private:
  std::span<const std::size_t> members_;
  std::vector<int> tokens_;             // of all members, one after another
  std::vector<float> logprobs_;         // of each token
  std::vector<models::Run> runs_;       // of each member
  std::vector<std::int64_t> reported_;  // its rows that are reported or need not be
};

/// A piece of a document, and what becomes of it.
class Piece {
 public:
  /// `tokens`: where another piece follows, the first of that one too.
  Piece(models::Slot slot, std::size_t position, std::vector<int> tokens, bool another_follows)
      : tokens_(std::move(tokens)),
        logprobs_(tokens_.size()),
        run_{slot, static_cast<std::int64_t>(position), 0, std::ssize(tokens_) - (another_follows ? 1 : 0)} {}

  models::Work work() {
    return {.tokens = tokens_, .runs = {&run_, 1}, .logprobs = logprobs_, .is_piece = true, .wants_logits = false};
  }
  /// As PackedDocuments.
  template <class OnProgress>
  bool report(std::int64_t rows_done, const OnProgress& on_progress) {
    const std::int64_t end = scored(rows_done);
    const std::int64_t tokens = end - reported_;
    double nll = 0.0;
    for (; reported_ < end; ++reported_) nll -= static_cast<double>(logprobs_[static_cast<std::size_t>(reported_)]);
    return tokens <= 0 || on_progress(tokens, nll);
  }
  /// Whether all is done.
  bool finish(std::int64_t rows_done, DocumentScore& score) const {
    for (std::int64_t i = 1; i < scored(rows_done); ++i) {
      const float logprob = logprobs_[static_cast<std::size_t>(i)];
      score.logprobs.push_back(logprob);
      score.nll -= static_cast<double>(logprob);
    }
    return rows_done == run_.rows;
  }

 private:
  /// Elements of logprobs_ that are computed.
  std::int64_t scored(std::int64_t rows_done) const { return rows_done == run_.rows ? std::ssize(tokens_) : rows_done; }

  std::vector<int> tokens_;
  std::vector<float> logprobs_;
  models::Run run_;
  std::int64_t reported_ = 1;  // the piece before had the first
};

struct Group {
  Block* block = nullptr;
  std::span<const std::size_t> members;
};

/// One call of a scorer.
class Scoring {
 public:
  /// `streams`: documents are made while others are scored. A GPU then has a thread of its own, so that it does not
  /// wait for them. A CPU gains nothing by that, because scoring takes all of its threads.
  Scoring(std::span<const Model> models, const ScorerOptions& options, PrefillStats& stats, bool streams)
      : options_(options),
        execution_(engine::execution_options(options.session)),
        stats_(stats),
        is_alone_(models.size() == 1 && !(streams && models.front().info().device == Device::kCuda)) {
    for (const Model& model : models) {
      Worker& worker = workers_.emplace_back();
      worker.executor = engine::Access::executor(model);
      const int likes = options.batch != 0 ? options.batch : worker.executor->sequences_of_a_call();
      most_documents_ = std::min(most_documents_, static_cast<std::size_t>(likes));
    }
  }
  Scoring(const Scoring&) = delete;
  Scoring& operator=(const Scoring&) = delete;
  ~Scoring() { end(); }

  /// Whether a document may be scored in pieces, with the bits that it has in one call.
  bool takes_pieces() const {
    return !options_.whole_calls && workers_.front().executor->piece(0, kAnyRows, kPieceTokens) < kAnyRows;
  }

  /// Documents of a block at most.
  std::size_t most_documents_of_a_block() const {
    constexpr std::size_t kMost = 1U << 14;
    return std::min(most_documents_, kMost / kGroupsOfABlock) * kGroupsOfABlock;
  }

  /// read() makes a block of the next documents, null where there are none. deliver(block, begin, end) receives
  /// documents in order as they are done, where the call was cancelled also those that are not, and returns whether to
  /// go on. False if it was cancelled. If a block grows, read_part(ids, goes_on) appends a part of its document to
  /// `ids` and says whether more follow; it returns false where the document is cut.
  template <class Read, class Deliver>
  bool run(const Read& read, Scorer::NextPart read_part, const Deliver& deliver) {
    read_part_ = std::move(read_part);
    if (!is_alone_) start();
    const std::size_t most_blocks = 2 * workers_.size() + 1;
    engine::CallbackFault fault;
    std::unique_lock lock(mutex_);
    while (!is_over_ && (is_reading_ || !blocks_.empty())) {
      if (told_tokens_ > 0) {
        const std::int64_t tokens = std::exchange(told_tokens_, 0);
        const double nll = std::exchange(told_nll_, 0.0);
        lock.unlock();
        const bool go_on = fault.guard([&] { return options_.on_progress(tokens, nll); });
        lock.lock();
        is_over_ = is_over_ || !go_on;
      } else if (!blocks_.empty() && blocks_.front()->delivered < blocks_.front()->done) {
        Block& block = *blocks_.front();
        const std::size_t begin = std::exchange(block.delivered, block.done);
        const std::size_t end = block.delivered;
        lock.unlock();
        if (!deliver(block, begin, end)) return false;
        lock.lock();
        if (end == block.documents.size()) blocks_.pop_front();
      } else if (!blocks_.empty() && blocks_.front()->is_dropped) {
        blocks_.pop_front();
      } else if (!is_alone_ && !blocks_.empty() && blocks_.back()->grows) {
        Block& block = *blocks_.back();
        if (block.owned.front().size() - block.taken < Scorer::kReadAheadTokens) {
          add_part(block, lock);
        } else {
          changed_.wait(lock);
        }
      } else if (is_reading_ && (is_alone_ ? groups_.empty() : blocks_.size() < most_blocks)) {
        lock.unlock();
        std::unique_ptr<Block> block;
        try {
          block = read();
        } catch (...) {
          read_fault_ = std::current_exception();
        }
        lock.lock();
        add(std::move(block));
      } else if (is_alone_) {
        take(workers_.front(), lock);
      } else {
        changed_.wait(lock);
      }
    }
    const bool is_cancelled = is_over_;
    lock.unlock();
    end();
    if (fault_) std::rethrow_exception(fault_);
    fault.rethrow();
    if (read_fault_ && !is_cancelled) std::rethrow_exception(read_fault_);
    for (const std::unique_ptr<Block>& block : blocks_) {
      if (!deliver(*block, block->delivered, block->documents.size())) break;
    }
    return !is_cancelled;
  }

 private:
  struct Worker {
    std::shared_ptr<models::Executor> executor;
    models::Slots slots;
    bool has_used_slots = false;
    std::size_t most = std::numeric_limits<std::size_t>::max();  // for more slots there is no memory
  };

  void start() {
    try {
      const kernels::SignalsBlocked in_threads;
      for (Worker& worker : workers_) threads_.emplace_back([this, &worker] { work(worker); });
    } catch (const std::system_error&) {  // no more threads can be started: those that run do the work
      if (threads_.empty()) is_alone_ = true;
    }
  }
  void end() noexcept {
    {
      const std::lock_guard lock(mutex_);
      is_over_ = true;
    }
    has_work_.notify_all();
    threads_.clear();  // which joins them
  }

  /// Cuts a block into groups; null ends the reading. Requires: the lock.
  void add(std::unique_ptr<Block> block) {
    is_reading_ = block != nullptr;
    if (is_reading_) {
      std::vector<std::pair<std::size_t, Group>> groups;  // by their first document
      for (std::size_t begin = 0; begin < block->order.size();) {
        const std::span<const std::size_t> members = std::span(block->order).subspan(begin, group_size(*block, begin));
        groups.emplace_back(*std::min_element(members.begin(), members.end()), Group{block.get(), members});
        begin += members.size();
      }
      std::sort(groups.begin(), groups.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
      for (const auto& [first, group] : groups) groups_.push_back(group);
      blocks_.push_back(std::move(block));
    }
    has_work_.notify_all();
  }
  /// Reads the next part of the document that grows. Requires: the lock, which is held again.
  void add_part(Block& block, std::unique_lock<std::mutex>& lock) {
    lock.unlock();
    std::vector<int> ids;
    bool goes_on = false;
    bool is_whole = false;
    std::exception_ptr fault;
    try {
      is_whole = read_part_(ids, goes_on);
    } catch (...) {
      fault = std::current_exception();
    }
    lock.lock();
    block.owned.front().insert(block.owned.front().end(), ids.begin(), ids.end());
    block.grows = is_whole && goes_on;
    block.is_cut = !is_whole;
    if (fault) read_fault_ = fault;
    is_reading_ = is_reading_ && is_whole;
    has_work_.notify_all();
  }

  std::size_t group_size(const Block& block, std::size_t begin) const {
    const std::size_t most = std::min(block.order.size() - begin, most_documents_);
    const auto tokens_of = [&](std::size_t i) { return block.documents[block.order[i]].size(); };
    if (options_.batch != 0) return tokens_of(begin) > kGroupTokens ? 1 : most;
    std::size_t left = 0;
    for (std::size_t i = begin; i < block.order.size(); ++i) left += tokens_of(i);
    const std::size_t groups = (left + kGroupTokens - 1) / kGroupTokens;
    const std::size_t share = (left + groups - 1) / groups;
    std::size_t tokens = 0;
    for (std::size_t size = 0; size < most; ++size) {
      tokens += tokens_of(begin + size);
      if (size > 0 && tokens > share) return size;
    }
    return most;
  }

  void work(Worker& worker) {
    std::unique_lock lock(mutex_);
    for (;;) {
      has_work_.wait(lock, [&] { return is_over_ || !is_reading_ || !groups_.empty(); });
      if (is_over_ || groups_.empty()) return;
      try {
        take(worker, lock);
      } catch (...) {
        lock.lock();
        if (!fault_) fault_ = std::current_exception();
        is_over_ = true;
      }
      changed_.notify_one();
    }
  }

  /// Scores the next group. Requires: the lock, which is held again unless it throws.
  void take(Worker& worker, std::unique_lock<std::mutex>& lock) {
    const Group group = groups_.front();
    groups_.pop_front();
    const bool is_growing = group.block->comes_in_parts;
    lock.unlock();
    changed_.notify_one();
    Block& block = *group.block;
    const bool go_on = is_growing ? score_in_pieces(worker, block) : score(worker, group);
    lock.lock();
    if (!go_on) {
      is_over_ = true;
    } else if (block.is_cut) {
      block.is_dropped = true;
    } else {
      block.finish(group.members);
    }
  }

  /// A document that grows. Whether to go on.
  bool score_in_pieces(Worker& worker, Block& block) {
    make_room(worker, 1);
    if (std::exchange(worker.has_used_slots, true)) worker.executor->clear(worker.slots.first(), 1);
    DocumentScore& score = block.scores.front();
    for (;;) {
      const std::size_t position = block.taken;
      bool is_last = false;
      std::vector<int> tokens = take_tokens(*worker.executor, block, is_last);
      if (tokens.empty()) return !is_over();
      Piece piece(worker.slots[0], position, std::move(tokens), !is_last);
      bool go_on = true;
      engine::CallbackFault fault;
      const auto report = [&](std::span<const std::int64_t> rows_done) {
        const auto tell = [&](std::int64_t count, double nll) { return progressed(count, nll); };
        go_on =
            fault.guard([&] { return !options_.on_progress || piece.report(rows_done.front(), tell); }) && !is_over();
        return go_on;
      };
      models::Work work = piece.work();
      work.progress = report;
      const models::Done done = worker.executor->run(work, execution_);
      const bool is_done = piece.finish(done.rows.front(), score);
      if (go_on) report(done.rows);
      fault.rethrow();
      {
        const std::lock_guard lock(mutex_);
        stats_ += done.stats;
      }
      score.complete = is_last && is_done;
      if (!go_on || is_last) return go_on;
    }
  }

  /// The tokens of the next piece, with one more unless it is the last; none if the document is cut or all is over.
  std::vector<int> take_tokens(models::Executor& executor, Block& block, bool& is_last) {
    std::unique_lock lock(mutex_);
    const std::vector<int>& all = block.owned.front();
    for (std::size_t wanted = kPieceTokens;;) {
      // Two tokens are left for the last piece, because a call of one token is computed as a step.
      const auto has_enough = [&] { return is_over_ || !block.grows || all.size() - block.taken >= wanted + 2; };
      while (is_alone_ && !has_enough()) add_part(block, lock);
      has_work_.wait(lock, has_enough);
      if (is_over_ || block.is_cut) return {};
      std::size_t rows = all.size() - block.taken;
      is_last = !block.grows && rows <= kGroupTokens;
      if (!is_last) {
        const std::size_t most = std::min(rows - 2, kGroupTokens);
        const std::size_t position = block.taken;
        lock.unlock();
        rows = static_cast<std::size_t>(
            executor.piece(static_cast<std::int64_t>(position), kAnyRows, static_cast<std::int64_t>(most)));
        lock.lock();
        wanted = rows;
        if (all.size() - block.taken < rows + 2) continue;
      }
      const auto first = all.begin() + static_cast<std::ptrdiff_t>(block.taken);
      block.taken += rows;
      changed_.notify_one();
      return {first, first + static_cast<std::ptrdiff_t>(is_last ? rows : rows + 1)};
    }
  }

  /// Whether to go on: if not, some of the group may be missing.
  bool score(Worker& worker, const Group& group) {
    make_room(worker, group.members.size());
    const auto room = static_cast<std::size_t>(worker.slots.count());
    bool go_on = true;
    for (std::size_t begin = 0; begin < group.members.size() && go_on; begin += room) {
      const auto members = group.members.subspan(begin, std::min(room, group.members.size() - begin));
      if (std::exchange(worker.has_used_slots, true)) {
        worker.executor->clear(worker.slots.first(), static_cast<int>(members.size()));
      }
      PackedDocuments packed(group.block->documents, members, worker.slots);
      models::Work work = packed.work();
      work.whole_calls = options_.whole_calls;
      engine::CallbackFault fault;
      const auto report = [&](std::span<const std::int64_t> rows_done) {
        const auto tell = [&](std::int64_t tokens, double nll) { return progressed(tokens, nll); };
        go_on = fault.guard([&] { return !options_.on_progress || packed.report(rows_done, tell); }) && !is_over();
        return go_on;
      };
      if (options_.on_progress || !is_alone_) work.progress = report;
      const models::Done done = worker.executor->run(work, execution_);
      packed.finish(done.rows, group.block->scores);
      if (go_on) report(done.rows);
      fault.rethrow();
      const std::lock_guard lock(mutex_);
      stats_ += done.stats;
    }
    return go_on;
  }

  /// Slots for so many documents; fewer if memory does not suffice and the options do not give a number.
  void make_room(Worker& worker, std::size_t documents) {
    if (static_cast<std::size_t>(worker.slots.count()) >= std::min(documents, worker.most)) return;
    worker.slots = {};
    worker.has_used_slots = false;
    for (std::size_t count = std::min(documents, worker.most);; count = (count + 1) / 2, worker.most = count) {
      try {
        worker.slots = models::Slots(worker.executor, static_cast<int>(count), execution_);
        return;
      } catch (const std::bad_alloc&) {
        if (options_.batch != 0 || count == 1) throw;
      }
    }
  }

  bool progressed(std::int64_t tokens, double nll) {
    if (is_alone_) return options_.on_progress(tokens, nll);
    const std::lock_guard lock(mutex_);
    told_tokens_ += tokens;
    told_nll_ += nll;
    changed_.notify_one();
    return true;
  }
  bool is_over() {
    const std::lock_guard lock(mutex_);
    return is_over_;
  }

  const ScorerOptions& options_;
  models::ExecutionOptions execution_;
  PrefillStats& stats_;
  bool is_alone_;                                                         // scores in the caller's thread
  std::size_t most_documents_ = std::numeric_limits<std::size_t>::max();  // of a group
  std::deque<Worker> workers_;
  std::vector<std::jthread> threads_;

  std::mutex mutex_;                            // guards all that follows
  std::condition_variable changed_, has_work_;  // for the caller's thread, for the workers
  std::deque<std::unique_ptr<Block>> blocks_;   // not handed over, in order
  std::deque<Group> groups_;                    // of these, those that nobody has taken
  bool is_reading_ = true, is_over_ = false;    // over: cancelled or failed
  std::int64_t told_tokens_ = 0;                // for on_progress
  double told_nll_ = 0.0;
  std::exception_ptr fault_, read_fault_;  // the latter is thrown when what came before is scored
  Scorer::NextPart read_part_;
};

}  // namespace

Scorer::Scorer(Model model, ScorerOptions options) : Scorer(std::vector{std::move(model)}, std::move(options)) {}

Scorer::Scorer(std::vector<Model> models, ScorerOptions options)
    : models_(std::move(models)), options_(std::move(options)) {
  engine::check_replicas(models_);
  if (options_.batch != 0) engine::check_batch(options_.batch);
  engine::check_options(options_.session);
  const ModelInfo& info = models_.front().info();
  engine::require(!options_.whole_calls || info.variant.bank.value_or(false),
                  "scorer option whole_calls: found true, but this model ({}) has no bank", info.architecture);
}

std::vector<DocumentScore> Scorer::score(std::span<const std::vector<int>> documents) {
  if (documents.empty()) return {};
  for (std::size_t d = 0; d < documents.size(); ++d) {
    engine::check_ids(documents[d], models_.front().info().vocab_size, fmt::format("document {}: ", d));
  }
  std::vector<DocumentScore> scores;
  bool is_read = false;
  Scoring(models_, options_, stats_, false)
      .run([&] { return std::exchange(is_read, true) ? nullptr : make_block(documents); }, {},
           [&](Block& block, std::size_t begin, std::size_t end) {
             std::move(block.scores.begin() + static_cast<std::ptrdiff_t>(begin),
                       block.scores.begin() + static_cast<std::ptrdiff_t>(end), std::back_inserter(scores));
             return true;
           });
  return scores;
}

namespace {

/// Makes the blocks of a stream.
class BlockReader {
 public:
  BlockReader(const Scorer::NextPart& next, std::int64_t vocab, const Scoring& scoring)
      : next_(next), vocab_(vocab), scoring_(scoring), most_documents_(scoring.most_documents_of_a_block()) {}

  /// Whether a document went on and its rest did not come.
  bool is_cut() const { return is_cut_; }

  /// Null where there are no more documents.
  std::unique_ptr<Block> read() {
    if (!long_.empty()) return block_of_long();
    // Documents after a long one are those that would be in a block with it if it came whole. So what is scored
    // together does not depend on the parts.
    if (tokens_ >= Scorer::kReadAheadTokens || count_ >= most_documents_) tokens_ = count_ = 0;
    std::vector<std::vector<int>> documents;
    while (!is_cut_ && tokens_ < Scorer::kReadAheadTokens && count_ < most_documents_) {
      std::vector<int> ids;
      bool goes_on = false;
      if (!read_part(ids, goes_on, 0)) break;
      while (goes_on && !has_own_block(ids.size(), documents.empty())) {
        std::vector<int> part;
        if (!read_part(part, goes_on, ids.size())) break;
        ids.insert(ids.end(), part.begin(), part.end());
      }
      if (is_cut_) break;
      ++count_;
      tokens_ += ids.size();
      if (goes_on) {
        long_ = std::move(ids);
        return documents.empty() ? block_of_long() : block_of(std::move(documents));
      }
      documents.push_back(std::move(ids));
    }
    return documents.empty() ? nullptr : block_of(std::move(documents));
  }

  /// The next part of the last block's document, and whether it goes on. False if it is cut.
  bool read_more(std::vector<int>& ids, bool& goes_on) {
    goes_on = true;
    if (!read_part(ids, goes_on, long_size_)) return false;
    tokens_ += ids.size();
    long_size_ += ids.size();
    return true;
  }

 private:
  /// `goes_on`: of the document at hand, before and after. `first`: number of the part's first token.
  bool read_part(std::vector<int>& ids, bool& goes_on, std::size_t first) {
    const bool went_on = std::exchange(goes_on, false);
    if (!next_(ids, goes_on)) {
      is_cut_ = went_on;
      return false;
    }
    if (!went_on) ++begun_;
    engine::check_ids(ids, vocab_, fmt::format("document {}: ", begun_ - 1), first);
    return true;
  }
  /// Whether a document that goes on after so many tokens is alone in its group, and a block of it changes no other
  /// group: it is the first of its block, or its end is that of the block.
  bool has_own_block(std::size_t size, bool is_first) {
    if (size <= kGroupTokens || (!is_first && tokens_ + size < Scorer::kReadAheadTokens)) return false;
    if (!takes_pieces_) takes_pieces_ = scoring_.takes_pieces();
    return *takes_pieces_;
  }
  std::unique_ptr<Block> block_of(std::vector<std::vector<int>> documents) {
    std::unique_ptr<Block> block = make_block(documents, first_);
    block->owned = std::move(documents);  // which moves none of them
    first_ += block->owned.size();
    return block;
  }
  std::unique_ptr<Block> block_of_long() {
    long_size_ = long_.size();
    std::vector<std::vector<int>> documents;
    documents.push_back(std::exchange(long_, {}));
    std::unique_ptr<Block> block = block_of(std::move(documents));
    block->comes_in_parts = block->grows = true;
    return block;
  }

  const Scorer::NextPart& next_;
  std::int64_t vocab_;
  const Scoring& scoring_;
  std::size_t most_documents_;
  std::size_t tokens_ = 0, count_ = 0;  // of documents read together so far
  std::size_t first_ = 0;               // number of the next block's first document
  std::size_t begun_ = 0;               // documents
  std::vector<int> long_;               // the begin of the next block's only document
  std::size_t long_size_ = 0;           // tokens so far of the last block's
  bool is_cut_ = false;
  std::optional<bool> takes_pieces_;
};

}  // namespace

bool Scorer::score_stream(const std::function<bool(std::vector<int>& ids)>& next, const OnScore& on_score) {
  return score_parts([&](std::vector<int>& ids, bool&) { return next(ids); }, on_score);
}

bool Scorer::score_parts(const NextPart& next, const OnScore& on_score) {
  Scoring scoring(models_, options_, stats_, true);
  BlockReader reader(next, models_.front().info().vocab_size, scoring);
  const auto deliver = [&](Block& block, std::size_t begin, std::size_t end) {
    for (std::size_t d = begin; d < end; ++d) {
      if (!block.scores[d].complete || !on_score(block.first + d, block.owned[d], block.scores[d])) return false;
    }
    return true;
  };
  const auto more = [&](std::vector<int>& ids, bool& goes_on) { return reader.read_more(ids, goes_on); };
  return scoring.run([&] { return reader.read(); }, more, deliver) && !reader.is_cut();
}

}  // namespace mmrec
