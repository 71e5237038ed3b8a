// What a sequence of an mmrec-jax model remembers between calls, and where it lies in its slot.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "models/mmrec_jax/config.h"
#include "models/runtime/host_state.h"

namespace mmrec::models::jax {

/// Offsets and size in bytes. There is a bank, or h where no bank is written. How many of the bank's rows are written
/// follows from the position, whatever the calls: every layer of a call writes as many as it has tokens.
struct SlotLayout {
  std::size_t logits = 0;  // [V] fp32: of the next token
  std::size_t h = 0;       // [L, D] fp32
  std::size_t bank = 0;    // [S, D] fp32, the rows written so far
  std::size_t bytes = 0;   // of a slot

  explicit SlotLayout(const Config& config) {
    const auto dim = static_cast<std::size_t>(config.model_dim);
    SlotPlaces places;
    logits = places.place(static_cast<std::size_t>(config.vocab_size) * sizeof(float));
    if (config.bank) {
      bank = places.place(static_cast<std::size_t>(config.long_mem_len) * dim * sizeof(float));
    } else {
      h = places.place(static_cast<std::size_t>(config.num_layers) * dim * sizeof(float));
    }
    bytes = places.bytes();
  }
};

/// Rows of the bank that are written at a position.
inline Filling bank_filling(const Config& config) {
  return {.pieces = config.long_mem_len, .tokens = 1, .at_once = config.num_layers};
}
inline std::int64_t used_rows(const Config& config, std::int64_t position) {
  return bank_filling(config).filled(position);
}

/// What is saved of it.
inline StateLayout state_layout(const Config& config) {
  using enum StatePart::Type;
  const SlotLayout slot(config);
  const StatePart memory =
      config.bank
          ? StatePart{"bank", kF32, 1, config.long_mem_len * config.model_dim, slot.bank, true, bank_filling(config)}
          : StatePart{"h", kF32, config.num_layers, config.model_dim, slot.h};
  return {.numbers = {{"num_layers", config.num_layers},
                      {"model_dim", config.model_dim},
                      {"long_mem_len", config.long_mem_len},
                      {"vocab_size", config.vocab_size}},
          .parts = {memory, {"logits", kF32, 1, config.vocab_size, slot.logits, false}},
          .slot_bytes = slot.bytes};
}

}  // namespace mmrec::models::jax
