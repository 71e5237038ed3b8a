// mmrec-jax as a model that has been loaded.
#include "models/mmrec_jax/model.h"

#include <fmt/format.h>

#include <optional>
#include <stdexcept>
#include <utility>

#include "models/mmrec_jax/config.h"
#include "models/mmrec_jax/executors.h"
#include "models/mmrec_jax/state.h"
#include "models/mmrec_jax/weights.h"

namespace mmrec::models {
namespace {

jax::Config config_of(const ModelSource& source) {
  jax::Config config = jax::parse_config(source.config, source.config_name, source.warn);
  config.calls = source.variant.calls.value_or(config.calls);
  config.bank = source.variant.bank.value_or(config.bank);
  return config;
}

class LoadedMmrecJax final : public LoadedModel {
 public:
  explicit LoadedMmrecJax(const ModelSource& source)
      : config_(config_of(source)),
        weights_(std::make_shared<jax::HostWeights>(
            jax::load_weights(Checkpoint::open(source.folder), config_, source.weights, source.warn))) {
    info_.architecture = "mmrec-jax";
    info_.vocab_size = config_.vocab_size;
    info_.model_dim = config_.model_dim;
    info_.num_layers = config_.num_layers;
    info_.num_heads = config_.num_heads;
    info_.ffn_dim = config_.ffn_dim();
    info_.memory_slots = config_.bank ? config_.long_mem_len : 0;
    info_.variant.calls = config_.calls;
    info_.variant.bank = config_.bank;
    info_.parameters = weights_->parameters;
    info_.weight_bytes = weights_->bytes;
    info_.bytes_per_token = bytes_per_token(std::nullopt);
    info_.fingerprint = weights_->fingerprint;
    info_.bos_token_id = config_.ids.bos.value_or(-1);
    info_.eos_token_ids = config_.ids.eos;
    info_.device_name = "cpu";
  }

  StateLayout state() const override { return jax::state_layout(config_); }
  std::shared_ptr<Executor> on_cpu() const override { return jax::make_cpu_executor(config_, weights_); }

  void round_to_bf16() override {
    jax::visit_model([&](const Field& /*field*/, auto& w) { weights_->bytes -= models::round_to_bf16(w); }, *weights_);
    weights_->rounds_inputs = true;
    info_.precision = Precision::kBF16;
    info_.weight_bytes = weights_->bytes;
    info_.bytes_per_token = bytes_per_token(std::nullopt);
  }

 protected:
  std::shared_ptr<Executor> copy_to_cuda(Precision precision, int gpu, ModelInfo& info) const override {
    const auto weights = jax::upload_weights(*weights_, precision, gpu);
    info.precision = precision_of(*weights);
    info.weight_bytes = device_bytes(*weights);
    info.bytes_per_token = bytes_per_token(type_of(info.precision));
    return jax::make_cuda_executor(config_, weights);
  }

 private:
  /// All of the blocks, the head, which is the embedding, and a row of it: a step multiplies no h_{t-1} where it is 0,
  /// and attends to nothing without a bank.
  std::uint64_t bytes_per_token(std::optional<kernels::DType> type) const {
    const std::uint64_t embedding = bytes_of(weights_->embedding, type);
    std::uint64_t bytes = bytes_of(weights_->norm, type) + embedding;
    if (weights_->embedding.rows > 0) bytes += embedding / static_cast<std::uint64_t>(weights_->embedding.rows);
    for (const auto& layer : weights_->layers) {
      jax::visit_layer([&](const Field& /*field*/, const auto& w) { bytes += bytes_of(w, type); }, layer);
      if (config_.bank) {
        bytes -= bytes_of(layer.gate_h, type);
      } else {
        bytes -= bytes_of(layer.query, type) + bytes_of(layer.attended, type);
      }
    }
    return bytes;
  }

  jax::Config config_;
  std::shared_ptr<jax::HostWeights> weights_;
};

}  // namespace

std::unique_ptr<LoadedModel> load_mmrec_jax(const ModelSource& source) {
  return std::make_unique<LoadedMmrecJax>(source);
}

ProductCounts products_of_mmrec_jax(const ModelSource& source) {
  const jax::Config config = config_of(source);
  const std::int64_t dim = config.model_dim, square = dim * dim;
  std::int64_t block = 5 * square + 4 * dim * config.gate_hidden_dim() + 2 * dim * config.ffn_dim();
  // Attention to the bank: W_q and W_out, and two products with all its rows; else, of prompts too, the gate of h.
  block += config.bank ? 2 * square + 2 * dim * config.long_mem_len : square;
  if (config.bank && config.calls != Calls::kStepwise) block += square;
  return {.per_token = config.num_layers * block, .head = config.vocab_size * dim};
}

SyntheticModel synthetic_mmrec_jax(const SyntheticSizes& sizes) {
  if (sizes.ffn != 4 * sizes.dim) {
    throw std::invalid_argument(fmt::format("ffn: found {}, expected {}: mmrec-jax has 4 times its width of {}",
                                            sizes.ffn, 4 * sizes.dim, sizes.dim));
  }
  jax::Config config;
  config.model_dim = sizes.dim;
  config.num_layers = sizes.layers;
  config.vocab_size = sizes.vocab;
  config.num_heads = sizes.dim / 64;
  return {jax::to_json(config), jax::tensor_specs(config, true)};
}

}  // namespace mmrec::models
