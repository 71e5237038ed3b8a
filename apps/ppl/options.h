// The command line of mmrec-ppl.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "apps/common/cli.h"
#include "apps/common/model_folder.h"
#include "apps/common/named_files.h"
#include "apps/common/option_table.h"
#include "apps/ppl/corpus.h"
#include "apps/ppl/report.h"
#include "mmrec/evaluation.h"

namespace mmrec::apps {

/// What the command line says, checked as far as that needs no file.
struct PplOptions {
  RunOptions run;
  int batch = 0;
  std::filesystem::path folder;
  std::vector<std::string> files;
  std::optional<Split> split;
  std::string field = "text";
  std::size_t most_bytes = kMaxInputBytes;  // of a text
  bool pairs() const { return split == Split::kPairs; }
  WindowOptions windows;
  ReportFormat format = ReportFormat::kText;
  ReportDetail detail = ReportDetail::kSummary;
  std::optional<std::string> output;
  std::optional<std::string> compare;
  std::optional<std::string> save_logprobs;
  std::optional<std::string> plot;
  std::optional<std::string> html;
  bool resume = false;
  std::int64_t shard = 0;  // of `shards`: every document of which the number leaves this remainder
  std::int64_t shards = 1;
  bool quiet = false;
  bool verbose = false;
  bool sandbox = false;
  std::vector<NamedFile> named;
  bool whole_calls = false;  // of mmrec-jax: log-probs may be given later tokens
};

std::span<const Option> ppl_option_table();
/// Those of `mmrec-ppl merge`, and its page.
std::span<const Option> merge_option_table();
std::string merge_help();
/// The page of --help, or of --help-all.
std::string ppl_help(bool all);

/// Throws UsageError, RejectedFile where the bundled model is missing.
PplOptions ppl_options(const Arguments& arguments);

/// What it opens by name when the command line is read.
SandboxFiles files_of(const PplOptions& options);

}  // namespace mmrec::apps
