// MMRec100M as an architecture, and its executor on the CPU.
#include "models/mmrec100m/mmrec100m.h"

#include <fmt/format.h>

#include <iterator>
#include <string>

#include "models/mmrec100m/net.h"
#include "models/runtime/cpu_executor.h"

namespace mmrec::models {

static ChunkPlan chunk_plan(const Config100m& /*config*/, const kernels::Cpu& /*cpu*/) { return kCpuPlan; }

template class ModelOf<Mmrec100m>;
template std::shared_ptr<Executor> make_cpu_executor(const Config100m& config,
                                                     std::shared_ptr<const HostWeights100m> weights);

namespace {

std::string hint(const Config100m& config, std::string_view name) {
  if (name.find(".blocks.") != std::string_view::npos) {
    return fmt::format("; config.json has num_layers {}", config.num_layers);
  }
  if (name.starts_with("fusion.gate.")) return "; the fusion method concatenate has none, and another is not supported";
  return {};
}

}  // namespace

std::vector<TensorSpec> Mmrec100m::tensors(const Config& config, const Sizes& sizes) {
  using enum Field::Kind;
  std::vector<TensorSpec> specs;
  const auto add = [&](const Field& field) { add_specs(field, sizes, sizes, specs, std::ssize(specs)); };
  add({kTable, table::kEmbedding});
  for (const std::string_view prefix : kExpertPrefixes) {
    add_block_specs(std::string(prefix), sizes, config.num_layers, specs);
    add({.kind = kNorm, .parts = table::kNorm, .prefix = prefix});
  }
  add({kLinear, table::kFusion});
  add({kNorm, table::kFinalNorm});
  add({kTable, table::kWideHead});
  return specs;
}

TensorRules Mmrec100m::rules(const Config& config) {
  return {.is_training_only = is_training_only,
          .training_names = kTrainingNames,
          .hint = [config](std::string_view name) { return hint(config, name); }};
}

Config100m Mmrec100m::config_of(const ModelSource& source) {
  Config config = parse_config_100m(source.config, source.config_name, source.warn);
  config.expert = source.variant.expert.value_or(config.expert);
  return config;
}

void Mmrec100m::describe(const Config& config, ModelInfo& info) {
  info.model_dim = config.expert_dim;
  info.ffn_dim = config.ffn_dim;
  info.variant.expert = config.expert;
}

// All but the embedding, of which it is a row.
void Mmrec100m::count_bytes(const Config& config, const HostWeights100m& weights, std::optional<kernels::DType> type,
                            ModelInfo& info) {
  info.bytes_per_token = bytes_of(weights.embedding, type) / static_cast<std::uint64_t>(config.vocab_size) +
                         bytes_of(weights.fusion, type) + bytes_of(weights.fusion_bias, type) +
                         bytes_of(weights.norm, type) + bytes_of(weights.head, type);
  for (const auto& expert : weights.experts) {
    info.bytes_per_token += bytes_of(expert.norm, type);
    for (const auto& layer : expert.layers) add_block_bytes(info, layer, type);
  }
  info.memory_bytes = 0;  // never read
}

ProductCounts Mmrec100m::products(const Config& config) {
  const std::int64_t dim = config.expert_dim;
  ProductCounts counts = products_of_blocks(config.stack());
  const std::int64_t of_q = config.num_layers * dim * dim;  // which nothing is attended to for
  counts.per_token = static_cast<std::int64_t>(config.stacks()) * (counts.per_token - of_q) + 4 * dim * dim;
  counts.head = config.vocab_size * 2 * dim;
  return counts;
}

SyntheticModel Mmrec100m::synthetic(const SyntheticSizes& sizes) {
  Config100m config;
  config.vocab_size = sizes.vocab;
  config.expert_dim = sizes.dim;
  config.num_layers = sizes.layers;
  config.num_heads = sizes.dim / 64;
  config.ffn_dim = sizes.ffn;
  return {to_json(config), tensors(config, sizes_of(config.stack()))};
}

}  // namespace mmrec::models
