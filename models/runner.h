// The one virtual seam: a model bound to a backend. The engine talks to runners and knows no backend.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "models/config.h"
#include "models/state.h"
#include "models/weights.h"

namespace mmrec::models {

/// How the recurrence of a prompt is computed. The rest of a block runs over many tokens at once either way.
///   kSteps   exactly, one token after another
///   kSweeps  gate-frozen sweeps over the scan until the change is below the tolerance, exact steps where a window does
///            not converge
///   kAuto    whichever measurement found faster for this backend, model and length, by a fixed rule
enum class PrefillMode : std::uint8_t { kAuto, kSweeps, kSteps };

struct RunnerOptions {
  int threads = 0;  // <= 0: all processors
  PrefillMode prefill = PrefillMode::kAuto;
  float sweep_tolerance = 1e-5F;  // bound on the change, relative to the window's largest |h|; > 0
  int max_sweeps = 64;            // per window, before it falls back to steps; >= 1
};

/// What prefilling has cost since the runner was made or reset.
struct PrefillStats {
  std::int64_t layer_tokens = 0;  // tokens × layers × batch that went through sweeps
  std::int64_t token_sweeps = 0;  // of these, the sum over tokens of the sweeps each took part in
  std::int64_t windows = 0;       // windows swept (a window is of one layer)
  std::int64_t fallbacks = 0;     // of these, windows finished by exact steps
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
  /// Consumes tokens [batch, count] and writes the log-prob of each given all before it, [batch, count]. Before the
  /// very first token there is nothing to predict it from: its entry is 0.
  virtual void score(std::span<const int> tokens, std::span<float> logprobs) = 0;

  /// Logits [batch, V] of the next token; empty before the first token.
  virtual std::span<const float> logits() const = 0;
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
