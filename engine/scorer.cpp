// Scoring documents together.
//
// Documents are taken in order of length, so that those of a group are alike, and a group is one call: one run for each
// document, in a slot of its own. How a call is cut and computed is the executor's matter.
#include "mmrec/scorer.h"

#include <fmt/format.h>

#include <algorithm>
#include <new>
#include <stdexcept>
#include <utility>

#include "engine/access.h"
#include "engine/callback.h"

namespace mmrec {
namespace {

using Documents = std::span<const std::vector<int>>;

void check_ids(const std::vector<int>& ids, std::size_t document, std::int64_t vocab) {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= vocab) {
      throw std::invalid_argument(
          fmt::format("document {}: token {} has id {}, expected 0..{}", document, i, ids[i], vocab - 1));
    }
  }
}

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

/// Documents of one call, packed, and what has become of them.
class Group {
 public:
  Group(Documents documents, std::span<const std::size_t> members, const models::Slots& slots) : members_(members) {
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

}  // namespace

Scorer::Scorer(Model model, ScorerOptions options) : model_(std::move(model)), options_(std::move(options)) {
  if (options_.batch != 0) engine::check_batch(options_.batch);
  engine::check_options(options_.session);
}

std::vector<DocumentScore> Scorer::score(std::span<const std::vector<int>> documents) {
  for (std::size_t d = 0; d < documents.size(); ++d) check_ids(documents[d], d, model_.info().vocab_size);
  std::vector<DocumentScore> scores(documents.size());
  score_together(documents, scores);
  return scores;
}

bool Scorer::score_stream(
    const std::function<bool(std::vector<int>& ids)>& next,
    const std::function<bool(std::size_t document, std::vector<int>& ids, DocumentScore& score)>& on_score) {
  constexpr std::size_t kMostDocuments = 1U << 14;
  std::vector<std::vector<int>> documents;
  std::vector<DocumentScore> scores;
  for (std::size_t first = 0;; first += documents.size()) {
    documents.clear();
    std::size_t tokens = 0;
    std::vector<int> ids;
    while (tokens < kReadAheadTokens && documents.size() < kMostDocuments && next(ids)) {
      check_ids(ids, first + documents.size(), model_.info().vocab_size);
      tokens += ids.size();
      documents.push_back(std::move(ids));
      ids = {};
    }
    if (documents.empty()) return true;
    scores.assign(documents.size(), {});
    bool go_on = score_together(documents, scores);
    for (std::size_t d = 0; d < documents.size() && scores[d].complete; ++d) {
      if (!on_score(first + d, documents[d], scores[d])) return false;
    }
    if (!go_on) return false;
  }
}

// False if it was cancelled.
bool Scorer::score_together(Documents documents, std::vector<DocumentScore>& scores) {
  for (std::size_t d = 0; d < documents.size(); ++d) scores[d].complete = documents[d].size() < 2;
  const std::vector<std::size_t> order = by_length(documents);
  if (order.empty()) return true;

  const std::shared_ptr<models::Executor>& on = engine::Access::executor(model_);
  const int limit = options_.batch != 0 ? options_.batch : on->sequences_of_a_call();
  auto batch = std::min(static_cast<std::size_t>(limit), order.size());
  const models::ExecutionOptions execution = engine::execution_options(options_.session);
  const models::Slots slots = [&] {
    for (;; batch = (batch + 1) / 2) {
      try {
        return models::Slots(on, static_cast<int>(batch), execution);
      } catch (const std::bad_alloc&) {  // fewer, where nobody has said how many
        if (options_.batch != 0 || batch == 1) throw;
      }
    }
  }();
  models::Executor& executor = *on;
  bool go_on = true;
  for (std::size_t begin = 0; begin < order.size() && go_on; begin += batch) {
    const auto members = std::span(order).subspan(begin, std::min(batch, order.size() - begin));
    if (begin > 0) executor.clear(slots.first(), static_cast<int>(members.size()));
    Group group(documents, members, slots);
    models::Work work = group.work();
    engine::CallbackFault fault;
    const auto report = [&](std::span<const std::int64_t> rows_done) {
      go_on = fault.guard([&] { return group.report(rows_done, options_.on_progress); });
      return go_on;
    };
    if (options_.on_progress) work.progress = report;
    const models::Done done = executor.run(work, execution);
    stats_ += done.stats;
    group.finish(done.rows, scores);
    if (options_.on_progress && go_on) report(done.rows);
    fault.rethrow();
  }
  return go_on;
}

}  // namespace mmrec
