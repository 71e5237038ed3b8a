// A run of sequences: prefill, step, score; branch, save and restore the state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "mmrec/prefill.h"
#include "mmrec/sampler.h"

namespace mmrec {

namespace engine {
struct Access;  // builds sessions and models on runners of its own; not part of the contract
}

struct SessionOptions {
  int threads =
      0;  ///< 0: all the processors this process may use; results do not depend on it. More than 256 count as 256
  PrefillMode prefill = PrefillMode::kAuto;
  float sweep_tolerance = 0.0F;  ///< bound on the last sweep's change, relative to that time's largest |h|; >= 0,
                                 ///< finite. 0: 1e-5 where products are fp32, 1e-3 where they are 16-bit
  int max_sweeps = 64;           ///< per window, before exact steps finish it; >= 1
};

/// `batch` sequences in lock-step, with their recurrent state. The state has a fixed size however many tokens were
/// consumed. Movable, not copyable (see clone()); a session moved from may only be assigned to or destroyed. One thread
/// at a time; different sessions are independent.
///
/// Splitting the tokens into calls does not change the result: see docs/numerics.md for what is equal to the bit.
/// A call that throws std::invalid_argument has changed nothing.
class Session {
 public:
  Session(Session&&) noexcept;
  Session& operator=(Session&&) noexcept;
  ~Session();

  int batch() const;
  std::int64_t vocab_size() const;
  /// Tokens consumed per sequence.
  std::int64_t position() const;

  /// Consumes `tokens` [batch, T] row by row, T >= 1, and returns the logits of the next token [batch, vocab_size]. The
  /// span is valid until the next call on this session. Throws std::invalid_argument for an id outside
  /// [0, vocab_size), naming it and its index, and for a length that batch does not divide.
  std::span<const float> prefill(std::span<const int> tokens);

  /// Consumes one token per sequence [batch]; otherwise like prefill. Always exact, never sweeps.
  std::span<const float> step(std::span<const int> tokens);

  /// step() without fetching the logits: on a GPU it returns before the work is done. draw() or logits() follow.
  void advance(std::span<const int> tokens);

  /// Draws the next token of every sequence into `tokens` [batch], where the logits are: from a GPU only the ids come.
  /// The rule is Sampler's, and sequence b has the random number of (seed, first_sequence + b, step); a GPU may differ
  /// from Sampler on these logits only where a sum of weights falls on a threshold to within rounding. Consumes
  /// nothing: step() or advance() do. Throws std::invalid_argument at position 0, for a span of another size, for an
  /// option out of range and for a repetition penalty other than 1, which needs the tokens so far; NumericError like
  /// Sampler::sample.
  void draw(const SamplerOptions& options, std::uint64_t step, std::uint64_t first_sequence, std::span<int> tokens);

  /// Consumes `tokens` [batch, T] and returns log p of each token given all before it, including those of earlier
  /// calls, [batch, T]. The first token of all has nothing before it: its entry is 0. Logits for all tokens are never
  /// stored.
  std::vector<float> score(std::span<const int> tokens);

  /// Logits of the next token [batch, vocab_size], valid until the next call on this session; empty at position 0.
  std::span<const float> logits() const;

  PrefillStats prefill_stats() const;

  /// An independent copy of this session, state and all; it shares the weights.
  Session clone() const;
  /// Back to position 0.
  void reset();

  /// The state as bytes: format version, model fingerprint, position, recurrent state, memory, last logits, checksum.
  /// A restored session continues bit for bit as this one would on the same kind of device. The state can
  /// betray the text it came from: treat the bytes like the text. See docs/file-formats.md.
  std::vector<std::byte> save() const;
  /// Replaces the state by a saved one of the same model and batch. Throws std::runtime_error saying what was found and
  /// expected if the bytes are damaged, of another model, version or batch, or hold a NaN or an infinity; the session
  /// is then unchanged. Statistics and options are not part of the state.
  void restore(std::span<const std::byte> state);

 private:
  friend struct engine::Access;
  struct Impl;
  explicit Session(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace mmrec
