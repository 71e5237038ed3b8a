// The documents that mmrec-ppl scores, read as they are needed: files, parts of files, or lines of token ids.
//
// Documents are read some hundred KB ahead for each processor, and tokenized by all of them. A long text is tokenized
// in parts as its tokens are asked for.
//
// Must stay true: memory is that of the longest document and of these, whatever the size of a file that is split. Blank
// lines are no documents, however a file is split. What is malformed is one error that names FILE:LINE, found and
// expected, and comes when all documents before it have.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/common/input.h"
#include "apps/common/progress.h"
#include "mmrec/tokenizer.h"

namespace mmrec::apps {

class ResumeFilter;

/// One document to score. bytes and words are those of the document's text; -1 where the input was token ids.
struct Document {
  std::int64_t index = 0;     // among all documents of the input, from 0
  std::string name = {};      // FILE, or FILE:LINE of its first line
  std::uint64_t hash = 0;     // CRC-64 of the text, or of the token ids where the input was these
  std::vector<int> ids = {};  // the first is context only
  std::size_t context = 1;    // this many ids are context only
  std::int64_t bytes = -1;
  std::int64_t words = -1;
  bool goes_on = false;  // Corpus::more() has more ids
};

/// What of a file is a document.
enum class Split : std::uint8_t {
  kFile,   // all of it
  kLine,   // a line
  kBlank,  // lines up to a blank one
  kJsonl,  // a string in the JSON object of a line
  kIds,    // a line of token ids
  kPairs   // a line's JSON object of "context" and "continuation"
};

struct CorpusOptions {
  std::vector<std::string> files;        // in their order, "-" for stdin
  std::optional<Split> split;            // none: kJsonl of files that are named .jsonl, kFile of others
  std::string field = "text";            // of JSON objects
  const Tokenizer* tokenizer = nullptr;  // needed but for ids; must live on
  int threads = 0;                       // of the CPU that tokenize; 0: all
  bool has_prefix = false;  // prefix_token() stands before each text, instead of what the tokenizer puts there
  std::int64_t vocab_size = 0;
  std::size_t most_bytes = kMaxInputBytes;  // of a document's text, and of a line
  bool parts = false;                       // a long text's ids come in parts
  Progress* progress = nullptr;             // gives way to warnings and to the progress of a long text; must live on
  bool quiet = false;                       // without the latter
  /// Documents whose number leaves the remainder `shard` by `shards` are wanted. Others are counted, and neither
  /// tokenized nor, if they are files, read.
  std::int64_t shard = 0, shards = 1;
  /// Skips wanted documents: they are read but not tokenized. None: all are left. Must live on.
  ResumeFilter* resumed = nullptr;

  Split split_of(const std::string& file) const {
    return split.value_or(file.ends_with(".jsonl") ? Split::kJsonl : Split::kFile);
  }
};

class Corpus {
 public:
  /// Throws for a file that cannot be read, as far as that shows before it is opened.
  explicit Corpus(CorpusOptions options);

  /// The next document that is wanted; none at the end, and after an interrupt. Throws std::runtime_error naming the
  /// file, RejectedFile naming line, found and expected too.
  std::optional<Document> next();
  /// Appends to `ids` more ids of the last document, which goes on, and says in `document` whether it still does. Its
  /// words are counted with the last. Throws as next().
  void more(Document& document, std::vector<int>& ids);

  /// Tokens after the first of each document so far.
  std::int64_t tokens() const { return tokens_; }
  bool is_at_end() const { return is_read() && ready_.empty() && !long_; }
  /// Documents so far, wanted or not.
  std::int64_t documents() const { return index_; }
  /// Tokens of all documents: known at the end; before it judged by the bytes that are left, 0 where a pipe does not
  /// say.
  std::int64_t expected_tokens() const;

 private:
  /// A document whose text has no tokens yet.
  struct Read {
    Document document = {};
    std::string text = {};     // of a pair, both texts
    std::size_t context = 0;   // of a pair, how many bytes of these are the first text's
    std::int64_t invalid = 0;  // runs of bytes that are no UTF-8
  };

  /// A text whose ids come in parts.
  struct Long {
    Long(std::string of, const Tokenizer& tokenizer, int threads)
        : text(std::move(of)), encoder(tokenizer, text, true, threads) {}
    std::string text;
    StreamEncoder encoder;
    bool is_empty = true;
    std::int64_t tokens = 0;  // so far, after the first
  };

  static bool is_long(const Read& read) { return read.text.size() >= kLongText; }
  bool is_read() const { return at_ == options_.files.size(); }
  /// The next document of the file at hand; none at its end, and after an interrupt.
  std::optional<Read> read();
  std::optional<Read> read_file();
  std::optional<Read> read_part(Split split);
  bool is_next_wanted();
  /// Sets the hash of a document that was read; whether the document is to be scored.
  bool is_left(Read& read) const;
  /// Reads some documents and tokenizes them.
  void fill();
  void tokenize(std::span<Read> documents) const;
  /// How many it tokenized before the first that cannot be, which becomes `fault_`.
  std::size_t tokenize_until_fault(std::span<Read> documents);
  std::vector<int> tokens_of_long(std::string_view text) const;
  /// Makes a document of a text and its ids.
  void put(Read& read, std::vector<int> ids) const;

  CorpusOptions options_;
  int threads_;
  std::size_t at_ = 0;               // the file that is read
  std::optional<LineReader> lines_;  // of it
  std::int64_t index_ = 0;           // of the next document
  std::deque<Read> ready_;           // with tokens
  std::unique_ptr<Long> long_;       // of the last document, while it goes on
  std::exception_ptr fault_;         // for after these
  std::int64_t tokens_ = 0;
  std::int64_t read_tokens_ = 0;  // and those of what is ready
  std::uint64_t bytes_ = 0;       // of the files before it
  std::optional<std::uint64_t> all_bytes_ = 0;
};

/// The string `field` of one.
std::string string_field(const nlohmann::ordered_json& object, const std::string& field, const std::string& where);

}  // namespace mmrec::apps
