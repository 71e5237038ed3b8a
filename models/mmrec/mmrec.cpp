// MM-Rec as an architecture, and its executor on the CPU.
#include "models/mmrec/mmrec.h"

#include <utility>

#include "models/mmrec/net.h"
#include "models/mmrec/synthetic.h"
#include "models/runtime/cpu_executor.h"

namespace mmrec::models {

static ChunkPlan chunk_plan(const Config& /*config*/, const kernels::Cpu& /*cpu*/) { return kCpuPlan; }

template class ModelOf<Mmrec>;
template std::shared_ptr<Executor> make_cpu_executor(const Config& config, std::shared_ptr<const HostWeights> weights);

void Mmrec::read_rest(WeightReader& reader, const Sizes& sizes, HostWeights& weights) {
  reader.read_unless_equal({Field::Kind::kTable, table::kHead}, sizes, weights.head, weights.embedding);
}

void Mmrec::describe(const Config& config, ModelInfo& info) {
  info.model_dim = config.model_dim;
  info.ffn_dim = config.ffn_dim;
  info.memory_segment = config.memory_segment;
  info.memory_slots = config.memory_slots;
}

// Every matrix and vector of every layer, the head, one embedding row.
void Mmrec::count_bytes(const Config& /*config*/, const HostWeights& weights, std::optional<kernels::DType> type,
                        ModelInfo& info) {
  const std::uint64_t embedding = bytes_of(weights.embedding, type);
  info.bytes_per_token = bytes_of(weights.norm, type);
  info.memory_bytes = 0;
  info.bytes_per_token += weights.head.rows == 0 ? embedding : bytes_of(weights.head, type);
  if (weights.embedding.rows > 0) {
    info.bytes_per_token += embedding / static_cast<std::uint64_t>(weights.embedding.rows);
  }
  for (const auto& layer : weights.layers) add_block_bytes(info, layer, type);
}

ProductCounts Mmrec::products(const Config& config) {
  ProductCounts counts = products_of_blocks(config);
  counts.head = config.vocab_size * config.model_dim;
  return counts;
}

SyntheticModel Mmrec::synthetic(const SyntheticSizes& sizes) {
  Config config;
  config.model_dim = sizes.dim;
  config.num_layers = sizes.layers;
  config.vocab_size = sizes.vocab;
  config.ffn_dim = sizes.ffn;
  config.num_heads = sizes.dim / 64;
  return {to_json(config), synthetic_tensors(config)};
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

void add_block_bytes(ModelInfo& info, const LayerFields<HostMatrix, HostVector>& layer,
                     std::optional<kernels::DType> type) {
  const auto add = [&](const Field& field, const auto& w) {
    (field.of_memory && field.is_matrix() ? info.memory_bytes : info.bytes_per_token) += bytes_of(w, type);
  };
  visit_layer(add, layer);
  if (!type.has_value()) return;  // a GPU's step multiplies W_q only where there is something to attend to
  const std::uint64_t of_q = kernels::bytes_of(*type, layer.qvzk.cols, layer.qvzk.cols);
  info.bytes_per_token -= of_q;
  info.memory_bytes += of_q;
}

}  // namespace mmrec::models
