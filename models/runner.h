// The one virtual seam: a model bound to a backend. The engine talks to runners and knows no backend.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "models/mmrec/config.h"
#include "models/mmrec/state.h"
#include "models/mmrec/weights.h"

namespace mmrec::models {

/// How the recurrence of a prompt is computed. The rest of a block runs over many tokens at once either way.
///   kSteps   exactly, one token after another
///   kSweeps  gate-frozen sweeps over the scan until the change is below the tolerance, exact steps where a window does
///            not converge
///   kAuto    whichever measurement found faster for this backend, model and length, by a fixed rule
enum class PrefillMode : std::uint8_t { kAuto, kSweeps, kSteps };

inline constexpr float kFloatTolerance = 1e-5F;
/// Half a unit in the last place of bf16, relative: finer than the rounding of what enters the gates.
inline constexpr float kHalfTolerance = 1e-3F;

struct RunnerOptions {
  int threads = 0;  // <= 0: all processors
  PrefillMode prefill = PrefillMode::kAuto;
  float sweep_tolerance = 0.0F;  // bound on the change, relative to that time's largest |h|; 0: kFloatTolerance where
                                 // products are fp32, kHalfTolerance where they are 16-bit
  int max_sweeps = 64;           // per window, before it falls back to steps; >= 1
};

/// What prefilling has cost since the runner was made or reset.
struct PrefillStats {
  std::int64_t layer_tokens = 0;  // tokens × layers × batch that went through sweeps
  std::int64_t token_sweeps = 0;  // of these, the sum over tokens of the sweeps each took part in
  std::int64_t windows = 0;       // windows swept (a window is of one layer)
  std::int64_t fallbacks = 0;     // of these, windows finished by exact steps
};

/// The sampling chain where the device runs it: temperature (0 is greedy), top-k (0: all), top-p (1: all), min-p (0:
/// none); ids from vocab_limit on are never drawn (0: all may be). The rule is mmrec/sampler.h's.
struct DrawOptions {
  float temperature = 0.0F;
  int top_k = 0;
  float top_p = 1.0F;
  float min_p = 0.0F;
  int vocab_limit = 0;
  std::uint64_t seed = 0;
  bool operator==(const DrawOptions&) const = default;
};

/// `batch` sequences in lock-step. One thread at a time. Token ids must lie in [0, vocab_size): the engine checked
/// them.
class Runner {
 public:
  virtual ~Runner() = default;

  /// Consumes tokens [batch, count], count >= 1; returns the next-token logits [batch, V], valid until the next call.
  virtual std::span<const float> prefill(std::span<const int> tokens) = 0;
  /// Consumes one token per sequence [batch]; returns logits [batch, V]. Always exact.
  virtual std::span<const float> step(std::span<const int> tokens) = 0;
  /// Consumes one token per sequence [batch] and leaves the logits where they were computed, for logits() or draw().
  virtual void advance(std::span<const int> tokens) = 0;
  /// Consumes tokens [batch, count] and writes the log-prob of each given all before it, [batch, count]. Before the
  /// very first token there is nothing to predict it from: its entry is 0.
  virtual void score(std::span<const int> tokens, std::span<float> logprobs) = 0;

  /// Logits [batch, V] of the next token in host memory, valid until the next call; empty before the first token.
  virtual std::span<const float> logits() const = 0;
  /// Draws the next token of every sequence from the logits where they are, by the chain that `options` describes, into
  /// tokens [batch]. Sequence b draws with the random number of (seed, first_sequence + b, step). False where this
  /// runner cannot draw: nothing has happened then. An undrawable row (NaN, +inf, nothing left) gives -1.
  virtual bool draw(const DrawOptions& options, std::uint64_t step, std::uint64_t first_sequence,
                    std::span<int> tokens) {
    static_cast<void>(options), static_cast<void>(step), static_cast<void>(first_sequence), static_cast<void>(tokens);
    return false;
  }
  virtual std::int64_t position() const = 0;
  virtual int batch() const = 0;
  virtual PrefillStats prefill_stats() const = 0;

  virtual void reset() = 0;
  virtual std::unique_ptr<Runner> clone() const = 0;
  virtual HostState export_state() const = 0;
  /// `state` must have this runner's shapes (the engine checked them).
  virtual void import_state(const HostState& state) = 0;
};

/// A runner on the CPU. Keeps `weights` alive.
std::unique_ptr<Runner> make_cpu_runner(const Config& config, std::shared_ptr<const HostWeights> weights, int batch,
                                        const RunnerOptions& options);

}  // namespace mmrec::models
