// mmrec-jax as an architecture, and its executor on the CPU.
#include "models/mmrec_jax/mmrec_jax.h"

#include <fmt/format.h>

#include <stdexcept>

#include "models/mmrec_jax/net.h"
#include "models/runtime/cpu_executor.h"

template std::shared_ptr<mmrec::models::Executor> mmrec::models::make_cpu_executor(
    const mmrec_jax::Config& config, std::shared_ptr<const mmrec_jax::HostWeights> weights);

namespace mmrec::models::mmrec_jax {
namespace {

static_assert(fields_visited([](const auto& visit) { visit_layer(visit); }) == sizeof(LayerFields<char, char>),
              "visit_layer reaches every field");

/// What a missing or unexpected name may be owed to.
std::string hint(const Config& config, std::string_view name) {
  const auto has = [&](std::string_view part) { return name.find(part) != std::string_view::npos; };
  if (has("norm_recurrence")) return "; models of before the recurrence had a norm are not supported";
  if (has("moe_ffn.")) return "; a mixture of experts is not supported";
  if (has("block_")) return fmt::format("; config.json has num_layers {}", config.num_layers);
  return {};
}

}  // namespace

TensorRules MmrecJax::rules(const Config& config) {
  return {.is_training_only = [](auto name) { return name.find(".W_planning_") != std::string_view::npos; },
          .training_names = "W_planning_*",
          .hint = [config](auto name) { return hint(config, name); }};
}

void MmrecJax::describe(const Config& config, ModelInfo& info) {
  info.model_dim = config.model_dim;
  info.ffn_dim = config.ffn_dim();
  info.memory_slots = config.bank ? config.long_mem_len : 0;
}

ProductCounts MmrecJax::products(const Config& config) {
  const std::int64_t dim = config.model_dim, square = dim * dim;
  std::int64_t block = 5 * square + 4 * dim * config.gate_hidden_dim() + 2 * dim * config.ffn_dim();
  // Attention to the bank: W_q and W_out, and two products with all its rows; else, of prompts too, the gate of h.
  block += config.bank ? 2 * square + 2 * dim * config.long_mem_len : square;
  if (config.bank && config.calls != Calls::kStepwise) block += square;
  return {.per_token = config.num_layers * block, .head = config.vocab_size * dim};
}

Config MmrecJax::synthetic(const SyntheticSizes& sizes) {
  if (sizes.ffn != 4 * sizes.dim) {
    throw std::invalid_argument(fmt::format("ffn: found {}, expected {}: mmrec-jax has 4 times its width of {}",
                                            sizes.ffn, 4 * sizes.dim, sizes.dim));
  }
  Config config;
  config.model_dim = sizes.dim;
  config.num_layers = sizes.layers;
  config.vocab_size = sizes.vocab;
  config.num_heads = sizes.heads();
  return config;
}

}  // namespace mmrec::models::mmrec_jax
