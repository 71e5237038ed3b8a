// What mmrec-ppl prints: records as documents are finished, a summary at the end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "apps/corpus.h"
#include "apps/output.h"
#include "mmrec/scorer.h"

namespace mmrec::apps {

/// What a summary holds besides the measures.
// NOLINTNEXTLINE(bugprone-exception-escape): of an implicit move; JSON's does not throw
struct SummaryContext {
  bool has_text = true;            // the input was text: bytes and words mean something
  std::int64_t empty_docs = 0;     // documents without a token to score
  nlohmann::ordered_json details;  // how the figures came about: model, tokenizer, modes, timings
};

/// The summary object, schema "mmrec-ppl/1". A measure without a value is null.
nlohmann::ordered_json summary_json(const PerplexitySummary& summary, const SummaryContext& context);

enum class ReportFormat : std::uint8_t { kText, kJson, kJsonl };

/// Writes one report.
///   text           the summary, a line per measure
///   json           the summary object; with per_token its `documents` hold ids and log-probs
///   jsonl          one line per document, or with per_token one line per scored token; no summary
class Report {
 public:
  /// `calls`: how documents are cut into calls of the model, where that changes scores; every record names it.
  Report(Output& out, ReportFormat format, bool per_token, std::optional<std::string_view> calls = {});

  /// The next document and its score.
  void add(const Document& document, const DocumentScore& score);
  void finish(const PerplexitySummary& summary, const SummaryContext& context);

 private:
  void add_tokens_jsonl(const Document& document, const DocumentScore& score);
  void add_document_json(const Document& document, const DocumentScore& score);

  Output& out_;
  ReportFormat format_;
  bool per_token_;
  std::optional<std::string_view> calls_;
  std::int64_t index_ = 0;
};

}  // namespace mmrec::apps
