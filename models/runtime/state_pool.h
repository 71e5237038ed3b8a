// Memory for the state of sequences: blocks of slots side by side. What is given back is kept for who asks for as many
// next, so that a session after another costs no allocation, and graphs recorded for its slots stay of use; but for the
// blocks of many sequences, whose memory others may want.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <string_view>
#include <utility>
#include <vector>

#include "models/runtime/executor.h"

namespace mmrec::models {

/// Not thread-safe: the executor's lock guards it.
template <class Backend>
class StatePool {
 public:
  explicit StatePool(std::size_t slot_bytes) : slot_bytes_(slot_bytes) {}

  /// Uninitialised. Throws std::bad_alloc when even without what is kept memory does not suffice.
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

}  // namespace mmrec::models
