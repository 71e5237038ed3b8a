// MMRec100M as an architecture, and its executor on the CPU.
#include "models/mmrec100m/mmrec100m.h"

#include <fmt/format.h>

#include "models/mmrec100m/net.h"
#include "models/runtime/cpu_executor.h"

template std::shared_ptr<mmrec::models::Executor> mmrec::models::make_cpu_executor(
    const mmrec100m::Config& config, std::shared_ptr<const mmrec100m::HostWeights> weights);

namespace mmrec::models::mmrec100m {

namespace {

std::string hint(const Config& config, std::string_view name) {
  if (name.find(".blocks.") != std::string_view::npos) {
    return fmt::format("; config.json has num_layers {}", config.num_layers);
  }
  if (name.starts_with("fusion.gate.")) return "; the fusion method concatenate has none, and another is not supported";
  return {};
}

}  // namespace

TensorRules Mmrec100m::rules(const Config& config) {
  return {.is_training_only = is_training_only,
          .training_names = kTrainingNames,
          .hint = [config](std::string_view name) { return hint(config, name); }};
}

void Mmrec100m::describe(const Config& config, ModelInfo& info) {
  info.model_dim = config.expert_dim;
  info.ffn_dim = config.ffn_dim;
}

void Mmrec100m::correct_bytes(const Config& config, std::optional<kernels::DType> type, ModelInfo& info) {
  if (type.has_value()) info.bytes_per_token -= config.stacks() * bytes_of_queries(config.stack(), *type);
}

ProductCounts Mmrec100m::products(const Config& config) {
  const std::int64_t dim = config.expert_dim;
  ProductCounts counts = products_of_blocks(config.stack());
  const std::int64_t of_q = config.num_layers * dim * dim;  // which nothing is attended to for
  counts.per_token = static_cast<std::int64_t>(config.stacks()) * (counts.per_token - of_q) + 4 * dim * dim;
  counts.head = config.vocab_size * 2 * dim;
  return counts;
}

Config Mmrec100m::synthetic(const SyntheticSizes& sizes) {
  Config config;
  config.vocab_size = sizes.vocab;
  config.expert_dim = sizes.dim;
  config.num_layers = sizes.layers;
  config.num_heads = sizes.heads();
  config.ffn_dim = sizes.ffn;
  return config;
}

}  // namespace mmrec::models::mmrec100m
