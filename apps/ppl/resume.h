// --resume: goes on with the output that an interrupted run left.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "apps/common/output.h"
#include "apps/ppl/corpus.h"
#include "apps/ppl/merge.h"

namespace mmrec::apps {

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
  RecordSums sums_;
  std::size_t next_ = 0;
  std::int64_t empty_ = 0;
};

}  // namespace mmrec::apps
