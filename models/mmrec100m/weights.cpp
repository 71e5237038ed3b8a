#include "models/mmrec100m/weights.h"

#include <fmt/format.h>

#include <iterator>
#include <string>

namespace mmrec::models {
namespace {

std::string hint(const Config100m& config, std::string_view name) {
  if (name.find(".blocks.") != std::string_view::npos) {
    return fmt::format("; config.json has num_layers {}", config.num_layers);
  }
  if (name.starts_with("fusion.gate.")) return "; the fusion method concatenate has none, and another is not supported";
  return {};
}

}  // namespace

View100m<kernels::Host> view_of(const HostWeights100m& weights) {
  auto model = empty_view<kernels::Host>(weights);
  visit_100m([](const Field&, const auto& from, auto& to) { to = view(from); }, weights, model);
  return model;
}

kernels::DType common_dtype(const HostWeights100m& weights) {
  const kernels::DType type = weights.embedding.format.code;
  bool all = true;
  visit_100m([&](const Field& /*field*/, const auto& w) { all = all && has_dtype(w, type); }, weights);
  return all ? type : kernels::DType::kF32;
}

std::vector<TensorSpec> tensor_specs(const Config100m& config) {
  using enum Field::Kind;
  const Sizes sizes = sizes_of(config.stack());
  std::vector<TensorSpec> specs;
  const auto add = [&](const Field& field, std::string_view prefix) {
    add_specs(field, std::string(prefix), sizes, sizes, specs, std::ssize(specs));
  };
  add({kTable, table::kEmbedding}, "");
  for (const std::string_view prefix : kExpertPrefixes) {
    add_block_specs(std::string(prefix), sizes, config.num_layers, specs);
    add({kNorm, table::kNorm}, prefix);
  }
  add({kLinear, table::kFusion}, "");
  add({kNorm, table::kFinalNorm}, "");
  add({kTable, table::kWideHead}, "");
  return specs;
}

HostWeights100m load_weights(const Checkpoint& checkpoint, const Config100m& config, const WeightOptions& options,
                             const WarningSink& warn) {
  check_tensors(checkpoint, tensor_specs(config),
                {.is_training_only = [](std::string_view name) { return is_training_only(name); },
                 .training_names = kTrainingNames,
                 .hint = [&](std::string_view name) { return hint(config, name); }},
                warn);
  const Sizes sizes = sizes_of(config.stack());
  HostWeights100m weights;
  for (std::size_t i = 0; i < config.stacks(); ++i) {
    weights.experts[config.first() + i].layers.resize(static_cast<std::size_t>(config.num_layers));
  }
  WeightReader reader(checkpoint, options);
  std::string prefix;
  const auto add = [&](const Field& field, auto& to) {
    const bool is_idle = field.of_memory && field.is_matrix();  // nothing is ever attended to
    if (!is_idle) reader.add(field, prefix, sizes, to);
  };
  using enum Field::Kind;
  add({kTable, table::kEmbedding}, weights.embedding);
  add({kLinear, table::kFusion}, weights.fusion);
  add({kBias, table::kFusion}, weights.fusion_bias);
  add({kNorm, table::kFinalNorm}, weights.norm);
  add({kTable, table::kWideHead}, weights.head);
  for (std::size_t e = 0; e < weights.experts.size(); ++e) {
    auto& fields = weights.experts[e];
    if (fields.layers.empty()) continue;
    prefix = kExpertPrefixes[e];
    add({kNorm, table::kNorm}, fields.norm);
    for (std::size_t i = 0; i < fields.layers.size(); ++i) {
      prefix = std::string(kExpertPrefixes[e]) + "blocks." + std::to_string(i) + ".";
      visit_layer(add, fields.layers[i]);
    }
  }
  reader.read();
  Config100m identity = config;  // which tokens begin and end a text, and heads that attend to nothing, change nothing
  identity.ids = {};
  identity.num_heads = 1;
  static_cast<WeightTotals&>(weights) = reader.totals(to_json(identity));
  return weights;
}

}  // namespace mmrec::models
