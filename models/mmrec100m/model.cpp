// MMRec100M as a model that has been loaded.
#include "models/mmrec100m/model.h"

#include <optional>
#include <utility>

#include "models/mmrec/model.h"
#include "models/mmrec100m/config.h"
#include "models/mmrec100m/executors.h"
#include "models/mmrec100m/state.h"

namespace mmrec::models {
namespace {

Config100m config_of(const ModelSource& source) {
  Config100m config = parse_config_100m(source.config, source.config_name, source.warn);
  config.expert = source.variant.expert.value_or(config.expert);
  return config;
}

class LoadedMmrec100m final : public LoadedModel {
 public:
  explicit LoadedMmrec100m(const ModelSource& source)
      : config_(config_of(source)),
        weights_(std::make_shared<HostWeights100m>(
            load_weights(Checkpoint::open(source.folder), config_, source.weights, source.warn))) {
    info_.architecture = "mmrec100m";
    info_.vocab_size = config_.vocab_size;
    info_.model_dim = config_.expert_dim;
    info_.num_layers = config_.num_layers;
    info_.num_heads = config_.num_heads;
    info_.ffn_dim = config_.ffn_dim;
    info_.variant.expert = config_.expert;
    info_.parameters = weights_->parameters;
    info_.weight_bytes = weights_->bytes;
    count_bytes(info_, std::nullopt);
    info_.fingerprint = weights_->fingerprint;
    info_.bos_token_id = config_.ids.bos.value_or(-1);
    info_.eos_token_ids = config_.ids.eos;
    info_.device_name = "cpu";
  }

  StateLayout state() const override { return state_layout(config_); }
  std::shared_ptr<Executor> on_cpu() const override { return make_cpu_executor(config_, weights_); }

  void round_to_bf16() override {
    visit_100m([&](const Field& /*field*/, auto& w) { weights_->bytes -= models::round_to_bf16(w); }, *weights_);
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
  /// All but the embedding, of which it is a row.
  void count_bytes(ModelInfo& info, std::optional<kernels::DType> type) const {
    info.bytes_per_token = bytes_of(weights_->embedding, type) / static_cast<std::uint64_t>(config_.vocab_size) +
                           bytes_of(weights_->fusion, type) + bytes_of(weights_->fusion_bias, type) +
                           bytes_of(weights_->norm, type) + bytes_of(weights_->head, type);
    for (const auto& expert : weights_->experts) {
      info.bytes_per_token += bytes_of(expert.norm, type);
      for (const auto& layer : expert.layers) add_block_bytes(info, layer, type);
    }
    info.memory_bytes = 0;  // never read
  }

  Config100m config_;
  std::shared_ptr<HostWeights100m> weights_;
};

}  // namespace

std::unique_ptr<LoadedModel> load_mmrec100m(const ModelSource& source) {
  return std::make_unique<LoadedMmrec100m>(source);
}

ProductCounts products_of_mmrec100m(const ModelSource& source) {
  const Config100m config = config_of(source);
  const std::int64_t dim = config.expert_dim;
  ProductCounts counts = products_of_blocks(config.stack());
  const std::int64_t of_q = config.num_layers * dim * dim;  // which nothing is attended to for
  counts.per_token = static_cast<std::int64_t>(config.stacks()) * (counts.per_token - of_q) + 4 * dim * dim;
  counts.head = config.vocab_size * 2 * dim;
  return counts;
}

SyntheticModel synthetic_mmrec100m(const SyntheticSizes& sizes) {
  Config100m config;
  config.vocab_size = sizes.vocab;
  config.expert_dim = sizes.dim;
  config.num_layers = sizes.layers;
  config.num_heads = sizes.dim / 64;
  config.ffn_dim = sizes.ffn;
  return {to_json(config), tensor_specs(config)};
}

}  // namespace mmrec::models
