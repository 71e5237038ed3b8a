// mmrec-jax as an architecture, and its executor on the CPU.
#include "models/mmrec_jax/mmrec_jax.h"

#include <fmt/format.h>

#include <cstddef>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>

#include "models/mmrec_jax/net.h"
#include "models/runtime/cpu_executor.h"

namespace mmrec::models::jax {

static Plan chunk_plan(const Config& /*config*/, const kernels::Cpu& /*cpu*/) {
  return {.tokens = kCpuPlan.tokens, .tile = kernels::kRowTile, .rows = kCpuPlan.rows};
}

}  // namespace mmrec::models::jax

namespace mmrec::models {

template class ModelOf<jax::MmrecJax>;
template std::shared_ptr<Executor> make_cpu_executor(const jax::Config& config,
                                                     std::shared_ptr<const jax::HostWeights> weights);

}  // namespace mmrec::models

namespace mmrec::models::jax {
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

std::vector<TensorSpec> tensor_specs(const Config& config, bool fused) {
  const Sizes sizes = sizes_of(config, fused);
  std::vector<TensorSpec> specs;
  add_specs(kEmbeddingField, sizes, sizes, specs, 0);
  for (std::int64_t layer = 0; layer < config.num_layers; ++layer) {
    const std::ptrdiff_t first = std::ssize(specs);
    const std::string prefix = block_prefix(static_cast<std::size_t>(layer));
    const auto add = [&](const Field& field) { add_specs(field, sizes, sizes, specs, first); };
    visit_layer(at_prefix(add, prefix));
  }
  add_specs(kNormField, sizes, sizes, specs, std::ssize(specs));
  return specs;
}

TensorRules MmrecJax::rules(const Config& config) {
  return {.is_training_only = [](auto name) { return name.find(".W_planning_") != std::string_view::npos; },
          .training_names = "W_planning_*",
          .hint = [config](auto name) { return hint(config, name); }};
}

Config MmrecJax::config_of(const ModelSource& source) {
  Config config = parse_config(source.config, source.config_name, source.warn);
  config.calls = source.variant.calls.value_or(config.calls);
  config.bank = source.variant.bank.value_or(config.bank);
  return config;
}

void MmrecJax::describe(const Config& config, ModelInfo& info) {
  info.model_dim = config.model_dim;
  info.ffn_dim = config.ffn_dim();
  info.memory_slots = config.bank ? config.long_mem_len : 0;
  info.variant.calls = config.calls;
  info.variant.bank = config.bank;
}

// All of the blocks, the head, which is the embedding, and a row of it: a step multiplies no h_{t-1} where it is 0, and
// attends to nothing without a bank.
void MmrecJax::count_bytes(const Config& config, const HostWeights& weights, std::optional<kernels::DType> type,
                           ModelInfo& info) {
  const std::uint64_t embedding = bytes_of(weights.embedding, type);
  std::uint64_t bytes = bytes_of(weights.norm, type) + embedding;
  if (weights.embedding.rows > 0) bytes += embedding / static_cast<std::uint64_t>(weights.embedding.rows);
  for (const auto& layer : weights.layers) {
    visit_layer([&](const Field& /*field*/, const auto& w) { bytes += bytes_of(w, type); }, layer);
    bytes -= config.bank ? bytes_of(layer.gate_h, type) : bytes_of(layer.query, type) + bytes_of(layer.attended, type);
  }
  info.bytes_per_token = bytes;
}

ProductCounts MmrecJax::products(const Config& config) {
  const std::int64_t dim = config.model_dim, square = dim * dim;
  std::int64_t block = 5 * square + 4 * dim * config.gate_hidden_dim() + 2 * dim * config.ffn_dim();
  // Attention to the bank: W_q and W_out, and two products with all its rows; else, of prompts too, the gate of h.
  block += config.bank ? 2 * square + 2 * dim * config.long_mem_len : square;
  if (config.bank && config.calls != Calls::kStepwise) block += square;
  return {.per_token = config.num_layers * block, .head = config.vocab_size * dim};
}

SyntheticModel MmrecJax::synthetic(const SyntheticSizes& sizes) {
  if (sizes.ffn != 4 * sizes.dim) {
    throw std::invalid_argument(fmt::format("ffn: found {}, expected {}: mmrec-jax has 4 times its width of {}",
                                            sizes.ffn, 4 * sizes.dim, sizes.dim));
  }
  Config config;
  config.model_dim = sizes.dim;
  config.num_layers = sizes.layers;
  config.vocab_size = sizes.vocab;
  config.num_heads = sizes.dim / 64;
  return {to_json(config), tensor_specs(config, true)};
}

}  // namespace mmrec::models::jax
