// Where the state of a sequence lies in its slot.
#pragma once

#include <cstddef>
#include <cstdint>

#include "models/mmrec/config.h"
#include "models/runtime/host_state.h"

namespace mmrec::models {

/// Where the state of one sequence lies in its slot, a block of memory; offsets and size in bytes. The ring's write
/// index is (position / memory_segment) mod memory_slots, and min(position / memory_segment, memory_slots) slots are
/// filled: both follow from the position.
struct SlotLayout {
  std::size_t logits = 0;           // [V] fp32: of the next token
  std::size_t h = 0;                // [L, D] fp32: the recurrent state
  std::size_t segment_sum = 0;      // [L, D] fp64: sum of block outputs over the running segment
  std::size_t segment_context = 0;  // [L, D] fp32: c while exactly one slot of memory is filled; follows from memory
  std::size_t memory = 0;           // [L, M, D] fp32: a ring of segment means, those filled so far
  std::size_t bytes = 0;            // of a slot

  /// Of a whole model.
  explicit SlotLayout(const Config& config) {
    SlotPlaces places;
    logits = places.place(static_cast<std::size_t>(config.vocab_size) * sizeof(float));
    place_blocks(config, places);
    bytes = places.bytes();
  }
  /// Of a stack of blocks that shares its slot with others: the next of `places`. The caller sets `bytes` when
  /// everything is placed.
  SlotLayout(const Config& config, SlotPlaces& places) { place_blocks(config, places); }

 private:
  void place_blocks(const Config& config, SlotPlaces& places) {
    const auto layers = static_cast<std::size_t>(config.num_layers);
    const auto dim = static_cast<std::size_t>(config.model_dim);
    h = places.place(layers * dim * sizeof(float));
    segment_sum = places.place(layers * dim * sizeof(double));
    segment_context = places.place(layers * dim * sizeof(float));
    // Last: what is in use lies together while little of it is filled.
    memory = places.place(layers * static_cast<std::size_t>(config.memory_slots) * dim * sizeof(float));
  }
};

/// The saved part of the state.
inline StateLayout state_layout(const Config& config) {
  using enum StatePart::Type;
  const SlotLayout slot(config);
  const std::int64_t layers = config.num_layers, dim = config.model_dim - config.num_heads * config.head_padding;
  const Spread heads = config.head_padding == 0 ? Spread() : Spread{config.head_dim(), config.head_padding};
  return {.numbers = {{"num_layers", layers},
                      {"model_dim", dim},
                      {"memory_slots", config.memory_slots},
                      {"memory_segment", config.memory_segment},
                      {"vocab_size", config.vocab_size}},
          .parts = {{.name = "h", .type = kF32, .rows = layers, .cols = dim, .offset = slot.h, .spread = heads},
                    {"memory", kF32, layers, config.memory_slots * dim, slot.memory, true,
                     Filling{.pieces = config.memory_slots, .tokens = config.memory_segment}, heads},
                    {.name = "segment_sum",
                     .type = kF64,
                     .rows = layers,
                     .cols = dim,
                     .offset = slot.segment_sum,
                     .spread = heads},
                    {"logits", kF32, 1, config.vocab_size, slot.logits, false}},
          .slot_bytes = slot.bytes};
}

}  // namespace mmrec::models
