// Scoring documents: log-probs, perplexity and the field's other measures.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "mmrec/export.h"
#include "mmrec/model.h"

namespace mmrec {

/// How a Scorer computes, and how it is watched.
struct ScorerOptions {
  /// Documents scored together at most, each with a state of its own; 0: as many as suit the device and the memory it
  /// has free, up to some 260,000 tokens; fewer where memory does not suffice. 0..65536. A document of more tokens is
  /// scored alone.
  int batch = 0;
  SessionOptions session = {};  ///< of the sessions that score
  /// Of an mmrec-jax model with a memory bank: score by calls as long as the bank (Calls::kWhole), in which log-probs
  /// are given later tokens too, rather than token by token. For reference data: what comes out is no perplexity.
  bool whole_calls = false;
  /// Called between chunks and after the last one of each batch, with the tokens scored since the last call and their
  /// summed negative log-likelihood (natural log). Returning false cancels: the next chunk is the last, and score()
  /// then returns what is finished. A chunk is what CallOptions (session.h) says, of all documents scored together.
  /// Several devices, and a GPU that score_stream() uses, do not wait for the answer, so a chunk more of each may
  /// follow. Must not use sessions of the model.
  std::function<bool(std::int64_t tokens, double nll)> on_progress = {};
};

/// Log-probs of one document.
struct DocumentScore {
  std::vector<float> logprobs;  ///< of tokens 1..T-1 given all before, fewer where cancelled; empty for T < 2
  double nll = 0.0;             ///< −Σ logprobs, summed in order in fp64
  bool complete = false;        ///< whether all of its tokens were scored
};

/// Scores whole documents exactly, each token once: a recurrent model needs no window. Not thread-safe; callbacks are
/// called in the thread that calls.
///
/// On several devices, each device has a thread that scores the next group of documents when the device is free. A GPU
/// whose documents come one by one has such a thread, too. Scores and their order do not depend on the number of
/// devices: the groups do not, unless memory falls short.
class MMREC_EXPORT Scorer {
 public:
  /// On the model's device. Throws std::invalid_argument for a batch out of range.
  explicit Scorer(Model model, ScorerOptions options = {});
  /// On all devices of `models`, which are one model, as from Model::load_on_gpus. Throws std::invalid_argument where
  /// there is none, or where they differ in fingerprint, device, precision or calls, and as above.
  explicit Scorer(std::vector<Model> models, ScorerOptions options = {});

  /// Documents as token ids, of any lengths; the first token of each is context only. Results in the order given; a
  /// document's score does not depend on the others nor on `batch` beyond what docs/numerics.md states. Blocks until
  /// all are scored. Throws std::invalid_argument naming document and index for an id outside the vocabulary, before
  /// anything is scored; std::bad_alloc, std::system_error where CUDA fails, and what the callback throws.
  std::vector<DocumentScore> score(std::span<const std::vector<int>> documents);

  /// The callbacks of a stream, which the functions below describe.
  using OnScore = std::function<bool(std::size_t document, std::vector<int>& ids, DocumentScore& score)>;
  using NextPart = std::function<bool(std::vector<int>& ids, bool& goes_on)>;  ///< likewise

  /// The same of documents that come one by one and go as they are scored, so that memory does not grow with the
  /// corpus: next() fills in the next document's ids and returns whether there was one; on_score() receives the number
  /// of a document, from 0, its ids and its score, in the order in which they came, and returns whether to go on.
  /// A document is handed over as soon as it and all before it are scored. Documents are read ahead, so that what is
  /// scored together is alike: kReadAheadTokens and a document at most, and eight times what is scored together (on a
  /// CPU 8 x 32 documents). For each GPU and each of several devices twice as much is read besides, so that none waits
  /// for documents and one that takes long holds nobody up before that.
  /// Cancelled by on_score() or on_progress it returns false, and documents that are not complete are not handed over.
  /// Throws as score() does, an id's error naming the document's number; that and what next() throws when all that was
  /// read ahead before is scored and handed over, and nothing that was read ahead with it is.
  bool score_stream(const std::function<bool(std::vector<int>& ids)>& next, const OnScore& on_score);
  /// The same of documents that may come in parts: next() fills in the next part of a document and sets `goes_on`,
  /// which is false before, if another part follows. A document of more than some 260,000 tokens is then scored while
  /// the rest of it comes, if the model's results do not depend on calls. Scores are to the bit those of whole
  /// documents. Where next() returns false although the document goes on, or throws, that document is dropped; in the
  /// first case score_parts() returns false, when all before it is handed over.
  bool score_parts(const NextPart& next, const OnScore& on_score);
  /// Tokens that score_stream() reads ahead at most.
  static constexpr std::size_t kReadAheadTokens = std::size_t{1} << 20;

  /// What prefilling has cost so far.
  PrefillStats prefill_stats() const { return stats_; }

 private:
  std::vector<Model> models_;
  ScorerOptions options_;
  PrefillStats stats_;
};

/// Corpus measures as lm-evaluation-harness defines them: sums over documents, natural logarithm.
struct PerplexitySummary {
  std::int64_t docs = 0;       ///< documents, those without a token to score among them
  std::int64_t tokens = 0;     ///< scored tokens
  double nll = 0.0;            ///< summed negative log-likelihood, in nats
  double ppl = 0.0;            ///< exp(nll / tokens)
  double ppl_stderr = 0.0;     ///< standard error of ppl from the spread of per-token log-probs (delta method)
  std::int64_t bytes = 0;      ///< of the original input
  std::int64_t words = 0;      ///< fields of re.split(r"\s+", document)
  double bits_per_byte = 0.0;  ///< nll / bytes / ln 2
  double word_ppl = 0.0;       ///< exp(nll / words)
  double byte_ppl = 0.0;       ///< exp(nll / bytes)
  double nll_m2 = 0.0;         ///< Σ (−logprob − mean)²: with it and the sums above parts of a corpus add up
};

/// len(re.split(r"\s+", text)) with Python's Unicode white space.
MMREC_EXPORT std::int64_t count_words(std::string_view text);

/// What corpus measures need of a document's log-probs.
struct DocumentSums {
  std::int64_t tokens = 0;  ///< scored tokens
  double nll = 0.0;         ///< −Σ logprobs, in nats
  double nll_m2 = 0.0;      ///< Σ (−logprob − mean)², summed in order (Welford)
  /// exp(nll / tokens); NaN without tokens.
  MMREC_EXPORT double ppl() const;
};
/// Of log-probs in their order.
MMREC_EXPORT DocumentSums sums_of(const DocumentScore& score);

/// Accumulates documents in order; measures without a denominator (no tokens, no bytes) are NaN. Nothing but sums of
/// documents enters, so that those of parts of a corpus, added in the corpus' order, give its summary to the bit.
class MMREC_EXPORT PerplexityAccumulator {
 public:
  /// Adds a document of so many bytes and words; they may be 0 where nobody knows them.
  void add(const DocumentScore& score, std::int64_t bytes, std::int64_t words) { add(sums_of(score), bytes, words); }
  /// The same from sums: of one document, or of `docs` documents that were added up elsewhere (Chan's formula).
  void add(const DocumentSums& sums, std::int64_t bytes, std::int64_t words, std::int64_t docs = 1);
  /// The measures of all that was added.
  PerplexitySummary summary() const;

 private:
  PerplexitySummary sums_;
  double mean_ = 0.0;  // of −logprob so far
};

}  // namespace mmrec
