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

std::int64_t continuation_tokens(const Document& pair) {
  return std::ssize(pair.ids) - static_cast<std::int64_t>(pair.context);
}

/// Greedy decoding from the context of each open pair until it leaves the continuation: what it has then seen are the
/// continuation's own tokens, so that each step's choice is that of the model given them.
void decode(Generator& generator, const std::vector<Document>& pairs, std::vector<PairScore>& scores) {
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    const Document& pair = pairs[i];
    PairScore& score = scores[i];
    if (score.is_greedy) continue;
    score.is_greedy = true;
    GeneratorRequest request;
    request.prompt.assign(pair.ids.begin(), pair.ids.begin() + static_cast<std::ptrdiff_t>(pair.context));
    request.options.sampler.temperature = 0.0F;
    request.options.max_tokens = continuation_tokens(pair);
    request.options.logprobs = false;
    request.options.cancelled = [] { return interrupt_exit_code() != 0; };
    request.options.on_token = [&pair, &score, at = pair.context](int token, float) mutable {
      score.is_greedy = token == pair.ids[at++];
      return *score.is_greedy;
    };
    request.on_finish = [&pair](const GenerateResult& result) {
      if (result.finish_reason != FinishReason::kError) return;
      throw NumericError(fmt::format("{}: {}", pair.name, result.error));
    };
    generator.submit(std::move(request));
  }
  generator.run();
}

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
    std::vector<std::vector<int>> documents;
    for (const Document& pair : pairs) documents.push_back(pair.ids);
    const std::vector<DocumentScore> found = scorer.score(documents);
    const auto is_complete = [](const DocumentScore& score) { return score.complete; };
    if (interrupt_exit_code() != 0 || !std::all_of(found.begin(), found.end(), is_complete)) break;
    std::vector<PairScore> scores;
    std::int64_t open = 0;
    for (std::size_t i = 0; i < pairs.size(); ++i) {
      try {
        scores.push_back(
            score_pair(std::span(found[i].logprobs).subspan(pairs[i].context - 1), models.front().info().vocab_size));
      } catch (const NumericError& error) {
        throw NumericError(fmt::format("{}: {}", pairs[i].name, error.what()));
      }
      if (!scores.back().is_greedy) ++open;
    }
    if (open > 0 && !generator) generator.emplace(models, tokenizer, GeneratorOptions{.session = options.session});
    if (open > 0) decode(*generator, pairs, scores);
    if (interrupt_exit_code() != 0) break;
    done.decoded += open;
    for (std::size_t i = 0; i < pairs.size(); ++i) {
      const std::int64_t tokens = continuation_tokens(pairs[i]);
      ++done.pairs;
      done.tokens += tokens;
      done.greedy += *scores[i].is_greedy && tokens > 0 ? 1 : 0;
      done.empty += tokens == 0 ? 1 : 0;
      done.loglikelihood += scores[i].loglikelihood;
      constexpr std::int64_t kMostWarnings = 10;
      if (tokens == 0 && done.empty <= kMostWarnings) warn(fmt::format("{}: 0 scored tokens", pairs[i].name));
      on_pair(pairs[i], scores[i]);
    }
  }
  done.interrupted = interrupt_exit_code() != 0;
  if (fault && !done.interrupted) std::rethrow_exception(fault);
  done.prefill = scorer.prefill_stats();
  return done;
}

}  // namespace mmrec::apps
