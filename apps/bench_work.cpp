#include "apps/bench_work.h"

#include <algorithm>

namespace mmrec::apps {

double prefill_flops(const models::Config& config, std::int64_t batch, std::int64_t tokens, const PrefillStats& stats) {
  const std::int64_t dim = config.model_dim;
  const std::int64_t square = dim * dim;
  const std::int64_t gates = 2 * square;  // W_g and the half of mdi.W_g that looks at h
  const std::int64_t decay = config.use_dpg ? 2 * config.dpg_rank * dim : 4 * config.gate_hidden_dim() * dim;
  const std::int64_t projections = (config.use_dpg ? 3 : 4) * square;
  const std::int64_t always = projections + gates + square + decay + 2 * dim * config.ffn_dim;
  const std::int64_t memory = 2 * square;
  const std::int64_t with_memory =
      config.memory_slots < 2 ? 0 : std::max<std::int64_t>(0, tokens - 2 * config.memory_segment);
  const std::int64_t per_layer = tokens * always + with_memory * memory;
  const std::int64_t more_sweeps = std::max<std::int64_t>(0, stats.token_sweeps - stats.layer_tokens);
  const double elements = static_cast<double>(batch * config.num_layers) * static_cast<double>(per_layer) +
                          static_cast<double>(more_sweeps) * static_cast<double>(gates) +
                          static_cast<double>(batch * config.vocab_size) * static_cast<double>(dim);
  return 2.0 * elements;
}

}  // namespace mmrec::apps
