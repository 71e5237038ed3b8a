#include "apps/bench/work.h"

#include <algorithm>

namespace mmrec::apps {

double prefill_flops(const models::ProductCounts& counts, std::int64_t batch, std::int64_t tokens,
                     const PrefillStats& stats) {
  const std::int64_t with_memory = counts.of_memory == 0 ? 0 : std::max<std::int64_t>(0, tokens - counts.memory_from);
  const std::int64_t more_sweeps = std::max<std::int64_t>(0, stats.token_sweeps - stats.layer_tokens);
  const double elements =
      static_cast<double>(batch) * (static_cast<double>(tokens) * static_cast<double>(counts.per_token) +
                                    static_cast<double>(with_memory) * static_cast<double>(counts.of_memory) +
                                    static_cast<double>(counts.head)) +
      static_cast<double>(more_sweeps) * static_cast<double>(counts.per_sweep);
  return 2.0 * elements;
}

}  // namespace mmrec::apps
