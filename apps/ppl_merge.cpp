#include "apps/ppl_merge.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "apps/cli.h"
#include "apps/corpus.h"
#include "apps/input.h"
#include "apps/ppl_options.h"

namespace mmrec::apps {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view kAfterMeasures = "words";  // the key before the identity's

class RecordReader {
 public:
  RecordReader(const Json& object, const std::string& where) : object_(object), where_(where) {}

  template <class Number>
  Number number(const char* key, bool (Json::*is)() const noexcept, std::string_view expected) const {
    const Json& value = at(key);
    if (!(value.*is)()) refuse(key, value, expected);
    return value.get<Number>();
  }
  std::int64_t count(const char* key) const {
    const auto value = number<std::int64_t>(key, &Json::is_number_integer, "a count");
    if (value < 0) refuse(key, at(key), "a count");
    return value;
  }
  std::int64_t count_or_none(const char* key) const { return at(key).is_null() ? -1 : count(key); }
  std::string text(const char* key) const { return number<std::string>(key, &Json::is_string, "a string"); }
  double real(const char* key) const { return number<double>(key, &Json::is_number, "a number"); }

 private:
  const Json& at(const char* key) const {
    const auto found = object_.find(key);
    if (found == object_.end()) {
      throw RejectedFile(
          fmt::format("{}: not the record of a document (found no '{}', expected a line of mmrec-ppl --format jsonl)",
                      where_, key));
    }
    return *found;
  }
  [[noreturn]] void refuse(const char* key, const Json& found, std::string_view expected) const {
    throw RejectedFile(fmt::format("{}: field '{}' (found {}, expected {})", where_, key,
                                   printable(dump(found).substr(0, 40)), expected));
  }

  const Json& object_;
  const std::string& where_;
};

// NOLINTNEXTLINE(bugprone-exception-escape): of an implicit move; JSON's does not throw
struct Merged {
  std::vector<DocumentRecord> records;
  RunIdentity identity;
  std::set<std::string> devices;
};

void read_records(const std::string& file, Merged& merged) {
  LineReader lines(file);
  while (const auto line = lines.next()) {
    if (line->find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const std::string where = fmt::format("{}:{}", input_name(file), lines.lines());
    DocumentRecord record = parse_record(*line, where);
    if (merged.records.empty()) merged.identity = record.identity;
    check_comparable(record.identity, merged.identity, where);
    merged.devices.insert(record.identity.value("device", std::string()));
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
}

}  // namespace

DocumentRecord parse_record(std::string_view line, const std::string& where) {
  const Json object = parse_object(line, where);
  const RecordReader reader(object, where);
  DocumentRecord record;
  record.index = reader.count("doc");
  record.name = reader.text("name");
  record.sums = {reader.count("tokens"), reader.real("nll"), reader.real("nll_m2")};
  record.bytes = reader.count_or_none("bytes");
  record.words = reader.count_or_none("words");
  record.identity = Json::object();
  bool is_identity = false;
  for (const auto& [key, value] : object.items()) {
    if (is_identity) record.identity[key] = value;
    is_identity = is_identity || key == kAfterMeasures;
  }
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
  sums.add(record.sums, is_empty ? 0 : std::max<std::int64_t>(record.bytes, 0),
           is_empty ? 0 : std::max<std::int64_t>(record.words, 0));
  return !is_empty;
}

int merge_main(int argc, const char* const* argv) {
  const Arguments arguments(flags_of(merge_option_table()), true, argc, argv);
  if (print_help_or_version(arguments, merge_help(), "mmrec-ppl")) return kOk;
  constexpr std::array<std::string_view, 2> kFormats = {"text", "json"};
  const auto format = static_cast<ReportFormat>(arguments.choice("format", kFormats));
  if (arguments.positionals().empty()) throw UsageError("nothing to merge (expected FILE...)");
  const auto out =
      arguments.has("output") ? std::make_unique<Output>(*arguments.file("output")) : std::make_unique<Output>();

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
  context.identity = merged.identity.is_null() ? Json::object() : merged.identity;
  if (!merged.devices.empty()) context.identity["device"] = fmt::format("{}", fmt::join(merged.devices, ", "));
  const std::string mode = context.identity.value("mode", std::string());
  context.scores_all = mode != "llama" &&
                       (mode != "strided" || context.identity.value("stride", 0) < context.identity.value("window", 0));
  Records(*out, format, "documents", false).finish(summary_json(sums.summary(), context));
  out->commit();
  return kOk;
}

Resumed read_resumed(const std::string& path, const RunIdentity& identity) {
  Resumed resumed;
  if (!std::filesystem::exists(path)) return resumed;
  const std::uint64_t size = input_size(path).value_or(0);
  LineReader lines(path);
  while (const auto line = lines.next()) {
    if (lines.bytes() == size && !line->empty()) {
      // Whether the last line has an end shows in the count of bytes alone.
      if (resumed.bytes + line->size() == size) break;
    }
    const std::string where = fmt::format("{}:{}", path, lines.lines());
    DocumentRecord record = parse_record(*line, where);
    check_comparable(record.identity, identity, where);
    record.identity = nullptr;
    resumed.records.push_back(std::move(record));
    resumed.bytes = lines.bytes();
  }
  return resumed;
}

}  // namespace mmrec::apps
