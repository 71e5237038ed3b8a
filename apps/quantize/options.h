// The command line of mmrec-quantize.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "apps/common/arguments.h"
#include "apps/common/model_folder.h"
#include "mmrec/quantize.h"

namespace mmrec::apps {

struct QuantizeCommand {
  std::filesystem::path from, to;
  QuantizeOptions options;
  std::optional<std::string> calibrate, eval;  // texts
  RunOptions run;
  bool quiet = false;
};

const Program& quantize_program();

/// Throws UsageError.
QuantizeCommand quantize_command(const Arguments& arguments);

}  // namespace mmrec::apps
