// A run of sequences: prefill, step, score; branch, save and restore the state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "mmrec/export.h"
#include "mmrec/prefill.h"
#include "mmrec/sampler.h"

namespace mmrec {

namespace engine {
struct Access;  // builds sessions and models on executors of its own; not part of the contract
}

/// How a session computes.
struct SessionOptions {
  /// 0: all the processors this process may use; results do not depend on it. More than 256 count as 256.
  int threads = 0;
  PrefillMode prefill = PrefillMode::kAuto;  ///< how the recurrence of a prompt is computed
  float sweep_tolerance = 0.0F;  ///< bound on the last sweep's change, relative to that time's largest |h|; >= 0,
                                 ///< finite. 0: 1e-5 where products are fp32, 1e-3 where they are 16-bit
  int max_sweeps = 64;           ///< per window, before exact steps finish it; >= 1
};

/// How a call over many tokens is watched.
struct CallOptions {
  /// Asked between the chunks of a call with how many tokens of each sequence it has consumed, 0 < done < total.
  /// Returning false makes the next chunk the last; so the call ends within the time of one chunk: up to 256 tokens of
  /// each sequence on the CPU, up to 4,096 on a GPU (65,536 of a small model). The session then stands at the
  /// position() it has reached, as if it had been given no more tokens. What it throws ends the call in the same way
  /// and is then thrown on. Called in the calling thread; must not use sessions of the model.
  std::function<bool(std::int64_t done, std::int64_t total)> on_progress = {};
};

/// `batch` sequences in lock-step, with their recurrent state. The state has a fixed size however many tokens were
/// consumed. Movable, not copyable (see clone()); a session moved from may only be assigned to or destroyed. One thread
/// at a time; different sessions are independent, though those of a model on a GPU take turns there.
///
/// Splitting the tokens into calls does not change the result: see docs/numerics.md for what is equal to the bit. Not
/// so with an mmrec-jax model that has a memory bank, unless it was loaded with Calls::kStepwise: each prefill() begins
/// a call of the model, and more of them where it has more tokens than the bank has rows (Calls::kPrompt), or every so
/// many positions from 0 on (Calls::kWhole); each step() is one. score() goes token by token whatever was chosen.
///
/// Where results go. prefill() and step() bring nothing back: logits() fetches, draw() draws. Log-probs and drawn
/// tokens are written to spans of the caller's, laid out as their tokens.
///
/// Time. On the CPU a call returns when its work is done. On a GPU prefill() and step() may return before that;
/// whatever brings something to the host waits for it.
///
/// Errors. A call that throws std::invalid_argument has changed nothing. After std::bad_alloc or std::system_error
/// (CUDA fails; on a GPU it may be a later call that says so) from a call that consumes tokens, the state is undefined
/// until reset() or restore().
class MMREC_EXPORT Session {
 public:
  /// The session moved from may only be assigned to or destroyed.
  Session(Session&&) noexcept;
  /// Gives up the state it had.
  Session& operator=(Session&&) noexcept;
  ~Session();

  /// Sequences in lock-step, >= 1.
  int batch() const;
  /// The model's: ids and columns of logits.
  std::int64_t vocab_size() const;
  /// Tokens consumed per sequence.
  std::int64_t position() const;

  /// Consumes `tokens` [batch, T] row by row, T >= 1. Throws std::invalid_argument for an id outside [0, vocab_size),
  /// naming it and its index, and for a length that batch does not divide; what on_progress throws.
  void prefill(std::span<const int> tokens, const CallOptions& options = {});

  /// Consumes one token per sequence [batch]; otherwise like prefill. Always exact, never sweeps.
  void step(std::span<const int> tokens);

  /// Consumes `tokens` [batch, T] like prefill and writes log p of each token given all before it, including those of
  /// earlier calls, to `logprobs` [batch, T]. The first token of all has nothing before it: its entry is 0. Where
  /// on_progress ended the call, the entries of tokens that were not consumed are unspecified. Logits for all tokens
  /// are never stored. Throws as prefill does, and std::invalid_argument for `logprobs` of another size.
  void score(std::span<const int> tokens, std::span<float> logprobs, const CallOptions& options = {});

  /// Logits of the next token [batch, vocab_size], in host memory until the next call that is not const; empty at
  /// position 0. Fetched when first asked for after the state has changed.
  std::span<const float> logits() const;

  /// Draws the next token of every sequence into `samples` [batch], where the logits are: from a GPU only the samples
  /// come. The rule is Sampler's, and sequence b has the random number of (seed, first_sequence + b, step); a GPU may
  /// differ from Sampler on these logits only where a sum of weights falls on a threshold to within rounding. Consumes
  /// nothing: step() does. Without `logprobs` those of the samples are 0, which saves a GPU a pass over the logits.
  /// Throws std::invalid_argument at position 0, for a span of another size, for an option out of range and for a
  /// repetition penalty other than 1, which needs the tokens so far; NumericError like Sampler::sample.
  void draw(const SamplerOptions& options, std::uint64_t step, std::uint64_t first_sequence, std::span<Sample> samples,
            bool logprobs = true);

  /// How many of its last tokens a session remembers of each sequence: four times the default repetition_window, and
  /// more than the text of a character can take. They are no part of the recurrent state.
  static constexpr int kRecentTokens = 256;
  /// The last tokens that `sequence` has consumed, oldest first, at most kRecentTokens; those since restore(), which
  /// cannot know what came before. Valid until the next call that is not const. Throws std::invalid_argument for a
  /// sequence outside [0, batch).
  std::span<const int> recent_tokens(int sequence = 0) const;

  /// What prefilling has cost since the session began or was reset.
  PrefillStats prefill_stats() const;

  /// An independent copy of this session, state and all; it shares the weights, and on a GPU the copy is made there.
  /// Throws std::bad_alloc, std::system_error where CUDA fails.
  Session clone() const;
  /// Back to position 0.
  void reset();

  /// The state as bytes: format version, model fingerprint, position, recurrent state, memory, last logits, checksum.
  /// A restored session continues bit for bit as this one would on the same kind of device. The state can
  /// betray the text it came from: treat the bytes like the text. See docs/file-formats.md.
  std::vector<std::byte> save() const;
  /// Replaces the state by a saved one of the same model and batch. Throws std::runtime_error saying what was found and
  /// expected if the bytes are damaged, of another model, version or batch, or hold a NaN or an infinity; the session
  /// is then unchanged. Statistics, options and recent_tokens() are not part of the state: the first two stay, the last
  /// becomes `recent` [batch, n], the last tokens before the state row by row; none where nobody knows them. Throws
  /// std::invalid_argument for ids outside [0, vocab_size), a size that batch does not divide, and more tokens than the
  /// state has consumed.
  void restore(std::span<const std::byte> state, std::span<const int> recent = {});

 private:
  friend struct engine::Access;
  struct MMREC_NO_EXPORT Impl;
  MMREC_NO_EXPORT explicit Session(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace mmrec
