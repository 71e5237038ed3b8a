// MM-Rec as an architecture, and its executor on the CPU.
#include "models/mmrec/mmrec.h"

#include <fmt/format.h>

#include "models/mmrec/net.h"
#include "models/runtime/cpu_executor.h"

namespace mmrec::models {

template std::shared_ptr<Executor> make_cpu_executor(const Config& config, std::shared_ptr<const HostWeights> weights);

namespace {

static_assert(fields_visited([](const auto& visit) { visit_layer(visit); }) == sizeof(LayerFields<char, char>),
              "visit_layer reaches every field");

/// The setting a missing or unexpected name may be owed to.
std::string hint(const Config& config, std::string_view name) {
  const auto has = [&](std::string_view part) { return name.find(part) != std::string_view::npos; };
  if (has("W_fused") || has(".W_k.") || has(".W_v.") || has(".W_z.") || (has(".W_q.") && !has("multi_mem"))) {
    return fmt::format("; config.json has use_hem {}", config.use_hem);
  }
  if (has("W_gamma_") || has("mdi.W_gamma") || has("mdi.W_context")) {
    return fmt::format("; config.json has use_dpg {}", config.use_dpg);
  }
  if (has("blocks.")) return fmt::format("; config.json has num_layers {}", config.num_layers);
  return {};
}

}  // namespace

bool is_training_only(std::string_view name) {
  return name.find("blocks.") != std::string_view::npos && name.find(".mdi.W_planning_") != std::string_view::npos;
}

TensorRules Mmrec::rules(const Config& config) {
  return {.is_training_only = [](auto name) { return name.starts_with("blocks.") && is_training_only(name); },
          .training_names = kTrainingNames,
          .hint = [config](auto name) { return hint(config, name); }};
}

void Mmrec::describe(const Config& config, ModelInfo& info) {
  info.model_dim = config.model_dim;
  info.ffn_dim = config.ffn_dim;
  info.memory_segment = config.memory_segment;
  info.memory_slots = config.memory_slots;
}

void Mmrec::correct_bytes(const Config& config, std::optional<kernels::DType> type, ModelInfo& info) {
  if (!type.has_value()) return;
  info.bytes_per_token -= bytes_of_queries(config, *type);
  info.memory_bytes += bytes_of_queries(config, *type);
}

ProductCounts Mmrec::products(const Config& config) {
  ProductCounts counts = products_of_blocks(config);
  counts.head = config.vocab_size * config.model_dim;
  return counts;
}

Config Mmrec::synthetic(const SyntheticSizes& sizes) {
  Config config;
  config.model_dim = sizes.dim;
  config.num_layers = sizes.layers;
  config.vocab_size = sizes.vocab;
  config.ffn_dim = sizes.ffn;
  config.num_heads = sizes.heads();
  return config;
}

ProductCounts products_of_blocks(const Config& config) {
  const std::int64_t dim = config.model_dim, square = dim * dim;
  const std::int64_t gates = 2 * square;  // W_g and the half of mdi.W_g that looks at h
  const std::int64_t decay = config.use_dpg ? 2 * config.dpg_rank * dim : 4 * config.gate_hidden_dim() * dim;
  const std::int64_t projections = (config.use_dpg ? 3 : 4) * square;
  const std::int64_t block = projections + gates + square + decay + 2 * dim * config.ffn_dim;
  ProductCounts counts{.per_token = config.num_layers * block, .per_sweep = gates};
  if (config.memory_slots >= 2) {
    counts.of_memory = config.num_layers * 2 * square;
    counts.memory_from = 2 * config.memory_segment;
  }
  return counts;
}

std::uint64_t bytes_of_queries(const Config& config, kernels::DType type) {
  return kernels::bytes_of(type, config.num_layers * config.model_dim, config.model_dim);
}

}  // namespace mmrec::models
