// Where the state of a sequence lies in its slot, and its way to and from plain vectors.
#pragma once

#include <cstddef>
#include <cstdint>

#include "models/host_state.h"
#include "models/mmrec/config.h"

namespace mmrec::models {

/// Where the state of one sequence lies in its slot, a block of memory; offsets and size in bytes.
struct SlotLayout {
  std::size_t h = 0;                // [L, D] fp32: the recurrent state
  std::size_t memory = 0;           // [L, M, D] fp32: a ring of segment means
  std::size_t segment_sum = 0;      // [L, D] fp64: sum of block outputs over the running segment
  std::size_t segment_context = 0;  // [L, D] fp32: c while exactly one slot of memory is filled; follows from memory
  std::size_t logits = 0;           // [V] fp32: of the next token
  std::size_t bytes = 0;            // of a slot; all of these are multiples of kAlign

  static constexpr std::size_t kAlign = 256;

  explicit SlotLayout(const Config& config) {
    const auto layers = static_cast<std::size_t>(config.num_layers);
    const auto dim = static_cast<std::size_t>(config.model_dim);
    const auto place = [this](std::size_t count, std::size_t size) {
      const std::size_t offset = bytes;
      bytes += (count * size + kAlign - 1) / kAlign * kAlign;
      return offset;
    };
    h = place(layers * dim, sizeof(float));
    memory = place(layers * static_cast<std::size_t>(config.memory_slots) * dim, sizeof(float));
    segment_sum = place(layers * dim, sizeof(double));
    segment_context = place(layers * dim, sizeof(float));
    logits = place(static_cast<std::size_t>(config.vocab_size), sizeof(float));
  }
};

/// A state whose tensors have the shapes of the configuration, and zeros; without logits at position 0.
inline HostState zero_state(const Config& config, std::int64_t batch, std::int64_t position) {
  const auto rows = static_cast<std::size_t>(config.num_layers * batch * config.model_dim);
  HostState state;
  state.batch = batch;
  state.position = position;
  state.h.resize(rows);
  state.memory.resize(rows * static_cast<std::size_t>(config.memory_slots));
  state.segment_sum.resize(rows);
  if (position > 0) state.logits.resize(static_cast<std::size_t>(batch * config.vocab_size));
  return state;
}

/// visit(part of the state, its place among the bytes of slots side by side, bytes) for all that lies together in both.
template <class State, class Visit>
void for_each_part(State& state, const Config& config, const SlotLayout& slot, Visit visit) {
  const auto layers = static_cast<std::size_t>(config.num_layers);
  const auto batch = static_cast<std::size_t>(state.batch);
  const auto part = [&](auto& tensor, std::size_t offset, std::size_t outer) {
    if (tensor.empty()) return;
    const std::size_t count = tensor.size() / outer / batch;
    for (std::size_t row = 0; row < outer * batch; ++row) {
      const std::size_t bytes = count * sizeof(tensor[0]);
      visit(tensor.data() + row * count, row % batch * slot.bytes + offset + row / batch * bytes, bytes);
    }
  };
  part(state.h, slot.h, layers);
  part(state.memory, slot.memory, layers);
  part(state.segment_sum, slot.segment_sum, layers);
  part(state.logits, slot.logits, 1);
}

}  // namespace mmrec::models
