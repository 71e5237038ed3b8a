// Model: configuration, weights and a way to make runners.
#include "mmrec/model.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "engine/access.h"
#include "models/checkpoint.h"
#include "models/weights.h"

namespace mmrec {

struct Model::Impl {
  ModelInfo info;
  models::Config config;
  engine::RunnerFactory make_runner;
};

namespace {

std::uint64_t bytes_of(const models::HostMatrix& matrix) {
  return static_cast<std::uint64_t>(matrix.rows * matrix.cols) * kernels::size_of(matrix.dtype);
}
std::uint64_t bytes_of(const models::HostVector& vector) { return vector.size() * sizeof(float); }

/// Weight bytes that one decoded token reads: every matrix and vector of every layer, the head, one embedding row.
std::uint64_t bytes_per_token(const models::HostWeights& weights) {
  const models::HostMatrix& head = weights.head.rows == 0 ? weights.embedding : weights.head;
  std::uint64_t bytes = bytes_of(weights.norm) + bytes_of(head);
  if (weights.embedding.rows > 0)
    bytes += bytes_of(weights.embedding) / static_cast<std::uint64_t>(weights.embedding.rows);
  for (const models::LayerWeights& layer : weights.layers) {
    for (const models::HostMatrix* matrix :
         {&layer.qvzk, &layer.gate, &layer.gate_z, &layer.gamma_in, &layer.gamma_up, &layer.context_in,
          &layer.context_up, &layer.memory_q, &layer.memory_out, &layer.ffn_in, &layer.ffn_out}) {
      bytes += bytes_of(*matrix);
    }
    for (const models::HostVector* vector :
         {&layer.qvzk_bias, &layer.gate_bias, &layer.gate_z_bias, &layer.gamma_in_bias, &layer.gamma_up_bias,
          &layer.context_in_bias, &layer.context_up_bias, &layer.memory_q_bias, &layer.memory_out_bias,
          &layer.ffn_in_bias, &layer.ffn_out_bias, &layer.norm1, &layer.norm2}) {
      bytes += bytes_of(*vector);
    }
  }
  return bytes;
}

ModelInfo info_of(const models::Config& config, const models::HostWeights& weights) {
  ModelInfo info;
  info.vocab_size = config.vocab_size;
  info.model_dim = config.model_dim;
  info.num_layers = config.num_layers;
  info.num_heads = config.num_heads;
  info.ffn_dim = config.ffn_dim;
  info.memory_segment = config.memory_segment;
  info.memory_slots = config.memory_slots;
  info.parameters = weights.parameters;
  info.weight_bytes = weights.bytes;
  info.bytes_per_token = bytes_per_token(weights);
  info.fingerprint = weights.fingerprint;
  info.bos_token_id = config.bos_token_id.value_or(-1);
  info.eos_token_ids = config.eos_token_ids;
  info.device = "cpu";
  return info;
}

void check(const LoadOptions& options) {
  if (options.device != Device::kAuto && options.device != Device::kCpu) {
    throw std::invalid_argument(
        fmt::format("load option device: found {}, expected a Device", static_cast<int>(options.device)));
  }
  if (options.threads < 0) {
    throw std::invalid_argument(fmt::format("load option threads: found {}, expected >= 0", options.threads));
  }
}

}  // namespace

Model::Model(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

Model Model::load(const std::filesystem::path& folder, const LoadOptions& options) {
  check(options);
  const models::Config config = models::load_config(folder / "config.json", options.on_warning);
  const models::Checkpoint checkpoint = models::Checkpoint::open(folder);
  models::WeightOptions weight_options;
  weight_options.allow_nonfinite = options.allow_nonfinite;
  weight_options.threads = options.threads;
  const auto weights = std::make_shared<const models::HostWeights>(
      models::load_weights(checkpoint, config, weight_options, options.on_warning));
  ModelInfo info = info_of(config, *weights);
  return engine::Access::model(std::move(info), config, [config, weights](int batch, const models::RunnerOptions& o) {
    return models::make_cpu_runner(config, weights, batch, o);
  });
}

const ModelInfo& Model::info() const { return impl_->info; }

Session Model::new_session(int batch, const SessionOptions& options) const {
  engine::check_batch(batch);
  engine::check_options(options);
  return engine::Access::session(impl_->make_runner(batch, engine::runner_options(options)), impl_->config,
                                 impl_->info.fingerprint);
}

namespace engine {

Model Access::model(ModelInfo info, const models::Config& config, RunnerFactory make_runner) {
  return Model(std::make_shared<const Model::Impl>(Model::Impl{std::move(info), config, std::move(make_runner)}));
}

}  // namespace engine
}  // namespace mmrec
