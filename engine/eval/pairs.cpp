// Tokens of documents and pairs, and the score of a pair.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <stdexcept>

#include "engine/require.h"
#include "mmrec/errors.h"
#include "mmrec/evaluation.h"
#include "models/files/utf8.h"

namespace mmrec {
namespace {

/// Python's text.rstrip().
std::string_view without_trailing_space(std::string_view text) {
  while (!text.empty()) {
    std::size_t last = text.size() - 1;
    while (last > 0 && models::is_continuation(text[last])) --last;
    const models::Utf8Unit unit = models::first_unit(text.substr(last));
    if (unit.length != text.size() - last || !models::is_python_space(unit.code)) break;
    text.remove_suffix(unit.length);
  }
  return text;
}

}  // namespace

std::optional<int> prefix_token(const Tokenizer& tokenizer) {
  const int token = tokenizer.bos_id() >= 0 ? tokenizer.bos_id() : tokenizer.eos_id();
  return token >= 0 ? std::optional(token) : std::nullopt;
}

std::vector<int> with_prefix(const Tokenizer& tokenizer, std::vector<int> ids) {
  if (const auto prefix = prefix_token(tokenizer)) ids.insert(ids.begin(), *prefix);
  return ids;
}

std::vector<PairTokens> encode_pairs(const Tokenizer& tokenizer, std::span<const TextPair> pairs, bool add_bos,
                                     std::int64_t max_length, int threads) {
  if (add_bos && tokenizer.bos_id() < 0) throw std::invalid_argument("add_bos: the tokenizer has no BOS");
  engine::require(max_length >= 0, "max_length: found {}, expected at least 0", max_length);
  std::vector<std::string_view> texts;
  for (const TextPair& pair : pairs) {
    texts.push_back(without_trailing_space(pair.text.substr(0, pair.context)));
    texts.push_back(pair.text);
  }
  const auto ids = tokenizer.encode_batch(texts, false, threads);
  std::vector<PairTokens> found;
  for (std::size_t i = 0; i < ids.size(); i += 2) {
    const std::vector<int>& context = ids[i];
    const std::vector<int>& both = ids[i + 1];
    std::vector<int> joined;
    joined.reserve(both.size() + 1);
    if (context.empty()) {
      // Without a context the two share nothing, not even what the tokenizer puts first.
      if (const auto prefix = prefix_token(tokenizer)) joined.push_back(*prefix);
    } else {
      if (add_bos) joined.push_back(tokenizer.bos_id());
      joined.insert(joined.end(), context.begin(), context.end());
    }
    const std::size_t length = joined.size();
    engine::require(length != 0, "context: found no tokens, expected some, as the tokenizer has neither BOS nor EOS");
    for (std::size_t t = context.size(); t < both.size(); ++t) joined.push_back(both[t]);
    const auto kept = static_cast<std::size_t>(max_length) + 1;
    const std::size_t cut = max_length == 0 ? 0 : joined.size() - std::min(joined.size(), kept);
    if (cut >= length) {
      throw std::invalid_argument(fmt::format("max_length: found {}, expected at least the {} tokens of a continuation",
                                              max_length, joined.size() - length));
    }
    joined.erase(joined.begin(), joined.begin() + static_cast<std::ptrdiff_t>(cut));
    found.push_back({std::move(joined), length - cut});
  }
  return found;
}

PairScore score_pair(std::span<const float> logprobs, std::int64_t vocab_size) {
  constexpr float kMargin = 1e-3F;  // far above the error of a log-prob
  const float least = -std::log(static_cast<float>(vocab_size)) - kMargin;
  const float surely = -std::numbers::ln2_v<float> + kMargin;
  PairScore score{.is_greedy = true};
  for (std::size_t t = 0; t < logprobs.size(); ++t) {
    const float logprob = logprobs[t];
    if (!std::isfinite(logprob)) {
      throw NumericError(fmt::format("log-prob of token {} of the continuation is not finite (found {})", t, logprob));
    }
    score.loglikelihood += static_cast<double>(logprob);
    if (logprob < least) score.is_greedy = false;
    if (logprob <= surely && score.is_greedy == true) score.is_greedy.reset();
  }
  return score;
}

}  // namespace mmrec
