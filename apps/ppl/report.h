// What mmrec-ppl prints: records as documents are finished, a summary at the end.
//
// Must stay true: whatever is printed of a document or of all says how it came about, see RunIdentity.
#pragma once

#include <array>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "apps/common/input.h"
#include "apps/common/output.h"
#include "apps/ppl/score.h"
#include "mmrec/scorer.h"

namespace mmrec::apps {

/// How figures came about, a JSON object of "mode" (with its "window" and "stride", if any), "bos", the options
/// and the precision of the computation, "model" and "tokenizer" (fingerprints), "version" and "device". Figures are
/// comparable where all but the device agree. docs/schemas/mmrec-ppl-record.schema.json has the members.
using RunIdentity = nlohmann::ordered_json;

/// What a summary holds besides the measures.
// NOLINTNEXTLINE(bugprone-exception-escape): of an implicit move; JSON's does not throw
struct SummaryContext {
  bool has_text = true;         // the input was text: bytes and words mean something
  bool scores_all = true;       // every token of it counts, so that measures by bytes and words do too
  std::int64_t empty_docs = 0;  // documents without a token to score
  RunIdentity identity = {};
  nlohmann::ordered_json details = nlohmann::ordered_json::object();  // what else: model, prefill, timings
};

/// Adds an identity to a summary, where fingerprints are named such: its "model" says more.
void add_identity(nlohmann::ordered_json& summary, const RunIdentity& identity);

/// The summary object, schema "mmrec-ppl/1". A measure without a value is null.
nlohmann::ordered_json summary_json(const PerplexitySummary& summary, const SummaryContext& context);
/// The same for people: a line per figure.
std::string summary_text(const nlohmann::ordered_json& summary);

/// What a format does with records, and whether a summary follows them.
enum class Layout : std::uint8_t {
  kSummary,  // no records; the summary as text
  kObject,   // records are the first member of the JSON object that the summary is
  kLines,    // a line of JSON for each record; no summary
  kTable     // a line of values for each, below a line of names (RFC 4180; null is empty); no summary
};

/// A format of --format. Another one is a row here; its help and completion follow.
struct ReportFormat {
  std::string_view name;
  std::string_view help;
  Layout layout;
  char separator = ',';  // of kTable
  bool has_lines() const { return layout == Layout::kLines || layout == Layout::kTable; }
};
inline constexpr auto kReportFormats =
    std::to_array<ReportFormat>({{"text", "text", Layout::kSummary},
                                 {"json", "json (one object)", Layout::kObject},
                                 {"jsonl", "jsonl", Layout::kLines},
                                 {"csv", "csv (a line a document)", Layout::kTable}});

/// The format of that name, which is one of the table.
const ReportFormat& report_format(std::string_view name);

enum class ReportDetail : std::uint8_t { kSummary, kDocuments, kTokens };

/// Throws NumericError unless there is a finite perplexity, or no token at all.
void require_finite(const PerplexitySummary& summary);
/// Null where a number is not finite.
nlohmann::ordered_json real_or_null(double value);

/// Records of one kind, and the summary, in a format.
class Records {
 public:
  /// Records of kObject are written only if `in_json`; `name` is that of their member.
  Records(Output& out, const ReportFormat& format, std::string_view name, bool in_json);

  /// An object; all have the same keys in the same order. `tail` is what else stands in the entry of kObject: nothing,
  /// or `,"key":value` and so on.
  void add(const nlohmann::ordered_json& record, std::string_view tail = {});
  /// The summary, of those formats that have one.
  void finish(const nlohmann::ordered_json& summary);

 private:
  Output& out_;
  const ReportFormat& format_;
  std::string name_;
  bool in_json_;
  bool is_first_ = true;
};

/// What ends the line of a record, and of the one of a corpus' last document.
inline constexpr std::string_view kEnding = "}";
inline constexpr std::string_view kLastEnding = ",\"last\":true}";

/// The beginning of a document's record: what is known of it before it is scored.
std::string record_head(const Document& document);

/// Writes one report of documents. A line of JSON gets its end when it shows whether the document is the last of the
/// corpus: that one has "last": true, by which `mmrec-ppl merge` knows that it has all documents. With kTokens lines
/// are of scored tokens, and records of kObject have ids and log-probs.
class Report : public DocumentSink {
 public:
  /// `unended`: the document whose line a run before has left without an end. `flushes`: each line of a document is
  /// written at once.
  Report(Output& out, const ReportFormat& format, ReportDetail detail, RunIdentity identity,
         std::optional<std::int64_t> unended, bool flushes);

  void add(const ScoredDocument& scored) override;
  /// After the last document of a corpus of `documents`.
  void finish_corpus(const nlohmann::ordered_json& summary, std::int64_t documents);
  /// Instead, where the run ends before the corpus does. Leaves what a run before has written as it is.
  void stop();

 private:
  void add_tokens(const ScoredDocument& scored);
  void end_line(bool is_last);

  Output& out_;
  const ReportFormat& format_;
  ReportDetail detail_;
  RunIdentity identity_;
  Records records_;
  bool flushes_;
  bool is_first_ = true;
  std::optional<std::int64_t> unended_;
};

}  // namespace mmrec::apps
