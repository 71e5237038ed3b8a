#include "apps/corpus.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "apps/signals.h"
#include "mmrec/scorer.h"

namespace mmrec::apps {

Corpus::Corpus(std::vector<std::string> files, const Tokenizer* tokenizer, std::int64_t vocab_size,
               std::function<void(std::string_view)> on_warning)
    : files_(std::move(files)), tokenizer_(tokenizer), vocab_size_(vocab_size), on_warning_(std::move(on_warning)) {
  for (const std::string& file : files_) {
    const auto size = input_size(file);
    all_bytes_ = size && all_bytes_ ? std::optional(*all_bytes_ + *size) : std::nullopt;
  }
}

std::optional<Document> Corpus::next() {
  std::optional<Document> document = tokenizer_ != nullptr ? next_text() : next_ids();
  if (document) tokens_ += std::max<std::int64_t>(std::ssize(document->ids) - 1, 0);
  return document;
}

std::optional<Document> Corpus::next_text() {
  if (is_at_end()) return std::nullopt;
  const std::string text = read_input(files_[at_]);
  if (interrupt_exit_code() != 0) return std::nullopt;
  Document document{input_name(files_[at_]), {}, std::ssize(text), count_words(text)};
  if (const auto runs = count_invalid_utf8(text); runs > 0) {
    on_warning_(fmt::format("{}: {} places are no UTF-8 and are read as U+FFFD", document.name, runs));
  }
  document.ids = tokenizer_->encode(text);
  bytes_ += text.size();
  ++at_;
  return document;
}

std::optional<Document> Corpus::next_ids() {
  for (; !is_at_end(); ++at_) {
    if (!lines_) lines_.emplace(files_[at_]);
    if (const auto line = lines_->next()) {
      Document document;
      document.name = fmt::format("{}:{}", input_name(files_[at_]), lines_->lines());
      document.ids = parse_ids(*line, document.name, vocab_size_);
      return document;
    }
    if (interrupt_exit_code() != 0) return std::nullopt;
    bytes_ += lines_->bytes();
    lines_.reset();
  }
  return std::nullopt;
}

std::int64_t Corpus::expected_tokens() const {
  if (is_at_end()) return tokens_;
  const std::uint64_t done = bytes_ + (lines_ ? lines_->bytes() : 0);
  if (!all_bytes_ || done == 0) return 0;
  const auto all = static_cast<double>(std::max(*all_bytes_, done));
  return static_cast<std::int64_t>(static_cast<double>(tokens_) * all / static_cast<double>(done));
}

}  // namespace mmrec::apps
