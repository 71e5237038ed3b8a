// One token of a whole model as one op (models/mmrec/decode_step.h), for backends and models that have it: the model's
// weights as the op wants them, and the memory it works in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "models/mmrec/config.h"
#include "models/mmrec/decode_step.h"
#include "models/mmrec/mmrec.h"

namespace mmrec::models {

template <class Backend, class A>
class WholeStep {
 public:
  using Space = typename Backend::Space;
  using Op = kernels::DecodeStep<Space, A>;

  /// A model without a head leaves x instead of logits. `stacks`: how many such ops run side by side.
  WholeStep(const Config& config, const ModelView<Space>& model, Backend& backend, std::int64_t batch,
            [[maybe_unused]] std::int64_t stacks = 1) {
    if constexpr (kBackendHasIt) {
      const kernels::DecodeShape shape = {.batch = batch,
                                          .dim = config.model_dim,
                                          .layers = config.num_layers,
                                          .heads = config.num_heads,
                                          .ffn = config.ffn_dim,
                                          .gate_hidden = config.use_dpg ? config.dpg_rank : config.gate_hidden_dim(),
                                          .vocab = model.head.rows,
                                          .memory_slots = config.memory_slots,
                                          .dpg = config.use_dpg,
                                          .stacks = stacks};
      available_ = decode_step_supported(backend, shape, sizeof(A));
      if (!available_) return;
      exchange_ = backend.template allocate<std::byte>(decode_exchange_bytes(backend, shape, sizeof(A)));
      decode_exchange_clear(backend, shape, sizeof(A), exchange_.data());
      std::vector<Layer> layers;
      for (const LayerView<Space>& w : model.layers) layers.push_back(layer_of(w));
      layers_ = backend.template allocate<Layer>(layers.size());
      backend.upload(layers.data(), layers_.data(), layers.size());
      op_ = {.shape = shape,
             .layers = layers_.data(),
             .embedding = pointer(model.embedding),
             .head = pointer(model.head),
             .norm = model.norm,
             .mdi_mix = config.mdi_mix,
             .exchange = exchange_.data()};
    }
  }

  bool available() const { return available_; }
  /// What changes between steps is the caller's to say: tokens, logits, and where the sequences' state lies.
  Op& op() { return op_; }
  /// Requires: available().
  void run(Backend& backend) {
    if constexpr (kBackendHasIt) decode_step(backend, op_);
  }
  /// Side by side with another one of the same shapes, or alone if that is null. Requires: both available().
  void run_with(WholeStep* other, Backend& backend) {
    if (other == nullptr) return run(backend);
    if constexpr (kBackendHasIt) decode_steps(backend, op_, other->op_);
  }

  // Unqualified, so that names are looked for where the backend is, and only if it has them.
  static constexpr bool kBackendHasIt = requires(Backend & backend, const Op& op) { decode_step(backend, op); };

 private:
  using Layer = kernels::DecodeLayer<Space, A>;

  static const A* pointer(const kernels::WeightView<Space>& weight) { return weight.template as<A>(); }
  static const float* pointer(const float* vector) { return vector; }
  static Layer layer_of(const LayerView<Space>& view) {
    Layer layer;
    visit_layer([](const Field& /*field*/, const auto& from, auto& to) { to = pointer(from); }, view, layer);
    return layer;
  }

  bool available_ = false;
  Op op_;
  typename Backend::template Buffer<Layer> layers_;
  typename Backend::template Buffer<std::byte> exchange_;
};

}  // namespace mmrec::models
