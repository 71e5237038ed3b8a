#include "apps/corpus.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "apps/cli.h"
#include "apps/json_text.h"
#include "apps/pairs.h"
#include "apps/progress.h"
#include "apps/signals.h"
#include "mmrec/scorer.h"

namespace mmrec::apps {
namespace {

using Json = nlohmann::ordered_json;

std::string_view without_return(std::string_view line) {
  if (line.ends_with('\r')) line.remove_suffix(1);
  return line;
}

std::string keys_of(const Json& object) {
  std::string keys;
  for (const auto& [key, value] : object.items()) keys += fmt::format("{}'{}'", keys.empty() ? "" : ", ", key);
  return keys.empty() ? "no field" : printable(keys.substr(0, 100));
}

}  // namespace

std::string string_field(const Json& object, const std::string& field, const std::string& where) {
  const auto value = object.find(field);
  if (value == object.end()) {
    throw RejectedFile(fmt::format("{}: no field '{}' (found {}, expected '{}')", where, printable(field),
                                   keys_of(object), printable(field)));
  }
  if (!value->is_string()) {
    throw RejectedFile(
        fmt::format("{}: field '{}' (found {}, expected a string)", where, printable(field), value->type_name()));
  }
  return value->get<std::string>();
}

Corpus::Corpus(CorpusOptions options) : options_(std::move(options)) {
  for (const std::string& file : options_.files) {
    const auto size = input_size(file);
    all_bytes_ = size && all_bytes_ ? std::optional(*all_bytes_ + *size) : std::nullopt;
  }
}

Split Corpus::split_of(const std::string& file) const {
  if (options_.split) return *options_.split;
  return file.ends_with(".jsonl") ? Split::kJsonl : Split::kFile;
}

std::optional<Document> Corpus::next() {
  while (!is_at_end()) {
    const Split split = split_of(options_.files[at_]);
    std::optional<Document> document = split == Split::kFile ? next_file() : next_part(split);
    if (document && interrupt_exit_code() == 0) {  // else it may have been cut short
      tokens_ += std::max<std::int64_t>(std::ssize(document->ids) - 1, 0);
      return document;
    }
    if (interrupt_exit_code() != 0) return std::nullopt;
  }
  return std::nullopt;
}

bool Corpus::is_next_wanted(const std::string& name) {
  const std::int64_t index = index_++;
  return !options_.is_wanted || options_.is_wanted(index, name);
}

std::optional<Document> Corpus::next_file() {
  const std::string& file = options_.files[at_];
  Document document{.index = index_, .name = input_name(file)};
  if (!is_next_wanted(document.name)) {
    bytes_ += input_size(file).value_or(0);
    ++at_;
    return std::nullopt;
  }
  const std::string text = read_input(file);
  if (interrupt_exit_code() != 0) return std::nullopt;
  encode(document, text);
  bytes_ += text.size();
  ++at_;
  return document;
}

std::optional<std::string_view> Corpus::next_line() {
  for (;;) {
    const auto line = lines_->next();
    if (!line) return std::nullopt;
    if (!is_blank(*line)) return without_return(*line);
  }
}

std::optional<Document> Corpus::next_part(Split split) {
  const std::string& file = options_.files[at_];
  if (!lines_) lines_.emplace(file);
  while (const auto line = next_line()) {
    Document document{.index = index_, .name = fmt::format("{}:{}", input_name(file), lines_->lines())};
    const bool is_wanted = is_next_wanted(document.name);
    if (split == Split::kBlank) {
      std::string text(*line);
      for (auto more = lines_->next(); more && !is_blank(*more); more = lines_->next()) {
        if (is_wanted) text.append("\n").append(without_return(*more));
      }
      if (interrupt_exit_code() != 0) return std::nullopt;
      if (is_wanted) encode(document, text);
    } else if (is_wanted && split == Split::kIds) {
      document.ids = parse_ids(*line, document.name, options_.vocab_size);
    } else if (is_wanted && split == Split::kPairs) {
      const Json object = parse_object(*line, document.name);
      encode_pair(*options_.tokenizer, options_.prefix, string_field(object, "context", document.name),
                  string_field(object, "continuation", document.name), document);
      if (document.context == 0) {
        throw RejectedFile(fmt::format(
            "{}: field 'context' (found no tokens, expected some, as the tokenizer has neither BOS nor EOS)",
            document.name));
      }
    } else if (is_wanted) {
      encode(document, split == Split::kJsonl
                           ? string_field(parse_object(*line, document.name), options_.field, document.name)
                           : std::string(*line));
    }
    if (is_wanted) return document;
  }
  if (interrupt_exit_code() != 0) return std::nullopt;
  bytes_ += lines_->bytes();
  lines_.reset();
  ++at_;
  return std::nullopt;
}

void Corpus::encode(Document& document, std::string_view text) const {
  if (const auto runs = count_invalid_utf8(text); runs > 0) {
    options_.on_warning(fmt::format("{}: {} places are no UTF-8 and are read as U+FFFD", document.name, runs));
  }
  document.bytes = std::ssize(text);
  document.words = count_words(text);
  document.ids = options_.tokenizer->encode(text, !options_.prefix, [&](std::size_t bytes) {
    return text.size() < kLongText || !options_.on_encoding || options_.on_encoding(bytes, text.size());
  });
  if (options_.prefix) document.ids.insert(document.ids.begin(), *options_.prefix);
}

std::int64_t Corpus::expected_tokens() const {
  if (is_at_end()) return tokens_;
  const std::uint64_t done = bytes_ + (lines_ ? lines_->bytes() : 0);
  if (!all_bytes_ || done == 0) return 0;
  const auto all = static_cast<double>(std::max(*all_bytes_, done));
  return static_cast<std::int64_t>(static_cast<double>(tokens_) * all / static_cast<double>(done));
}

}  // namespace mmrec::apps
