// The command line of mmrec-generate.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "apps/common/arguments.h"
#include "apps/common/model_folder.h"
#include "apps/generate/records.h"

namespace mmrec::apps {

/// What the command line says, checked as far as that needs no file.
struct GenerateCommand : ModelCommand {
  std::optional<std::string> prompt;  // its escapes resolved
  std::optional<std::string> file;    // "-": stdin
  GenerateOptions options;            // without what files say of the sampler and of what ends a sequence
  int num_samples = 1;
  int slots = 0;  // 0: as the generator likes
  std::optional<std::string> state_in;
  std::optional<std::string> state_out;
  std::optional<std::string> prefix_cache;
  std::int64_t prefix_cache_mb = 1024;
  bool echo = false;
  bool json = false;
  bool lines = false;
  std::optional<std::string> jsonl;  // "-": stdin
  std::size_t max_line_bytes = 0;
  std::int64_t max_line_tokens = std::int64_t{1} << 22;
  std::size_t max_line_extra_bytes = std::size_t{16} << 10;  // of its id; of its stop strings together
  bool as_completed = false;
  bool interactive = false;

  RecordDetail detail() const { return {.prompt = echo, .tokens = json || options.top_logprobs > 0}; }
};

const Program& generate_program();

/// Throws UsageError, RejectedFile where the bundled model is missing.
GenerateCommand generate_command(const Arguments& arguments);

/// Sets what --tokens and --stop say. Throws UsageError.
void set_options(const Arguments& arguments, GenerateOptions& options);

/// `text` with \n, \r, \t, \e, \\, \", \', \xHH and a backslash before the end of a line (which takes both away)
/// replaced by what they stand for. Throws UsageError naming `option` for any other.
std::string unescaped(std::string_view text, std::string_view option);

}  // namespace mmrec::apps
