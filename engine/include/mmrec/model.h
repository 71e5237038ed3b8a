// Loading a model. Start here: Model::load(folder).new_session().
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "mmrec/precision.h"
#include "mmrec/session.h"

namespace mmrec {

/// Where a model runs.
enum class Device : std::uint8_t {
  kAuto,  ///< a usable GPU, else the CPU
  kCpu,   ///< touches no GPU: makes no CUDA context, loads no CUDA library
  kCuda,  ///< the first GPU that CUDA shows, or DeviceUnavailable
};

struct LoadOptions {
  Device device = Device::kAuto;
  Precision precision = Precision::kAuto;  ///< kF16 and kBF16 are for a GPU alone
  int threads = 0;               ///< threads that read the weights; 0: all the processors this process may use. >= 0
  bool allow_nonfinite = false;  ///< accept NaN and infinite weights
  /// Receives one line for each thing worth knowing that is not an error: an unknown configuration key, or why a build
  /// for GPUs takes the CPU under kAuto.
  std::function<void(std::string_view)> on_warning;
};

/// What a loaded model is.
struct ModelInfo {
  std::int64_t vocab_size = 0;
  std::int64_t model_dim = 0;
  std::int64_t num_layers = 0;
  std::int64_t num_heads = 0;
  std::int64_t ffn_dim = 0;
  std::int64_t memory_segment = 0;
  std::int64_t memory_slots = 0;
  std::uint64_t parameters = 0;
  std::uint64_t weight_bytes = 0;     ///< resident bytes of the weights, in the memory of the device they run on
  std::uint64_t device_bytes = 0;     ///< of these, in GPU memory: all or nothing
  std::uint64_t bytes_per_token = 0;  ///< weight bytes that one decoded token reads
  std::uint64_t memory_bytes = 0;     ///< those it reads besides once attention has several memory slots to choose from
  std::uint64_t fingerprint = 0;      ///< identity of configuration and weights, as saved states carry it
  int bos_token_id = -1;              ///< from config.json; -1: not given there
  std::vector<int> eos_token_ids;     ///< from config.json; empty: not given there
  std::string device;                 ///< "cpu", or "cuda" and the GPU's name: "cuda (NVIDIA H200)"
  std::string precision;              ///< what products are computed in: "fp32", "fp16" or "bf16"
};

/// An MM-Rec model. Immutable after load and cheap to copy: copies share the weights. Thread-safe: any number of
/// threads may call const members and use sessions of their own.
class Model {
 public:
  /// Loads a model folder: config.json and model.safetensors, or shards with model.safetensors.index.json. On a GPU the
  /// weights stay in its memory alone.
  /// Throws std::runtime_error naming file, field, found and expected for a malformed folder, std::system_error where a
  /// file cannot be read or CUDA fails, DeviceUnavailable for kCuda without a usable GPU (before any file is read),
  /// std::bad_alloc, and std::invalid_argument for options out of range, a 16-bit precision on the CPU among them.
  static Model load(const std::filesystem::path& folder, const LoadOptions& options = {});

  const ModelInfo& info() const;

  /// A session of `batch` sequences at position 0, 1 <= batch <= 65536; it keeps the weights alive. Throws
  /// std::invalid_argument for a batch or an option out of range, std::bad_alloc, std::system_error where CUDA fails.
  Session new_session(int batch = 1, const SessionOptions& options = {}) const;

 private:
  friend struct engine::Access;
  struct Impl;
  explicit Model(std::shared_ptr<const Impl> impl);
  std::shared_ptr<const Impl> impl_;
};

}  // namespace mmrec
