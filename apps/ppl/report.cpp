#include "apps/ppl/report.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <utility>

#include "apps/common/model_folder.h"
#include "mmrec/errors.h"

namespace mmrec::apps {
namespace {

using Json = nlohmann::ordered_json;

Json count_or_null(std::int64_t count, bool known) { return known ? Json(count) : Json(nullptr); }

std::string csv_field(const Json& value) {
  if (value.is_null()) return {};
  if (!value.is_string()) return value.dump();
  std::string text = dump(value).size() == value.get_ref<const std::string&>().size() + 2
                         ? value.get<std::string>()
                         : Json::parse(dump(value)).get<std::string>();  // what is no UTF-8 was replaced
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
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
  std::string ids;
  for (const int id : scored.document.ids) fmt::format_to(std::back_inserter(ids), "{}{}", ids.empty() ? "" : ",", id);
  std::string positions;
  std::string logprobs;
  scored.for_each_token([&](std::size_t position, int, float logprob) {
    const std::string_view comma = positions.empty() ? "" : ",";
    fmt::format_to(std::back_inserter(positions), "{}{}", comma, position);
    fmt::format_to(std::back_inserter(logprobs), "{}{:.9g}", comma, logprob);
  });
  return fmt::format(",\"ids\":[{}],\"positions\":[{}],\"logprobs\":[{}]", ids, positions, logprobs);
}

}  // namespace

std::string dump(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }
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

Records::Records(Output& out, ReportFormat format, std::string_view name, bool in_json)
    : out_(out), format_(format), name_(name), in_json_(in_json) {}

void Records::begin_entry() {
  if (format_ == ReportFormat::kJson) out_.write(is_first_ ? fmt::format("{{\"{}\":[", name_) : ",");
  is_first_ = false;
}

void Records::add(const Json& record, std::string_view tail) {
  if (format_ == ReportFormat::kText || (format_ == ReportFormat::kJson && !in_json_)) return;
  if (format_ == ReportFormat::kCsv) {
    std::string names;
    std::string values;
    for (const auto& [key, value] : record.items()) {
      const std::string_view comma = names.empty() ? "" : ",";
      names += fmt::format("{}{}", comma, key);
      values += fmt::format("{}{}", comma, csv_field(value));
    }
    if (std::exchange(is_first_, false)) out_.write(names + "\n");
    out_.write(values + "\n");
    return;
  }
  begin_entry();
  out_.write(without_brace(record));
  out_.write(tail);
  out_.write(format_ == ReportFormat::kJson ? "}" : "}\n");
}

void Records::finish(const Json& summary) {
  if (format_ == ReportFormat::kText) out_.write(summary_text(summary));
  if (format_ != ReportFormat::kJson) return;
  const std::string object = dump(summary);
  if (!in_json_) {
    out_.write(object + "\n");
    return;
  }
  if (is_first_) out_.write(fmt::format("{{\"{}\":[", name_));
  out_.write("],");
  out_.write(std::string_view(object).substr(1));
  out_.write("\n");
}

Report::Report(Output& out, ReportFormat format, ReportDetail detail, RunIdentity identity,
               std::optional<std::int64_t> unended)
    : out_(out),
      format_(format),
      detail_(detail),
      identity_(std::move(identity)),
      records_(out, format, "documents", detail != ReportDetail::kSummary),
      unended_(unended) {}

void Report::end_line(bool is_last) {
  if (!std::exchange(unended_, std::nullopt)) return;
  out_.write(is_last ? kLastEnding : kEnding);
  out_.write("\n");
}

void Report::stop() {
  if (!is_first_) end_line(false);
}

void Report::finish(const Json& summary, std::int64_t documents) {
  end_line(unended_ == documents - 1);
  records_.finish(summary);
}

void Report::add(const ScoredDocument& scored) {
  const bool has_lines = format_ == ReportFormat::kJsonl || format_ == ReportFormat::kCsv;
  if (detail_ == ReportDetail::kTokens && has_lines) {
    add_tokens(scored);
  } else if (format_ == ReportFormat::kJsonl) {
    end_line(false);
    out_.write(without_brace(document_json(scored, identity_)));
    unended_ = scored.document.index;
    is_first_ = false;
  } else if (has_lines || detail_ != ReportDetail::kSummary) {
    records_.add(document_json(scored, identity_),
                 detail_ == ReportDetail::kTokens ? tokens_members(scored) : std::string());
  }
}

void Report::add_tokens(const ScoredDocument& scored) {
  const bool csv = format_ == ReportFormat::kCsv;
  // Scores of another cut are other scores: the only part of the identity that stands beside each.
  const auto calls = identity_.find("calls");
  const std::string cut = calls == identity_.end() ? std::string() : calls->get<std::string>();
  const std::string tail = cut.empty() ? cut : csv ? "," + cut : fmt::format(",\"calls\":\"{}\"", cut);
  if (std::exchange(is_first_, false) && csv) {
    out_.write(fmt::format("doc,pos,id,logprob{}\n", cut.empty() ? "" : ",calls"));
  }
  scored.for_each_token([&](std::size_t position, int id, float logprob) {
    const std::int64_t doc = scored.document.index;
    out_.write(csv ? fmt::format("{},{},{},{:.9g}{}\n", doc, position, id, logprob, tail)
                   : fmt::format("{{\"doc\":{},\"pos\":{},\"id\":{},\"logprob\":{:.9g}{}}}\n", doc, position, id,
                                 logprob, tail));
  });
}

}  // namespace mmrec::apps
