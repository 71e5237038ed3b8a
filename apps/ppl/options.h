// The command line of mmrec-ppl.
#pragma once

#include <optional>
#include <string>

#include "apps/common/arguments.h"
#include "apps/common/model_folder.h"
#include "apps/ppl/corpus.h"
#include "apps/ppl/report.h"
#include "mmrec/evaluation.h"

namespace mmrec::apps {

/// What the command line says, checked as far as that needs no file.
struct PplOptions : ModelCommand {
  int batch = 0;
  CorpusOptions corpus;  // what the command line says of it
  bool pairs() const { return corpus.split == Split::kPairs; }
  WindowOptions windows;
  ReportFormat format = kReportFormats.front();
  ReportDetail detail = ReportDetail::kSummary;
  std::optional<std::string> compare;
  std::optional<std::string> save_logprobs;
  std::optional<std::string> plot;
  std::optional<std::string> html;
  bool resume = false;
  bool whole_calls = false;  // of mmrec-jax: log-probs may be given later tokens
};

const Program& ppl_program();
/// mmrec-ppl merge.
const Program& merge_program();

/// Throws UsageError, RejectedFile where the bundled model is missing.
PplOptions ppl_options(const Arguments& arguments);

}  // namespace mmrec::apps
