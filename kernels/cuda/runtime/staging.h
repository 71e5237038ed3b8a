// Large copies from ordinary host memory to the device through page-locked blocks.
#pragma once

#include <array>
#include <cstddef>

#include "kernels/cuda/runtime/cuda.h"

struct CUevent_st;

namespace mmrec::kernels {

/// Two page-locked blocks in turn: the caller fills block() while the other is on its way. Copies run on a stream of
/// their own. Throws std::bad_alloc, std::system_error.
class Staging {
 public:
  static constexpr std::size_t kBlockBytes = std::size_t{16} << 20;

  Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;
  ~Staging();

  /// kBlockBytes that may be overwritten now; waits until their last copy has left.
  std::byte* block();
  /// Copies the first `bytes` of block() to device memory; the next block() is the other one.
  void send(void* to, std::size_t bytes);
  /// Waits until everything has arrived.
  void finish();

 private:
  explicit Staging(std::nullptr_t) {}  // so that what the other constructor has made goes if it fails
  struct Block {
    PinnedBuffer<std::byte> memory;
    CUevent_st* sent = nullptr;
  };
  std::array<Block, 2> blocks_;
  std::size_t current_ = 0;
  CUstream_st* stream_ = nullptr;
};

}  // namespace mmrec::kernels
