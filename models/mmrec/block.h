// The MM-Rec block: one layer's work on the rows of a chunk, in the order of the equations. This is the reference:
// every path of paths/ must equal it (tests/models/terms.h). A chunk that no path takes goes through it.
//
//   u = rmsnorm(x; norm1)
//   q, v, z, k = W u + b                                        γ = decay gate of (z, k)
//   h_t = a_t ⊙ h_{t-1} + b_t, gates from z_t and h_{t-1}       (kernels::GateInputs)
//   y = x + h + c + 0.1 v,  c = W_o attend(W_q' h + ½ q; memory) + b_o
//   x = y + W_2 gelu(W_1 rmsnorm(y; norm2) + b_1) + b_2
//   memory: the mean of x over each past segment
//
// Up to γ all rows of the chunk go at once. The recurrence reads no memory, so it takes all tokens of a batch. The
// terms after it read the filled slots, so they go piece by piece, and a piece ends with its segment.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/ops.h"
#include "models/mmrec/choose_path.h"
#include "models/mmrec/swept_runs.h"
#include "models/mmrec/terms.h"
#include "models/runtime/executor.h"
#include "models/runtime/schedule.h"

namespace mmrec::models {

template <class Backend, class A>
class Block {
 public:
  using Terms = BlockTerms<Backend, A>;
  using Work = typename Terms::Work;
  using Space = typename Terms::Space;
  using Layer = typename Terms::Layer;

  explicit Block(Terms& its_terms) : terms(its_terms), stretches_(terms.work) {}

  Terms& terms;

  void begin(const Chunk& chunk) { terms.embed(chunk); }

  void layer(std::int64_t layer, const Chunk& chunk, Done& done) {
    inputs(layer, chunk);
    for (const Batch& b : chunk.batches) {
      recur(layer, b, chunk.options, done);
      finish(layer, b);
      // Last, because the device waits for the host when sweeps end: the work above keeps it busy.
      terms.carry_out(layer, b);
    }
  }

  // The parts of a layer, for paths that replace others.

  /// From x to the recurrence's inputs: z, gates of z, γ; and v and q.
  void inputs(std::int64_t layer, const Chunk& chunk) {
    const Layer& w = terms.layer(layer);
    terms.norm(w, chunk.rows);
    terms.project(w, chunk.rows);
    terms.decay(w, chunk.rows);
  }

  /// h, token by token or by sweeps, which equal that within the tolerance.
  void recur(std::int64_t layer, const Batch& b, const RecurrenceOptions& options, Done& done) {
    const Layer& w = terms.layer(layer);
    terms.carry_in(layer, b);
    if (!takes_sweeps(b, options)) return step(w, b, 0);
    if constexpr (PathOps<Backend, A>::kPacked) {
      if (terms.work.until_restart(b, 0) < b.tokens) return sweep_stretches(w, b, options, done);
    }
    count(done, b.rows(), kernels::gated_sweeps(terms.work.backend, terms.sweeps(w, b, options)));
  }

  /// From h to the block's output in x.
  void finish(std::int64_t layer, const Batch& b) {
    const Layer& w = terms.layer(layer);
    terms.prepare_attention(w, b, terms.attending(b));
    const std::int64_t segment = terms.work.config.memory_segment;
    for (Piece piece; piece.first < b.tokens; piece.first += piece.tokens) {
      piece.tokens = std::min(b.tokens - piece.first, segment - (b.position + piece.first) % segment);
      terms.mix(w, layer, b, piece);
      terms.feed_forward(w, b, piece);
      terms.remember(w, layer, b, piece);
    }
  }

  static void count(Done& done, std::int64_t rows, const kernels::SweepCounts& counts) {
    done.stats += {rows, counts.token_sweeps, counts.windows, counts.fallbacks};
  }

 private:
  /// h from time `first` on. What follows a restart comes before what precedes it: the last state before a restart goes
  /// where the carry of the first token after it was.
  void step(const Layer& w, const Batch& b, std::int64_t first) {
    const std::int64_t tokens = terms.work.until_restart(b, first);
    if (first + tokens < b.tokens) step(w, b, first + tokens);
    if (first > 0) terms.zero_carry(b, first);
    kernels::gated_recurrence(
        terms.work.backend,
        kernels::GatedRecurrence<Space, A>{
            .in = terms.gate_inputs(b, {first, tokens}), .gate_weight = w.gate, .gate_bias = w.gate_bias});
  }
  /// Stretches between restarts are as independent as packed runs, so they are swept together.
  void sweep_stretches(const Layer& w, const Batch& b, const RecurrenceOptions& options, Done& done) {
    if (b.position != swept_.position || b.tokens != swept_.tokens) {  // once for all layers
      swept_ = {};                                                     // until its lists are there
      const Batch alone{.position = b.position, .sequences = 1, .tokens = b.tokens};
      stretches_.lay_out({&alone, 1}, b.tokens);
      swept_ = alone;
    }
    for (std::int64_t s = 0; s < b.sequences; ++s) {
      kernels::PackedSweeps<Space, A> op{terms.sweeps(w, b, options), stretches_.begin()};
      op.sweeps.in = op.sweeps.in.slice(s, 0, b.tokens);
      count(done, b.tokens, packed_sweeps(terms.work.backend, op));
    }
  }

  Batch swept_;  // whose stretches are laid out
  SweptRuns<Backend, A> stretches_;
};

}  // namespace mmrec::models
