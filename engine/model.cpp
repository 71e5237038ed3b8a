// Model: configuration, and an executor with the weights on the device they live on.
#include "mmrec/model.h"

#include <fmt/format.h>

#include <algorithm>
#include <future>
#include <optional>
#include <stdexcept>
#include <utility>

#include "engine/access.h"
#include "engine/kernel_backend.h"
#include "mmrec/errors.h"
#include "models/files/checkpoint.h"
#include "models/mmrec/executors.h"
#include "models/mmrec/weights.h"

namespace mmrec {

struct Model::Impl {
  ModelInfo info;
  models::Config config;
  std::shared_ptr<models::Executor> executor;
};

namespace {

std::uint64_t bytes_of(const models::HostVector& vector, std::optional<kernels::DType> /*type*/) {
  return vector.size() * sizeof(float);
}
std::uint64_t bytes_of(const models::HostMatrix& matrix, std::optional<kernels::DType> type) {
  return kernels::bytes_of(type.value_or(matrix.format.code), matrix.rows, matrix.cols);
}

/// Sets the weight bytes that one decoded token reads: every matrix and vector of every layer, the head, one embedding
/// row; the projections of attention over memory slots by themselves. Matrices are of `type` on the device that
/// decodes, of their stored type where it is not given.
void count_bytes(ModelInfo& info, const models::HostWeights& weights, std::optional<kernels::DType> type) {
  const std::uint64_t embedding = bytes_of(weights.embedding, type);
  std::uint64_t bytes = bytes_of(weights.norm, type);
  std::uint64_t memory_bytes = 0;
  bytes += weights.head.rows == 0 ? embedding : bytes_of(weights.head, type);
  if (weights.embedding.rows > 0) bytes += embedding / static_cast<std::uint64_t>(weights.embedding.rows);
  const auto add = [&](const models::Field& field, const auto& w) {
    (field.of_memory && field.is_matrix() ? memory_bytes : bytes) += bytes_of(w, type);
  };
  for (const auto& layer : weights.layers) {
    models::visit_layer(add, layer);
    if (type.has_value()) {  // a GPU's step multiplies W_q only where there is something to attend to
      const std::uint64_t of_q = kernels::bytes_of(*type, layer.qvzk.cols, layer.qvzk.cols);
      bytes -= of_q;
      memory_bytes += of_q;
    }
  }
  info.bytes_per_token = bytes;
  info.memory_bytes = memory_bytes;
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
  count_bytes(info, weights, std::nullopt);
  info.fingerprint = weights.fingerprint;
  info.bos_token_id = config.bos_token_id.value_or(-1);
  info.eos_token_ids = config.eos_token_ids;
  info.device_name = "cpu";
  return info;
}

bool is_half(Precision precision) { return precision == Precision::kF16 || precision == Precision::kBF16; }

void check(const LoadOptions& options) {
  if (options.device != Device::kAuto && options.device != Device::kCpu && options.device != Device::kCuda) {
    throw std::invalid_argument(
        fmt::format("load option device: found {}, expected a Device", static_cast<int>(options.device)));
  }
  if (options.precision != Precision::kAuto && options.precision != Precision::kF32 && !is_half(options.precision)) {
    throw std::invalid_argument(
        fmt::format("load option precision: found {}, expected a Precision", static_cast<int>(options.precision)));
  }
  if (options.gpu < 0) {
    throw std::invalid_argument(fmt::format("load option gpu: found {}, expected >= 0", options.gpu));
  }
  if (options.threads < 0) {
    throw std::invalid_argument(fmt::format("load option threads: found {}, expected >= 0", options.threads));
  }
}

std::string unusable(const std::string& reason) { return fmt::format("no usable CUDA device ({})", reason); }

/// Whether the model runs on the GPU, decided before any file is read. kCpu never asks for one.
bool takes_cuda(const LoadOptions& options) {
  std::string reason;
  if (options.device != Device::kCpu) {
    reason = models::cuda_unusable_reason(options.gpu);
    if (reason.empty()) return true;
    if (options.device == Device::kCuda) throw DeviceUnavailable(unusable(reason));
    reason = unusable(reason);
  }
  if (is_half(options.precision)) {
    throw std::invalid_argument(fmt::format("load option precision: found {} on the CPU, expected auto or fp32{}{}",
                                            to_string(options.precision), reason.empty() ? "" : ": ", reason));
  }
  // Where a GPU could have been expected: a build without CUDA says nothing.
  if (!reason.empty() && engine::built_with_cuda() && options.on_warning) {
    options.on_warning(fmt::format("{}: running on the CPU", reason));
  }
  return false;
}

/// Those of `gpus` if there are any, else all that can be used; decided before any file is read.
std::vector<int> chosen_gpus(std::span<const int> gpus, const LoadOptions& options) {
  for (auto gpu = gpus.begin(); gpu != gpus.end(); ++gpu) {
    if (*gpu < 0) throw std::invalid_argument(fmt::format("gpus: found {}, expected >= 0", *gpu));
    if (std::find(gpus.begin(), gpu, *gpu) != gpu) {
      throw std::invalid_argument(fmt::format("gpus: found {} twice, expected each GPU once", *gpu));
    }
  }
  for (const int gpu : gpus) {
    if (const std::string reason = models::cuda_unusable_reason(gpu); !reason.empty())
      throw DeviceUnavailable(unusable(reason));
  }
  if (!gpus.empty()) return {gpus.begin(), gpus.end()};
  std::vector<int> chosen;
  std::vector<std::string> left_out;
  for (int gpu = 0; gpu < models::cuda_device_count(); ++gpu) {
    if (const std::string reason = models::cuda_unusable_reason(gpu); reason.empty()) {
      chosen.push_back(gpu);
    } else {
      left_out.push_back(fmt::format("GPU {} is not used ({})", gpu, reason));
    }
  }
  if (chosen.empty()) throw DeviceUnavailable(unusable(models::cuda_unusable_reason()));
  for (const std::string& warning : left_out) {
    if (options.on_warning) options.on_warning(warning);
  }
  return chosen;
}

/// What the files say.
struct Loaded {
  Loaded(const std::filesystem::path& folder, const LoadOptions& options)
      : config(models::load_config(folder / "config.json", options.on_warning)),
        weights(std::make_shared<const models::HostWeights>(models::load_weights(
            models::Checkpoint::open(folder), config,
            {.allow_nonfinite = options.allow_nonfinite, .threads = options.threads}, options.on_warning))),
        info(info_of(config, *weights)) {}
  models::Config config;
  std::shared_ptr<const models::HostWeights> weights;
  ModelInfo info;
};

Model on_cuda(const Loaded& loaded, Precision precision, int gpu) {
  const models::HostWeights& host = *loaded.weights;
  ModelInfo info = loaded.info;
  const auto weights = models::upload_weights(host, precision, gpu);
  info.precision = models::precision_of(*weights);
  info.weight_bytes = models::device_bytes(*weights);
  count_bytes(info, host, models::type_of(info.precision));
  info.device = Device::kCuda;
  info.gpu = gpu;
  info.device_name = models::cuda_device_info(gpu).name;
  return engine::Access::model(std::move(info), loaded.config, models::make_cuda_executor(loaded.config, weights));
}

}  // namespace

Model::Model(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

Model Model::load(const std::filesystem::path& folder, const LoadOptions& options) {
  check(options);
  const bool cuda = takes_cuda(options);
  const Loaded loaded(folder, options);
  if (cuda) return on_cuda(loaded, options.precision, options.gpu);  // and the host's copy goes
  return engine::Access::model(loaded.info, loaded.config, models::make_cpu_executor(loaded.config, loaded.weights));
}

std::vector<Model> Model::load_on_gpus(const std::filesystem::path& folder, const LoadOptions& options,
                                       std::span<const int> gpus) {
  check(options);
  if (options.device == Device::kCpu) throw std::invalid_argument("load option device: found kCpu, expected a GPU");
  const std::vector<int> chosen = chosen_gpus(gpus, options);
  const Loaded loaded(folder, options);
  std::vector<std::future<Model>> uploads;
  uploads.reserve(chosen.size());
  for (const int gpu : chosen) {
    uploads.push_back(std::async(std::launch::async, [&, gpu] { return on_cuda(loaded, options.precision, gpu); }));
  }
  std::vector<Model> models;
  models.reserve(chosen.size());
  for (std::future<Model>& upload : uploads) models.push_back(upload.get());
  return models;
}

const ModelInfo& Model::info() const { return impl_->info; }

Session Model::new_session(int batch, const SessionOptions& options) const {
  engine::check_batch(batch);
  engine::check_options(options);
  return engine::Access::session(impl_->executor, impl_->config, impl_->info.fingerprint, batch,
                                 engine::execution_options(options));
}

namespace engine {

Model Access::model(ModelInfo info, const models::Config& config, std::shared_ptr<models::Executor> executor) {
  return Model(std::make_shared<const Model::Impl>(Model::Impl{std::move(info), config, std::move(executor)}));
}

const std::shared_ptr<models::Executor>& Access::executor(const Model& model) { return model.impl_->executor; }
const models::Config& Access::config(const Model& model) { return model.impl_->config; }

void check_replicas(std::span<const Model> models) {
  if (models.empty()) throw std::invalid_argument("models: found none, expected at least one");
  const auto of = [](const Model& model) {
    const ModelInfo& info = model.info();
    return fmt::format("fingerprint {:016x} on {} in {}", info.fingerprint,
                       info.device == Device::kCuda ? "a GPU" : "the CPU", to_string(info.precision));
  };
  for (std::size_t i = 1; i < models.size(); ++i) {
    if (of(models[i]) == of(models[0])) continue;
    throw std::invalid_argument(
        fmt::format("model {}: found {}, expected model 0's {}", i, of(models[i]), of(models[0])));
  }
}

}  // namespace engine
}  // namespace mmrec
