#include "apps/ppl/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "apps/common/model_folder.h"
#include "mmrec/errors.h"
#include "models/files/utf8.h"

namespace mmrec::apps {
namespace {

using Json = nlohmann::ordered_json;

Json count_or_null(std::int64_t count, bool known) { return known ? Json(count) : Json(nullptr); }

std::string table_field(const Json& value, char separator) {
  if (value.is_null()) return {};
  if (!value.is_string()) return value.dump();
  std::string text = models::replace_invalid_utf8(value.get_ref<const std::string&>());
  if (text.find_first_of(std::string("\"\r\n") + separator) == std::string::npos) return text;
  for (std::size_t at = 0; (at = text.find('"', at)) != std::string::npos; at += 2) text.insert(at, 1, '"');
  return fmt::format("\"{}\"", text);
}

Json known_of(const Document& document) {
  return {{"doc", document.index}, {"name", document.name}, {"hash", hex(document.hash)}};
}

std::string without_brace(const Json& object) {
  std::string text = dump(object);
  text.pop_back();
  return text;
}

Json document_json(const ScoredDocument& scored, const RunIdentity& identity) {
  const Document& document = scored.document;
  const DocumentSums sums = sums_of(scored.score);
  const bool has_text = document.bytes >= 0;
  Json json = known_of(document);
  json.update({{"tokens", sums.tokens},
               {"nll", sums.nll},
               {"nll_m2", sums.nll_m2},
               {"ppl", real_or_null(sums.ppl())},
               {"bytes", count_or_null(document.bytes, has_text)},
               {"words", count_or_null(document.words, has_text)}});
  json.update(identity);
  return json;
}

// Nine significant digits give every float back.
std::string tokens_members(const ScoredDocument& scored) {
  std::vector<std::size_t> positions;
  scored.for_each_token([&](std::size_t position, int, float) { positions.push_back(position); });
  return fmt::format(",\"ids\":[{}],\"positions\":[{}],\"logprobs\":[{:.9g}]", fmt::join(scored.document.ids, ","),
                     fmt::join(positions, ","), fmt::join(scored.score.logprobs, ","));
}

}  // namespace

const ReportFormat& report_format(std::string_view name) {
  return *std::find_if(kReportFormats.begin(), kReportFormats.end(), [&](const auto& one) { return one.name == name; });
}

std::string record_head(const Document& document) { return without_brace(known_of(document)) + ",\"tokens\":"; }

void require_finite(const PerplexitySummary& summary) {
  if (summary.tokens == 0 || std::isfinite(summary.ppl)) return;
  throw NumericError(fmt::format("the perplexity of {} tokens is not finite (found a mean of {:.6g} nats)",
                                 summary.tokens, summary.nll / static_cast<double>(summary.tokens)));
}

Json real_or_null(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

void add_identity(Json& summary, const RunIdentity& identity) {
  for (const auto& [key, value] : identity.items()) {
    summary[key == "model" || key == "tokenizer" ? key + "_fingerprint" : key] = value;
  }
}

Json summary_json(const PerplexitySummary& summary, const SummaryContext& context) {
  const double none = std::numeric_limits<double>::quiet_NaN();
  const bool of_text = context.has_text && context.scores_all;
  Json json = {{"schema", "mmrec-ppl/1"},
               {"docs", summary.docs},
               {"tokens", summary.tokens},
               {"nll", summary.nll},
               {"ppl", real_or_null(summary.ppl)},
               {"ppl_stderr", real_or_null(summary.ppl_stderr)},
               {"bytes", count_or_null(summary.bytes, context.has_text)},
               {"words", count_or_null(summary.words, context.has_text)},
               {"bits_per_byte", real_or_null(of_text ? summary.bits_per_byte : none)},
               {"word_ppl", real_or_null(of_text ? summary.word_ppl : none)},
               {"byte_ppl", real_or_null(of_text ? summary.byte_ppl : none)},
               {"empty_docs", context.empty_docs}};
  add_identity(json, context.identity);
  for (const auto& [key, value] : context.details.items()) json[key] = value;
  return json;
}

std::string summary_text(const Json& summary) {
  std::string text;
  for (const auto& [key, value] : summary.items()) {
    if (value.is_structured() || key == "schema" || key == "batch") continue;
    std::string shown = value.is_null() ? "n/a" : value.is_string() ? value.get<std::string>() : value.dump();
    if (value.is_number_float()) {
      const auto number = value.get<double>();
      shown = number != 0.0 && std::abs(number) < 1e-3 ? fmt::format("{:.6g}", number) : fmt::format("{:.6f}", number);
    }
    constexpr std::string_view kIdentity = "_fingerprint";
    const std::string_view name =
        key.ends_with(kIdentity) ? std::string_view(key).substr(0, key.size() - kIdentity.size()) : key;
    text += fmt::format("{:<14} {}\n", name, shown);
  }
  return text;
}

Records::Records(Output& out, const ReportFormat& format, std::string_view name, bool in_json)
    : out_(out), format_(format), name_(name), in_json_(in_json) {}

void Records::add(const Json& record, std::string_view tail) {
  const bool is_first = std::exchange(is_first_, false);
  switch (format_.layout) {
    case Layout::kSummary:
      return;
    case Layout::kObject:
      if (!in_json_) return;
      out_.write(is_first ? fmt::format("{{\"{}\":[", name_) : ",");
      out_.write(without_brace(record));
      out_.write(tail);
      return out_.write("}");
    case Layout::kLines:
      return out_.write(dump(record) + "\n");
    case Layout::kTable:
      std::string names;
      std::string values;
      for (const auto& [key, value] : record.items()) {
        if (!names.empty()) names += format_.separator, values += format_.separator;
        names += key;
        values += table_field(value, format_.separator);
      }
      if (is_first) out_.write(names + "\n");
      out_.write(values + "\n");
  }
}

void Records::finish(const Json& summary) {
  if (format_.layout == Layout::kSummary) out_.write(summary_text(summary));
  if (format_.layout != Layout::kObject) return;
  std::string object = dump(summary) + "\n";
  if (in_json_) object.replace(0, 1, is_first_ ? fmt::format("{{\"{}\":[],", name_) : "],");
  out_.write(object);
}

Report::Report(Output& out, const ReportFormat& format, ReportDetail detail, RunIdentity identity,
               std::optional<std::int64_t> unended, bool flushes)
    : out_(out),
      format_(format),
      detail_(detail),
      identity_(std::move(identity)),
      records_(out, format, "documents", detail != ReportDetail::kSummary),
      flushes_(flushes),
      unended_(unended) {}

void Report::end_line(bool is_last) {
  if (!std::exchange(unended_, std::nullopt)) return;
  out_.write(is_last ? kLastEnding : kEnding);
  out_.write("\n");
}

void Report::stop() {
  if (!is_first_) end_line(false);
}

void Report::finish_corpus(const Json& summary, std::int64_t documents) {
  end_line(unended_ == documents - 1);
  records_.finish(summary);
}

void Report::add(const ScoredDocument& scored) {
  if (detail_ == ReportDetail::kTokens && format_.has_lines()) return add_tokens(scored);
  if (detail_ == ReportDetail::kSummary && !format_.has_lines()) return;
  const Json record = document_json(scored, identity_);
  if (format_.layout != Layout::kLines) {
    return records_.add(record, detail_ == ReportDetail::kTokens ? tokens_members(scored) : std::string());
  }
  end_line(false);
  out_.write(without_brace(record));
  unended_ = scored.document.index;
  is_first_ = false;
  if (flushes_) out_.flush();
}

void Report::add_tokens(const ScoredDocument& scored) {
  // Scores of another cut are other scores: the only part of the identity that stands beside each.
  const std::string calls = identity_.value("calls", "");
  const bool is_table = format_.layout == Layout::kTable;
  const std::string_view by(&format_.separator, 1);
  std::string tail;
  if (!calls.empty()) tail = is_table ? fmt::format("{}{}", by, calls) : fmt::format(",\"calls\":\"{}\"", calls);
  if (std::exchange(is_first_, false) && is_table) {
    out_.write(
        fmt::format("doc{0}pos{0}id{0}logprob{1}{2}\n", by, calls.empty() ? "" : by, calls.empty() ? "" : "calls"));
  }
  const std::int64_t doc = scored.document.index;
  scored.for_each_token([&](std::size_t position, int id, float logprob) {
    out_.write(is_table ? fmt::format("{1}{0}{2}{0}{3}{0}{4:.9g}{5}\n", by, doc, position, id, logprob, tail)
                        : fmt::format("{{\"doc\":{},\"pos\":{},\"id\":{},\"logprob\":{:.9g}{}}}\n", doc, position, id,
                                      logprob, tail));
  });
}

}  // namespace mmrec::apps
