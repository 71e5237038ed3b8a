// What executors of all backends share: the pool of slots and the state's way in and out.
//
// A lane is a backend with its activations, on which one call runs at a time. What they share otherwise, the weights,
// is immutable.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "kernels/cpu/cpu.h"
#include "models/runtime/executor.h"
#include "models/runtime/host_state.h"
#include "models/runtime/state_pool.h"

namespace mmrec::models {

/// What lanes are made of: a configuration with its weights, which are shared. Its state_layout() is looked up beside
/// the configuration; gpu() is of weights on a device.
template <class Config, class Weights>
struct BoundModel {
  Config config;
  std::shared_ptr<const Weights> weights;
  StateLayout state() const { return state_layout(config); }
  std::int64_t vocab() const { return config.vocab_size; }
  int gpu() const { return weights->gpu(); }
};

/// `Derived` has lane(options, sequences): something that holds a lane for as long as it lives, with memory for calls
/// of so many sequences, and points to it: its `backend`, and the `forward` of an architecture, of which complete_state
/// and logits are called; and any_lane(), for work on the state alone.
template <class Derived, class Backend>
class ExecutorBase : public Executor {
 public:
  explicit ExecutorBase(StateLayout state) : state_(std::move(state)), pool_(state_.slot_bytes) {}

  std::size_t slot_bytes() const override { return state_.slot_bytes; }

  Slot acquire(int count, const ExecutionOptions& options) override {
    const auto lane = derived().lane(options, count);
    const std::lock_guard lock(pool_mutex_);
    const Slot first = pool_.acquire(count);
    zero(lane->backend, first, count);
    return first;
  }
  void clear(Slot first, int count) override { zero(derived().any_lane()->backend, first, count); }
  void copy(Slot from, Slot to, int count, std::int64_t position) override {
    const auto lane = derived().any_lane();
    for_each_used(state_, count, position, [&](const StridedBytes& used) {
      lane->backend.copy(from + used.offset, to + used.offset, used.stride, used.bytes, used.count);
    });
  }

  HostState save(Slot first, int count, std::int64_t position) override {
    HostImage image(bytes_of(count), kernels::Uninitialized{});
    const auto lane = derived().any_lane();
    HostState state = zero_state(state_, count, position);
    for_each_used(state_, count, position, [&](const StridedBytes& used) {
      lane->backend.download(first + used.offset, image.data() + used.offset, used.stride, used.bytes, used.count);
    });
    for_each_piece(state, state_,
                   [&](void* piece, std::size_t at, std::size_t size) { std::memcpy(piece, image.data() + at, size); });
    return state;
  }
  void load(Slot first, const HostState& state) override {
    const auto count = static_cast<int>(state.batch);
    HostImage image(bytes_of(count), kernels::Uninitialized{});
    for_each_used(state_, count, state.position, [&](const StridedBytes& used) {
      for (std::size_t i = 0; i < used.count; ++i) {
        std::memset(image.data() + used.offset + i * used.stride, 0, used.bytes);
      }
    });
    for_each_piece(state, state_, [&](const void* piece, std::size_t at, std::size_t size) {
      std::memcpy(image.data() + at, piece, size);
    });
    const auto lane = derived().any_lane();
    for_each_used(state_, count, state.position, [&](const StridedBytes& used) {
      lane->backend.upload(image.data() + used.offset, first + used.offset, used.stride, used.bytes, used.count);
    });
    lane->forward.complete_state(first, state.batch, state.position);
  }

  void logits(Slot first, int count, std::span<float> to) override {
    const auto lane = derived().any_lane();
    lane->backend.download_rows(lane->forward.logits(first, count), to.data());
  }

 protected:
  using HostImage = kernels::HostBuffer<std::byte>;  // of slots: what is not used of it costs nothing

  void zero(Backend& backend, Slot first, int count) {
    for_each_used(state_, count, 0, [&](const StridedBytes& used) {
      backend.zero(first + used.offset, used.stride, used.bytes, used.count);
    });
  }
  Derived& derived() { return static_cast<Derived&>(*this); }
  std::size_t bytes_of(int count) const { return state_.slot_bytes * static_cast<std::size_t>(count); }

  const StateLayout state_;
  std::mutex pool_mutex_;
  StatePool<Backend> pool_;
};

}  // namespace mmrec::models
