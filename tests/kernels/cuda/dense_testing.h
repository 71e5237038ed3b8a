// Matrices of any stride and alignment on the device, surrounded by NaN, and comparison with fp64 by the largest error
// of any entry.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "tests/kernels/cuda/cuda_testing.h"

namespace mmrec::kernels::test {

/// How rows lie in memory: `pad` elements between rows, the first row `offset` elements into the buffer.
struct Layout {
  std::int64_t pad = 0;
  std::int64_t offset = 0;
};
inline constexpr Layout kPacked = {};
inline constexpr Layout kAlignedGaps = {.pad = 24, .offset = 8};
inline constexpr Layout kUnaligned = {.pad = 3, .offset = 1};

/// [rows, cols] of a device buffer; what is not in the matrix is NaN.
template <class T>
class DeviceMatrix {
 public:
  /// NaN throughout.
  DeviceMatrix(Cuda& cuda, std::int64_t rows, std::int64_t cols, Layout layout = kPacked)
      : DeviceMatrix(cuda, std::vector<T>(static_cast<std::size_t>(rows * cols), nan_of<T>()), rows, cols, layout) {}
  DeviceMatrix(Cuda& cuda, std::vector<T> values, std::int64_t rows, std::int64_t cols, Layout layout = kPacked)
      : cuda_(&cuda),
        rows_(rows),
        cols_(cols),
        layout_(layout),
        values_(std::move(values)),
        buffer_(static_cast<std::size_t>(layout.offset + rows * (cols + layout.pad) + 1)) {
    std::vector<T> all(buffer_.size(), nan_of<T>());
    for (std::int64_t r = 0; r < rows; ++r) std::copy_n(values_.data() + r * cols, cols, all.data() + at(r));
    cuda.upload(all.data(), buffer_.data(), all.size());
  }

  MatrixView<T, Device> view() { return {buffer_.data() + layout_.offset, rows_, cols_, cols_ + layout_.pad}; }
  /// What it was made of.
  const std::vector<T>& values() const { return values_; }
  double operator()(std::int64_t row, std::int64_t col) const {
    return static_cast<double>(to_float(values_[static_cast<std::size_t>(row * cols_ + col)]));
  }
  /// What the device holds now; a failure if anything around the matrix has changed.
  std::vector<T> download() const {
    std::vector<T> all(buffer_.size());
    cuda_->download(buffer_.data(), all.data(), all.size());
    std::vector<T> inside;
    for (std::int64_t r = 0; r < rows_; ++r) {
      inside.insert(inside.end(), all.data() + at(r), all.data() + at(r) + cols_);
      std::fill_n(all.data() + at(r), cols_, nan_of<T>());
    }
    EXPECT_TRUE(same_bits(all, std::vector<T>(all.size(), nan_of<T>()))) << "written outside of the matrix";
    return inside;
  }

 private:
  std::int64_t at(std::int64_t row) const { return layout_.offset + row * (cols_ + layout_.pad); }

  Cuda* cuda_;
  std::int64_t rows_, cols_;
  Layout layout_;
  std::vector<T> values_;
  DeviceBuffer<T> buffer_;
};

template <class T>
DeviceMatrix<T> random_matrix(Cuda& cuda, std::int64_t rows, std::int64_t cols, Layout layout, std::uint64_t stream,
                              double deviation = 1.0) {
  return {cuda, random_normal<T>(static_cast<std::size_t>(rows * cols), 0.0, deviation, stream), rows, cols, layout};
}

/// [batch, time, dim] of a matrix whose rows are those of `batch` sequences of `rows_each` >= time, from row `first`.
template <class T>
SequenceView<T, Device> sequences(MatrixView<T, Device> m, std::int64_t batch, std::int64_t rows_each,
                                  std::int64_t first, std::int64_t time) {
  SequenceView<T, Device> s(m.row(first), batch, time, m.cols);
  s.batch_stride = rows_each * m.stride;
  s.time_stride = m.stride;
  return s;
}

}  // namespace mmrec::kernels::test
