// Documents of a corpus through a scorer: cut into windows, scored, and put together again in their order. And pairs of
// context and continuation: log p of a continuation given its context, and whether greedy decoding gives it, as
// lm-evaluation-harness' loglikelihood defines them.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "apps/common/progress.h"
#include "apps/ppl/corpus.h"
#include "mmrec/evaluation.h"
#include "mmrec/model.h"
#include "mmrec/scorer.h"
#include "mmrec/tokenizer.h"

namespace mmrec::apps {

/// Positions [first, first + count) of a document.
struct Span {
  std::size_t first = 0;
  std::size_t count = 0;
};

/// A document with the log-probs of the tokens that count, of rising positions.
struct ScoredDocument {
  Document document = {};
  DocumentScore score = {};
  std::vector<Span> spans = {};  // the positions of these tokens

  /// visit(position, id, logprob) of each of them.
  template <class Visit>
  void for_each_token(Visit&& visit) const {
    std::size_t i = 0;
    for (const Span& span : spans) {
      for (std::size_t p = span.first; p < span.first + span.count; ++p, ++i) {
        visit(p, document.ids[p], score.logprobs[i]);
      }
    }
  }
};

/// Something that is made of scored documents: the report, --compare, --html and so on.
class DocumentSink {
 public:
  DocumentSink() = default;
  DocumentSink(const DocumentSink&) = delete;
  DocumentSink& operator=(const DocumentSink&) = delete;
  virtual ~DocumentSink() = default;
  /// The next document of the corpus.
  virtual void add(const ScoredDocument& scored) = 0;
  /// After the last one: what the summary says of it, an object; null for nothing.
  virtual nlohmann::ordered_json differences() { return nullptr; }
  /// After all: writes its file.
  virtual void finish(const nlohmann::ordered_json& /*summary*/) {}
};
using DocumentSinks = std::vector<std::unique_ptr<DocumentSink>>;

/// Perplexity so far and its standard error, judged by how much parts of a corpus differ (a ratio estimate over parts).
class RunningPerplexity {
 public:
  void add(std::int64_t tokens, double nll);
  double ppl() const { return std::exp(nll_ / tokens_); }
  /// NaN before the second part.
  double standard_error() const;

 private:
  double parts_ = 0, tokens_ = 0, nll_ = 0, squares_ = 0, products_ = 0, token_squares_ = 0;
};

struct Scored {
  PerplexitySummary summary;
  std::int64_t empty_docs = 0;
  PrefillStats prefill;
  bool interrupted = false;
  std::int64_t tokens_done = 0;  // that the model was given, also of what was interrupted
  double seconds = 0.0;          // from the first document's reading to the last one's score
  double read_seconds = 0.0;     // in which documents were read and tokenized; a GPU scores others meanwhile
  RunningPerplexity running;
};

/// Scores what `corpus` has and adds it to `sums` and to each of `sinks`, in order. What comes before a document that
/// cannot be read or is malformed is scored and handed over, then that is thrown. Throws NumericError for a log-prob
/// that is not finite.
Scored score_corpus(const std::vector<Model>& models, ScorerOptions options, const WindowOptions& windows,
                    Corpus& corpus, Progress& progress, PerplexityAccumulator& sums, const DocumentSinks& sinks);

struct PairsDone {
  std::int64_t pairs = 0;
  std::int64_t greedy = 0;
  std::int64_t empty = 0;    // continuations without tokens
  std::int64_t decoded = 0;  // pairs that needed decoding to tell whether they are greedy
  std::int64_t tokens = 0;   // of continuations
  double loglikelihood = 0.0;
  bool interrupted = false;
  PrefillStats prefill = {};
};

/// Scores the pairs of a corpus; on_pair receives them in order, with is_greedy set. Memory does not grow with their
/// number. Throws NumericError for a log-prob that is not finite, and what `corpus` throws once all before is handed
/// over.
PairsDone score_pairs(const std::vector<Model>& models, const Tokenizer& tokenizer, const ScorerOptions& options,
                      Corpus& corpus, const std::function<void(const Document&, const PairScore&)>& on_pair);

}  // namespace mmrec::apps
