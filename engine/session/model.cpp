// Model: what it is, and an executor with the weights on the device they live on.
#include "mmrec/model.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <new>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include "engine/kernels/kernel_backend.h"
#include "engine/require.h"
#include "engine/session/access.h"
#include "kernels/cpu/thread_pool.h"
#include "mmrec/errors.h"
#include "models/architecture.h"
#include "models/runtime/cuda_device.h"

namespace mmrec {

struct Model::Impl {
  ModelInfo info;
  models::StateLayout layout;  // of one sequence's state
  std::shared_ptr<models::Executor> executor;
};

namespace {

void check(const LoadOptions& options) {
  const auto require_name = [](const auto& names, auto value, std::string_view option, std::string_view type) {
    const auto number = static_cast<std::size_t>(value);
    engine::require(number < names.size(), "load option {}: found {}, expected {}", option, number, type);
  };
  require_name(kDeviceNames, options.device, "device", "a Device");
  require_name(kPrecisionNames, options.precision, "precision", "a Precision");
  require_name(kExpertNames, options.variant.expert.value_or(Expert::kBoth), "expert", "an Expert");
  require_name(kCallsNames, options.variant.calls.value_or(Calls::kPrompt), "calls", "a Calls");
  engine::require(options.gpu >= 0, "load option gpu: found {}, expected >= 0", options.gpu);
  engine::require(options.threads >= 0, "load option threads: found {}, expected >= 0", options.threads);
}

std::string unusable(const std::string& reason) { return fmt::format("no usable CUDA device ({})", reason); }

/// Whether the model runs on the GPU, decided before any file is read; if not, and one was looked for, `reason` says
/// why. kCpu never asks for one.
bool takes_cuda(const LoadOptions& options, std::string& reason) {
  if (options.device != Device::kCpu) {
    reason = models::cuda_unusable_reason(options.gpu);
    if (reason.empty()) return true;
    if (options.device == Device::kCuda) throw DeviceUnavailable(unusable(reason));
    reason = unusable(reason);
  }
  engine::require(options.precision != Precision::kF16,
                  "load option precision: found {} on the CPU, expected auto, fp32 or bf16{}{}",
                  to_string(options.precision), reason.empty() ? "" : ": ", reason);
  return false;
}

void warn_of_cpu(const LoadOptions& options, std::string_view reason) {
  if (options.on_warning) options.on_warning(fmt::format("{}: running on the CPU", reason));
}

/// The same where no GPU was found: once in a process, as it stays so. A build without CUDA says nothing.
void warn_of_no_gpu(const LoadOptions& options, const std::string& reason) {
  if (reason.empty() || !engine::built_with_cuda() || !options.on_warning) return;
  static std::mutex mutex;
  static auto* const told = new std::set<std::string>;  // outlives threads that load when the process ends
  {
    const std::lock_guard lock(mutex);
    if (!told->insert(reason).second) return;
  }
  warn_of_cpu(options, reason);
}

/// Those of `gpus` if there are any, else all that can be used; decided before any file is read.
std::vector<int> chosen_gpus(std::span<const int> gpus, const LoadOptions& options) {
  for (auto gpu = gpus.begin(); gpu != gpus.end(); ++gpu) {
    engine::require(*gpu >= 0, "gpus: found {}, expected >= 0", *gpu);
    engine::require(std::find(gpus.begin(), gpu, *gpu) == gpu, "gpus: found {} twice, expected each GPU once", *gpu);
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

std::unique_ptr<models::LoadedModel> loaded(const std::filesystem::path& folder, const LoadOptions& options,
                                            bool for_gpu) {
  return models::load_model(
      folder, options.variant,
      {.allow_nonfinite = options.allow_nonfinite, .threads = options.threads, .mixes_formats = !for_gpu},
      options.on_warning);
}

Model on_cuda(const models::LoadedModel& model, const LoadOptions& options, int gpu) {
  models::LoadedModel::OnDevice there = model.on_cuda(options.precision, gpu, options.batch_invariant);
  return engine::Access::model(std::move(there.info), model.state(), std::move(there.executor));
}

}  // namespace

Model::Model(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}

Model Model::load(const std::filesystem::path& folder, const LoadOptions& options) {
  check(options);
  std::string no_gpu;
  const bool cuda = takes_cuda(options, no_gpu);
  const std::unique_ptr<models::LoadedModel> model = loaded(folder, options, cuda);
  warn_of_no_gpu(options, no_gpu);  // a file that is refused is the only news then
  if (cuda) {
    const bool insists = options.device == Device::kCuda || options.precision == Precision::kF16;
    try {
      return on_cuda(*model, options, options.gpu);  // and the host's copy goes
    } catch (const std::bad_alloc& fault) {
      if (insists) throw;
      warn_of_cpu(options, fault.what());
    } catch (const std::system_error& fault) {  // no context, or a device that fails
      if (insists) throw;
      warn_of_cpu(options, fault.what());
    }
  }
  if (options.precision == Precision::kBF16) model->round_to_bf16();
  return engine::Access::model(model->info(), model->state(), model->on_cpu());
}

std::vector<Model> Model::load_on_gpus(const std::filesystem::path& folder, const LoadOptions& options,
                                       std::span<const int> gpus) {
  check(options);
  engine::require(options.device != Device::kCpu, "load option device: found cpu, expected a GPU");
  const std::vector<int> chosen = chosen_gpus(gpus, options);
  const std::unique_ptr<models::LoadedModel> model = loaded(folder, options, true);
  std::vector<std::optional<Model>> uploaded(chosen.size());
  kernels::parallel_items(chosen.size(), static_cast<int>(chosen.size()),
                          [&](std::size_t i) { uploaded[i] = on_cuda(*model, options, chosen[i]); });
  std::vector<Model> models;
  models.reserve(chosen.size());
  for (std::optional<Model>& one : uploaded) models.push_back(*std::move(one));
  return models;
}

const ModelInfo& Model::info() const { return impl_->info; }

Session Model::new_session(int batch, const SessionOptions& options) const {
  engine::check_batch(batch);
  return engine::Access::session(impl_->executor, impl_->layout, impl_->info.vocab_size, impl_->info.fingerprint, batch,
                                 engine::execution_options(options));
}

namespace engine {

Model Access::model(ModelInfo info, models::StateLayout layout, std::shared_ptr<models::Executor> executor) {
  return Model(
      std::make_shared<const Model::Impl>(Model::Impl{std::move(info), std::move(layout), std::move(executor)}));
}

const std::shared_ptr<models::Executor>& Access::executor(const Model& model) { return model.impl_->executor; }
const models::StateLayout& Access::layout(const Model& model) { return model.impl_->layout; }

void check_replicas(std::span<const Model> models) {
  require(!models.empty(), "models: found none, expected at least one");
  const auto of = [](const Model& model) {
    const ModelInfo& info = model.info();
    return fmt::format(
        "fingerprint {:016x} on {} in {}{}{}", info.fingerprint, info.device == Device::kCuda ? "a GPU" : "the CPU",
        to_string(info.precision), info.batch_invariant ? ", batch-invariant" : "",
        info.variant.calls ? fmt::format(", calls {}", kCallsNames[static_cast<std::size_t>(*info.variant.calls)])
                           : "");
  };
  for (std::size_t i = 1; i < models.size(); ++i) {
    require(of(models[i]) == of(models[0]), "model {}: found {}, expected model 0's {}", i, of(models[i]),
            of(models[0]));
  }
}

}  // namespace engine
}  // namespace mmrec
