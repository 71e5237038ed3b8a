// The command line of mmrec-bench: its options and their help.
#pragma once

#include <span>
#include <string>

#include "apps/common/option_table.h"

namespace mmrec::apps {

std::span<const Option> bench_option_table();
/// The page of --help, or of --help-all.
std::string bench_help(bool all);

}  // namespace mmrec::apps
