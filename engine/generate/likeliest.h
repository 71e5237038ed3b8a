// The likeliest tokens of a draw.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "mmrec/sampler.h"

namespace mmrec::engine {

/// Appends to `to` the `count` tokens with the largest of the first `limit` logits (all of them where these are fewer),
/// falling, ties in the order of ids, each with its log-softmax over all of `logits` [vocab], in double. Requires:
/// finite logits or -inf, not all of them.
void append_likeliest(std::span<const float> logits, std::size_t limit, std::size_t count, std::vector<Sample>& to);

}  // namespace mmrec::engine
