// Context and continuation: log p of a continuation given its context, and whether it is what greedy decoding gives, as
// lm-evaluation-harness' loglikelihood defines them.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/ppl/corpus.h"
#include "mmrec/model.h"
#include "mmrec/scorer.h"
#include "mmrec/tokenizer.h"

namespace mmrec::apps {

struct PairScore {
  double loglikelihood = 0.0;  // of the continuation; 0 of one without tokens
  bool is_greedy = true;       // each token of it is the likeliest
};

/// The texts that are encoded: white space at the end of the context (Python's str.rstrip) begins the continuation.
std::pair<std::string, std::string> split_pair(std::string_view context, std::string_view continuation);

/// Both texts in tokens, of which `context` and `both` are those of the first and of both together, without BOS: the
/// latter, less as many tokens as the context alone has, after those of the context. A context without tokens is
/// `prefix`; without one either, document.context is 0. Sets ids and context of `document`.
void join_pair(const Tokenizer& tokenizer, std::optional<int> prefix, std::span<const int> context,
               std::span<const int> both, Document& document);

struct PairsDone {
  std::int64_t pairs = 0;
  std::int64_t greedy = 0;
  std::int64_t empty = 0;    // continuations without tokens
  std::int64_t decoded = 0;  // pairs of which log-probs alone did not tell whether they are greedy
  std::int64_t tokens = 0;   // of continuations
  double loglikelihood = 0.0;
  bool interrupted = false;
  PrefillStats prefill = {};
};

/// Scores the pairs of a corpus; on_pair receives them in order. Memory does not grow with their number. Throws
/// NumericError for a log-prob that is not finite, and what `corpus` throws once all before is handed over.
PairsDone score_pairs(const std::vector<Model>& models, const Tokenizer& tokenizer, const ScorerOptions& options,
                      Corpus& corpus, const std::function<void(const Document&, const PairScore&)>& on_pair);

}  // namespace mmrec::apps
