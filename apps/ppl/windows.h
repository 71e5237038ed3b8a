// How a document is cut into what a model scores at once, so that figures can be set beside those of programs whose
// models see a window of N tokens at most. A recurrent model needs none of it: kFull is the exact figure.
//
// What must stay true: a window is some tokens of the document of which a suffix counts; the suffixes of a document
// follow one another and never overlap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace mmrec::apps {

enum class Mode : std::uint8_t {
  kFull,     // each token but the first, given all before it
  kRolling,  // as lm-evaluation-harness' loglikelihood_rolling: each token but the first, which is the prefix, once;
             // windows of N predictions that do not overlap, the last one filled up with context from its left
  kStrided,  // as Hugging Face's page on fixed-length models: windows of N tokens, each S after the one before, of
             // which those count that no window before had; the first of a window has nothing before it and never does
  kLlama     // as llama-perplexity: chunks of N tokens, BOS in the first place of each; those after the first half and
             // a token count; what is left at the end is dropped
};

struct WindowOptions {
  Mode mode = Mode::kFull;
  std::int64_t window = 0;     // N of the modes above; kFull has none
  std::int64_t stride = 0;     // S; kStrided alone has one, 1..N
  bool repeats_first = false;  // kLlama: the document's first token, which is BOS, stands first in each chunk

  /// Whether every token but a document's first counts.
  bool scores_all() const { return mode != Mode::kLlama && (mode != Mode::kStrided || stride < window); }
};

/// Tokens [begin, end) of a document; the last `scored` of them count.
struct Window {
  std::size_t begin = 0;
  std::size_t end = 0;
  std::size_t scored = 0;
};

/// The windows of one document, in order: at least one, which may score nothing.
class Windows {
 public:
  /// Of a document of `tokens` tokens. Throws RejectedFile naming `name` where kLlama would score nothing: fewer than
  /// two chunks, as llama-perplexity does.
  Windows(const WindowOptions& options, std::size_t tokens, const std::string& name);

  std::optional<Window> next();
  /// All of them, and the tokens after the first of each.
  std::size_t count() const { return count_; }
  std::int64_t evaluated() const { return evaluated_; }

 private:
  std::optional<Window> cut();

  WindowOptions options_;
  std::size_t tokens_;
  std::size_t begin_ = 0;  // of the next window, or of the next tokens to count
  bool is_over_ = false;
  std::size_t count_ = 0;
  std::int64_t evaluated_ = 0;
};

/// What a model is given of a window of the document `ids`.
std::vector<int> ids_of(const Window& window, std::span<const int> ids, const WindowOptions& options);

}  // namespace mmrec::apps
