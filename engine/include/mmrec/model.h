// Loading a model. Start here: Model::load(folder).new_session().
#pragma once

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "mmrec/export.h"
#include "mmrec/model_info.h"
#include "mmrec/precision.h"
#include "mmrec/session.h"
#include "mmrec/variant_options.h"

namespace mmrec {

/// How a model is loaded.
struct LoadOptions {
  Device device = Device::kAuto;  ///< where it is to run
  int gpu = 0;                    ///< which GPU, counted from 0 as CUDA shows them; >= 0. No meaning on the CPU
  Precision precision = Precision::kAuto;  ///< kF16 is for a GPU alone
  /// On a GPU: logits and drawn texts of a sequence do not depend on which others run, how many, or how its prompt was
  /// cut into calls at ends of memory segments (docs/numerics.md, "Batch invariance"). mmrec-jax has no such arithmetic
  /// there. On the CPU nothing changes: no result depends on the batch.
  bool batch_invariant = false;
  int threads = 0;               ///< threads that read the weights; 0: all the processors this process may use. >= 0
  bool allow_nonfinite = false;  ///< accept NaN and infinite weights
  VariantOptions variant = {};   ///< in place of what config.json says of them
  /// Receives one line for each thing worth knowing that is not an error: an unknown configuration key, or why a build
  /// for GPUs takes the CPU under kAuto. That there is no usable GPU is told once in a process.
  std::function<void(std::string_view)> on_warning = {};
};

/// Sets device and GPU by name: "auto", "cpu", "cuda", or "cuda:N" for GPU number N. False for another name; then
/// nothing has changed.
inline bool set_device(LoadOptions& options, std::string_view name) {
  for (std::size_t i = 0; i < kDeviceNames.size(); ++i) {
    if (name == kDeviceNames[i]) return options.device = static_cast<Device>(i), true;
  }
  constexpr std::string_view kNumbered = "cuda:";
  int gpu = 0;
  if (!name.starts_with(kNumbered) || name.starts_with("cuda:-")) return false;
  const char* const last = name.data() + name.size();
  const auto [end, fault] = std::from_chars(name.data() + kNumbered.size(), last, gpu);
  if (fault != std::errc() || end != last) return false;
  options.device = Device::kCuda;
  options.gpu = gpu;
  return true;
}

/// An MM-Rec model. Immutable after load and cheap to copy: copies share the weights. Thread-safe: any number of
/// threads may call const members and use sessions of their own.
class MMREC_EXPORT Model {
 public:
  /// Loads a model folder: config.json and model.safetensors, or shards with model.safetensors.index.json. On a GPU the
  /// weights stay in its memory alone. Blocks until they are there.
  /// Throws std::runtime_error naming file, field, found and expected for a malformed folder, std::system_error where a
  /// file cannot be read or CUDA fails, DeviceUnavailable for kCuda where GPU number `gpu` is not there (naming it and
  /// how many there are) or not usable (before any file is read), std::bad_alloc, and std::invalid_argument for options
  /// out of range, a negative GPU, kF16 on the CPU and an option of another architecture's among them.
  static Model load(const std::filesystem::path& folder, const LoadOptions& options = {});
  /// The same on several GPUs of this machine, for a Scorer or a Generator to use together: one model for each of
  /// `gpus`, in their order; for none given, one for each that can be used, and a warning for each that cannot. The
  /// files are read once. options.gpu has no meaning.
  /// Throws as load does for kCuda, and std::invalid_argument for kCpu and for a GPU that is named twice.
  static std::vector<Model> load_on_gpus(const std::filesystem::path& folder, const LoadOptions& options = {},
                                         std::span<const int> gpus = {});

  /// What it is and where it runs; lives as long as this handle or a copy of it.
  const ModelInfo& info() const;

  /// A session of `batch` sequences at position 0, 1 <= batch <= 65536; it keeps the weights alive. Throws
  /// std::invalid_argument for a batch or an option out of range, std::bad_alloc, std::system_error where CUDA fails.
  Session new_session(int batch = 1, const SessionOptions& options = {}) const;

 private:
  friend struct engine::Access;
  struct MMREC_NO_EXPORT Impl;
  MMREC_NO_EXPORT explicit Model(std::shared_ptr<const Impl> impl);
  std::shared_ptr<const Impl> impl_;
};

}  // namespace mmrec
