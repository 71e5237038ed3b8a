// How much arithmetic a prefill is: the matrix products it has done, counted.
#pragma once

#include <cstdint>

#include "mmrec/session.h"
#include "models/architecture.h"

namespace mmrec::apps {

/// Floating-point operations of the matrix products of a prefill of `tokens` tokens in each of `batch` sequences from
/// position 0: two per weight element and token; those of the recurrent gates again for every sweep beyond the first;
/// the head for the last token. Scans, norms and activations are not counted.
double prefill_flops(const models::ProductCounts& counts, std::int64_t batch, std::int64_t tokens,
                     const PrefillStats& stats);

}  // namespace mmrec::apps
