// --html: the documents with each token coloured by its surprise, in one file that needs nothing else.
#pragma once

#include <optional>
#include <string>

#include "apps/common/output.h"
#include "apps/ppl/report.h"
#include "apps/ppl/score.h"
#include "mmrec/tokenizer.h"

namespace mmrec::apps {

/// Written as documents come, a hundred bytes or so a token. Without a tokenizer it shows ids.
class HtmlReport {
 public:
  HtmlReport(Output& out, std::optional<Tokenizer> tokenizer, const RunIdentity& identity);

  void add(const ScoredDocument& scored);
  /// Ends the file and puts it in its place.
  void finish(const nlohmann::ordered_json& summary);

 private:
  std::string text_of(StreamDecoder* decoder, int id) const;

  Output& out_;
  std::optional<Tokenizer> tokenizer_;
};

}  // namespace mmrec::apps
