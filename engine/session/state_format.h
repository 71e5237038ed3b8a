// Saved states: a models::HostState as bytes. The layout is in docs/file-formats.md.
//
// What must stay true: reading trusts no byte, allocates nothing before the sizes are known to be those of the session
// that asks, and either returns a whole valid state or throws.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "models/runtime/host_state.h"

namespace mmrec::engine {

/// What a state must agree with to be restored.
struct StateShape {
  std::uint64_t fingerprint = 0;  // of the model
  std::int64_t batch = 0;         // B
  models::StateLayout layout;
};

inline constexpr std::uint32_t kStateVersion = 3;  // 2: a fingerprint of samples of the weights

/// Throws std::logic_error if `state` has not the shapes of `shape`.
std::vector<std::byte> encode_state(const models::HostState& state, const StateShape& shape);

/// Throws std::runtime_error saying what was found and expected.
models::HostState decode_state(std::span<const std::byte> bytes, const StateShape& shape);

}  // namespace mmrec::engine
