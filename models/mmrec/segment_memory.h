// What follows the recurrence in a block: the memory of past segments, the feed-forward network, and the running
// segment's sum, whose mean becomes the newest slot of the memory when the segment ends.
//
//   y = x + h + c + 0.1 v,  c = W_o attend(W_q' h + ½ q; memory) + b_o
//   x = y + W_2 gelu(W_1 rmsnorm(y; norm2) + b_1) + b_2
//
// h looks at no memory, so the recurrence runs over a whole chunk; where a chunk spans segments, what is here goes
// piece by piece, a piece ending with its segment. With a single slot filled attend() is that slot, whatever the query,
// so c is one vector for the whole segment, the segment's context, which lies in the sequence's slot.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <type_traits>

#include "kernels/backend.h"
#include "models/mmrec/finish_segments.h"
#include "models/mmrec/mmrec.h"
#include "models/mmrec/workspace.h"

namespace mmrec::models {

/// Shorter chunks take exact steps: a sweep would cost as much as all of them.
inline constexpr std::int64_t kMinSweepTokens = 16;

template <class Backend, class A>
class SegmentMemory {
 public:
  using Work = Workspace<Backend, A>;
  using Space = typename Work::Space;
  using Layer = LayerView<Space>;
  template <class T>
  using Matrix = typename Work::template Matrix<T>;
  template <class T>
  using Sequence = typename Work::template Sequence<T>;

  explicit SegmentMemory(Work& work) : work_(work) {}

  /// From h to the block's output in x, for all of a batch's tokens.
  void finish(const Layer& w, std::int64_t layer, const Batch& b) {
    if (finish_at_once(w, layer, b)) return;
    prepare_attention(w, b, attending(b));
    const std::int64_t segment = work_.config.memory_segment;
    for (Piece piece; piece.first < b.tokens; piece.first += piece.tokens) {
      piece.tokens = std::min(b.tokens - piece.first, segment - (b.position + piece.first) % segment);
      mix(w, layer, b, piece);
      feed_forward(w, b, piece);
      kernels::segment_sum(work_.backend, {.x = Work::times(work_.x(b), piece), .sum = work_.segment_sum(b, layer)});
      close(w, layer, b, b.position + piece.first + piece.tokens);
    }
  }

  /// The same of all batches of a chunk that keeps to segments: what looks at no memory sees all its rows at once.
  void finish_together(const Layer& w, std::int64_t layer, std::span<const Batch> batches, std::int64_t rows) {
    for (const Batch& b : batches) {
      prepare_attention(w, b, attending(b));
      mix(w, layer, b, {0, b.tokens});
    }
    const Batch all{.sequences = 1, .tokens = rows};
    feed_forward(w, all, {0, rows});
    for (const Batch& b : batches) {
      kernels::segment_sum(work_.backend, {.x = work_.x(b), .sum = work_.segment_sum(b, layer)});
      close(w, layer, b, b.position + b.tokens);
    }
  }

  /// x += W_2 gelu(W_1 u + b_1) + b_2.
  void feed_forward(const Layer& w, const Batch& b, const Piece& piece) {
    const Sequence<float> x = Work::times(work_.x(b), piece);
    const Sequence<A> ffn = Work::times(work_.ffn(b), piece);
    work_.template linear<A>(Work::times(work_.u(b), piece), ffn,
                             {.weight = w.ffn_in, .bias = w.ffn_in_bias, .activation = kernels::Activation::kGelu});
    work_.template linear<float>(ffn, x, {.weight = w.ffn_out, .bias = w.ffn_out_bias}, x);
  }

  /// Position `end` has been reached: the segment that ends there, if one does, becomes a slot.
  void close(const Layer& w, std::int64_t layer, const Batch& b, std::int64_t end) {
    if (end % work_.config.memory_segment != 0) return;
    kernels::segment_close(work_.backend, work_.segment_sum(b, layer), work_.config.memory_segment,
                           work_.memory(b, layer, work_.ring_slot(end)));
    set_context(w, layer, b, end);
  }

  /// c of the segment that begins at `end`, or in which it lies, where just one slot is filled: W_o slot + b_o. Row by
  /// row, so that its bits depend on nothing but the slot. Works in the attention's queries.
  void set_context(const Layer& w, std::int64_t layer, const Batch& b, std::int64_t end) {
    if (work_.filled_slots(end) != 1) return;
    const Matrix<float> slots = work_.memory(b, layer, work_.ring_slot(end));
    const Matrix<float> contexts = work_.segment_context(b, layer);
    const Matrix<A> rounded = Work::row_of(work_.attended(b), 0).middle_rows(0, 1);
    for (std::int64_t s = 0; s < b.sequences; ++s) {
      kernels::copy_rows(work_.backend, Matrix<const float>(slots.middle_rows(s, 1)), rounded);
      work_.template linear<float>(
          {.x = rounded, .weight = w.memory_out, .bias = w.memory_out_bias, .y = contexts.middle_rows(s, 1)});
    }
  }

  /// c where at most one slot is filled: [D] for all sequences (stride 0), or a row for each.
  Matrix<const float> context(const Layer& w, std::int64_t layer, const Batch& b, std::int64_t position) const {
    if (work_.filled_slots(position) != 0) return work_.segment_context(b, layer);
    return {w.memory_out_bias, b.sequences, work_.dim(), 0};
  }

  /// x += W_o attend(W_q' h + ½ q; memory) + b_o, where two slots or more are filled.
  void attend(const Layer& w, std::int64_t layer, const Batch& b, const Piece& piece) {
    const std::int64_t slots = work_.filled_slots(b.position + piece.first);
    const Sequence<A> query = Work::times(work_.attended(b), piece);
    const Matrix<float> memory = work_.memory(b, layer, 0);
    Sequence<const float> rings(memory.data, b.sequences, slots, work_.dim());
    rings.batch_stride = memory.stride;
    kernels::memory_attention(
        work_.backend,
        kernels::MemoryAttention<Space, A>{.q = query, .slots = rings, .heads = work_.config.num_heads, .out = query});
    add_attended(w, b, piece);
  }
  /// x += W_o attended + b_o.
  void add_attended(const Layer& w, const Batch& b, const Piece& piece) {
    const Sequence<float> x = Work::times(work_.x(b), piece);
    work_.template linear<float>(Work::times(work_.attended(b), piece), x,
                                 {.weight = w.memory_out, .bias = w.memory_out_bias}, x);
  }
  /// What attention needs that looks at no memory, for tokens that will attend: their queries, and x = x + h + 0.1 v.
  void prepare_attention(const Layer& w, const Batch& b, const Piece& piece) {
    if (piece.tokens == 0) return;
    project_queries(w, b, piece);
    kernels::block_residual(work_.backend, residual(b, piece));
  }
  /// Queries of a piece: W_q' h + ½ q.
  void project_queries(const Layer& w, const Batch& b, const Piece& piece) {
    if (piece.tokens == 0) return;
    work_.template linear<A>(
        Work::times(work_.h_rounded(b), piece.first + 1, piece.tokens), Work::times(work_.attended(b), piece),
        {.weight = w.memory_q, .bias = w.memory_q_bias, .residual_scale = 0.5F}, Work::times(work_.q(b), piece));
  }

 private:
  using Residual = kernels::BlockResidual<Space, A>;

  /// The batch's tokens that attend to two slots or more.
  Piece attending(const Batch& b) const {
    if (work_.config.memory_slots < 2) return {b.tokens, 0};
    const std::int64_t first = std::clamp<std::int64_t>(2 * work_.config.memory_segment - b.position, 0, b.tokens);
    return {first, b.tokens - first};
  }
  Residual residual(const Batch& b, const Piece& piece) {
    const Sequence<float> x = Work::times(work_.x(b), piece);
    return {.x = x,
            .h = Work::times(work_.h(b), piece.first + 1, piece.tokens),
            .v = Work::times(work_.v(b), piece),
            .y = x};
  }

  /// x = x + h + c + 0.1 v and u = rmsnorm(x; norm2).
  void mix(const Layer& w, std::int64_t layer, const Batch& b, const Piece& piece) {
    const Sequence<float> x = Work::times(work_.x(b), piece);
    const Sequence<A> u = Work::times(work_.u(b), piece);
    if (work_.filled_slots(b.position + piece.first) > 1) {
      attend(w, layer, b, piece);
      return work_.normalise(x, w.norm2, u);
    }
    Residual op = residual(b, piece);
    const Matrix<const float> c = context(w, layer, b, b.position + piece.first);
    op.bias = c.data, op.bias_stride = c.stride;
    if constexpr (requires { block_residual_norm(work_.backend, op, w.norm2, Work::matrix(u)); }) {
      if (Work::is_matrix(u)) return block_residual_norm(work_.backend, op, w.norm2, Work::matrix(u));
    }
    kernels::block_residual(work_.backend, op);
    work_.normalise(x, w.norm2, u);
  }

  /// All pieces by one op, for backends and models that have it. Shorter chunks keep to the chain of ops.
  bool finish_at_once(const Layer& w, std::int64_t layer, const Batch& b) {
    using Op = kernels::FinishSegments<Space, A>;
    if constexpr (Work::kRounds && requires(const Op& op) { finish_segments(work_.backend, op); }) {
      if (b.tokens < kMinSweepTokens) return false;
      const Op op{.x = work_.x(b),
                  .h = Work::times(work_.h(b), 1, b.tokens),
                  .v = work_.v(b),
                  .q = work_.attended(b),
                  .position = b.position,
                  .segment = work_.config.memory_segment,
                  .heads = work_.config.num_heads,
                  .memory = work_.memory(b, layer, 0).data,
                  .memory_slots = work_.config.memory_slots,
                  .sum = work_.segment_sum(b, layer).data,
                  .slot_bytes = static_cast<std::int64_t>(work_.slot.bytes),
                  .memory_out = w.memory_out,
                  .memory_out_bias = w.memory_out_bias,
                  .norm = w.norm2,
                  .ffn_in = w.ffn_in,
                  .ffn_in_bias = w.ffn_in_bias,
                  .ffn_out = w.ffn_out,
                  .ffn_out_bias = w.ffn_out_bias};
      if (!finish_segments_supported(work_.backend, op)) return false;
      project_queries(w, b, attending(b));
      finish_segments(work_.backend, op);
      const std::int64_t segment = work_.config.memory_segment;
      const std::int64_t ended = (b.position + b.tokens) / segment * segment;
      if (ended > b.position) set_context(w, layer, b, ended);
      return true;
    }
    return false;
  }

  Work& work_;
};

}  // namespace mmrec::models
