// The weights of a whole model, by its architecture's table: read from a checkpoint, viewed, compared. Once for all
// architectures; models/runtime/model.h says what an `Arch` is.
#pragma once

#include <cstddef>

#include "kernels/tensor.h"
#include "models/files/checkpoint.h"
#include "models/files/warning_sink.h"
#include "models/weights/fields.h"
#include "models/weights/host.h"

namespace mmrec::models {

/// A whole model in host memory. Immutable after load; shared between sessions.
template <class Arch>
struct WeightsOf : Arch::template Fields<HostMatrix, HostVector>, WeightTotals {};

/// Weights as the forward pass sees them, in a backend's memory space. Null data where the model has no such field.
template <class Arch, class Space>
using ViewOf = typename Arch::template Fields<kernels::WeightView<Space>, const float*>;

/// What an architecture's table says where it says nothing else.
struct TableDefaults {
  /// Whether load_weights() reads the field.
  static bool is_read(const Field& /*field*/) { return true; }
  /// Reads what is_read() leaves out, where that depends on what was read.
  template <class Weights>
  static void read_rest(WeightReader& /*reader*/, const Sizes& /*sizes*/, Weights& /*weights*/) {}
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

/// The type of all matrices where they agree, fp32 otherwise.
template <class Arch>
kernels::DType common_dtype(const WeightsOf<Arch>& weights) {
  const kernels::DType type = weights.embedding.format.code;
  bool all = true;
  Arch::visit([&](const Field& /*field*/, const auto& w) { all = all && has_dtype(w, type); }, weights);
  return all ? type : kernels::DType::kF32;
}

/// Checks every tensor's presence and shape against the configuration before allocating anything, then reads. Missing,
/// unexpected (except those that only training uses, which are reported) and mis-shaped tensors and non-finite values
/// are refused with std::runtime_error naming file, tensor, found and expected. Throws std::bad_alloc if memory does
/// not suffice: the weights exceed the machine's, or an allocation failed.
template <class Config>
WeightsOf<typename Config::Arch> load_weights(const Checkpoint& checkpoint, const Config& config,
                                              const WeightOptions& options = {}, const WarningSink& warn = {}) {
  using Arch = typename Config::Arch;
  const Sizes sizes = Arch::sizes(config, checkpoint);
  check_tensors(checkpoint, Arch::tensors(config, sizes), Arch::rules(config), warn);
  WeightsOf<Arch> weights;
  Arch::make_layers(config, weights);
  WeightReader reader(checkpoint, options);
  const auto add = [&](const Field& field, auto& to) {
    if (Arch::is_read(field)) reader.add(field, sizes, to);
  };
  Arch::visit(add, weights);
  reader.read();
  Arch::read_rest(reader, sizes, weights);
  static_cast<WeightTotals&>(weights) = reader.totals(to_json(Arch::identity(config)));
  return weights;
}

}  // namespace mmrec::models
