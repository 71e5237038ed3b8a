// Activations of a chunk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/tensor.h"
#include "models/runtime/schedule.h"

namespace mmrec::models {

/// Whether what enters a product, of A, is rounded, so that it needs memory of its own.
template <class A>
inline constexpr bool kRounds = !std::is_same_v<A, float>;

/// `yes` where it is, else `no`.
template <class A, class Yes, class No>
auto& if_rounded(Yes& yes, No& no) {
  if constexpr (kRounds<A>) {
    return yes;
  } else {
    return no;
  }
}

/// [rows, width] of T in a backend's memory: as a matrix of a chunk's rows, or as the sequences of a batch.
template <class Backend, class T>
class Activation {
 public:
  using Space = typename Backend::Space;

  explicit Activation(std::int64_t width) : width_(width) {}

  /// Room for so many rows; what was there is gone.
  void reserve(Backend& backend, std::int64_t rows) {
    memory_ = {};  // before the larger one comes
    memory_ = backend.template allocate<T>(static_cast<std::size_t>(rows * width_));
  }
  T* data() { return memory_.data(); }
  kernels::MatrixView<T, Space> operator()(std::int64_t rows) { return {data(), rows, width_}; }
  /// [batch.sequences, batch.tokens, width].
  kernels::SequenceView<T, Space> operator()(const Batch& b) { return columns(b, 0, width_); }
  kernels::SequenceView<T, Space> columns(const Batch& b, std::int64_t first, std::int64_t count) {
    kernels::SequenceView<T, Space> s(data() + b.first_row * width_ + first, b.sequences, b.tokens, count);
    s.batch_stride = b.tokens * width_;
    s.time_stride = width_;
    return s;
  }

 private:
  std::int64_t width_;
  typename Backend::template Buffer<T> memory_;
};

}  // namespace mmrec::models
