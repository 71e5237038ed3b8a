// Documents that are scored by one call of an executor: its tokens and runs, and scores from what it computed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "mmrec/scorer.h"
#include "models/runtime/executor.h"

namespace mmrec::engine {

using Documents = std::span<const std::vector<int>>;

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

}  // namespace mmrec::engine
