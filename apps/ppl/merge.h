// Records of documents that were printed before: added up by `mmrec-ppl merge`, and gone on from by --resume.
//
// Must stay true: sums are made of documents in their order, as one run makes them, so that the records of a corpus
// give its figures to the last digit, however it was divided.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "apps/common/output.h"
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

/// Adds a document's record as score_corpus adds its score; whether it had a token to score. Throws RejectedFile where
/// counts add up to more than 2^53.
bool add_record(const DocumentRecord& record, PerplexityAccumulator& sums);

/// `mmrec-ppl merge FILE...`: the summary of all documents of these records, each of which must be there once. Returns
/// the exit code.
int merge_main(int argc, const char* const* argv);

/// The output that an interrupted run left.
struct Resumed {
  std::vector<DocumentRecord> records;  // without identities
  std::uint64_t keep = 0;               // bytes up to the end of the last record's line, which is written anew
  std::string tail;                     // a last line that is cut short
};
/// Of the file at `path`, none if there is none. Throws RejectedFile for a file of something else, and for a record of
/// another run than `identity`.
Resumed read_resumed(const std::string& path, const RunIdentity& identity);

}  // namespace mmrec::apps
