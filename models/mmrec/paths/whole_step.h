// One token of a whole model as one op (models/mmrec/fused_ops.h), on backends that have it.
//
// This holds the model's weights as the op wants them, and the memory it works in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "models/mmrec/choose_path.h"
#include "models/mmrec/terms.h"

namespace mmrec::models {

template <class Backend, class A>
class WholeStep {
 public:
  using Space = typename Backend::Space;
  using Op = kernels::DecodeStep<Space, A>;
  using Terms = BlockTerms<Backend, A>;

  /// A model without a head leaves x instead of logits. `stacks`: how many such ops run side by side.
  WholeStep(const Terms& terms, Backend& backend, std::int64_t batch, [[maybe_unused]] std::int64_t stacks) {
    if constexpr (PathOps<Backend, A>::kWholeStep) {
      const Config& config = terms.work.config;
      const ModelView<Space>& model = terms.model;
      kernels::DecodeShape shape = decode_shape(config, batch, model.head.rows);
      shape.stacks = stacks;
      shape.formats = formats_of(model);
      available_ = decode_step_supported(backend, shape, sizeof(A));
      if (!available_) return;
      exchange_ = backend.template allocate<std::byte>(decode_exchange_bytes(backend, shape, sizeof(A)));
      decode_exchange_clear(backend, shape, sizeof(A), exchange_.data());
      std::vector<Layer> layers;
      for (const LayerView<Space>& w : model.layers) {
        visit_layer([](const Field& /*field*/, const auto& from, auto& to) { to = pointer(from); }, w,
                    layers.emplace_back());
      }
      layers_ = backend.template allocate<Layer>(layers.size());
      backend.upload(layers.data(), layers_.data(), layers.size());
      if (shape.formats.are_compact()) {
        std::vector<Compact> compact;
        for (const LayerView<Space>& w : model.layers) {
          visit_layer([](const Field& /*field*/, const auto& from, auto& to) { to = compact_pointer(from); }, w,
                      compact.emplace_back());
        }
        compact_ = backend.template allocate<Compact>(compact.size());
        backend.upload(compact.data(), compact_.data(), compact.size());
      }
      op_ = {.shape = shape,
             .layers = layers_.data(),
             .embedding = pointer(model.embedding),
             .head = pointer(model.head),
             .norm = model.norm,
             .compact_layers = compact_.data(),
             .compact_head = compact_pointer(model.head),
             .mdi_mix = config.mdi_mix,
             .exchange = exchange_.data()};
    }
  }

  bool available() const { return available_; }

  /// Makes the op ready but for what receives its result. Requires here and below: available().
  void begin(Terms& terms, const int* tokens, const Batch& b) {
    auto& work = terms.work;
    work.restart(b);
    op_.tokens = tokens + b.first_row;
    op_.h = work.state(b, 0).data;
    op_.memory = work.memory(b, 0, 0).data;
    op_.slots = work.filled_slots(b.position);
    op_.context = work.segment_context(b, 0).data;
    op_.segment_sum = work.segment_sum(b, 0).data;
    op_.slot_bytes = static_cast<std::int64_t>(work.slot.bytes);
  }
  /// Receive the result: logits, or x of a model without a head.
  Op& op() { return op_; }
  /// Side by side with another one of the same shapes, or alone if that is null.
  void run(Backend& backend, WholeStep* other = nullptr) {
    if constexpr (PathOps<Backend, A>::kWholeStep) {
      other == nullptr ? decode_step(backend, op_) : decode_steps(backend, op_, other->op_);
    }
  }
  /// The segment that the step ends, if it does.
  static void end(Terms& terms, const Batch& b) {
    for (std::int64_t i = 0; i < terms.work.config.num_layers; ++i) terms.close(terms.layer(i), i, b, b.position + 1);
  }

 private:
  using Layer = kernels::DecodeLayer<Space, A>;
  using Compact = kernels::CompactLayer<Space>;

  static const A* pointer(const kernels::WeightView<Space>& weight) { return weight.template as<A>(); }
  static const float* pointer(const float* vector) { return vector; }
  static const std::byte* compact_pointer(const kernels::WeightView<Space>& w) { return w.compact.data; }
  static kernels::NoVector compact_pointer(const float* /*vector*/) { return {}; }

  /// Of compact matrices, if all are and none is fp8, and those of a field and those that are multiplied together have
  /// one format.
  static kernels::DecodeFormats formats_of(const ModelView<Space>& model) {
    kernels::DecodeFormats formats;
    formats.head = model.head.compact.format;
    bool agree = model.head.rows == 0 || model.head.compact.data != nullptr;
    const LayerView<Space>* before = nullptr;
    for (const LayerView<Space>& w : model.layers) {
      const auto add = [&]<class Format>(const Field& /*field*/, const auto& from, Format& to) {
        if constexpr (std::is_same_v<Format, kernels::WeightFormat>) {
          if (from.rows == 0) return;
          const kernels::WeightFormat format = from.compact.format;
          agree = agree && from.compact.data != nullptr && format.code != kernels::DType::kF8 &&
                  (before == nullptr || to == format);
          to = format;
        }
      };
      visit_layer(add, w, formats);
      before = &w;
    }
    const bool has_context = before != nullptr && before->context_in.rows != 0;
    agree =
        agree && (!has_context || (formats.gamma_in == formats.context_in && formats.gamma_up == formats.context_up));
    return agree ? formats : kernels::DecodeFormats();
  }

  bool available_ = false;
  Op op_;
  typename Backend::template Buffer<Layer> layers_;
  typename Backend::template Buffer<Compact> compact_;
  typename Backend::template Buffer<std::byte> exchange_;
};

}  // namespace mmrec::models
