// MM-Rec's weights by its table (weight_table.h): read, and seen.
#include "models/mmrec/weights.h"

#include <string>

namespace mmrec::models {

ModelView<kernels::Host> view_of(const HostWeights& weights) {
  ModelView<kernels::Host> model;
  model.layers.resize(weights.layers.size());
  visit_model([](const Field&, const auto& from, auto& to) { to = view(from); }, weights, model);
  if (weights.head.rows == 0) model.head = model.embedding;
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
  using enum Field::Kind;
  HostWeights weights;
  check_tensors(checkpoint, config, warn);
  const Sizes sizes = sizes_of(config);
  WeightReader reader(checkpoint, options);
  weights.layers.resize(static_cast<std::size_t>(config.num_layers));
  reader.add({kTable, table::kEmbedding}, "", sizes, weights.embedding);
  for (std::size_t i = 0; i < weights.layers.size(); ++i) {
    const std::string prefix = "blocks." + std::to_string(i) + ".";
    visit_layer([&](const Field& field, auto& to) { reader.add(field, prefix, sizes, to); }, weights.layers[i]);
  }
  reader.add({kNorm, table::kNorm}, "", sizes, weights.norm);
  reader.read();
  // Public checkpoints hold the tied head twice: keep it only if it differs.
  reader.read_unless_equal({kTable, table::kHead}, sizes, weights.head, weights.embedding);
  Config identity = config;  // which tokens begin and end a text does not change what the model computes
  identity.bos_token_id.reset();
  identity.eos_token_ids.clear();
  static_cast<WeightTotals&>(weights) = reader.totals(to_json(identity));
  return weights;
}

}  // namespace mmrec::models
