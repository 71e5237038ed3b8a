// The command line of mmrec-bench: its options and their help.
#pragma once

#include "apps/common/arguments.h"

namespace mmrec::apps {

const Program& bench_program();

}  // namespace mmrec::apps
