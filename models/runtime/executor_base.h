// The common part of all backends' executors: the pool of slots, and saving and loading of states.
//
// A worker is a backend with its activations, on which one call runs at a time. Workers share the weights, which are
// immutable.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/cpu/cpu.h"
#include "models/runtime/executor.h"
#include "models/runtime/host_state.h"

namespace mmrec::models {

/// Memory for the state of sequences: blocks of slots side by side. Free blocks are kept, so that the next session of
/// as many sequences costs no allocation and graphs recorded for its slots stay of use; but not large ones, whose
/// memory others may want. Not thread-safe: the executor's lock guards it.
template <class Backend>
class StatePool {
 public:
  explicit StatePool(std::size_t slot_bytes) : slot_bytes_(slot_bytes) {}

  /// Uninitialised slots. Throws std::bad_alloc if memory does not suffice even without the free blocks.
  Slot acquire(int count) {
    const auto free = std::find_if(blocks_.begin(), blocks_.end(),
                                   [&](const Block& block) { return !block.used && block.count == count; });
    if (free != blocks_.end()) {
      free->used = true;
      return free->memory.data();
    }
    const std::size_t bytes = slot_bytes_ * static_cast<std::size_t>(count);
    blocks_.reserve(blocks_.size() + 1);
    Buffer memory;
    try {
      memory = Backend::template uninitialized<std::byte>(bytes, kWhat);
    } catch (const std::bad_alloc&) {
      drop_free(0);
      memory = Backend::template uninitialized<std::byte>(bytes, kWhat);
    }
    blocks_.push_back({std::move(memory), count, true});
    return blocks_.back().memory.data();
  }

  void release(Slot first) noexcept {
    constexpr std::size_t kKept = 4;                            // blocks: a few sizes in turn
    constexpr std::size_t kMostBytes = std::size_t{256} << 20;  // of one
    for (Block& block : blocks_) {
      if (block.memory.data() == first) block.used = false;
    }
    std::erase_if(blocks_, [&](const Block& block) {
      return !block.used && slot_bytes_ * static_cast<std::size_t>(block.count) > kMostBytes;
    });
    drop_free(kKept);
  }

  bool is_unused() const {
    return std::none_of(blocks_.begin(), blocks_.end(), [](const Block& block) { return block.used; });
  }

 private:
  using Buffer = typename Backend::template Buffer<std::byte>;
  static constexpr std::string_view kWhat = "not enough memory for the state of sequences";
  struct Block {
    Buffer memory;
    int count = 0;
    bool used = false;
  };

  // The oldest first.
  void drop_free(std::size_t kept) noexcept {
    auto free = static_cast<std::size_t>(
        std::count_if(blocks_.begin(), blocks_.end(), [](const Block& block) { return !block.used; }));
    std::erase_if(blocks_, [&](const Block& block) { return !block.used && free > kept && free-- > kept; });
  }

  std::size_t slot_bytes_;
  std::vector<Block> blocks_;
};

/// `Derived` has worker(options, sequences), which returns a pointer that owns a worker's turn, with memory for calls
/// of so many sequences; and any_worker(), for work on the state alone. A worker has a `backend` and the `forward` of
/// an architecture.
template <class Derived, class Backend>
class ExecutorBase : public Executor {
 public:
  explicit ExecutorBase(StateLayout state) : state_(std::move(state)), pool_(state_.slot_bytes) {}

  std::size_t slot_bytes() const override { return state_.slot_bytes; }

  Slot acquire(int count, const ExecutionOptions& options) override {
    const auto worker = derived().worker(options, count);
    const std::lock_guard lock(pool_mutex_);
    const Slot first = pool_.acquire(count);
    try {
      zero(worker->backend, first, count);
    } catch (...) {
      pool_.release(first);
      throw;
    }
    return first;
  }
  void clear(Slot first, int count) override { zero(derived().any_worker()->backend, first, count); }
  void copy(Slot from, Slot to, int count, std::int64_t position) override {
    const auto worker = derived().any_worker();
    for_each_used(state_, count, position, [&](const StridedBytes& used) {
      worker->backend.copy(from + used.offset, to + used.offset, used.stride, used.bytes, used.count);
    });
  }

  HostState save(Slot first, int count, std::int64_t position) override {
    HostImage image(bytes_of(count), kernels::Uninitialized{});
    const auto worker = derived().any_worker();
    HostState state = zero_state(state_, count, position);
    for_each_used(state_, count, position, [&](const StridedBytes& used) {
      worker->backend.download(first + used.offset, image.data() + used.offset, used.stride, used.bytes, used.count);
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
    const auto worker = derived().any_worker();
    for_each_used(state_, count, state.position, [&](const StridedBytes& used) {
      worker->backend.upload(image.data() + used.offset, first + used.offset, used.stride, used.bytes, used.count);
    });
    worker->forward.complete_state(first, state.batch, state.position);
  }

  std::int64_t piece(std::int64_t position, std::int64_t rows, std::int64_t most) override {
    return derived().any_worker()->forward.piece(position, rows, most);
  }

  void logits(Slot first, int count, std::span<float> to) override {
    const auto worker = derived().any_worker();
    worker->backend.download_rows(worker->forward.logits(first, count), to.data());
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
