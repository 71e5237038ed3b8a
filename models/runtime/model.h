// Models that have been loaded, once for all architectures. An architecture is a struct of types and static functions,
// `Arch`:
//
//   Config                      the members that ConfigReader asks for, Arch, num_layers, num_heads and parse();
//                               state_layout(config) stands beside it
//   Fields<Matrix, Vector>      its weights; visit(f, fields...) calls f(Field, members...) for each of them
//   sizes, rules                the tensors of a checkpoint (models/weights/fields.h)
//   is_tied                     whether the embedding is the head
//   Net<Backend, A>             its equations, for models/runtime/forward.h
//   describe(config, info)      sets sizes
//   correct_bytes(config, type, info)
//                               moves the bytes that a step reads only with a memory; `type`: of the matrices, if one
//   products(config), synthetic(sizes)
//                               for benchmarks and tests
//
// chunk_plan(config, cuda) beside Config says how a GPU's work is cut into chunks, padded(config) the sizes that
// the weights get there (models/runtime/cuda/padding.h), of num_heads heads. TableDefaults has the rest.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "mmrec/model_info.h"
#include "mmrec/precision.h"
#include "mmrec/variant_options.h"
#include "models/files/checkpoint.h"
#include "models/files/warning_sink.h"
#include "models/runtime/cuda_device.h"
#include "models/runtime/executor.h"
#include "models/runtime/host_state.h"
#include "models/weights/model_weights.h"
#include "models/weights/synthetic.h"

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
  /// Calls visit(NAME, col, part) for each part of a tensor NAME.weight [out, in] that is rows of a matrix: its columns
  /// from `col` on.
  using VisitParts = std::function<void(const std::string&, std::int64_t, const kernels::WeightView<kernels::Host>&)>;
  virtual void visit_parts(const VisitParts& visit) const = 0;
  /// Rounds all matrices to bf16, and products on the CPU are in bf16 from now on; before anything runs. Throws
  /// std::bad_alloc.
  virtual void round_to_bf16() = 0;
  /// Copies the weights; see make_cuda_executor() for precisions and what is thrown.
  OnDevice on_cuda(Precision precision, int gpu, bool batch_invariant = false) const;

 protected:
  /// Sets what the device decides in `info`: precision, weight_bytes, bytes_per_token and memory_bytes.
  virtual std::shared_ptr<Executor> copy_to_cuda(Precision precision, int gpu, bool batch_invariant,
                                                 ModelInfo& info) const = 0;

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

/// The sizes of a synthetic model. Each architecture derives its configuration from them.
struct SyntheticSizes {
  std::int64_t dim = 0;  // a multiple of 4
  std::int64_t layers = 0;
  std::int64_t vocab = 0;
  std::int64_t ffn = 0;

  /// Heads of 64 channels where they fit, else as many of 8 as do.
  std::int64_t heads() const { return dim % 64 == 0 ? dim / 64 : std::gcd(dim, std::int64_t{8}); }
};

/// The input of an architecture's loader: the folder, and the text of its config.json.
struct ModelSource {
  std::filesystem::path folder;
  std::string config;       // the text of config.json
  std::string config_name;  // stands for the file in messages
  VariantOptions variant;
  WeightOptions weights;
  WarningSink warn;
};

/// The executor on the CPU. Calls of several threads run side by side, each on threads and activations of its own,
/// which are kept for later calls while any slot is in use.
template <class Config>
std::shared_ptr<Executor> make_cpu_executor(const Config& config,
                                            std::shared_ptr<const WeightsOf<typename Config::Arch>> weights);

/// Bytes that a step reads always, and only with a memory.
struct StepBytes {
  std::uint64_t always = 0, with_memory = 0;
};
/// An executor on a GPU, with its weights there in one precision.
struct CudaModel {
  std::shared_ptr<Executor> executor;     // all its sessions share one stream: calls of several threads take turns
  Precision precision = Precision::kF32;  // what kAuto became
  std::uint64_t bytes = 0;                // resident on the device
  StepBytes saved;                        // that a step of one sequence reads less than matrices of `precision`
};
/// Copies `weights` through page-locked staging memory, rounding where the precision is narrower than the stored type;
/// kAuto is the stored matrices' type where all agree on a 16-bit one, fp32 otherwise. Throws std::bad_alloc whose
/// what() names needed and free bytes, std::system_error; std::runtime_error in a build without CUDA
/// (models/cuda_stub.cpp); std::invalid_argument where it has no such arithmetic. Requires: cuda_unusable_reason(gpu)
/// was "".
template <class Config>
CudaModel make_cuda_executor(const Config& config, const WeightsOf<typename Config::Arch>& weights, Precision precision,
                             int gpu = 0, bool batch_invariant = false);

/// visit(option, member) for each of VariantOptions that an architecture has.
template <class Options, class Config, class Visit>
void for_each_option(Options& options, Config& config, const Visit& visit) {
  if constexpr (requires { config.expert; }) visit(options.expert, config.expert);
  if constexpr (requires { config.calls; }) visit(options.calls, config.calls);
  if constexpr (requires { config.bank; }) visit(options.bank, config.bank);
}

/// Throws std::invalid_argument naming an option that is given and that the architecture does not have.
void refuse_options(const VariantOptions& others, std::string_view architecture);

/// The configuration of a folder as the user wants it.
template <class Config>
Config config_of(const ModelSource& source) {
  Config config = Config::parse(source.config, source.config_name, source.warn);
  VariantOptions others = source.variant;
  for_each_option(others, config, [](auto& option, auto& to) {
    to = option.value_or(to);
    option.reset();
  });
  refuse_options(others, Config::kModelType);
  return config;
}

/// A model of this architecture.
template <class Arch>
class ModelOf final : public LoadedModel {
 public:
  explicit ModelOf(const ModelSource& source)
      : config_(config_of<Config>(source)),
        weights_(std::make_shared<WeightsOf<Arch>>(
            load_weights(Checkpoint::open(source.folder), config_, source.weights, source.warn))) {
    info_.architecture = Config::kModelType;
    info_.vocab_size = config_.vocab_size;
    info_.num_layers = config_.num_layers;
    info_.num_heads = config_.num_heads;
    Arch::describe(config_, info_);
    for_each_option(info_.variant, config_, [](auto& option, const auto& is) { option = is; });
    info_.parameters = weights_->parameters;
    info_.weight_bytes = weights_->bytes;
    count_bytes(std::nullopt, info_);
    info_.fingerprint = weights_->fingerprint;
    info_.bos_token_id = config_.ids.bos.value_or(-1);
    info_.eos_token_ids = config_.ids.eos;
    info_.device_name = "cpu";
  }

  StateLayout state() const override { return state_layout(config_); }
  std::shared_ptr<Executor> on_cpu() const override { return make_cpu_executor<Config>(config_, weights_); }

  void visit_parts(const VisitParts& visit) const override {
    const Sizes sizes = Arch::sizes(config_, nullptr);
    const auto visit_field = [&]<class To>(const Field& field, const To& matrix) {
      if constexpr (std::is_same_v<To, HostMatrix>) {
        std::int64_t row = 0;
        for (const TensorPart& part : field.parts) {
          if (matrix.rows == 0 || field.storage.transposed || !part.used_by(sizes)) continue;
          const std::int64_t rows = part.rows.of(sizes);
          visit(std::string(field.prefix) + std::string(part.name), part.col.of(sizes),
                matrix.view().middle_rows(row, rows));
          row += rows;
        }
      }
    };
    Arch::visit(visit_field, *weights_);
  }

  void round_to_bf16() override {
    Arch::visit([&](const Field& /*field*/, auto& w) { weights_->bytes -= models::round_to_bf16(w); }, *weights_);
    weights_->rounds_inputs = true;
    info_.precision = Precision::kBF16;
    info_.weight_bytes = weights_->bytes;
    count_bytes(std::nullopt, info_);
  }

 protected:
  std::shared_ptr<Executor> copy_to_cuda(Precision precision, int gpu, bool batch_invariant,
                                         ModelInfo& info) const override {
    CudaModel model = make_cuda_executor(config_, *weights_, precision, gpu, batch_invariant);
    info.precision = model.precision;
    info.weight_bytes = model.bytes;
    count_bytes(type_of(info.precision), info);
    info.bytes_per_token -= model.saved.always;
    info.memory_bytes -= model.saved.with_memory;
    return std::move(model.executor);
  }

 private:
  using Config = typename Arch::Config;

  // What one decoded token reads: every matrix and vector, of the embedding a row unless it is the head; the
  // projections of attention over memory slots apart.
  void count_bytes(std::optional<kernels::DType> type, ModelInfo& info) const {
    const HostMatrix& embedding = weights_->embedding;
    info.bytes_per_token = bytes_of(embedding, type) / static_cast<std::uint64_t>(embedding.rows);
    if (!Arch::is_tied(*weights_)) info.bytes_per_token -= bytes_of(embedding, type);
    info.memory_bytes = 0;
    const auto add = [&](const Field& field, const auto& w) {
      if (!Arch::step_reads(config_, field)) return;
      (field.of_memory && field.is_matrix() ? info.memory_bytes : info.bytes_per_token) += bytes_of(w, type);
    };
    Arch::visit(add, *weights_);
    Arch::correct_bytes(config_, type, info);
  }

  Config config_;
  std::shared_ptr<WeightsOf<Arch>> weights_;
};

}  // namespace mmrec::models
