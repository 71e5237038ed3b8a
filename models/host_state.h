// The state of sequences between calls, everything the model remembers, as plain vectors.
#pragma once

#include <cstdint>
#include <vector>

namespace mmrec::models {

/// A copy of the state in host memory, the same for every backend. Sequences run in lock-step at one position.
/// The ring's write index is (position / memory_segment) mod memory_slots, and min(position / memory_segment,
/// memory_slots) slots are filled: both follow from `position`.
struct HostState {
  std::int64_t batch = 0;
  std::int64_t position = 0;        // tokens consumed
  std::vector<float> h;             // [L, B, D] recurrent state
  std::vector<float> memory;        // [L, B, M, D] ring of segment means
  std::vector<double> segment_sum;  // [L, B, D] sum of block outputs over the running segment
  std::vector<float> logits;        // [B, V] of the next token; empty before the first token
};

}  // namespace mmrec::models
