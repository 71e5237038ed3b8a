// All batches of a chunk at once by exact steps, on backends that have the op (kernels::GatedRecurrences). Each lies
// within one memory segment.
#pragma once

#include <cstdint>
#include <vector>

#include "models/mmrec/block.h"

namespace mmrec::models {

template <class Backend, class A>
class Together {
 public:
  using Space = typename Backend::Space;

  explicit Together(Block<Backend, A>& block) : block_(block) {}

  void begin(const Chunk& chunk) { block_.begin(chunk); }

  void layer(std::int64_t layer, const Chunk& chunk, Done& /*done*/) {
    auto& terms = block_.terms;
    const LayerView<Space>& w = terms.layer(layer);
    block_.inputs(layer, chunk);
    inputs_.clear();
    for (const Batch& b : chunk.batches) {
      terms.carry_in(layer, b);
      inputs_.push_back(terms.gate_inputs(b));
    }
    gated_recurrences(terms.work.backend, kernels::GatedRecurrences<Space, A>{
                                              .in = inputs_, .gate_weight = w.gate, .gate_bias = w.gate_bias});
    for (const Batch& b : chunk.batches) {
      terms.prepare_attention(w, b, terms.attending(b));
      terms.mix(w, layer, b, {0, b.tokens});
    }
    terms.feed_forward(w, {.sequences = 1, .tokens = chunk.rows}, {0, chunk.rows});
    for (const Batch& b : chunk.batches) {
      terms.remember(w, layer, b, {0, b.tokens});
      terms.carry_out(layer, b);
    }
  }

 private:
  Block<Backend, A>& block_;
  std::vector<kernels::GateInputs<Space, A>> inputs_;  // of the batches
};

}  // namespace mmrec::models
