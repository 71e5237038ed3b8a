// How the recurrence of a prompt is computed, and what that has cost.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace mmrec {

/// How the recurrence of a prompt is computed; see docs/numerics.md. The rest of a block runs over many tokens at once
/// either way.
enum class PrefillMode : std::uint8_t {
  kAuto,    ///< the faster of the two for this model and length, by a fixed rule
  kSweeps,  ///< gate-frozen sweeps over the parallel scan, until converged
  kSteps,   ///< one token after another
};

/// Their names, in the order of PrefillMode.
inline constexpr std::array<std::string_view, 3> kPrefillModeNames = {"auto", "sweeps", "steps"};

/// What prefilling has cost.
struct PrefillStats {
  std::int64_t layer_tokens = 0;  ///< tokens × layers × sequences that were swept
  std::int64_t token_sweeps = 0;  ///< sum over these of the sweeps each took part in
  std::int64_t windows = 0;       ///< windows swept, one layer each
  std::int64_t fallbacks = 0;     ///< windows that did not converge and were finished by steps

  /// token_sweeps / layer_tokens; 0 where nothing was swept.
  double sweeps_per_token() const {
    return layer_tokens == 0 ? 0.0 : static_cast<double>(token_sweeps) / static_cast<double>(layer_tokens);
  }
  /// Adds what another prefill has cost.
  PrefillStats& operator+=(const PrefillStats& other) {
    layer_tokens += other.layer_tokens;
    token_sweeps += other.token_sweeps;
    windows += other.windows;
    fallbacks += other.fallbacks;
    return *this;
  }
};

}  // namespace mmrec
