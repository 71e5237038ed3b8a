// Saved states: a models::HostState as bytes. The layout is in docs/file-formats.md.
//
// What must stay true: reading trusts no byte, allocates nothing before the sizes are known to be those of the session
// that asks, and either returns a whole valid state or throws; all numbers are little-endian whatever the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "models/host_state.h"
#include "models/mmrec/config.h"

namespace mmrec::engine {

/// What a state must agree with to be restored.
struct StateShape {
  std::uint64_t fingerprint = 0;    // of the model
  std::int64_t num_layers = 0;      // L
  std::int64_t batch = 0;           // B
  std::int64_t model_dim = 0;       // D
  std::int64_t memory_slots = 0;    // M
  std::int64_t memory_segment = 0;  // C
  std::int64_t vocab_size = 0;      // V
};

StateShape shape_of(const models::Config& config, int batch, std::uint64_t fingerprint);

inline constexpr std::uint32_t kStateVersion = 1;

/// Throws std::logic_error if `state` has not the shapes of `shape`.
std::vector<std::byte> encode_state(const models::HostState& state, const StateShape& shape);

/// Throws std::runtime_error saying what was found and expected.
models::HostState decode_state(std::span<const std::byte> bytes, const StateShape& shape);

}  // namespace mmrec::engine
