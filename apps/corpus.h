// The documents that mmrec-ppl scores, read as they are needed: a text is a document, or each line of token ids is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "apps/input.h"
#include "mmrec/tokenizer.h"

namespace mmrec::apps {

/// One document to score. bytes and words are those of the original input; -1 where the input was token ids.
struct Document {
  std::string name;
  std::vector<int> ids;
  std::int64_t bytes = -1;
  std::int64_t words = -1;
};

class Corpus {
 public:
  /// Of `files` in their order, "-" for stdin; as lines of ids where there is no tokenizer, which must live on. Throws
  /// for a file that cannot be read, as far as that shows before it is opened.
  Corpus(std::vector<std::string> files, const Tokenizer* tokenizer, std::int64_t vocab_size,
         std::function<void(std::string_view)> on_warning);

  /// The next document; none at the end, and after an interrupt. Throws std::runtime_error naming the file,
  /// RejectedFile naming line and index too.
  std::optional<Document> next();

  /// Tokens that are scored, of the documents so far.
  std::int64_t tokens() const { return tokens_; }
  bool is_at_end() const { return at_ == files_.size(); }
  /// Those of all documents: known at the end; before it judged by the bytes that are left, 0 where a pipe does not
  /// say.
  std::int64_t expected_tokens() const;

 private:
  std::optional<Document> next_text();
  std::optional<Document> next_ids();

  std::vector<std::string> files_;
  const Tokenizer* tokenizer_;
  std::int64_t vocab_size_;
  std::function<void(std::string_view)> on_warning_;
  std::size_t at_ = 0;               // the file that is read
  std::optional<LineReader> lines_;  // of it
  std::int64_t tokens_ = 0;
  std::uint64_t bytes_ = 0;  // of the files before it
  std::optional<std::uint64_t> all_bytes_ = 0;
};

}  // namespace mmrec::apps
