// Records of documents that were printed before. `mmrec-ppl merge` adds them up, and --resume goes on from them.
//
// Must stay true: sums are made of documents in their order, as one run makes them, so that the records of a corpus
// give its figures to the last digit, however it was divided.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "apps/common/arguments.h"
#include "apps/common/output.h"
#include "apps/ppl/corpus.h"
#include "apps/ppl/report.h"
#include "mmrec/scorer.h"

namespace mmrec::apps {

/// A line of mmrec-ppl --format jsonl.
// NOLINTNEXTLINE(bugprone-exception-escape): of an implicit move; JSON's does not throw
struct DocumentRecord {
  std::int64_t index = 0;
  std::string name;
  std::string hash;  // of the document, hexadecimal
  DocumentSums sums;
  std::int64_t bytes = -1;  // as in Document
  std::int64_t words = -1;
  bool is_last = false;  // of the corpus
  RunIdentity identity;
};

/// `where` stands for the line. Throws RejectedFile naming that, found and expected; for members that are unknown,
/// missing, or not of their type and range, too.
DocumentRecord parse_record(std::string_view line, const std::string& where);

/// Throws RejectedFile naming the field that differs unless figures of the two are comparable.
void check_comparable(const RunIdentity& found, const RunIdentity& expected, const std::string& where);

/// Adds a document's record to `sums`, as score_corpus adds its score; whether it had a token to score. Throws
/// RejectedFile if counts add up to more than 2^53.
bool add_record(const DocumentRecord& record, PerplexityAccumulator& sums);

/// `mmrec-ppl merge FILE...`: the summary of all documents of these records. Each document must be there once. Returns
/// the exit code.
int merge_main(const Arguments& arguments);

/// Skips documents that an interrupted run already scored, and adds what that run said of them to `sums`.
class ResumeFilter {
 public:
  /// Without `file` all documents are left. Reads the records of `file`, which need not be there. Throws RejectedFile
  /// for a file of something else, and for a record of another run than `identity`. `out`, which writes to that file,
  /// will go on behind the last record.
  ResumeFilter(const std::optional<std::string>& file, const RunIdentity& identity, PerplexityAccumulator& sums,
               Output& out);

  /// Whether the next document of the corpus is to be scored. Throws RejectedFile if the next record is of another one.
  bool is_left(const Document& document);
  /// After the last document. Throws RejectedFile if there are records of more.
  void finish();
  /// The document of the last record, whose line will be written anew from its end on.
  std::optional<std::int64_t> unended() const;
  /// Skipped documents without a token to score.
  std::int64_t empty() const { return empty_; }

 private:
  [[noreturn]] void refuse_tail(std::string_view expected) const;

  std::string file_;
  std::vector<DocumentRecord> records_;  // without identities
  std::string tail_;                     // a last line that is cut short
  PerplexityAccumulator& sums_;
  std::size_t next_ = 0;
  std::int64_t empty_ = 0;
};

}  // namespace mmrec::apps
