#include "apps/ppl/pairs.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <exception>
#include <numbers>
#include <optional>
#include <span>

#include "apps/common/cli.h"
#include "apps/common/signals.h"
#include "mmrec/errors.h"
#include "mmrec/generator.h"

namespace mmrec::apps {
namespace {

/// Bytes of the white space that `text` ends with, one character; 0 if it ends with none.
std::size_t trailing_space(std::string_view text) {
  // Beyond ASCII str.isspace() is true of these alone.
  constexpr std::array<std::string_view, 19> kSpaces = {
      "\u0085", "\u00a0", "\u1680", "\u2000", "\u2001", "\u2002", "\u2003", "\u2004", "\u2005", "\u2006",
      "\u2007", "\u2008", "\u2009", "\u200a", "\u2028", "\u2029", "\u202f", "\u205f", "\u3000"};
  if (text.empty()) return 0;
  const char last = text.back();
  if ((last >= '\t' && last <= '\r') || (last >= '\x1c' && last <= ' ')) return 1;
  for (const std::string_view space : kSpaces) {
    if (text.ends_with(space)) return space.size();
  }
  return 0;
}

/// What log-probs alone tell of whether a continuation is greedy. A token of more than half of the probability is the
/// likeliest, one of less than its share of the vocabulary is not.
std::optional<bool> greedy_by_logprobs(std::span<const float> logprobs, std::int64_t vocab_size) {
  constexpr float kMargin = 1e-3F;  // far above the error of a log-prob
  const float least = -std::log(static_cast<float>(vocab_size)) - kMargin;
  const float surely = -std::numbers::ln2_v<float> + kMargin;
  if (std::any_of(logprobs.begin(), logprobs.end(), [&](float p) { return p < least; })) return false;
  if (std::all_of(logprobs.begin(), logprobs.end(), [&](float p) { return p > surely; })) return true;
  return std::nullopt;
}

/// Pairs that are scored together.
class Block {
 public:
  Block(std::vector<Document> pairs, Scorer& scorer) : pairs_(std::move(pairs)) {
    std::vector<std::vector<int>> documents;
    for (const Document& pair : pairs_) documents.push_back(pair.ids);
    found_ = scorer.score(documents);
    scores_.resize(pairs_.size());
  }
  bool is_complete() const {
    return std::all_of(found_.begin(), found_.end(), [](const DocumentScore& score) { return score.complete; });
  }

  /// The pairs that have to be decoded.
  std::vector<std::size_t> judge(std::int64_t vocab_size) {
    std::vector<std::size_t> open;
    for (std::size_t i = 0; i < pairs_.size(); ++i) {
      const auto logprobs = std::span(found_[i].logprobs).subspan(pairs_[i].context - 1);
      double sum = 0.0;
      for (std::size_t t = 0; t < logprobs.size(); ++t) {
        if (!std::isfinite(logprobs[t])) {
          throw NumericError(fmt::format("{}: log-prob of token {} of the continuation is not finite (found {})",
                                         pairs_[i].name, t, logprobs[t]));
        }
        sum += static_cast<double>(logprobs[t]);
      }
      const auto greedy = greedy_by_logprobs(logprobs, vocab_size);
      scores_[i] = {sum, greedy.value_or(true)};
      if (!greedy) open.push_back(i);
    }
    return open;
  }

  /// Greedy decoding from each context until it leaves the continuation: what it has then seen are the continuation's
  /// own tokens, so that each step's choice is that of the model given them.
  void decode(Generator& generator, std::span<const std::size_t> open) {
    for (const std::size_t i : open) {
      const Document& pair = pairs_[i];
      PairScore& score = scores_[i];
      GeneratorRequest request;
      request.prompt.assign(pair.ids.begin(), pair.ids.begin() + static_cast<std::ptrdiff_t>(pair.context));
      request.options.sampler.temperature = 0.0F;
      request.options.max_tokens = std::ssize(pair.ids) - static_cast<std::ptrdiff_t>(pair.context);
      request.options.logprobs = false;
      request.options.cancelled = [] { return interrupt_exit_code() != 0; };
      request.options.on_token = [&pair, &score, at = pair.context](int token, float) mutable {
        score.is_greedy = token == pair.ids[at++];
        return score.is_greedy;
      };
      request.on_finish = [&pair](const GenerateResult& result) {
        if (result.finish_reason == FinishReason::kError) {
          throw NumericError(fmt::format("{}: {}", pair.name, result.error));
        }
      };
      generator.submit(std::move(request));
    }
    generator.run();
  }

  const std::vector<Document>& pairs() const { return pairs_; }
  const std::vector<PairScore>& scores() const { return scores_; }

 private:
  std::vector<Document> pairs_;
  std::vector<DocumentScore> found_;
  std::vector<PairScore> scores_;
};

}  // namespace

std::pair<std::string, std::string> split_pair(std::string_view context, std::string_view continuation) {
  std::string_view kept = context;
  while (const std::size_t size = trailing_space(kept)) kept.remove_suffix(size);
  return {std::string(kept), std::string(context.substr(kept.size())).append(continuation)};
}

void join_pair(const Tokenizer& tokenizer, std::optional<int> prefix, std::span<const int> context,
               std::span<const int> both, Document& document) {
  std::vector<int>& ids = document.ids;
  ids.clear();
  // Without a context the two share nothing, not even what the tokenizer puts first.
  if (!context.empty() && tokenizer.adds_bos()) ids.push_back(tokenizer.bos_id());
  ids.insert(ids.end(), context.begin(), context.end());
  if (ids.empty() && prefix) ids.push_back(*prefix);
  document.context = ids.size();
  const auto continuation = both.subspan(std::min(context.size(), both.size()));
  ids.insert(ids.end(), continuation.begin(), continuation.end());
}

PairsDone score_pairs(const std::vector<Model>& models, const Tokenizer& tokenizer, const ScorerOptions& options,
                      Corpus& corpus, const std::function<void(const Document&, const PairScore&)>& on_pair) {
  constexpr std::size_t kMostPairs = std::size_t{1} << 12;
  constexpr std::size_t kMostTokens = std::size_t{1} << 18;
  PairsDone done;
  Scorer scorer(models, options);
  std::optional<Generator> generator;
  std::exception_ptr fault;
  for (bool is_at_end = false; !is_at_end && interrupt_exit_code() == 0;) {
    std::vector<Document> pairs;
    try {
      for (std::size_t tokens = 0; pairs.size() < kMostPairs && tokens < kMostTokens;) {
        std::optional<Document> pair = corpus.next();
        is_at_end = !pair;
        if (is_at_end) break;
        tokens += pair->ids.size();
        pairs.push_back(std::move(*pair));
      }
    } catch (...) {
      fault = std::current_exception();
      is_at_end = true;
    }
    Block block(std::move(pairs), scorer);
    if (interrupt_exit_code() != 0 || !block.is_complete()) break;
    const auto open = block.judge(models.front().info().vocab_size);
    if (!open.empty() && !generator) generator.emplace(models, tokenizer, GeneratorOptions{.session = options.session});
    if (!open.empty()) block.decode(*generator, open);
    if (interrupt_exit_code() != 0) break;
    done.decoded += std::ssize(open);
    for (std::size_t i = 0; i < block.pairs().size(); ++i) {
      const Document& pair = block.pairs()[i];
      const PairScore& score = block.scores()[i];
      const std::int64_t tokens = std::ssize(pair.ids) - static_cast<std::int64_t>(pair.context);
      ++done.pairs;
      done.tokens += tokens;
      done.greedy += score.is_greedy && tokens > 0 ? 1 : 0;
      done.empty += tokens == 0 ? 1 : 0;
      done.loglikelihood += score.loglikelihood;
      constexpr std::int64_t kMostWarnings = 10;
      if (tokens == 0 && done.empty <= kMostWarnings) warn(fmt::format("{}: 0 scored tokens", pair.name));
      on_pair(pair, score);
    }
  }
  done.interrupted = interrupt_exit_code() != 0;
  if (fault && !done.interrupted) std::rethrow_exception(fault);
  done.prefill = scorer.prefill_stats();
  return done;
}

}  // namespace mmrec::apps
