// Weights as their formats store them, by the words of kernels/tensor.h alone, and the numbers that these stand for.
#pragma once

#include "kernels/tensor.h"
#include "tests/ops/testing.h"

namespace mmrec::kernels::test {

/// Weights as a format stores them: bytes, laid out as kernels/tensor.h says, and the values of the stored numbers.
/// Storing these values again gives the same bytes. A scale takes the largest of its numbers to the largest of the
/// format.
struct Stored {
  std::vector<std::byte> bytes;
  std::vector<double> values;

  Stored(std::vector<double> numbers, std::int64_t rows, std::int64_t cols, WeightFormat format)
      : bytes(bytes_of(format, rows, cols)), values(std::move(numbers)) {
    parallel_for(rows, [&](std::int64_t r) {
      double* const row = values.data() + r * cols;
      std::byte* const to = bytes.data() + static_cast<std::size_t>(r) * bytes_of(format, 1, cols);
      switch (format.code) {
        case DType::kF32:
          return plain<float>(row, cols, to);
        case DType::kF16:
          return plain<Float16>(row, cols, to);
        case DType::kBF16:
          return plain<BFloat16>(row, cols, to);
        default:
          return quantize(format, row, cols, to);
      }
    });
  }

 private:
  template <class T>
  static void plain(double* row, std::int64_t cols, std::byte* to) {
    for (std::int64_t i = 0; i < cols; ++i) {
      const T number = from_float<T>(static_cast<float>(row[i]));
      row[i] = static_cast<double>(to_float(number));
      std::memcpy(to + static_cast<std::size_t>(i) * sizeof(T), &number, sizeof(T));
    }
  }
  static void quantize(WeightFormat format, double* row, std::int64_t cols, std::byte* to) {
    const std::int64_t group = format.group == 0 ? cols : format.group;
    const double most = format.code == DType::kI4 ? 7.0 : format.code == DType::kI8 ? 127.0 : 448.0;
    std::byte* scales = to + number_bytes(format, cols);
    if (format.code == DType::kI4) std::fill(to, scales, std::byte{0x88});
    for (std::int64_t first = 0; first < cols; first += group, scales += sizeof(float)) {
      const std::int64_t end = std::min(first + group, cols);
      double largest = 0.0;
      for (std::int64_t i = first; i < end; ++i) largest = std::max(largest, std::abs(row[i]));
      const float scale = largest == 0.0 ? 1.0F : static_cast<float>(largest / most);
      std::memcpy(scales, &scale, sizeof(scale));
      for (std::int64_t i = first; i < end; ++i) {
        double q = std::nearbyint(row[i] / static_cast<double>(scale)) + 0.0;  // no -0
        if (format.code == DType::kF8) {
          const Float8 number = from_float<Float8>(static_cast<float>(row[i] / static_cast<double>(scale)));
          q = static_cast<double>(to_float(number));
          to[i] = std::byte{number.bits};
        } else if (format.code == DType::kI8) {
          to[i] = static_cast<std::byte>(static_cast<std::int8_t>(q));
        } else {
          const std::int64_t of_block = i % 64, word = i / 64 * 16 + of_block % 16, nibble = of_block / 16;
          const unsigned at = 4U * static_cast<unsigned>(nibble % 2);
          std::byte& byte = to[2 * word + nibble / 2];
          byte = (byte & ~(std::byte{15} << at)) | static_cast<std::byte>(static_cast<unsigned>(q + 8.0) << at);
        }
        row[i] = q * static_cast<double>(scale);
      }
    }
  }
};
/// Normal numbers, of this deviation, as a format stores them.
inline std::vector<double> random_weights(std::int64_t rows, std::int64_t cols, WeightFormat format,
                                          std::uint64_t stream, double deviation) {
  const auto count = static_cast<std::size_t>(rows * cols);
  return Stored(widened(random_normal<float>(count, 0.0, deviation, stream)), rows, cols, format).values;
}

}  // namespace mmrec::kernels::test
