#include "apps/ppl/corpus.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "apps/common/cli.h"
#include "apps/ppl/merge.h"
#include "kernels/cpu/thread_pool.h"
#include "mmrec/evaluation.h"
#include "mmrec/scorer.h"
#include "models/files/checksum.h"

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

std::int64_t scored_tokens(const Document& document) { return std::max<std::int64_t>(std::ssize(document.ids) - 1, 0); }

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

Corpus::Corpus(CorpusOptions options)
    : options_(std::move(options)),
      threads_(options_.threads > 0 ? options_.threads : kernels::ThreadPool::available_processors()) {
  for (const std::string& file : options_.files) {
    const auto size = input_size(file);
    all_bytes_ = size && all_bytes_ ? std::optional(*all_bytes_ + *size) : std::nullopt;
  }
}

std::optional<Document> Corpus::next() {
  if (ready_.empty() && !fault_) fill();
  if (interrupt_exit_code() != 0) return std::nullopt;
  if (ready_.empty()) {
    if (fault_) std::rethrow_exception(std::exchange(fault_, nullptr));
    return std::nullopt;
  }
  Read next = std::move(ready_.front());
  ready_.pop_front();
  if (next.invalid > 0) {
    options_.progress->clear();
    warn(invalid_utf8_warning(next.document.name, next.invalid));
  }
  Document& document = next.document;
  if (document.goes_on) {
    // Half of them, because a GPU's work needs as many to keep up (models/mmrec/cuda/staggered.h).
    const int threads = std::max(threads_ / 2, std::min(threads_, 4));
    long_ = std::make_unique<Long>(std::move(next.text), *options_.tokenizer, threads);
    more(document, document.ids);
  } else {
    tokens_ += scored_tokens(document);
  }
  return std::move(document);
}

void Corpus::more(Document& document, std::vector<int>& ids) {
  const std::int64_t before = std::ssize(ids);
  try {
    document.goes_on = long_->encoder.next(ids);
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(fmt::format("{}: {}", document.name, error.what()));
  }
  std::int64_t tokens = std::ssize(ids) - before;
  if (tokens > 0 && std::exchange(long_->is_empty, false)) --tokens;  // the first is context only
  tokens_ += tokens;
  read_tokens_ += tokens;
  long_->tokens += tokens;
  if (document.goes_on) return;
  document.words = count_words(long_->text);  // while the last tokens are scored
  long_.reset();
}

void Corpus::fill() {
  constexpr std::size_t kBytesOfAThread = std::size_t{256} << 10;  // a tenth of a second
  constexpr std::size_t kMostDocuments = std::size_t{1} << 12;
  const std::size_t most = kBytesOfAThread * static_cast<std::size_t>(threads_);
  std::vector<Read> documents;
  try {
    for (std::size_t bytes = 0; bytes < most && documents.size() < kMostDocuments && !is_read();) {
      std::optional<Read> document = read();
      if (interrupt_exit_code() != 0) return;  // it may have been cut short
      if (!document) continue;
      bytes += document->text.size() + document->document.ids.size() * sizeof(int);
      documents.push_back(std::move(*document));
      if (is_long(documents.back())) break;
    }
  } catch (...) {
    fault_ = std::current_exception();
  }
  const std::size_t done = tokenize_until_fault(documents);
  for (std::size_t i = 0; i < done; ++i) {
    const Document& document = documents[i].document;
    read_tokens_ += scored_tokens(document);
    if (!document.goes_on) documents[i].text = {};
    ready_.push_back(std::move(documents[i]));
  }
}

std::size_t Corpus::tokenize_until_fault(std::span<Read> documents) {
  try {
    tokenize(documents);
    return documents.size();
  } catch (...) {  // whose fault it was shows below
  }
  for (std::size_t i = 0; i < documents.size(); ++i) {
    try {
      tokenize(documents.subspan(i, 1));
      continue;
    } catch (const RejectedFile&) {  // names it
      fault_ = std::current_exception();
    } catch (const std::runtime_error& error) {
      fault_ =
          std::make_exception_ptr(std::runtime_error(fmt::format("{}: {}", documents[i].document.name, error.what())));
    } catch (...) {
      fault_ = std::current_exception();
    }
    return i;
  }
  return documents.size();
}

bool Corpus::is_next_wanted() {
  const std::int64_t index = index_++;
  return index % options_.shards == options_.shard;
}

bool Corpus::is_left(Read& read) const {
  Document& document = read.document;
  document.hash =
      models::crc64(read.text.empty() ? std::as_bytes(std::span(document.ids)) : std::as_bytes(std::span(read.text)));
  // An interrupt may have cut the text short. fill() drops it.
  return interrupt_exit_code() != 0 || options_.resumed == nullptr || options_.resumed->is_left(document);
}

std::optional<Corpus::Read> Corpus::read() {
  const Split split = options_.split_of(options_.files[at_]);
  return split == Split::kFile ? read_file() : read_part(split);
}

std::optional<Corpus::Read> Corpus::read_file() {
  const std::string& file = options_.files[at_];
  Read read{.document = {.index = index_, .name = input_name(file)}};
  const bool is_wanted = is_next_wanted();
  if (is_wanted) read.text = read_input(file, options_.most_bytes);
  bytes_ += is_wanted ? read.text.size() : input_size(file).value_or(0);
  ++at_;
  return is_wanted && is_left(read) ? std::optional(std::move(read)) : std::nullopt;
}

std::optional<Corpus::Read> Corpus::read_part(Split split) {
  const std::string& file = options_.files[at_];
  if (!lines_) lines_.emplace(file, true, options_.most_bytes);
  while (const auto next = lines_->next()) {
    if (is_blank(*next)) continue;
    const std::string_view line = without_return(*next);
    Read read{.document = {.index = index_, .name = fmt::format("{}:{}", input_name(file), lines_->lines())}};
    const std::string& name = read.document.name;
    const bool is_wanted = is_next_wanted();
    if (split == Split::kBlank) {
      read.text = line;
      for (auto more = lines_->next(); more && !is_blank(*more); more = lines_->next()) {
        if (!is_wanted) continue;
        read.text.append("\n").append(without_return(*more));
        if (read.text.size() > options_.most_bytes) throw TooLong(name, read.text.size(), options_.most_bytes);
      }
    } else if (is_wanted && split == Split::kIds) {
      read.document.ids = parse_ids(line, name, options_.vocab_size);
    } else if (is_wanted && split == Split::kPairs) {
      const Json object = parse_object(line, name);
      read.text = string_field(object, "context", name);
      read.context = read.text.size();
      read.text += string_field(object, "continuation", name);
    } else if (is_wanted) {
      read.text =
          split == Split::kJsonl ? string_field(parse_object(line, name), options_.field, name) : std::string(line);
    }
    if (is_wanted && is_left(read)) return read;
  }
  if (interrupt_exit_code() != 0) return std::nullopt;
  bytes_ += lines_->bytes();
  lines_.reset();
  ++at_;
  return std::nullopt;
}

void Corpus::tokenize(std::span<Read> documents) const {
  if (options_.split == Split::kIds) return;
  if (options_.split == Split::kPairs) {
    std::vector<TextPair> pairs;
    for (const Read& read : documents) pairs.push_back({read.text, read.context});
    std::vector<PairTokens> tokens =
        encode_pairs(*options_.tokenizer, pairs, options_.tokenizer->adds_bos(), 0, threads_);
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      documents[i].document.ids = std::move(tokens[i].ids);
      documents[i].document.context = tokens[i].context;
    }
    return;
  }
  std::vector<std::string_view> texts;
  for (const Read& read : documents) {
    if (!is_long(read)) texts.emplace_back(read.text);
  }
  std::vector<std::vector<int>> ids = options_.tokenizer->encode_batch(texts, !options_.has_prefix, threads_);
  auto next = ids.begin();
  for (Read& read : documents) {
    read.document.goes_on = is_long(read) && options_.parts;
    if (read.document.goes_on) {
      put(read, {});
    } else {
      put(read, is_long(read) ? tokens_of_long(read.text) : std::move(*next++));
    }
  }
}

std::vector<int> Corpus::tokens_of_long(std::string_view text) const {
  options_.progress->clear();
  Progress reading(!options_.quiet, ProgressUnit::kBytes);
  const auto on_progress = [&](std::size_t bytes) {
    reading.update(static_cast<std::int64_t>(bytes), std::ssize(text));
    return interrupt_exit_code() == 0;
  };
  return options_.tokenizer->encode(text, !options_.has_prefix, on_progress, threads_);
}

void Corpus::put(Read& read, std::vector<int> ids) const {
  Document& document = read.document;
  read.invalid = count_invalid_utf8(read.text);
  document.bytes = std::ssize(read.text);
  if (!document.goes_on) document.words = count_words(read.text);
  document.ids = options_.has_prefix ? with_prefix(*options_.tokenizer, std::move(ids)) : std::move(ids);
}

std::int64_t Corpus::expected_tokens() const {
  std::int64_t tokens = read_tokens_;
  if (long_) {
    const auto rest = static_cast<double>(long_->text.size() - long_->encoder.bytes());
    tokens += static_cast<std::int64_t>(rest * static_cast<double>(long_->tokens) /
                                        static_cast<double>(std::max<std::size_t>(long_->encoder.bytes(), 1)));
  }
  if (is_read()) return tokens;
  const std::uint64_t done = bytes_ + (lines_ ? lines_->bytes() : 0);
  if (!all_bytes_ || done == 0) return 0;
  const auto all = static_cast<double>(std::max(*all_bytes_, done));
  return static_cast<std::int64_t>(static_cast<double>(tokens) * all / static_cast<double>(done));
}

}  // namespace mmrec::apps
