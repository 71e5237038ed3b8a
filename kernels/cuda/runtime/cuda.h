// The CUDA backend of kernels/ops.h: a device, its stream, library handles and scratch; recorded graphs, and staged
// copies to the device.
//
// Ops are enqueued on the backend's stream and return at once; `download` and `synchronize` wait. Weights have the
// activation type A when they reach an op, whatever their stored type: models/runtime/cuda/upload.cpp converts them
// once. This header needs no CUDA header, so models/ can include it.
//
// Errors: a failing CUDA call throws std::system_error of cuda_category() with the call's name. OutOfDeviceMemory means
// that memory does not suffice. An error that destroys the context (an illegal access, uncorrectable memory) loses the
// device to the process. Its code is std::errc::no_such_device; every later call throws the same code and names that
// first error, and so does cuda_unusable_reason(). Functions that release something never throw.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "kernels/cuda/runtime/mark.h"
#include "kernels/ops.h"

struct CUgraphExec_st;

namespace mmrec::kernels {

class CublasLt;

/// CUDA runtime error codes as std::error_code.
const std::error_category& cuda_category();

/// Device memory does not suffice; what() names needed and free bytes.
class OutOfDeviceMemory : public std::bad_alloc {
 public:
  OutOfDeviceMemory(std::size_t needed, std::size_t free);
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::string message_;
};

/// How many devices CUDA shows; 0 where there is no driver. Never throws.
int cuda_device_count();
/// Why this CUDA device cannot be used (no driver, no such device, too old), or "" if it can. Creates no context where
/// it says no. Never throws.
std::string cuda_unusable_reason(int device = 0);

/// Whether code for these architectures, as CMake names them ("80-real 90"), runs on a device: machine code within a
/// generation, from its own revision on, and PTX on every newer device.
bool has_code_for(std::string_view architectures, int compute_capability);

/// Bytes of a device's memory. Creates a context and makes the device current.
struct DeviceMemory {
  std::size_t free = 0;
  std::size_t total = 0;
};
DeviceMemory device_memory(int device = 0);
/// "NVIDIA H200".
std::string device_name(int device = 0);

/// Makes a device the calling thread's current one.
void make_current(int device);

// Untyped memory of the current device and copies on a stream; the typed front ends are below.
void* device_allocate(std::size_t bytes);  // throws OutOfDeviceMemory
void device_free(void* data) noexcept;
void* pinned_allocate(std::size_t bytes);  // page-locked host memory; throws std::bad_alloc
void pinned_free(void* data) noexcept;

/// Uninitialised memory, of the current device or of the host. Move-only.
template <class T, void* (*kAllocate)(std::size_t bytes), void (*kFree)(void*) noexcept>
class OwnedMemory {
 public:
  OwnedMemory() = default;
  explicit OwnedMemory(std::size_t count)
      : data_(count == 0 ? nullptr : static_cast<T*>(kAllocate(count * sizeof(T)))), size_(count) {}
  OwnedMemory(OwnedMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  OwnedMemory& operator=(OwnedMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~OwnedMemory() { kFree(data_); }
  T* data() { return data_; }
  const T* data() const { return data_; }
  std::size_t size() const { return size_; }
  std::size_t size_bytes() const { return size_ * sizeof(T); }

 private:
  T* data_ = nullptr;
  std::size_t size_ = 0;
};
template <class T>
using DeviceBuffer = OwnedMemory<T, device_allocate, device_free>;
/// Page-locked, for transfers that do not wait for the host.
template <class T>
using PinnedBuffer = OwnedMemory<T, pinned_allocate, pinned_free>;

/// One session's stream on a device. One thread at a time; ops of one backend run in the order they were enqueued.
class Cuda {
 public:
  using Space = Device;
  template <class T>
  using Buffer = DeviceBuffer<T>;

  /// Scratch that ops of one stream share: contents do not outlive an op.
  static constexpr std::size_t kScratchBytes = std::size_t{64} << 20;
  /// Words that are zero between ops: counters and flags of kernels whose blocks wait for each other. An op that uses
  /// them leaves them zero.
  static constexpr std::size_t kFlagWords = std::size_t{1} << 21;

  /// Throws std::system_error, OutOfDeviceMemory.
  explicit Cuda(int device = 0);
  /// On a stream of the caller's, which must outlive this; null is the default stream.
  Cuda(int device, CUstream_st* stream);
  Cuda(const Cuda&) = delete;
  Cuda& operator=(const Cuda&) = delete;
  ~Cuda();

  /// Makes the backend's device the calling thread's current one. Before the first op in a thread.
  void make_current() const;

  CUstream_st* stream() const { return streams_.main; }
  /// A second stream for work that may run beside the first; fork() makes it wait for what is on stream(), join() makes
  /// stream() wait for it. Both are recorded when captured.
  CUstream_st* side_stream() const { return streams_.side.get(); }
  void fork();
  void join();
  /// Makes stream() wait for what is on another backend's stream() of the same device. Recorded when that is captured.
  void follow(Cuda& other);

  /// From now on no product's row depends on how many rows there are (docs/numerics.md#batch-invariance). Off at first.
  void set_batch_invariant(bool is) { batch_invariant_ = is; }
  bool batch_invariant() const { return batch_invariant_; }

  int device() const { return device_; }
  int processors() const { return processors_; }                  // multiprocessors
  int compute_capability() const { return compute_capability_; }  // 90 for 9.0
  std::size_t l2_bytes() const { return l2_bytes_; }
  /// The most dynamic shared memory that a block may ask for.
  std::size_t shared_memory_per_block() const { return shared_memory_per_block_; }
  std::size_t shared_memory_per_processor() const { return shared_memory_per_processor_; }
  const std::string& name() const { return name_; }

  /// Memory of kScratchBytes whose contents do not outlive an op. On first use.
  void* scratch() {
    if (scratch_.size() == 0) scratch_ = DeviceBuffer<std::byte>(kScratchBytes);
    return scratch_.data();
  }
  std::uint32_t* flags() { return flags_.data(); }
  /// Page-locked words by which kernels tell the host something: contents do not outlive an op.
  static constexpr std::size_t kReportWords = 64;
  std::uint32_t* report() { return report_.data(); }
  /// Operands of a product in another form: parts (kParts), or rounded to fp8. On first use; contents do not outlive a
  /// product. Within an op that has the scratch others may need this.
  static constexpr std::size_t kPartsBytes = std::size_t{65} << 20;
  BFloat16* parts() {
    if (parts_.size() == 0) parts_ = DeviceBuffer<BFloat16>(kPartsBytes / sizeof(BFloat16));
    return parts_.data();
  }
  /// The matrix library, opened on first use, and a workspace of it for each stream.
  CublasLt& blas();
  void* blas_workspace() { return blas_workspace_.data(); }
  void* side_blas_workspace() { return side_blas_workspace_.data(); }

  template <class T>
  Buffer<T> allocate(std::size_t count) {
    Buffer<T> buffer(count);
    zero(buffer.data(), count * sizeof(T));
    return buffer;
  }
  /// Of the current device. Throws OutOfDeviceMemory, whose message names the missing bytes.
  template <class T>
  static Buffer<T> uninitialized(std::size_t count, std::string_view /*what*/) {
    return Buffer<T>(count);
  }
  /// Host to device. The source may be reused at once: pageable memory is staged before this returns. Piece by piece,
  /// because CUDA stages up to 64 KB without waiting for the stream.
  template <class T>
  void upload(const T* from, T* to, std::size_t count) {
    constexpr std::size_t kPiece = std::max<std::size_t>((std::size_t{64} << 10) / sizeof(T), 1);
    for (std::size_t first = 0; first < count; first += kPiece) {
      const std::size_t bytes = std::min(kPiece, count - first) * sizeof(T);
      transfer(from + first, to + first, bytes, 1, bytes, bytes, Direction::kIn);
    }
  }
  /// Device to host; waits until it has arrived.
  template <class T>
  void download(const T* from, T* to, std::size_t count) const {
    transfer(from, to, count * sizeof(T), 1, count * sizeof(T), count * sizeof(T), Direction::kOut);
  }
  /// The same of a matrix whose rows lie apart, to [rows, cols].
  template <class T>
  void download_rows(MatrixView<T, Device> from, T* to) const {
    const std::size_t bytes = static_cast<std::size_t>(from.cols) * sizeof(T);
    transfer(from.data, to, bytes, static_cast<std::size_t>(from.rows),
             static_cast<std::size_t>(from.stride) * sizeof(T), bytes, Direction::kOut);
  }
  void zero(void* to, std::size_t bytes) { zero(static_cast<std::byte*>(to), bytes, bytes, 1); }
  /// Within the device's memory.
  void copy(const void* from, void* to, std::size_t bytes) {
    transfer(from, to, bytes, 1, bytes, bytes, Direction::kWithin);
  }
  /// Of `count` pieces of `bytes` each, `stride` apart on both sides.
  void upload(const std::byte* from, std::byte* to, std::size_t stride, std::size_t bytes, std::size_t count) {
    transfer(from, to, bytes, count, stride, stride, Direction::kIn);
  }
  void download(const std::byte* from, std::byte* to, std::size_t stride, std::size_t bytes, std::size_t count) const {
    transfer(from, to, bytes, count, stride, stride, Direction::kOut);
  }
  void copy(const std::byte* from, std::byte* to, std::size_t stride, std::size_t bytes, std::size_t count) {
    transfer(from, to, bytes, count, stride, stride, Direction::kWithin);
  }
  void zero(std::byte* to, std::size_t stride, std::size_t bytes, std::size_t count);
  void synchronize();
  /// Whether all that was enqueued is done. Throws as synchronize() would.
  bool is_idle() const;

 private:
  enum class Direction : std::uint8_t { kIn, kOut, kWithin };
  /// Copies `count` pieces of `bytes`, at their own strides on either side. Waits where the host is the destination.
  void transfer(const void* from, void* to, std::size_t bytes, std::size_t count, std::size_t from_stride,
                std::size_t to_stride, Direction direction) const;

  struct Streams {
    explicit Streams(int device) : own(new_stream(device)), side(new_stream(device)), main(own.get()) {}
    Streams(int device, CUstream_st* adopted) : side(new_stream(device)), main(adopted) {}
    OwnedStream own;  // null where main is the caller's
    OwnedStream side;
    CUstream_st* main;  // null: the default stream
    Mark fork, join, followed;
  };

  Cuda(int device, Streams streams);

  int device_ = 0;
  bool batch_invariant_ = false;
  int processors_ = 0;
  int compute_capability_ = 0;
  std::size_t l2_bytes_ = 0;
  std::size_t shared_memory_per_block_ = 0;
  std::size_t shared_memory_per_processor_ = 0;
  std::string name_;
  std::unique_ptr<CublasLt> blas_;
  DeviceBuffer<std::byte> scratch_;
  DeviceBuffer<BFloat16> parts_;
  DeviceBuffer<std::uint32_t> flags_;
  PinnedBuffer<std::uint32_t> report_;
  DeviceBuffer<std::byte> blas_workspace_, side_blas_workspace_;
  Streams streams_;
};

/// A recorded sequence of ops that one call replays with the same arguments. The buffers that it reads and writes must
/// outlive it. Move-only.
class Graph {
 public:
  Graph() = default;
  /// Records without running. `ops` may call ops alone: no allocation, upload, download or synchronisation. Each op
  /// must have run before: a kernel's first launch may load its code, which cannot be recorded. Throws
  /// std::system_error and whatever `ops` throws.
  Graph(Cuda& cuda, const std::function<void()>& ops);

  void launch(Cuda& cuda) const;

 private:
  struct Destroy {
    void operator()(CUgraphExec_st* executable) const;
  };
  std::unique_ptr<CUgraphExec_st, Destroy> executable_;
};

/// Ops that are run op by op first, then recorded, then replayed.
class Recorded {
 public:
  /// `ops` as in Graph: the same ops every time. Throws what they throw, and what Graph does.
  void run(Cuda& cuda, const std::function<void()>& ops) {
    if (!has_run_) {
      ops();
      has_run_ = true;  // once it has gone well: what it allocates, a recording must not
      return;
    }
    if (!graph_) graph_.emplace(cuda, ops);
    graph_->launch(cuda);
  }
  bool has_graph() const { return graph_.has_value(); }

 private:
  bool has_run_ = false;
  std::optional<Graph> graph_;
};

/// Large copies from ordinary host memory to the device through two page-locked blocks in turn: the caller fills
/// block() while the other is on its way. Copies run on a stream of their own. Throws std::bad_alloc,
/// std::system_error.
class Staging {
 public:
  static constexpr std::size_t kBlockBytes = std::size_t{16} << 20;

  Staging();
  ~Staging();

  /// kBlockBytes that may be overwritten now; waits until their last copy has left.
  std::byte* block();
  /// Copies the first `bytes` of block() to device memory; the next block() is the other one.
  void send(void* to, std::size_t bytes);
  /// Waits until everything has arrived.
  void finish();

 private:
  struct Block {
    PinnedBuffer<std::byte> memory{kBlockBytes};
    Mark sent;
  };
  std::array<Block, 2> blocks_;
  std::size_t current_ = 0;
  OwnedStream stream_;
};

/// Whether the ops of steps by rows (AdvanceNorm and its neighbours) take D channels.
bool takes_token_rows(const Cuda& cuda, std::int64_t dim);
/// Scratch with which bank_attention takes all runs of a call at once; with less it makes more launches.
std::size_t bank_scratch_bytes(const Cuda& cuda, std::int64_t runs, std::int64_t rows, std::int64_t slots,
                               std::int64_t dim, std::size_t element);

}  // namespace mmrec::kernels
