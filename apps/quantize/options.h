// The command line of mmrec-quantize.
#pragma once

#include <filesystem>

#include "apps/common/arguments.h"
#include "mmrec/quantize.h"

namespace mmrec::apps {

struct QuantizeCommand {
  std::filesystem::path from, to;
  QuantizeOptions options;
  bool quiet = false;
};

const Program& quantize_program();

/// Throws UsageError.
QuantizeCommand quantize_command(const Arguments& arguments);

}  // namespace mmrec::apps
