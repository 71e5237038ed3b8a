#include "apps/ppl/pairs.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <span>

#include "apps/common/cli.h"
#include "apps/common/signals.h"
#include "mmrec/errors.h"
#include "mmrec/generator.h"

namespace mmrec::apps {
namespace {

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
      try {
        scores_[i] = score_pair(logprobs, vocab_size);
      } catch (const NumericError& error) {
        throw NumericError(fmt::format("{}: {}", pairs_[i].name, error.what()));
      }
      if (!scores_[i].is_greedy) open.push_back(i);
    }
    return open;
  }

  /// Greedy decoding from each context until it leaves the continuation: what it has then seen are the continuation's
  /// own tokens, so that each step's choice is that of the model given them.
  void decode(Generator& generator, std::span<const std::size_t> open) {
    for (const std::size_t i : open) {
      const Document& pair = pairs_[i];
      PairScore& score = scores_[i];
      score.is_greedy = true;
      GeneratorRequest request;
      request.prompt.assign(pair.ids.begin(), pair.ids.begin() + static_cast<std::ptrdiff_t>(pair.context));
      request.options.sampler.temperature = 0.0F;
      request.options.max_tokens = std::ssize(pair.ids) - static_cast<std::ptrdiff_t>(pair.context);
      request.options.logprobs = false;
      request.options.cancelled = [] { return interrupt_exit_code() != 0; };
      request.options.on_token = [&pair, &score, at = pair.context](int token, float) mutable {
        score.is_greedy = token == pair.ids[at++];
        return *score.is_greedy;
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
      done.greedy += *score.is_greedy && tokens > 0 ? 1 : 0;
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
