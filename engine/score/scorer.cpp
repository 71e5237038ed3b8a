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

/// The fewest tokens of a piece of a document that comes in parts, as many as a GPU's largest chunk, and the most:
/// between two pieces a GPU waits some milliseconds.
constexpr std::size_t kPieceTokens = std::size_t{1} << 16;
constexpr std::size_t kMostPieceTokens = Scorer::kReadAheadTokens;

/// More rows than a run has.
constexpr std::int64_t kAnyRows = std::int64_t{1} << 40;

/// Documents that follow one another, and their scores.
struct Block {
  std::vector<std::vector<int>> owned;  // a stream's
  Documents documents;
  std::size_t first = 0;  // the number of the first
  std::vector<DocumentScore> scores;
  std::vector<std::size_t> order;  // those with a token to score, by falling length, then position
  std::vector<bool> is_done;       // of each document, once its group is
  std::size_t done = 0;            // documents that are done, as are all before them
  std::size_t delivered = 0;       // documents

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
    if (!block->is_done[d]) block->order.push_back(d);
  }
  block->finish({});
  std::ranges::stable_sort(block->order, std::greater{}, [&](std::size_t d) { return documents[d].size(); });
  return block;
}

/// What the executor gets at once, documents or a piece of one, and what has become of it.
class Call {
 public:
  Call() = default;  // documents
  struct Piece {
    bool is_last = false;  // else the last of its tokens is the first of the next piece
  };
  explicit Call(Piece piece) : is_piece_(true), ends_early_(piece.is_last ? 0 : 1) {}

  void add(models::Slot slot, std::size_t position, std::span<const int> tokens, DocumentScore& score) {
    runs_.push_back({slot, static_cast<std::int64_t>(position), std::ssize(tokens_), std::ssize(tokens) - ends_early_});
    tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
    logprobs_.resize(tokens_.size());
    scores_.push_back(&score);
    reported_.push_back(1);
  }

  models::Work work() {
    return {.tokens = tokens_, .runs = runs_, .logprobs = logprobs_, .is_piece = is_piece_, .wants_logits = false};
  }

  /// The number and the loss of tokens that are scored and were not reported before.
  std::pair<std::int64_t, double> report(std::span<const std::int64_t> rows_done) {
    std::int64_t tokens = 0;
    double nll = 0.0;
    for (std::size_t i = 0; i < runs_.size(); ++i) {
      for (; reported_[i] < scored(i, rows_done); ++reported_[i], ++tokens) {
        nll -= static_cast<double>(logprobs_[static_cast<std::size_t>(runs_[i].first_row + reported_[i])]);
      }
    }
    return {tokens, nll};
  }

  void finish(std::span<const std::int64_t> rows_done) const {
    for (std::size_t i = 0; i < runs_.size(); ++i) {
      DocumentScore& score = *scores_[i];
      const auto first = logprobs_.begin() + runs_[i].first_row;
      const auto found = std::span(first + 1, first + std::max<std::int64_t>(scored(i, rows_done), 1));
      score.logprobs.insert(score.logprobs.end(), found.begin(), found.end());
      for (const float logprob : found) score.nll -= static_cast<double>(logprob);
      score.complete = rows_done[i] == runs_[i].rows && ends_early_ == 0;
    }
  }

 private:
  /// Elements of a run's log-probs that are computed. The first is 0: it is context, or the piece before has it.
  std::int64_t scored(std::size_t i, std::span<const std::int64_t> rows_done) const {
    return rows_done[i] + (rows_done[i] == runs_[i].rows ? ends_early_ : 0);
  }

  bool is_piece_ = false;
  std::int64_t ends_early_ = 0;         // rows of the run are so many fewer than its tokens
  std::vector<int> tokens_;             // of all runs, one after another
  std::vector<float> logprobs_;         // of each token
  std::vector<models::Run> runs_;       // of each document
  std::vector<DocumentScore*> scores_;  // likewise
  std::vector<std::int64_t> reported_;  // likewise, rows that are reported or need not be
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
      std::vector<Group> groups;
      for (std::size_t begin = 0; begin < block->order.size(); begin += groups.back().members.size()) {
        groups.push_back({block.get(), std::span(block->order).subspan(begin, group_size(*block, begin))});
      }
      std::ranges::sort(groups, {}, [](const Group& group) { return std::ranges::min(group.members); });
      groups_.insert(groups_.end(), groups.begin(), groups.end());
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
    try {
      is_whole = read_part_(ids, goes_on);
    } catch (...) {
      read_fault_ = std::current_exception();
    }
    lock.lock();
    block.owned.front().insert(block.owned.front().end(), ids.begin(), ids.end());
    block.grows = is_whole && goes_on;
    block.is_cut = !is_whole;
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
    for (;;) {
      const std::size_t position = block.taken;
      bool is_last = false;
      const std::vector<int> tokens = take_tokens(*worker.executor, block, is_last);
      if (tokens.empty()) return !is_over();
      Call call(Call::Piece{is_last});
      call.add(worker.slots[0], position, tokens, block.scores.front());
      const bool go_on = run(worker, call);
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
      is_last = !block.grows && rows <= kMostPieceTokens;
      if (!is_last) {
        const std::size_t most = std::min(rows - 2, kMostPieceTokens);
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
    for (std::span<const std::size_t> left = group.members; !left.empty();) {
      const std::size_t count = make_room(worker, left.size());
      Call call;
      for (std::size_t i = 0; i < count; ++i) {
        const std::size_t d = left[i];
        call.add(worker.slots[static_cast<int>(i)], 0, group.block->documents[d], group.block->scores[d]);
      }
      if (!run(worker, call)) return false;
      left = left.subspan(count);
    }
    return true;
  }

  /// Whether to go on.
  bool run(Worker& worker, Call& call) {
    bool go_on = true;
    engine::CallbackFault fault;
    const auto report = [&](std::span<const std::int64_t> rows_done) {
      go_on = fault.guard([&] { return !options_.on_progress || progressed(call.report(rows_done)); }) && !is_over();
      return go_on;
    };
    models::Work work = call.work();
    work.whole_calls = options_.whole_calls;
    if (options_.on_progress || !is_alone_) work.progress = report;
    const models::Done done = worker.executor->run(work, execution_);
    call.finish(done.rows);
    if (go_on) report(done.rows);
    fault.rethrow();
    const std::lock_guard lock(mutex_);
    stats_ += done.stats;
    return go_on;
  }

  /// Clears slots for so many documents, or for fewer if memory does not suffice and the options do not give a number.
  /// Returns for how many.
  std::size_t make_room(Worker& worker, std::size_t documents) {
    const std::size_t wanted = std::min(documents, worker.most);
    if (static_cast<std::size_t>(worker.slots.count()) >= wanted) {
      worker.executor->clear(worker.slots.first(), static_cast<int>(wanted));
      return wanted;
    }
    worker.slots = {};
    for (std::size_t count = wanted;; count = (count + 1) / 2, worker.most = count) {
      try {
        worker.slots = models::Slots(worker.executor, static_cast<int>(count), execution_);
        return count;
      } catch (const std::bad_alloc&) {
        if (options_.batch != 0 || count == 1) throw;
      }
    }
  }

  bool progressed(std::pair<std::int64_t, double> tokens_and_nll) {
    const auto [tokens, nll] = tokens_and_nll;
    if (tokens == 0) return true;
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
  (void)engine::execution_options(options_.session);  // checks them
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
