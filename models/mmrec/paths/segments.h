// The terms after the recurrence by one op for all memory segments of a batch (models/mmrec/fused_ops.h), on backends
// that have it. Batches that the op does not take go as in block.h.
#pragma once

#include <cstdint>

#include "models/mmrec/block.h"

namespace mmrec::models {

template <class Backend, class A>
class Segments {
 public:
  using Space = typename Backend::Space;
  using Work = Workspace<Backend, A>;

  explicit Segments(Block<Backend, A>& block) : block_(block) {}

  /// Whether the op takes the model with this batch.
  bool fits(const Batch& b) { return finish_segments_supported(block_.terms.work.backend, op(0, b)); }

  void begin(const Chunk& chunk) { block_.begin(chunk); }

  void layer(std::int64_t layer, const Chunk& chunk, Done& done) {
    block_.layer(layer, chunk, done, [&](const Batch& b) { finish(layer, b, chunk.options); });
  }

  /// From h to the block's output in x, by the op where the batch may take it.
  void finish(std::int64_t layer, const Batch& b, const RecurrenceOptions& options) {
    if constexpr (PathOps<Backend, A>::kSegments) {
      auto& terms = block_.terms;
      if (takes_segments(b, options)) {
        const auto segments = op(layer, b);
        if (finish_segments_supported(terms.work.backend, segments)) {
          const LayerView<Space>& w = terms.layer(layer);
          terms.query(w, b, terms.attending(b));
          finish_segments(terms.work.backend, segments);
          const std::int64_t length = terms.work.config.memory_segment;
          const std::int64_t ended = (b.position + b.tokens) / length * length;
          if (ended > b.position) terms.set_context(w, layer, b, ended);
          return;
        }
      }
    }
    block_.finish(layer, b);
  }

 private:
  kernels::FinishSegments<Space, A> op(std::int64_t layer, const Batch& b) {
    Work& work = block_.terms.work;
    const LayerView<Space>& w = block_.terms.layer(layer);
    return {.x = work.x(b),
            .h = Work::times(work.h(b), 1, b.tokens),
            .v = work.v(b),
            .q = work.attended(b),
            .position = b.position,
            .segment = work.config.memory_segment,
            .heads = work.config.num_heads,
            .head_padding = work.config.head_padding,
            .memory = work.memory(b, layer, 0).data,
            .memory_slots = work.config.memory_slots,
            .sum = work.segment_sum(b, layer).data,
            .slot_bytes = static_cast<std::int64_t>(work.slot.bytes),
            .memory_out = w.memory_out,
            .memory_out_bias = w.memory_out_bias,
            .norm = w.norm2,
            .ffn_in = w.ffn_in,
            .ffn_in_bias = w.ffn_in_bias,
            .ffn_out = w.ffn_out,
            .ffn_out_bias = w.ffn_out_bias};
  }

  Block<Backend, A>& block_;
};

}  // namespace mmrec::models
