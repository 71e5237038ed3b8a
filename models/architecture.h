// Models by their architecture, the `model_type` of config.json: this is the one place that tells them apart. What the
// engine needs of a model apart from its executor is here, whatever the architecture.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "mmrec/model_info.h"
#include "mmrec/precision.h"
#include "mmrec/variant_options.h"
#include "models/files/warning_sink.h"
#include "models/runtime/executor.h"
#include "models/runtime/host_state.h"
#include "models/weights/host.h"

namespace mmrec::models {

/// A model whose weights are in host memory, to be run on a processor or copied to GPUs.
class LoadedModel {
 public:
  /// A model with its weights on a GPU.
  struct OnDevice {
    ModelInfo info;
    std::shared_ptr<Executor> executor;
  };

  LoadedModel() = default;
  LoadedModel(const LoadedModel&) = delete;
  LoadedModel& operator=(const LoadedModel&) = delete;
  virtual ~LoadedModel() = default;

  /// As it runs on the CPU.
  const ModelInfo& info() const { return info_; }
  /// Of one sequence, on any backend.
  virtual StateLayout state() const = 0;
  /// The executor keeps the weights alive.
  virtual std::shared_ptr<Executor> on_cpu() const = 0;
  /// Rounds all matrices to bf16, and products on the CPU are in bf16 from now on; before anything runs. Throws
  /// std::bad_alloc.
  virtual void round_to_bf16() = 0;
  /// Copies the weights; see upload_weights() of models/mmrec/executors.h for precisions and what is thrown.
  OnDevice on_cuda(Precision precision, int gpu) const;

 protected:
  /// Sets what the device decides in `info`: precision, weight_bytes, bytes_per_token and memory_bytes.
  virtual std::shared_ptr<Executor> copy_to_cuda(Precision precision, int gpu, ModelInfo& info) const = 0;

  ModelInfo info_;
};

/// The matrix products of a forward pass, in elements of weights that are multiplied, for benchmarks.
struct ProductCounts {
  std::int64_t per_token = 0;  // without the head
  std::int64_t head = 0;       // for each row of logits
  std::int64_t per_sweep = 0;  // of one layer, for each token of a sweep beyond the first
  std::int64_t of_memory = 0;  // besides, for each token from memory_from on
  std::int64_t memory_from = 0;
};

/// What a made-up model is: its width, layers, vocabulary and FFN. An architecture makes of them what it likes.
struct SyntheticSizes {
  std::int64_t dim = 0;  // a multiple of 64
  std::int64_t layers = 0;
  std::int64_t vocab = 0;
  std::int64_t ffn = 0;
};
struct SyntheticModel {
  std::string config;  // the text of config.json
  std::vector<TensorSpec> tensors;
};

/// What the loader of an architecture is given: the folder, and its config.json's text.
struct ModelSource {
  std::filesystem::path folder;
  std::string config;       // the text of config.json
  std::string config_name;  // stands for the file in messages
  VariantOptions variant;
  WeightOptions weights;
  WarningSink warn;
};

/// Loads the model of a folder. Throws std::runtime_error for a malformed folder, an unknown model_type among them,
/// std::system_error, std::bad_alloc, and std::invalid_argument for an option that the architecture has not.
std::unique_ptr<LoadedModel> load_model(const std::filesystem::path& folder, const VariantOptions& variant,
                                        const WeightOptions& weights, const WarningSink& warn = {});

/// Of the model of a folder, from its config.json alone. Throws as load_model.
ProductCounts product_counts(const std::filesystem::path& folder, const VariantOptions& variant = {});

/// Every model_type, the first being MM-Rec's.
std::vector<std::string_view> architecture_names();
/// Throws std::invalid_argument for an unknown name.
SyntheticModel synthetic_model(std::string_view architecture, const SyntheticSizes& sizes);

}  // namespace mmrec::models
