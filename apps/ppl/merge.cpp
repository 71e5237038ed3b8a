#include "apps/ppl/merge.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "apps/common/cli.h"
#include "apps/common/input.h"
#include "apps/common/model_folder.h"
#include "apps/ppl/options.h"

namespace mmrec::apps {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::uint64_t kMostCount = std::uint64_t{1} << 53;  // what every reader of JSON can hold

/// A member of a record. Without `is` it is one of the words that `expected` lists.
struct Member {
  std::string_view key;
  std::string_view expected;
  bool (*is)(const Json&) = nullptr;
  bool is_optional = false;
  bool is_identity = false;
};

bool is_text(const Json& value) { return value.is_string(); }
bool is_real(const Json& value) { return value.is_number(); }
bool is_real_or_null(const Json& value) { return value.is_null() || is_real(value); }
bool is_count(const Json& value) { return value.is_number_unsigned() && value.get<std::uint64_t>() <= kMostCount; }
bool is_count_or_null(const Json& value) { return value.is_null() || is_count(value); }
bool is_tokens_of_window(const Json& value) { return is_count(value) && value >= 1; }
bool is_tolerance(const Json& value) { return value == "auto" || (value.is_number_float() && value > 0.0); }
bool is_true(const Json& value) { return value.is_boolean() && value.get<bool>(); }
bool is_hash(const Json& value) { return value.is_string() && is_hex(value.get_ref<const std::string&>()); }
bool is_hash_or_null(const Json& value) { return value.is_null() || is_hash(value); }
/// Text that a summary can print.
bool is_words(const Json& value) {
  if (!value.is_string()) return false;
  const auto& text = value.get_ref<const std::string&>();
  return text.size() <= 200 && std::all_of(text.begin(), text.end(), [](char c) { return c >= ' ' && c <= '~'; });
}

constexpr std::string_view kCount = "a count";
constexpr std::string_view kHash = "16 hexadecimal digits";
constexpr std::string_view kWords = "at most 200 printable characters";
constexpr auto kMembers = std::to_array<Member>({
    {"doc", kCount, is_count},
    {"name", "a string", is_text},
    {"hash", kHash, is_hash},
    {"tokens", kCount, is_count},
    {"nll", "a number", is_real},
    {"nll_m2", "a number", is_real},
    {"ppl", "a number or null", is_real_or_null},
    {"bytes", kCount, is_count_or_null},
    {"words", kCount, is_count_or_null},
    {"mode", "full rolling strided llama", nullptr, false, true},
    {"window", kCount, is_tokens_of_window, true, true},
    {"stride", kCount, is_tokens_of_window, true, true},
    {"calls", "stepwise whole one", nullptr, true, true},
    {"bos", "added eos none given", nullptr, false, true},
    {"prefill_mode", "auto sweeps steps", nullptr, false, true},
    {"sweep_tol", "auto or a number above 0", is_tolerance, false, true},
    {"max_sweeps", kCount, is_count, false, true},
    {"precision", "fp32 fp16 bf16 fp32-fma", nullptr, false, true},
    {"model", kHash, is_hash, false, true},
    {"tokenizer", kHash, is_hash_or_null, false, true},
    {"version", kWords, is_words, false, true},
    {"device", kWords, is_words, false, true},
    {"last", "true", is_true, true},
});

bool is_allowed(const Member& member, const Json& value) {
  if (member.is != nullptr) return member.is(value);
  const auto choices = split(member.expected);
  return value.is_string() &&
         std::find(choices.begin(), choices.end(), value.get_ref<const std::string&>()) != choices.end();
}

[[noreturn]] void refuse(const std::string& where, std::string_view key, const Json& object,
                         std::string_view expected) {
  const auto found = object.find(key);
  throw RejectedFile(fmt::format("{}: field '{}' (found {}, expected {})", where, printable(key).substr(0, 60),
                                 found == object.end() ? "none" : brief(*found), expected));
}

/// Refuses members that are unknown or missing, and values of the wrong type or range.
void check_members(const Json& object, const std::string& where) {
  for (const Member& member : kMembers) {
    const auto found = object.find(member.key);
    if (found == object.end() && member.is_optional) continue;
    if (found == object.end()) {
      throw RejectedFile(
          fmt::format("{}: not the record of a document, or of an older mmrec-ppl (found no '{}', expected a line of "
                      "--format jsonl)",
                      where, member.key));
    }
    if (!is_allowed(member, *found)) refuse(where, member.key, object, member.expected);
  }
  for (const auto& [key, value] : object.items()) {
    const auto has_key = [&name = key](const Member& member) { return member.key == name; };
    if (std::none_of(kMembers.begin(), kMembers.end(), has_key)) refuse(where, key, object, "no such field");
  }
}

// NOLINTNEXTLINE(bugprone-exception-escape): of an implicit move; JSON's does not throw
struct Merged {
  std::vector<DocumentRecord> records;
  RunIdentity identity;
  std::set<std::string> devices;
};

void read_records(const std::string& file, Merged& merged) {
  LineReader lines(file);
  while (const auto line = lines.next()) {
    if (is_blank(*line)) continue;
    const std::string where = fmt::format("{}:{}", input_name(file), lines.lines());
    DocumentRecord record = parse_record(*line, where);
    if (merged.records.empty()) merged.identity = record.identity;
    check_comparable(record.identity, merged.identity, where);
    merged.devices.insert(record.identity["device"]);
    record.identity = nullptr;
    record.name = where;  // for what may be said of it below
    merged.records.push_back(std::move(record));
  }
}

void check_whole(const std::vector<DocumentRecord>& records) {
  for (std::size_t i = 0; i < records.size(); ++i) {
    const auto expected = static_cast<std::int64_t>(i);
    if (records[i].index == expected) continue;
    if (i > 0 && records[i].index == records[i - 1].index) {
      throw RejectedFile(fmt::format("{}: document {} is there twice (the other is {})", records[i].name,
                                     records[i].index, records[i - 1].name));
    }
    throw RejectedFile(
        fmt::format("{}: document {} is missing (found {} next)", records[i].name, expected, records[i].index));
  }
  const auto is_last = [](const DocumentRecord& record) { return record.is_last; };
  const auto last = std::find_if(records.begin(), records.end(), is_last);
  if (last == records.end()) {
    throw RejectedFile(fmt::format(
        "the end of the corpus is missing (found {} documents, expected one of them to have \"last\": true)",
        records.size()));
  }
  if (last->index + 1 != std::ssize(records)) {
    throw RejectedFile(fmt::format("{}: document {} is marked as the last (found {} documents, expected {})",
                                   last->name, last->index, records.size(), last->index + 1));
  }
}

}  // namespace

DocumentRecord parse_record(std::string_view line, const std::string& where) {
  const Json object = parse_object(line, where);
  check_members(object, where);
  const auto count_or_none = [](const Json& value) { return value.is_null() ? -1 : value.get<std::int64_t>(); };
  DocumentRecord record;
  record.index = object["doc"];
  record.name = object["name"];
  record.hash = object["hash"];
  record.sums = {object["tokens"], object["nll"], object["nll_m2"]};
  record.bytes = count_or_none(object["bytes"]);
  record.words = count_or_none(object["words"]);
  record.is_last = object.contains("last");
  record.identity = Json::object();
  for (const Member& member : kMembers) {
    if (member.is_identity && object.contains(member.key))
      record.identity[std::string(member.key)] = object[member.key];
  }
  // Sums of floats, so that no sum of records overflows.
  constexpr double kMost = std::numeric_limits<float>::max();
  const auto tokens = static_cast<double>(record.sums.tokens);
  if (!(std::abs(record.sums.nll) <= tokens * kMost)) refuse(where, "nll", object, "a sum over the tokens");
  if (!(record.sums.nll_m2 >= 0.0 && record.sums.nll_m2 <= tokens * kMost * kMost)) {
    refuse(where, "nll_m2", object, "a sum of squares over the tokens");
  }
  const bool has_window = object["mode"] != to_string(WindowMode::kFull);
  const bool has_stride = object["mode"] == to_string(WindowMode::kStrided);
  if (object.contains("window") != has_window) refuse(where, "window", object, has_window ? kCount : "none");
  if (object.contains("stride") != has_stride) refuse(where, "stride", object, has_stride ? kCount : "none");
  return record;
}

void check_comparable(const RunIdentity& found, const RunIdentity& expected, const std::string& where) {
  const auto shown = [](const RunIdentity& of, const std::string& key) {
    return of.contains(key) ? printable(dump(of.at(key)).substr(0, 80)) : std::string("none");
  };
  for (const auto& [one, other] : {std::pair(&expected, &found), std::pair(&found, &expected)}) {
    for (const auto& [key, value] : one->items()) {
      if (key == "device" || (other->contains(key) && other->at(key) == value)) continue;
      throw RejectedFile(fmt::format("{}: a record of another run: {} (found {}, expected {})", where, printable(key),
                                     shown(found, key), shown(expected, key)));
    }
  }
}

bool add_record(const DocumentRecord& record, PerplexityAccumulator& sums) {
  const bool is_empty = record.sums.tokens == 0;
  const std::int64_t bytes = is_empty ? 0 : std::max<std::int64_t>(record.bytes, 0);
  const std::int64_t words = is_empty ? 0 : std::max<std::int64_t>(record.words, 0);
  sums.add(record.sums, bytes, words);
  const PerplexitySummary all = sums.summary();
  for (const std::int64_t count : {all.tokens, all.bytes, all.words}) {
    if (static_cast<std::uint64_t>(count) <= kMostCount) continue;
    throw RejectedFile(fmt::format("{}: tokens, bytes or words add up to too many (found {}, expected at most {})",
                                   record.name, count, kMostCount));
  }
  return !is_empty;
}

int merge_main(const Arguments& arguments) {
  constexpr std::array<std::string_view, 2> kFormats = {"text", "json"};
  const ReportFormat& format = report_format(kFormats[arguments.choice("format", kFormats)]);
  if (arguments.positionals().empty()) throw UsageError("nothing to merge (expected FILE...)");
  refuse_lost_files(named_files(arguments, merge_program().options));
  Output out(arguments.file("output").value_or("-"));

  Merged merged;
  for (const std::string& file : arguments.positionals()) read_records(file, merged);
  std::stable_sort(merged.records.begin(), merged.records.end(),
                   [](const DocumentRecord& a, const DocumentRecord& b) { return a.index < b.index; });
  check_whole(merged.records);
  PerplexityAccumulator sums;
  SummaryContext context;
  for (const DocumentRecord& record : merged.records) {
    if (!add_record(record, sums)) ++context.empty_docs;
    context.has_text = context.has_text && record.bytes >= 0;
  }
  context.identity = merged.identity;
  context.identity["device"] = fmt::format("{}", fmt::join(merged.devices, ", "));
  const auto number = [&](const char* key) { return context.identity.value(key, std::int64_t{0}); };
  context.scores_all = WindowOptions{.mode = window_mode(context.identity["mode"].get<std::string>()),
                                     .window = number("window"),
                                     .stride = number("stride")}
                           .scores_all();
  require_finite(sums.summary());
  Records(out, format, "documents", false).finish(summary_json(sums.summary(), context));
  out.commit();
  return kOk;
}

ResumeFilter::ResumeFilter(const std::optional<std::string>& file, const RunIdentity& identity,
                           PerplexityAccumulator& sums, Output& out)
    : file_(file.value_or("")), sums_(sums) {
  if (!file) return;
  out.keep(0);
  if (!std::filesystem::exists(file_)) return;
  if (!input_size(file_)) throw RejectedFile(fmt::format("{}: --resume: not a regular file", file_));
  LineReader lines(file_);
  for (;;) {
    const std::uint64_t begin = lines.bytes();
    const auto line = lines.next();
    if (!line) return;
    const std::string where = fmt::format("{}:{}", file_, lines.lines());
    std::string text(*line);
    const bool has_end = lines.bytes() > begin + text.size();
    if (!has_end) {
      // A run that was killed leaves a record that lacks its end, or more. The device is the last member.
      const auto object = nlohmann::json::parse(text + "}", nullptr, false);
      if (!object.is_object() || !object.contains("device")) {
        tail_ = std::move(text);
        return;
      }
      text += "}";
    }
    DocumentRecord record = parse_record(text, where);
    check_comparable(record.identity, identity, where);
    record.identity = nullptr;
    const std::string_view ending = record.is_last ? kLastEnding : kEnding;
    if (!text.ends_with(ending)) {
      throw RejectedFile(fmt::format("{}: not as mmrec-ppl writes it (expected {} at the end)", where, ending));
    }
    out.keep(begin + text.size() - ending.size());
    records_.push_back(std::move(record));
  }
}

std::optional<std::int64_t> ResumeFilter::unended() const {
  return records_.empty() ? std::nullopt : std::optional(records_.back().index);
}

bool ResumeFilter::is_left(const Document& document) {
  if (next_ == records_.size()) {
    // A killed run may have left the beginning of this record, and nothing else.
    const std::string head = record_head(document);
    if (!tail_.starts_with(head) && !head.starts_with(tail_)) refuse_tail(head);
    tail_.clear();
    return true;
  }
  const DocumentRecord& record = records_[next_++];
  // As a record has the name: bytes that are not UTF-8 were replaced.
  const auto id = [](std::int64_t index, const std::string& name, std::string_view hash) {
    return fmt::format("document {} {}, hash {}", index, printable(dump(name)), hash);
  };
  const std::string found = id(record.index, record.name, record.hash);
  const std::string expected = id(document.index, document.name, hex(document.hash));
  if (found != expected) {
    throw RejectedFile(fmt::format("{}:{}: --resume: a record of another document (found {}, expected {})", file_,
                                   next_, found, expected));
  }
  if (!add_record(record, sums_)) ++empty_;
  return false;
}

void ResumeFilter::finish() {
  if (next_ < records_.size()) {
    throw RejectedFile(fmt::format("{}: --resume: more records than documents (found {}, expected {})", file_,
                                   records_.size(), next_));
  }
  if (!tail_.empty()) refuse_tail("the end of the file");
}

void ResumeFilter::refuse_tail(std::string_view expected) const {
  throw RejectedFile(fmt::format("{}:{}: --resume: not the beginning of this run's next record (found {}, expected {})",
                                 file_, next_ + 1, printable(tail_.substr(0, 80)), printable(expected)));
}

}  // namespace mmrec::apps
