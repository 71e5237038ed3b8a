// The rules of evaluation: tokens of documents and pairs, windows, scores of pairs, and the measures of a corpus.
#include "mmrec/evaluation.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "engine/require.h"
#include "mmrec/errors.h"
#include "mmrec/scorer.h"
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

double ratio(double numerator, std::int64_t denominator) {
  return denominator == 0 ? std::numeric_limits<double>::quiet_NaN() : numerator / static_cast<double>(denominator);
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
  engine::require(!add_bos || tokenizer.bos_id() >= 0, "add_bos: the tokenizer has no BOS");
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
    engine::require(cut < length, "max_length: found {}, expected at least the {} tokens of a continuation", max_length,
                    joined.size() - length);
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

WindowMode window_mode(std::string_view name) {
  const auto found = std::ranges::find(kWindowModeNames, name);
  engine::require(found != kWindowModeNames.end(), "mode: found {}, expected {}", name,
                  fmt::join(kWindowModeNames, ", "));
  return static_cast<WindowMode>(found - kWindowModeNames.begin());
}

Windows::Windows(const WindowOptions& options, std::size_t tokens) : options_(options), tokens_(tokens) {
  const auto mode = static_cast<std::size_t>(options.mode);
  engine::require(mode < kWindowModeNames.size(), "mode: found {}, expected a WindowMode", mode);
  const std::int64_t least = WindowOptions::least_window(options.mode);
  engine::require(options.window >= least, "window: found {}, expected at least {}", options.window, least);
  const bool is_strided = options.mode == WindowMode::kStrided;
  engine::require(!is_strided || (options.stride >= 1 && options.stride <= options.window),
                  "stride: found {}, expected 1..{}", options.stride, options.window);
  if (options.mode == WindowMode::kFull || tokens < 2) return;
  engine::require(tokens >= options.least_tokens(), "tokens: found {}, expected at least {}", tokens,
                  options.least_tokens());
  const auto window = static_cast<std::size_t>(options.window);
  const auto parts = [](std::size_t all, std::size_t part) { return all / part + (all % part != 0 ? 1 : 0); };
  if (options.mode == WindowMode::kRolling) {
    size_ = parts(tokens - 1, window);
  } else if (is_strided) {
    size_ = 1 + parts(tokens - std::min(tokens, window), static_cast<std::size_t>(options.stride));
  } else {
    size_ = tokens / window;
  }
}

Window Windows::operator[](std::size_t i) const {
  if (options_.mode == WindowMode::kFull || tokens_ < 2) return {0, tokens_, std::max<std::size_t>(tokens_, 1) - 1};
  const auto size = static_cast<std::size_t>(options_.window);
  if (options_.mode == WindowMode::kRolling) {
    const std::size_t scored = std::min(size, tokens_ - 1 - i * size);
    const std::size_t end = 1 + i * size + scored;
    return {end - std::min(end, size + 1), end, scored};
  }
  if (options_.mode == WindowMode::kStrided) {
    const auto stride = static_cast<std::size_t>(options_.stride);
    const std::size_t begin = i * stride;
    const std::size_t end = std::min(begin + size, tokens_);
    const std::size_t before = i == 0 ? 0 : begin - stride + size;
    return {begin, end, std::min(end - before, end - begin - 1)};
  }
  return {i * size, i * size + size, size - 1 - size / 2};
}

std::vector<int> Windows::ids(std::size_t i, std::span<const int> ids) const {
  const Window window = (*this)[i];
  const auto part = ids.subspan(window.begin, window.end - window.begin);
  std::vector<int> given(part.begin(), part.end());
  if (options_.repeats_first && !given.empty()) given.front() = ids.front();
  return given;
}

std::int64_t count_words(std::string_view text) {
  std::int64_t words = 1;  // re.split gives one field more than there are runs of white space, empty ones included
  bool in_space = false;
  while (!text.empty()) {
    const models::Utf8Unit unit = models::first_unit(text);
    const bool is_space = models::is_python_space(unit.code);
    if (is_space && !in_space) ++words;
    in_space = is_space;
    text.remove_prefix(unit.length);
  }
  return words;
}

double DocumentSums::ppl() const { return std::exp(ratio(nll, tokens)); }

DocumentSums sums_of(const DocumentScore& score) {
  DocumentSums sums{.nll = score.nll};
  double mean = 0.0;
  for (const float logprob : score.logprobs) {
    ++sums.tokens;
    const double nll = -static_cast<double>(logprob);
    const double delta = nll - mean;
    mean += delta / static_cast<double>(sums.tokens);
    sums.nll_m2 += delta * (nll - mean);
  }
  return sums;
}

void PerplexityAccumulator::add(const DocumentSums& sums, std::int64_t bytes, std::int64_t words, std::int64_t docs) {
  sums_.docs += docs;
  sums_.bytes += bytes;
  sums_.words += words;
  sums_.nll += sums.nll;
  if (sums.tokens == 0) return;
  const auto before = static_cast<double>(sums_.tokens);
  sums_.tokens += sums.tokens;
  const auto tokens = static_cast<double>(sums.tokens);
  const double share = tokens / static_cast<double>(sums_.tokens);
  const double delta = sums.nll / tokens - mean_;
  mean_ += delta * share;
  sums_.nll_m2 += sums.nll_m2 + delta * delta * before * share;
}

PerplexitySummary PerplexityAccumulator::summary() const {
  PerplexitySummary s = sums_;
  s.ppl = std::exp(ratio(s.nll, s.tokens));
  // d exp(m) = exp(m) dm, and the standard error of the mean m is sqrt(variance / tokens).
  s.ppl_stderr = s.tokens < 2 ? std::numeric_limits<double>::quiet_NaN()
                              : s.ppl * std::sqrt(ratio(ratio(s.nll_m2, s.tokens - 1), s.tokens));
  s.bits_per_byte = ratio(s.nll, s.bytes) / std::numbers::ln2;
  s.word_ppl = std::exp(ratio(s.nll, s.words));
  s.byte_ppl = std::exp(ratio(s.nll, s.bytes));
  return s;
}

}  // namespace mmrec
