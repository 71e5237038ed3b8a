// Matrix products by cuBLASLt, two algorithms per weight shape.
//
// The library is opened when the first product is asked for: linking it would cost every process 150 MB of resident
// memory, used or not. An algorithm is chosen for few rows (up to kFewRows) and one for more, each for a reference
// number of rows, and then kept for every number of its class, so that a row's bits do not depend on how many rows
// stand beside it. Few rows do not fill the device with tiles, so their products may be split along K, with the parts
// added in fp32 in a fixed order; others are not.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/tensor.h"

struct CUstream_st;

namespace mmrec::kernels {

class Cuda;

/// y = x Wᵀ + beta c + bias. x [m, k], w [n, k], y and c [m, n]; rows `*_stride` elements apart, w contiguous. x and w
/// are of type `in`, y and c of type `out` (in or kF32); c may be y. bias [n] is of type `out`, or null. Sums are fp32,
/// true fp32 where `in` is kF32.
struct Matmul {
  const void* x = nullptr;
  std::int64_t x_stride = 0;
  const void* w = nullptr;
  void* y = nullptr;
  std::int64_t y_stride = 0;
  const void* c = nullptr;
  std::int64_t c_stride = 0;
  float beta = 0.0F;
  const void* bias = nullptr;
  std::int64_t m = 0, n = 0, k = 0;
  DType in = DType::kF32;
  DType out = DType::kF32;
};

/// The library's handle and the algorithms chosen so far. One stream at a time per workspace.
class CublasLt {
 public:
  static constexpr std::int64_t kFewReferenceRows = 64;
  static constexpr std::int64_t kManyReferenceRows = 1024;
  static constexpr std::size_t kWorkspaceBytes = std::size_t{32} << 20;

  /// Throws std::runtime_error where the library cannot be opened, std::system_error.
  CublasLt();
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;
  ~CublasLt();

  /// Enqueues the product. `workspace` is kWorkspaceBytes of device memory that nothing else on another stream uses.
  /// Throws std::runtime_error naming the shape for one that the library does not support.
  void run(const Matmul& job, CUstream_st* stream, void* workspace);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Enqueues the product on the backend's stream, or on its side stream.
void matmul(Cuda& cuda, const Matmul& job, bool on_side_stream = false);

}  // namespace mmrec::kernels
