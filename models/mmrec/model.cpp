// MM-Rec as a model that has been loaded.
#include "models/mmrec/model.h"

#include <optional>
#include <utility>

#include "models/mmrec/config.h"
#include "models/mmrec/executors.h"
#include "models/mmrec/state.h"
#include "models/mmrec/synthetic.h"

namespace mmrec::models {
namespace {

class LoadedMmrec final : public LoadedModel {
 public:
  explicit LoadedMmrec(const ModelSource& source)
      : config_(parse_config(source.config, source.config_name, source.warn)),
        weights_(std::make_shared<HostWeights>(
            load_weights(Checkpoint::open(source.folder), config_, source.weights, source.warn))) {
    info_.architecture = "mmrec";
    info_.vocab_size = config_.vocab_size;
    info_.model_dim = config_.model_dim;
    info_.num_layers = config_.num_layers;
    info_.num_heads = config_.num_heads;
    info_.ffn_dim = config_.ffn_dim;
    info_.memory_segment = config_.memory_segment;
    info_.memory_slots = config_.memory_slots;
    info_.parameters = weights_->parameters;
    info_.weight_bytes = weights_->bytes;
    count_bytes(info_, std::nullopt);
    info_.fingerprint = weights_->fingerprint;
    info_.bos_token_id = config_.bos_token_id.value_or(-1);
    info_.eos_token_ids = config_.eos_token_ids;
    info_.device_name = "cpu";
  }

  StateLayout state() const override { return state_layout(config_); }
  std::shared_ptr<Executor> on_cpu() const override { return make_cpu_executor(config_, weights_); }

  void round_to_bf16() override {
    visit_model([&](const Field& /*field*/, auto& w) { weights_->bytes -= models::round_to_bf16(w); }, *weights_);
    weights_->rounds_inputs = true;
    info_.precision = Precision::kBF16;
    info_.weight_bytes = weights_->bytes;
    count_bytes(info_, std::nullopt);
  }

 protected:
  std::shared_ptr<Executor> copy_to_cuda(Precision precision, int gpu, ModelInfo& info) const override {
    const auto weights = upload_weights(*weights_, precision, gpu);
    info.precision = precision_of(*weights);
    info.weight_bytes = device_bytes(*weights);
    count_bytes(info, type_of(info.precision));
    return make_cuda_executor(config_, weights);
  }

 private:
  /// Every matrix and vector of every layer, the head, one embedding row.
  void count_bytes(ModelInfo& info, std::optional<kernels::DType> type) const {
    const std::uint64_t embedding = bytes_of(weights_->embedding, type);
    info.bytes_per_token = bytes_of(weights_->norm, type);
    info.memory_bytes = 0;
    info.bytes_per_token += weights_->head.rows == 0 ? embedding : bytes_of(weights_->head, type);
    if (weights_->embedding.rows > 0) {
      info.bytes_per_token += embedding / static_cast<std::uint64_t>(weights_->embedding.rows);
    }
    for (const auto& layer : weights_->layers) add_block_bytes(info, layer, type);
  }

  Config config_;
  std::shared_ptr<HostWeights> weights_;
};

}  // namespace

std::unique_ptr<LoadedModel> load_mmrec(const ModelSource& source) { return std::make_unique<LoadedMmrec>(source); }

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

ProductCounts products_of_mmrec(const ModelSource& source) {
  const Config config = parse_config(source.config, source.config_name);
  ProductCounts counts = products_of_blocks(config);
  counts.head = config.vocab_size * config.model_dim;
  return counts;
}

SyntheticModel synthetic_mmrec(const SyntheticSizes& sizes) {
  Config config;
  config.model_dim = sizes.dim;
  config.num_layers = sizes.layers;
  config.vocab_size = sizes.vocab;
  config.ffn_dim = sizes.ffn;
  config.num_heads = sizes.dim / 64;
  return {to_json(config), synthetic_tensors(config)};
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
