// Context and continuation: log p of a continuation given its context, and whether it is what greedy decoding gives, as
// lm-evaluation-harness' loglikelihood defines them.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "apps/ppl/corpus.h"
#include "mmrec/evaluation.h"
#include "mmrec/model.h"
#include "mmrec/scorer.h"
#include "mmrec/tokenizer.h"

namespace mmrec::apps {

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

/// Scores the pairs of a corpus; on_pair receives them in order, with is_greedy set. Memory does not grow with their
/// number. Throws NumericError for a log-prob that is not finite, and what `corpus` throws once all before is handed
/// over.
PairsDone score_pairs(const std::vector<Model>& models, const Tokenizer& tokenizer, const ScorerOptions& options,
                      Corpus& corpus, const std::function<void(const Document&, const PairScore&)>& on_pair);

}  // namespace mmrec::apps
