#include "apps/ppl/score.h"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <exception>
#include <limits>
#include <optional>
#include <span>
#include <utility>

#include "apps/common/cli.h"
#include "apps/common/stopwatch.h"
#include "mmrec/errors.h"
#include "mmrec/generator.h"

namespace mmrec::apps {
namespace {

/// A document whose windows are being scored.
struct InWork {
  ScoredDocument scored;
  Windows windows;
  std::size_t cut = 0;     // windows that the scorer was given
  std::size_t joined = 0;  // windows that have a score
};

class CorpusScoring {
 public:
  CorpusScoring(const WindowOptions& windows, Corpus& corpus, Progress& progress, PerplexityAccumulator& sums,
                const DocumentSinks& sinks)
      : windows_(windows), corpus_(corpus), progress_(progress), sums_(sums), sinks_(sinks) {}

  Scored run(const std::vector<Model>& models, ScorerOptions options) {
    options.on_progress = [&](std::int64_t tokens, double nll) {
      done_.tokens_done += tokens;
      if (windows_.mode == WindowMode::kFull) done_.running.add(tokens, nll);
      progress_.update(done_.tokens_done, expected_tokens(),
                       PerplexityEstimate{done_.running.ppl(), done_.running.standard_error()});
      return interrupt_exit_code() == 0;
    };
    Scorer scorer(models, options);
    const Stopwatch watch;
    const bool is_whole = scorer.score_parts([&](std::vector<int>& ids, bool& goes_on) { return next(ids, goes_on); },
                                             [&](std::size_t, std::vector<int>& ids, DocumentScore& score) {
                                               join(ids, score);
                                               return true;
                                             });
    done_.seconds = watch.seconds();
    done_.interrupted = (!is_whole && !fault_) || interrupt_exit_code() != 0;
    if (fault_ && !done_.interrupted) std::rethrow_exception(fault_);
    done_.summary = sums_.summary();
    done_.prefill = scorer.prefill_stats();
    return done_;
  }

 private:
  /// The next window, or a part of one.
  bool next(std::vector<int>& ids, bool& goes_on) {
    const Stopwatch watch;
    bool has_next = false;
    try {
      has_next = goes_on_ ? cut_more(ids) : cut(ids);
    } catch (...) {
      fault_ = std::current_exception();  // when what came before is done
    }
    done_.read_seconds += watch.seconds();
    goes_on = goes_on_;
    return has_next;
  }

  bool cut_more(std::vector<int>& ids) {
    if (fault_ || interrupt_exit_code() != 0) return false;
    Document& document = in_work_.back().scored.document;
    corpus_.more(document, ids);
    goes_on_ = document.goes_on;
    evaluated_ += std::ssize(ids);
    return true;
  }

  bool cut(std::vector<int>& ids) {
    if (fault_) return false;
    if (in_work_.empty() || in_work_.back().cut == in_work_.back().windows.size()) {
      std::optional<Document> document = corpus_.next();
      if (!document) return false;
      goes_on_ = document->goes_on;
      const std::size_t tokens = document->ids.size();
      if (tokens > 1 && tokens < windows_.least_tokens()) {
        throw RejectedFile(fmt::format(
            "{}: too short for --mode {} --window {} (found {} tokens, expected at least {}). Try: a smaller "
            "--window, or --mode full",
            document->name, to_string(windows_.mode), windows_.window, tokens, windows_.least_tokens()));
      }
      in_work_.push_back({{.document = std::move(*document)}, Windows(windows_, tokens)});
      const Windows& windows = in_work_.back().windows;
      for (std::size_t i = 0; i < windows.size(); ++i) {
        evaluated_ += static_cast<std::int64_t>(std::max<std::size_t>(windows[i].end - windows[i].begin, 1)) - 1;
      }
    }
    InWork& work = in_work_.back();
    std::vector<int>& all = work.scored.document.ids;
    // The only window takes the ids with it, so that a long document is held once.
    ids = windows_.mode == WindowMode::kFull ? std::exchange(all, {}) : work.windows.ids(work.cut, all);
    ++work.cut;
    return true;
  }

  void join(std::vector<int>& ids, DocumentScore& score) {
    InWork& work = in_work_.front();
    // Only now are all tokens of a document in parts known.
    if (windows_.mode == WindowMode::kFull) work.windows = Windows(windows_, ids.size());
    const Window window = work.windows[work.joined++];
    DocumentScore& joined = work.scored.score;
    if (windows_.mode == WindowMode::kFull) {
      work.scored.document.ids = std::move(ids);
      joined = std::move(score);
    } else {
      const auto begin = score.logprobs.end() - static_cast<std::ptrdiff_t>(window.scored);
      joined.logprobs.insert(joined.logprobs.end(), begin, score.logprobs.end());
      double nll = 0.0;
      for (auto at = begin; at != score.logprobs.end(); ++at) nll -= static_cast<double>(*at);
      joined.nll += nll;
      done_.running.add(std::ssize(score.logprobs) - (begin - score.logprobs.begin()), nll);
    }
    std::vector<Span>& spans = work.scored.spans;
    const std::size_t first = window.end - window.scored;
    if (!spans.empty() && spans.back().first + spans.back().count == first) {
      spans.back().count += window.scored;
    } else if (window.scored > 0) {
      spans.push_back({first, window.scored});
    }
    if (work.joined < work.windows.size()) return;
    finish(work.scored);
    in_work_.pop_front();
  }

  void finish(const ScoredDocument& scored) {
    const Document& document = scored.document;
    scored.for_each_token([&](std::size_t position, int, float logprob) {
      if (!std::isfinite(logprob)) {
        throw NumericError(
            fmt::format("{}: log-prob of token {} is not finite (found {})", document.name, position, logprob));
      }
    });
    const bool is_empty = scored.score.logprobs.empty();
    if (is_empty) report_empty(document);
    // A document without a scored token is counted and otherwise left out: its bytes would dilute bits per byte.
    sums_.add(scored.score, is_empty ? 0 : std::max<std::int64_t>(document.bytes, 0),
              is_empty ? 0 : std::max<std::int64_t>(document.words, 0));
    for (const auto& sink : sinks_) sink->add(scored);
  }

  // One line each for the first few; the summary counts them all.
  void report_empty(const Document& document) {
    constexpr std::int64_t kMost = 10;
    const std::int64_t count = ++done_.empty_docs;
    progress_.clear();
    if (count <= kMost) warn(fmt::format("{}: 0 scored tokens", document.name));
    if (count == kMost) warn("further documents with 0 scored tokens are counted only");
  }

  /// Tokens that the model will have been given: windows may overlap.
  std::int64_t expected_tokens() const {
    if (corpus_.tokens() == 0) return 0;
    return static_cast<std::int64_t>(static_cast<double>(corpus_.expected_tokens()) * static_cast<double>(evaluated_) /
                                     static_cast<double>(corpus_.tokens()));
  }

  const WindowOptions& windows_;
  Corpus& corpus_;
  Progress& progress_;
  PerplexityAccumulator& sums_;
  const DocumentSinks& sinks_;
  std::deque<InWork> in_work_;  // in order
  bool goes_on_ = false;        // the last document has more tokens
  std::int64_t evaluated_ = 0;
  std::exception_ptr fault_;
  Scored done_;
};

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

void RunningPerplexity::add(std::int64_t tokens, double nll) {
  if (tokens == 0) return;
  const auto n = static_cast<double>(tokens);
  ++parts_;
  tokens_ += n;
  nll_ += nll;
  squares_ += nll * nll;
  products_ += n * nll;
  token_squares_ += n * n;
}

double RunningPerplexity::standard_error() const {
  if (parts_ < 2) return std::numeric_limits<double>::quiet_NaN();
  const double mean = nll_ / tokens_;
  const double square = squares_ - 2.0 * mean * products_ + mean * mean * token_squares_;
  return ppl() * std::sqrt(std::max(square, 0.0) * parts_ / (parts_ - 1.0)) / tokens_;
}

Scored score_corpus(const std::vector<Model>& models, ScorerOptions options, const WindowOptions& windows,
                    Corpus& corpus, Progress& progress, PerplexityAccumulator& sums, const DocumentSinks& sinks) {
  return CorpusScoring(windows, corpus, progress, sums, sinks).run(models, std::move(options));
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
    std::vector<std::vector<int>> documents;
    documents.reserve(pairs.size());
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
