// An mmrec-jax model's tensors and weights by its table (weight_table.h).
#include "models/mmrec_jax/weights.h"

#include <fmt/format.h>

#include <cstddef>
#include <iterator>
#include <string>
#include <string_view>

namespace mmrec::models::jax {
namespace {

constexpr std::size_t fields_visited() {
  std::size_t count = 0;
  visit_layer([&](const Field& /*field*/) { ++count; });
  return count;
}
static_assert(fields_visited() == sizeof(LayerFields<char, char>), "visit_layer reaches every field");

std::string prefix_of(std::int64_t layer) { return fmt::format("block_{}.", layer); }

bool is_fused(const Checkpoint& checkpoint) { return checkpoint.find("block_0.W_fused.kernel") != nullptr; }

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
  add_specs(kEmbeddingField, "", sizes, sizes, specs, 0);
  for (std::int64_t layer = 0; layer < config.num_layers; ++layer) {
    const std::ptrdiff_t first = std::ssize(specs);
    visit_layer([&](const Field& field) { add_specs(field, prefix_of(layer), sizes, sizes, specs, first); });
  }
  add_specs(kNormField, "", sizes, sizes, specs, std::ssize(specs));
  return specs;
}

ModelView<kernels::Host> view_of(const HostWeights& weights) {
  ModelView<kernels::Host> model;
  model.layers.resize(weights.layers.size());
  visit_model([](const Field&, const auto& from, auto& to) { to = view(from); }, weights, model);
  return model;
}

kernels::DType common_dtype(const HostWeights& weights) {
  const kernels::DType type = weights.embedding.format.code;
  bool all = true;
  visit_model([&](const Field& /*field*/, const auto& w) { all = all && has_dtype(w, type); }, weights);
  return all ? type : kernels::DType::kF32;
}

HostWeights load_weights(const Checkpoint& checkpoint, const Config& config, const WeightOptions& options,
                         const WarningSink& warn) {
  const bool fused = is_fused(checkpoint);
  check_tensors(checkpoint, tensor_specs(config, fused),
                {.is_training_only = [](auto name) { return name.find(".W_planning_") != std::string_view::npos; },
                 .training_names = "W_planning_*",
                 .hint = [&](auto name) { return hint(config, name); }},
                warn);
  const Sizes sizes = sizes_of(config, fused);
  HostWeights weights;
  WeightReader reader(checkpoint, options);
  weights.layers.resize(static_cast<std::size_t>(config.num_layers));
  reader.add(kEmbeddingField, "", sizes, weights.embedding);
  for (std::size_t i = 0; i < weights.layers.size(); ++i) {
    const std::string prefix = prefix_of(static_cast<std::int64_t>(i));
    visit_layer([&](const Field& field, auto& to) { reader.add(field, prefix, sizes, to); }, weights.layers[i]);
  }
  reader.add(kNormField, "", sizes, weights.norm);
  reader.read();
  Config identity = config;  // neither changes what a saved state holds
  identity.ids = {};
  identity.calls = Config().calls;
  static_cast<WeightTotals&>(weights) = reader.totals(to_json(identity));
  return weights;
}

}  // namespace mmrec::models::jax
