// Where the state of a sequence lies in its slot: that of each expert that runs, and the logits.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "models/mmrec/state.h"
#include "models/mmrec100m/config.h"
#include "models/runtime/host_state.h"

namespace mmrec::models {

/// Offsets and size in bytes.
struct SlotLayout100m {
  std::array<SlotLayout, 2> stacks;  // of the experts that run, in their order
  std::size_t logits = 0;            // [V] fp32
  std::size_t bytes = 0;

  explicit SlotLayout100m(const Config100m& config) : SlotLayout100m(config, config.stack(), SlotPlaces()) {}

 private:
  SlotLayout100m(const Config100m& config, const Config& stack, SlotPlaces places)
      : stacks{SlotLayout(stack, places), SlotLayout(stack, places)},
        logits(places.place(static_cast<std::size_t>(config.vocab_size) * sizeof(float))),
        bytes(places.bytes()) {
    for (SlotLayout& of_stack : stacks) of_stack.bytes = bytes;
  }
};

/// What is saved of it: sums and contexts of segments are nothing here.
inline StateLayout state_layout(const Config100m& config) {
  using enum StatePart::Type;
  const SlotLayout100m slot(config);
  StateLayout layout{.numbers = {{"num_layers", config.num_layers},
                                 {"expert_dim", config.expert_dim},
                                 {"experts", static_cast<std::int64_t>(config.stacks())},
                                 {"vocab_size", config.vocab_size}},
                     .parts = {},
                     .slot_bytes = slot.bytes};
  constexpr std::array<std::string_view, 2> kNames = {"text.h", "code.h"};
  for (std::size_t i = 0; i < config.stacks(); ++i) {
    layout.parts.push_back({kNames[config.first() + i], kF32, config.num_layers, config.expert_dim, slot.stacks[i].h});
  }
  layout.parts.push_back({"logits", kF32, 1, config.vocab_size, slot.logits, false});
  return layout;
}

}  // namespace mmrec::models
