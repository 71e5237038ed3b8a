// How many processors this process may use.
#pragma once

#include <sched.h>

#include <algorithm>
#include <thread>

namespace mmrec::apps {

/// Those of its affinity mask; at least 1.
inline int usable_processors() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace mmrec::apps
