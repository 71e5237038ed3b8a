// The rules of evaluation: the tokens of a document and of a pair of texts, the tokens that each window scores, and
// what log-probs say of a continuation. mmrec-ppl and the Python package follow these rules and have none of their own.
// The measures of a corpus are in scorer.h.
//
// Must stay true: a window is a run of a document's tokens, and a suffix of it is scored. The suffixes of a document
// follow one another and never overlap.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "mmrec/export.h"
#include "mmrec/tokenizer.h"

namespace mmrec {

/// The token that lm-evaluation-harness puts before a text without context: BOS, or else EOS; none if the tokenizer has
/// neither.
MMREC_EXPORT std::optional<int> prefix_token(const Tokenizer& tokenizer);

/// The tokens [T] of a document for WindowMode::kRolling: the prefix token, if there is one, before `ids`, which are
/// the text's without BOS.
MMREC_EXPORT std::vector<int> with_prefix(const Tokenizer& tokenizer, std::vector<int> ids);

/// A context and its continuation: one text, of which the first `context` bytes are the context.
struct TextPair {
  std::string_view text;    ///< both texts, UTF-8
  std::size_t context = 0;  ///< bytes
};
/// The same in tokens.
struct PairTokens {
  std::vector<int> ids;     ///< [T]
  std::size_t context = 0;  ///< tokens of the context, at least 1; the others are the continuation
};
/// Pairs in tokens, as lm-evaluation-harness' loglikelihood defines them. Both texts are encoded together; the
/// continuation is what follows as many tokens as the context alone has. White space at the end of the context
/// (Python's str.rstrip) belongs to the continuation. BOS comes before a context if `add_bos`; a context without tokens
/// is the prefix token. The last max_length + 1 tokens of a pair are kept (0: all). `threads` of the CPU (0: all) share
/// the work. Throws std::invalid_argument where there is no prefix token, for `add_bos` without BOS, and for a
/// continuation of more than max_length tokens; and what Tokenizer::encode_batch throws.
MMREC_EXPORT std::vector<PairTokens> encode_pairs(const Tokenizer& tokenizer, std::span<const TextPair> pairs,
                                                  bool add_bos, std::int64_t max_length = 0, int threads = 0);

/// What log-probs say of a continuation.
struct PairScore {
  double loglikelihood = 0.0;     ///< in nats, summed in order in fp64; 0 without tokens
  std::optional<bool> is_greedy;  ///< whether each token is the likeliest; none: log-probs alone do not tell
};
/// From the log-probs of a continuation's tokens, in nats. A token of more than half of the probability is the
/// likeliest, one of less than 1 / vocab_size is not. Throws NumericError for a log-prob that is not finite.
MMREC_EXPORT PairScore score_pair(std::span<const float> logprobs, std::int64_t vocab_size);

/// How a document is cut into windows, so that figures can be compared with those of programs whose models see N tokens
/// at most. A recurrent model needs no windows: kFull is the exact figure.
enum class WindowMode : std::uint8_t {
  kFull,     ///< each token but the first, given all before it
  kRolling,  ///< as lm-evaluation-harness' loglikelihood_rolling: N predictions a window, each token but the first
             ///< once; the last window is filled up with context from its left
  kStrided,  ///< as Hugging Face's page on fixed-length models: N tokens, each window S tokens after the one before;
             ///< scored are tokens that no earlier window had, but never a window's first
  kLlama     ///< as llama-perplexity: chunks of N tokens; scored is what follows the first half and a token; the rest
             ///< at the end is dropped
};
/// Names of the modes, by value.
inline constexpr std::array<std::string_view, 4> kWindowModeNames = {"full", "rolling", "strided", "llama"};
/// The name of a mode.
constexpr std::string_view to_string(WindowMode mode) { return kWindowModeNames[static_cast<std::size_t>(mode)]; }
/// The mode of that name. Throws std::invalid_argument for another name.
MMREC_EXPORT WindowMode window_mode(std::string_view name);

/// A mode with its numbers.
struct WindowOptions {
  WindowMode mode = WindowMode::kFull;  ///< how windows are cut
  std::int64_t window = 0;              ///< N, in tokens; kFull has none
  std::int64_t stride = 0;              ///< S, in tokens: 1..N; kStrided alone has one
  bool repeats_first = false;           ///< kLlama: the document's first token, BOS, replaces the first of each window

  /// The least N of a mode: below it windows score nothing.
  static constexpr std::int64_t least_window(WindowMode mode) {
    return mode == WindowMode::kFull ? 0 : mode == WindowMode::kRolling ? 1 : mode == WindowMode::kStrided ? 2 : 4;
  }
  /// The tokens that a document of more than one token needs: two chunks of kLlama.
  std::size_t least_tokens() const { return mode == WindowMode::kLlama ? 2 * static_cast<std::size_t>(window) : 0; }
  /// Whether every token but a document's first is scored.
  bool scores_all() const { return mode != WindowMode::kLlama && (mode != WindowMode::kStrided || stride < window); }
};

/// A run of a document's tokens.
struct Window {
  std::size_t begin = 0;   ///< the first token
  std::size_t end = 0;     ///< behind the last token
  std::size_t scored = 0;  ///< so many tokens before `end` are scored
};

/// The windows of a document, in order: at least one, which may score nothing.
class MMREC_EXPORT Windows {
 public:
  /// Of a document of `tokens` tokens. Throws std::invalid_argument for a mode, window or stride out of range, and for
  /// more than one token but fewer than least_tokens().
  Windows(const WindowOptions& options, std::size_t tokens);

  std::size_t size() const { return size_; }  ///< number of windows
  /// Window i < size().
  Window operator[](std::size_t i) const;
  /// What a model is given of window i of the document `ids` [tokens].
  std::vector<int> ids(std::size_t i, std::span<const int> ids) const;

 private:
  WindowOptions options_;
  std::size_t tokens_;
  std::size_t size_ = 1;
};

}  // namespace mmrec
