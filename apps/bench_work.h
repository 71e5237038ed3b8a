// How much arithmetic a prefill is: the matrix products it has done, counted.
#pragma once

#include <cstdint>

#include "mmrec/session.h"
#include "models/mmrec/config.h"

namespace mmrec::apps {

/// Floating-point operations of the matrix products of a prefill of `tokens` tokens in each of `batch` sequences from
/// position 0: two per weight element, token and layer; the memory's two projections only where several slots have been
/// filled (a single one is attended to whatever the query); two per element of the recurrent gates for every sweep
/// beyond the first; the head for the last token. Scans, norms and activations are not counted.
double prefill_flops(const models::Config& config, std::int64_t batch, std::int64_t tokens, const PrefillStats& stats);

}  // namespace mmrec::apps
