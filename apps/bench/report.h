// What mmrec-bench prints of its runs.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "apps/bench/run.h"

namespace mmrec::apps {

/// One object, schema "mmrec-bench/1": the last run, with those before it under "compare" and how many times as fast
/// the last one's rows are under "speedups".
nlohmann::ordered_json bench_json(const std::vector<BenchRun>& runs);

/// A table for each run, then the speed-ups.
std::string bench_table(const std::vector<BenchRun>& runs);

}  // namespace mmrec::apps
