// The CPU backend of kernels/ops.h: threads and scratch.
//
// All but the products of whole row tiles are vectorised for AVX-512, AVX2 and plain C++ (simd.h) and picked once per
// process by the processor's features. Whole row tiles go through oneDNN in fixed shapes, every other row through one
// kernel (matvec.inl) whose bits depend on neither its neighbours nor the threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <string_view>

#include "kernels/cpu/host_memory.h"
#include "kernels/cpu/row_tile.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/ops.h"

namespace mmrec::kernels {

/// Tag: memory that the caller is about to overwrite whole need not be zero-filled first.
struct Uninitialized {};

/// 64-byte aligned host memory, zero-filled unless asked otherwise. Move-only.
template <class T>
class HostBuffer {
 public:
  HostBuffer() = default;
  /// Throws std::bad_alloc.
  explicit HostBuffer(std::size_t count) : HostBuffer(count, Uninitialized{}) {
    if (count != 0) std::memset(static_cast<void*>(data_.get()), 0, count * sizeof(T));
  }
  HostBuffer(std::size_t count, Uninitialized /*tag*/)
      : data_(count == 0 ? nullptr : static_cast<T*>(::operator new(count * sizeof(T), kAlign))), size_(count) {}
  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }
  std::size_t size() const { return size_; }
  std::size_t size_bytes() const { return size_ * sizeof(T); }

 private:
  static constexpr std::align_val_t kAlign{64};
  struct Free {
    void operator()(T* p) const { ::operator delete(static_cast<void*>(p), kAlign); }
  };
  std::unique_ptr<T, Free> data_;
  std::size_t size_ = 0;
};

/// Is told of products with weights: the jobs of `linear` before they are computed, and x and weight of the gates of an
/// exact recurrence, gated, after it.
class LinearObserver {
 public:
  virtual ~LinearObserver() = default;
  virtual void observe(std::span<const Linear<Host>> jobs) = 0;
};

/// Owns the threads and their scratch. One session at a time uses a backend; ops must not run on it concurrently.
class Cpu {
 public:
  using Space = Host;
  template <class T>
  using Buffer = HostBuffer<T>;

  /// threads <= 0 takes all the processors this process may run on; at most 256. Throws std::bad_alloc.
  /// rounds_inputs: products of whole row tiles with bf16 weights round x to bf16 where there are instructions for that
  /// (RowTileProducts).
  explicit Cpu(int threads = 0, bool rounds_inputs = false);

  int threads() const { return pool_.threads(); }
  bool rounds_inputs() const { return rounds_inputs_; }
  ThreadPool& pool() { return pool_; }
  /// Scratch of one thread (0 <= thread < threads()), kScratchFloats long, 64-byte aligned.
  float* scratch(int thread) { return scratch_.data() + static_cast<std::size_t>(thread) * kScratchFloats; }
  RowTileProducts& row_tiles() { return row_tiles_; }
  LinearObserver* observer = nullptr;  // none unless a call sets it
  static constexpr std::size_t kScratchFloats = std::size_t{384} * 1024;

  template <class T>
  Buffer<T> allocate(std::size_t count) {
    return Buffer<T>(count);
  }
  /// Memory that costs nothing until it is written. Throws std::bad_alloc, of blocks that are large with needed and
  /// available bytes and what for.
  template <class T>
  static Buffer<T> uninitialized(std::size_t count, std::string_view what) {
    if (count * sizeof(T) > kLarge) check_available(count * sizeof(T), what);
    return Buffer<T>(count, Uninitialized{});
  }
  /// Host to backend and back; `count` elements. On the CPU both are plain copies.
  template <class T>
  void upload(const T* from, T* to, std::size_t count) {
    if (count != 0) std::memcpy(static_cast<void*>(to), from, count * sizeof(T));
  }
  template <class T>
  void download(const T* from, T* to, std::size_t count) {
    if (count != 0) std::memcpy(static_cast<void*>(to), from, count * sizeof(T));
  }
  /// The same of a matrix whose rows lie apart, to [rows, cols].
  template <class T>
  void download_rows(MatrixView<T, Host> from, T* to) {
    for (std::int64_t r = 0; r < from.rows; ++r) {
      download(from.row(r), to + r * from.cols, static_cast<std::size_t>(from.cols));
    }
  }
  void zero(void* to, std::size_t bytes) { std::memset(to, 0, bytes); }
  void copy(const void* from, void* to, std::size_t bytes) { std::memcpy(to, from, bytes); }
  /// Of `count` pieces of `bytes` each, `stride` apart on both sides.
  void upload(const std::byte* from, std::byte* to, std::size_t stride, std::size_t bytes, std::size_t count) {
    copy(from, to, stride, bytes, count);
  }
  void download(const std::byte* from, std::byte* to, std::size_t stride, std::size_t bytes, std::size_t count) {
    copy(from, to, stride, bytes, count);
  }
  void zero(std::byte* to, std::size_t stride, std::size_t bytes, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) zero(to + i * stride, bytes);
  }
  void copy(const std::byte* from, std::byte* to, std::size_t stride, std::size_t bytes, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) copy(from + i * stride, to + i * stride, bytes);
  }

 private:
  static constexpr std::size_t kLarge = std::size_t{64} << 20;  // smaller blocks are not worth the question

  ThreadPool pool_;
  bool rounds_inputs_;
  HostBuffer<float> scratch_;
  RowTileProducts row_tiles_;
};

/// "avx512vnni", "avx512", "avx2" or "scalar": the vector code this process uses.
std::string_view cpu_instruction_set();

}  // namespace mmrec::kernels
