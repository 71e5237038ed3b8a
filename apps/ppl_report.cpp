#include "apps/ppl_report.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <string_view>

namespace mmrec::apps {
namespace {

using Json = nlohmann::ordered_json;

std::string dump(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

Json count_or_null(std::int64_t count, bool known) { return known ? Json(count) : Json(nullptr); }
Json real_or_null(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

Json document_json(const Document& document, const DocumentScore& score, std::int64_t index,
                   std::optional<std::string_view> calls) {
  const auto tokens = static_cast<double>(score.logprobs.size());
  const bool has_text = document.bytes >= 0;
  Json json = {{"doc", index},
               {"name", document.name},
               {"tokens", score.logprobs.size()},
               {"nll", score.nll},
               {"ppl", tokens > 0.0 ? real_or_null(std::exp(score.nll / tokens)) : Json(nullptr)},
               {"bytes", count_or_null(document.bytes, has_text)},
               {"words", count_or_null(document.words, has_text)}};
  if (calls) json["calls"] = *calls;
  return json;
}

// Nine significant digits give every float back.
template <class Append>
std::string array_of(std::size_t count, Append&& append) {
  std::string text = "[";
  for (std::size_t i = 0; i < count; ++i) {
    if (i > 0) text += ',';
    append(text, i);
  }
  return text + "]";
}

}  // namespace

Json summary_json(const PerplexitySummary& summary, const SummaryContext& context) {
  const double none = std::numeric_limits<double>::quiet_NaN();
  Json json = {{"schema", "mmrec-ppl/1"},
               {"docs", summary.docs},
               {"tokens", summary.tokens},
               {"nll", summary.nll},
               {"ppl", real_or_null(summary.ppl)},
               {"ppl_stderr", real_or_null(summary.ppl_stderr)},
               {"bytes", count_or_null(summary.bytes, context.has_text)},
               {"words", count_or_null(summary.words, context.has_text)},
               {"bits_per_byte", real_or_null(context.has_text ? summary.bits_per_byte : none)},
               {"word_ppl", real_or_null(context.has_text ? summary.word_ppl : none)},
               {"byte_ppl", real_or_null(context.has_text ? summary.byte_ppl : none)},
               {"empty_docs", context.empty_docs}};
  for (const auto& [key, value] : context.details.items()) json[key] = value;
  return json;
}

Report::Report(Output& out, ReportFormat format, bool per_token, std::optional<std::string_view> calls)
    : out_(out), format_(format), per_token_(per_token), calls_(calls) {}

void Report::add(const Document& document, const DocumentScore& score) {
  if (format_ == ReportFormat::kJsonl && per_token_) add_tokens_jsonl(document, score);
  if (format_ == ReportFormat::kJsonl && !per_token_)
    out_.write(dump(document_json(document, score, index_, calls_)) + "\n");
  if (format_ == ReportFormat::kJson && per_token_) add_document_json(document, score);
  ++index_;
}

void Report::add_tokens_jsonl(const Document& document, const DocumentScore& score) {
  const std::string calls = calls_ ? fmt::format(",\"calls\":\"{}\"", *calls_) : std::string();
  for (std::size_t i = 0; i < score.logprobs.size(); ++i) {
    out_.write(fmt::format("{{\"doc\":{},\"pos\":{},\"id\":{},\"logprob\":{:.9g}{}}}\n", index_, i + 1,
                           document.ids[i + 1], score.logprobs[i], calls));
  }
}

// The object is written in parts, so that a long document is never held as a tree.
void Report::add_document_json(const Document& document, const DocumentScore& score) {
  out_.write(index_ == 0 ? "{\"documents\":[" : ",");
  std::string object = dump(document_json(document, score, index_, calls_));
  object.pop_back();
  out_.write(object + ",\"ids\":");
  out_.write(
      array_of(document.ids.size(), [&](std::string& to, std::size_t i) { to += std::to_string(document.ids[i]); }));
  out_.write(",\"logprobs\":");
  out_.write(array_of(score.logprobs.size(), [&](std::string& to, std::size_t i) {
    fmt::format_to(std::back_inserter(to), "{:.9g}", score.logprobs[i]);
  }));
  out_.write("}");
}

void Report::finish(const PerplexitySummary& summary, const SummaryContext& context) {
  if (format_ == ReportFormat::kJsonl) return;
  Json json = summary_json(summary, context);
  if (calls_) json["calls"] = *calls_;
  if (format_ == ReportFormat::kJson) {
    const std::string object = dump(json);
    if (per_token_) {
      out_.write(index_ == 0 ? "{\"documents\":[" : "");
      out_.write("],");
      out_.write(std::string_view(object).substr(1));
    } else {
      out_.write(object);
    }
    out_.write("\n");
    return;
  }
  for (const std::string_view key : {"docs", "tokens", "bytes", "words", "nll", "ppl", "ppl_stderr", "bits_per_byte",
                                     "word_ppl", "byte_ppl", "empty_docs"}) {
    const Json& value = json.at(std::string(key));
    const std::string text = value.is_number_float() ? fmt::format("{:.6f}", value.get<double>())
                             : value.is_null()       ? "n/a"
                                                     : value.dump();
    out_.write(fmt::format("{:<14} {}\n", key, text));
  }
  if (calls_) out_.write(fmt::format("{:<14} {}\n", "calls", *calls_));
}

}  // namespace mmrec::apps
