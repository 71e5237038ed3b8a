// Ops that fuse a model's terms, for backends that have a kernel for them: a whole decode step, and what follows the
// recurrence over whole memory segments. The equations are those of models/mmrec/block.h; operands of products are
// rounded to A in the same places.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/tensor.h"
#include "models/mmrec/config.h"
#include "models/mmrec/layer_fields.h"

namespace mmrec::kernels {

/// The kernels that can run a step (chosen in models/mmrec/cuda/decode/step.cu). kNone: no kernel takes the shape.
enum class DecodeAlgo : std::uint8_t { kAuto, kNone, kCluster, kCompact, kSingle, kBatch };

struct NoVector {};
/// The formats of a model's compact matrices (kernels/cuda/gemm/compact.h), the same in every layer, of gamma_in and
/// context_in, and of gamma_up and context_up; all of them plain in a model that has none.
struct DecodeFormats : models::LayerFields<WeightFormat, NoVector> {
  WeightFormat head;

  bool are_compact() const { return is_quantized(ffn_in.code); }
};

struct DecodeShape {
  std::int64_t batch = 0;               // B
  std::int64_t dim = 0;                 // D
  std::int64_t layers = 0;              // L
  std::int64_t heads = 0;               // of the attention over memory slots
  std::int64_t ffn = 0;                 // F
  std::int64_t gate_hidden = 0;         // width of the decay gate's hidden layers: G, or R with dpg
  std::int64_t vocab = 0;               // V; 0: without a head, x is what comes out
  std::int64_t memory_slots = 0;        // M
  bool dpg = false;                     // one decay network instead of two: no k, no context matrices
  std::int64_t stacks = 1;              // such steps that run side by side, each on its share of the device
  std::int64_t head_padding = 0;        // channels of each head that are zeros
  DecodeAlgo algo = DecodeAlgo::kAuto;  // for tests and benches: this one or none
  DecodeFormats formats = {};
};

/// Of a layer's matrices, of elements of `element` bytes.
inline std::int64_t layer_bytes(const DecodeShape& s, std::int64_t element) {
  return element * s.dim * (8 * s.dim + 4 * s.gate_hidden + 2 * s.ffn);
}

/// Weights of one block in memory of Space: matrices [out, in] of type A, biases and norms fp32. A bias may be null,
/// and the context matrices are with dpg.
template <class Space, class A>
using DecodeLayer = models::LayerFields<const A*, const float*>;
/// The same matrices as DecodeFormats says.
template <class Space>
using CompactLayer = models::LayerFields<const std::byte*, NoVector>;

/// Consumes tokens[b] at a position that the caller counts; the position enters by `slots` alone. Before a step that
/// begins a segment without carried state the caller sets h to 0; after one that ends a segment it closes it
/// (segment_close). Everything but the state that is named so, `logits` and `x` is only read.
template <class Space, class A>
struct DecodeStep {
  DecodeShape shape;
  const DecodeLayer<Space, A>* layers = nullptr;  // [L], in memory of Space
  const A* embedding = nullptr;                   // [V, D]
  const A* head = nullptr;                        // [V, D]
  const float* norm = nullptr;                    // [D]
  // Of a model with compact matrices; else null.
  const CompactLayer<Space>* compact_layers = nullptr;  // [L], in memory of Space
  const std::byte* compact_head = nullptr;
  float mdi_mix = 0.1F;
  const int* tokens = nullptr;  // [B] in [0, V)
  // The first sequence's; those of sequence b lie b * slot_bytes bytes further.
  float* h = nullptr;              // state, [L, D]: h_{t-1} on entry, h_t after
  const float* memory = nullptr;   // [L, M, D]
  std::int64_t slots = 0;          // filled: the first `slots` of every ring
  const float* context = nullptr;  // [L, D]: c where one slot is filled, W_o slot + b_o; else not read
  double* segment_sum = nullptr;   // state, [L, D]: the block's outputs are added
  float* logits = nullptr;         // [V]; null without a head
  float* x = nullptr;              // [B, D]: the last block's output, without a head; else null
  std::int64_t slot_bytes = 0;     // a multiple of 16
  void* exchange = nullptr;        // memory of this shape's own, as decode_exchange_clear left it or the last step
};

}  // namespace mmrec::kernels

namespace mmrec::models {

/// The shape of a step of `batch` sequences. vocab: 0 without a head.
inline kernels::DecodeShape decode_shape(const Config& config, std::int64_t batch, std::int64_t vocab) {
  return {.batch = batch,
          .dim = config.model_dim,
          .layers = config.num_layers,
          .heads = config.num_heads,
          .ffn = config.ffn_dim,
          .gate_hidden = config.use_dpg ? config.dpg_rank : config.gate_hidden_dim(),
          .vocab = vocab,
          .memory_slots = config.memory_slots,
          .dpg = config.use_dpg,
          .head_padding = config.head_padding};
}

}  // namespace mmrec::models
