// Scoring documents in lock-step groups.
//
// Documents are taken in order of length, so that those of a group are alike; a group's shorter documents are padded at
// the end, which a causal model cannot see from any token before. Tokens go in calls of a fixed size, so memory beyond
// the results does not grow with the documents.
#include "mmrec/scorer.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <utility>

#include "engine/access.h"

namespace mmrec {
namespace {

constexpr double kMaxPadding = 0.25;  // share of a group's tokens

/// How documents are cut into calls: `tokens` of all sequences together, so that a large model still reports within
/// seconds, at multiples of `multiple`, the runner's own grid.
struct CallSize {
  std::size_t tokens, multiple;
};
constexpr CallSize kOnCpu{512, 256};
constexpr CallSize kOnGpu{65536, 4096};

/// Documents of at least two tokens by falling length, then position, cut into groups of at most `batch` whose padding
/// stays below kMaxPadding.
std::vector<std::vector<std::size_t>> group_by_length(std::span<const std::vector<int>> documents, std::size_t batch) {
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < documents.size(); ++i) {
    if (documents[i].size() >= 2) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return documents[a].size() > documents[b].size(); });
  std::vector<std::vector<std::size_t>> groups;
  std::size_t tokens = 0;  // of the last group, without padding
  for (const std::size_t i : order) {
    if (!groups.empty() && groups.back().size() < batch) {
      const auto padded = static_cast<double>(documents[groups.back().front()].size() * (groups.back().size() + 1));
      if (padded - static_cast<double>(tokens + documents[i].size()) <= kMaxPadding * padded) {
        groups.back().push_back(i);
        tokens += documents[i].size();
        continue;
      }
    }
    groups.push_back({i});
    tokens = documents[i].size();
  }
  return groups;
}

}  // namespace

Scorer::Scorer(Model model, ScorerOptions options) : model_(std::move(model)), options_(std::move(options)) {
  engine::check_batch(options_.batch);
  engine::check_options(options_.session);
}

std::vector<DocumentScore> Scorer::score(std::span<const std::vector<int>> documents) {
  for (std::size_t d = 0; d < documents.size(); ++d) {
    for (std::size_t i = 0; i < documents[d].size(); ++i) {
      const int id = documents[d][i];
      if (id < 0 || id >= model_.info().vocab_size) {
        throw std::invalid_argument(
            fmt::format("document {}: token {} has id {}, expected 0..{}", d, i, id, model_.info().vocab_size - 1));
      }
    }
  }
  std::vector<DocumentScore> scores(documents.size());
  for (std::size_t d = 0; d < documents.size(); ++d) scores[d].complete = documents[d].size() < 2;

  std::optional<Session> session;
  std::vector<int> call;
  for (const std::vector<std::size_t>& group : group_by_length(documents, static_cast<std::size_t>(options_.batch))) {
    const std::size_t batch = group.size();
    if (session && session->batch() == static_cast<int>(batch)) {
      session->reset();
    } else {
      session.reset();  // frees the old one's memory first
      session = model_.new_session(static_cast<int>(batch), options_.session);
    }
    const std::size_t longest = documents[group.front()].size();
    const auto [tokens, multiple] = model_.info().device_bytes > 0 ? kOnGpu : kOnCpu;
    const std::size_t step = std::max(multiple, tokens / batch / multiple * multiple);
    bool go_on = true;
    for (std::size_t begin = 0; begin < longest && go_on; begin += step) {
      const std::size_t count = std::min(step, longest - begin);
      call.assign(batch * count, 0);
      for (std::size_t b = 0; b < batch; ++b) {
        const std::vector<int>& document = documents[group[b]];
        if (begin >= document.size()) continue;
        const auto from = document.begin() + static_cast<std::ptrdiff_t>(begin);
        const std::size_t used = std::min(count, document.size() - begin);
        std::copy(from, from + static_cast<std::ptrdiff_t>(used),
                  call.begin() + static_cast<std::ptrdiff_t>(b * count));
      }
      const std::vector<float> logprobs = session->score(call);
      std::int64_t new_tokens = 0;
      double new_nll = 0.0;
      for (std::size_t b = 0; b < batch; ++b) {
        const std::size_t size = documents[group[b]].size();
        DocumentScore& score = scores[group[b]];
        if (begin == 0) score.logprobs.reserve(size - 1);
        // The document's first token is context only.
        for (std::size_t t = begin == 0 ? 1 : 0; t < count && begin + t < size; ++t) {
          const float logprob = logprobs[b * count + t];
          score.logprobs.push_back(logprob);
          score.nll -= static_cast<double>(logprob);
          new_nll -= static_cast<double>(logprob);
          ++new_tokens;
        }
        score.complete = score.logprobs.size() == size - 1;
      }
      go_on = !options_.on_progress || options_.on_progress(new_tokens, new_nll);
    }
    const PrefillStats stats = session->prefill_stats();
    stats_.layer_tokens += stats.layer_tokens;
    stats_.token_sweeps += stats.token_sweeps;
    stats_.windows += stats.windows;
    stats_.fallbacks += stats.fallbacks;
    if (!go_on) break;
  }
  return scores;
}

}  // namespace mmrec
