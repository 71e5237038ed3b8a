// The weights of a whole model, by its architecture's table: read from a checkpoint, viewed, compared. Once for all
// architectures; models/runtime/model.h says what an `Arch` is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <type_traits>
#include <vector>

#include "kernels/tensor.h"
#include "models/files/checkpoint.h"
#include "models/files/warning_sink.h"
#include "models/weights/fields.h"
#include "models/weights/host.h"
#include "models/weights/synthetic.h"

namespace mmrec::models {

/// A whole model in host memory. Immutable after load; shared between sessions.
template <class Arch>
struct WeightsOf : Arch::template Fields<HostMatrix, HostVector>, WeightTotals {};

/// Weights as the forward pass sees them, in a backend's memory space. Null data where the model has no such field.
template <class Arch, class Space>
using ViewOf = typename Arch::template Fields<kernels::WeightView<Space>, const float*>;

/// What an architecture says of its table where it says nothing else.
struct TableDefaults {
  /// Whether load_weights() reads a field that is not optional.
  static bool is_read(const Field& /*field*/) { return true; }
  /// Makes the layers that a configuration has, and as many as other weights have.
  template <class Config, class Weights>
  static void make_layers(const Config& config, Weights& weights) {
    weights.layers.resize(static_cast<std::size_t>(config.num_layers));
  }
  template <class From, class To>
  static void match_layers(const From& from, To& to) {
    to.layers.resize(from.layers.size());
  }
  /// Sets views of fields that are others of the model.
  template <class View>
  static void complete(View& /*view*/) {}
  /// Makes of a device's copy what paths on a device want. Before that a field has `more_rows` rows, or elements, that
  /// are not filled; after it, those that are passing are gone.
  template <class View>
  static void complete_on_device(View& /*view*/, int /*gpu*/) {}
  static std::int64_t more_rows(const Field& /*field*/, const Sizes& /*sizes*/) { return 0; }
  static bool is_passing(const Field& /*field*/) { return false; }
  /// Whether an executor on a GPU may be batch-invariant (mmrec/model.h).
  static constexpr bool kBatchInvariant = false;
  /// Whether steps on a device read compact rows of quantised matrices (kernels/cuda/gemm/compact.h).
  template <class Config>
  static bool steps_compact(const Config& /*config*/, int /*gpu*/) {
    return false;
  }
  /// Of a field, in rows of the device's copy: those that the checkpoint has, the others being composed; and those,
  /// from the first on, that a step reads only with a memory.
  struct RowsOnDevice {
    std::int64_t own = 0, of_memory = 0;
  };
  static RowsOnDevice rows_on_device(const Field& /*field*/, std::int64_t rows, const Sizes& /*sizes*/) {
    return {rows, 0};
  }
  /// The configuration without what changes no saved state, besides ids; and with all that its checkpoint has.
  template <class Config>
  static Config identity(const Config& config) {
    return config;
  }
  template <class Config>
  static Config whole(const Config& config) {
    return config;
  }
  /// Whether one decoded token reads a field; and what else is to be said of the bytes that it reads.
  template <class Config>
  static bool step_reads(const Config& /*config*/, const Field& /*field*/) {
    return true;
  }
  template <class... Arguments>
  static void correct_bytes(const Arguments&... /*arguments*/) {}
};

/// Views of `weights`, which must outlive them.
template <class Arch>
ViewOf<Arch, kernels::Host> view_of(const WeightsOf<Arch>& weights) {
  ViewOf<Arch, kernels::Host> model;
  Arch::match_layers(weights, model);
  Arch::visit([](const Field& /*field*/, const auto& from, auto& to) { to = view(from); }, weights, model);
  Arch::complete(model);
  return model;
}

/// The type of all matrices that are not quantised where they agree, fp32 otherwise; bf16 where all are quantised.
template <class Arch>
kernels::DType common_dtype(const WeightsOf<Arch>& weights) {
  std::optional<kernels::DType> common;
  const auto add = [&](const Field& /*field*/, const auto& w) {
    const std::optional<kernels::DType> type = plain_type(w);
    if (type) common = common.value_or(*type) == *type ? *type : kernels::DType::kF32;
  };
  Arch::visit(add, weights);
  return common.value_or(kernels::DType::kBF16);
}

/// All tensors of a model, in the order of checks. Norms come first: every variant has them, so a missing one means
/// fewer blocks and nothing else.
template <class Config>
std::vector<TensorSpec> tensor_specs(const Config& config, const Checkpoint* checkpoint = nullptr) {
  using Arch = typename Config::Arch;
  struct Nothing {};
  typename Arch::template Fields<Nothing, Nothing> fields;
  Arch::make_layers(Arch::whole(config), fields);
  const Sizes sizes = Arch::sizes(config, checkpoint);
  std::vector<TensorSpec> specs;
  for (const bool norms : {true, false}) {
    const auto add = [&](const Field& field, const Nothing& /*field*/) {
      if ((field.kind == Field::Kind::kNorm) == norms) add_specs(field, sizes, specs);
    };
    Arch::visit(add, fields);
  }
  return specs;
}

/// A model's files with random weights; its head is tied if it can be.
template <class Config>
SyntheticModel synthetic_of(const Config& config) {
  SyntheticModel model{to_json(config), tensor_specs(config)};
  std::erase_if(model.tensors, [](const TensorSpec& spec) { return spec.use != TensorSpec::Use::kRequired; });
  for (TensorSpec& spec : model.tensors) {
    if (spec.may_have_more_rows) spec.shape[0] += spec.shape[0] / 2;  // as the public class has them
  }
  return model;
}
template <class Config>
void write_synthetic_model(const std::filesystem::path& folder, const Config& config,
                           kernels::DType dtype = kernels::DType::kF32, std::uint64_t seed = 0) {
  write_synthetic_folder(folder, synthetic_of(config), dtype, seed);
}

/// Checks every tensor's presence and shape against the configuration before allocating anything, then reads. Missing,
/// unexpected (except those that only training uses, which are reported) and mis-shaped tensors and non-finite values
/// are refused with std::runtime_error naming file, tensor, found and expected. Throws std::bad_alloc if memory does
/// not suffice: the weights exceed the machine's, or an allocation failed.
template <class Config>
WeightsOf<typename Config::Arch> load_weights(const Checkpoint& checkpoint, const Config& config,
                                              const WeightOptions& options = {}, const WarningSink& warn = {}) {
  using Arch = typename Config::Arch;
  check_tensors(checkpoint, tensor_specs(config, &checkpoint), config.quantization, Arch::rules(config), warn);
  const Sizes sizes = Arch::sizes(config, &checkpoint);
  WeightsOf<Arch> weights;
  Arch::make_layers(config, weights);
  WeightReader reader(checkpoint, config.quantization, options);
  const auto add = [&](const Field& field, auto& to) {
    if (!field.optional && Arch::is_read(field)) reader.add(field, sizes, to);
  };
  Arch::visit(add, weights);
  reader.read();
  const auto add_optional = [&]<class To>(const Field& field, To& to) {
    if constexpr (std::is_same_v<To, HostMatrix>) {
      if (field.optional) reader.read_unless_equal(field, sizes, to, weights.embedding);
    }
  };
  Arch::visit(add_optional, weights);
  Config identity = Arch::identity(config);
  identity.ids = {};
  static_cast<WeightTotals&>(weights) = reader.totals(to_json(identity));
  return weights;
}

}  // namespace mmrec::models
