#include "models/weights/stored_matrix.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "models/files/elements.h"
#include "models/files/text.h"

namespace mmrec::models {
namespace {

using kernels::DType;
using kernels::kQuantBlock;

/// Words of 32 bits that hold `cols` numbers.
std::int64_t words_of(std::int64_t cols, DType code) { return (cols - 1) / (32 / bits_of(code)) + 1; }

[[noreturn]] void fail(const Checkpoint& checkpoint, const TensorInfo& tensor, std::string_view message) {
  throw std::runtime_error(
      fmt::format("{}: {}: {}", checkpoint.path_of(tensor).string(), printable(tensor.name), message));
}

/// What must be there beside `of`.
const TensorInfo& require(const Checkpoint& checkpoint, const TensorInfo& of, const std::string& name) {
  const TensorInfo* const tensor = checkpoint.find(name);
  if (tensor == nullptr) fail(checkpoint, of, fmt::format("found no {} beside it", printable(name)));
  return *tensor;
}

void expect_shape(const Checkpoint& checkpoint, const TensorInfo& tensor, const std::vector<std::int64_t>& expected) {
  if (tensor.shape != expected) {
    fail(checkpoint, tensor, fmt::format("found shape {}, expected {}", list(tensor.shape), list(expected)));
  }
}
void expect_type(const Checkpoint& checkpoint, const TensorInfo& tensor, bool right, std::string_view expected) {
  if (!right) fail(checkpoint, tensor, fmt::format("found {}, expected {}", name_in_file(tensor.dtype), expected));
}

std::vector<std::int64_t> packed_dims(const Checkpoint& checkpoint, const TensorInfo& shape) {
  expect_type(checkpoint, shape, shape.dtype == DType::kI64 || shape.dtype == DType::kI32, "I64 or I32");
  expect_shape(checkpoint, shape, {2});
  std::vector<std::int64_t> dims;
  for (std::size_t i = 0; i < 2; ++i) {
    const std::size_t size = kernels::size_of(shape.dtype);
    std::int64_t value = 0;
    std::byte bytes[sizeof(value)] = {};
    checkpoint.read(shape, i * size, {bytes, size});
    std::memcpy(&value, bytes, sizeof(value));
    dims.push_back(value);
  }
  return dims;
}

/// The format, by the scales' shape.
kernels::WeightFormat format_of(const Checkpoint& checkpoint, const StoredMatrix& matrix, DType code,
                                const QuantSchemes& schemes) {
  const TensorInfo& scales = *matrix.scales;
  expect_type(checkpoint, scales, kernels::is_plain(scales.dtype), "F32, F16 or BF16");
  const std::int64_t rows = matrix.dims[0], cols = matrix.dims[1];
  const bool common = scales.shape.empty() || (scales.shape.size() == 1 && scales.shape[0] == 1);
  std::int64_t groups = 1;
  if (!common) {
    const bool is_column = scales.shape.size() == 1;
    groups = is_column ? 1 : scales.shape.size() == 2 ? scales.shape[1] : 0;
    if (scales.shape[0] != rows || groups < 1 || cols % groups != 0 ||
        (groups > 1 && cols / groups % kQuantBlock != 0)) {
      fail(checkpoint, scales,
           fmt::format("found shape {}, expected [{}, 1], or a scale for each group of a multiple of {} of {} inputs",
                       list(scales.shape), rows, kQuantBlock, cols));
    }
  }
  const kernels::WeightFormat format{code, groups == 1 ? 0 : cols / groups};
  const auto agrees = [&](const QuantScheme& scheme) {
    return scheme.code == code && (common ? scheme.group == -1 || (rows == 1 && scheme.group == 0)
                                          : scheme.group == format.group || (groups == 1 && scheme.group == cols));
  };
  if (std::none_of(schemes.begin(), schemes.end(), agrees)) {
    fail(checkpoint, *matrix.numbers,
         fmt::format("found {} with scales of shape {}, expected {}", name_of(format), list(scales.shape),
                     schemes.empty() ? "plain numbers: config.json has no quantization_config"
                                     : "a scheme of config.json's quantization_config"));
  }
  return format;
}

/// The 4 bits of number `i`.
unsigned nibble(const std::byte* numbers, std::int64_t i) {
  const auto byte = static_cast<unsigned>(numbers[i / 2]);
  return i % 2 == 0 ? byte & 15U : byte >> 4U;
}

float number(const StoredMatrix& from, const std::byte* numbers, std::int64_t i) {
  const DType code = from.format.code;
  if (code == DType::kI4) return static_cast<float>(static_cast<int>(nibble(numbers, i)) - 8);
  if (code == DType::kI8) return static_cast<float>(static_cast<std::int8_t>(numbers[i] ^ from.flips()));
  return to_float(kernels::Float8{static_cast<std::uint8_t>(numbers[i])});
}

}  // namespace

std::int64_t StoredMatrix::row_bytes() const {
  if (shape != nullptr) return words_of(dims[1], format.code) * 4;
  return dims[1] * static_cast<std::int64_t>(kernels::size_of(format.code));
}

StoredMatrix find_matrix(const Checkpoint& checkpoint, std::string_view name, const QuantSchemes& schemes) {
  StoredMatrix matrix;
  DType code = DType::kI4;
  matrix.numbers = checkpoint.find(name);
  const std::string of = std::string(name);
  if (matrix.numbers != nullptr) {
    const TensorInfo& tensor = *matrix.numbers;
    matrix.dims = tensor.shape;
    matrix.format = tensor.dtype;
    if (kernels::is_plain(tensor.dtype) || schemes.empty() || tensor.shape.size() != 2) return matrix;
    expect_type(checkpoint, tensor, kernels::is_quantized(tensor.dtype), "F32, F16, BF16, F8_E4M3 or I8");
    matrix.scales = &require(checkpoint, tensor, of + "_scale");
  } else {
    matrix.numbers = checkpoint.find(of + "_packed");
    if (matrix.numbers == nullptr) return matrix;
    const TensorInfo& tensor = *matrix.numbers;
    expect_type(checkpoint, tensor, tensor.dtype == DType::kI32, "I32");
    matrix.shape = &require(checkpoint, tensor, of + "_shape");
    matrix.scales = &require(checkpoint, tensor, of + "_scale");
    matrix.dims = packed_dims(checkpoint, *matrix.shape);
    if (matrix.dims[0] < 1 || matrix.dims[1] < 1) {
      fail(checkpoint, *matrix.shape, fmt::format("found {}, expected positive sizes", list(matrix.dims)));
    }
    const auto in_bits = [&](DType of) { return std::vector{matrix.dims[0], words_of(matrix.dims[1], of)}; };
    // A word holds up to 4 inputs of either type: those are int8 where a scheme is.
    const bool has_int8 = std::ranges::find(schemes, DType::kI8, &QuantScheme::code) != schemes.end();
    const bool fits_int4 = tensor.shape == in_bits(DType::kI4);
    if (tensor.shape == in_bits(DType::kI8) && (has_int8 || !fits_int4)) code = DType::kI8;
    if (code != DType::kI8) expect_shape(checkpoint, tensor, in_bits(DType::kI4));
  }
  if (matrix.shape == nullptr) code = matrix.numbers->dtype;
  matrix.format = format_of(checkpoint, matrix, code, schemes);
  return matrix;
}

void write_row(const StoredMatrix& from, const std::byte* numbers, const float* scales, std::int64_t col,
               std::int64_t cols, kernels::WeightFormat to, std::byte* row) {
  const DType code = from.format.code;
  const std::int64_t group = inputs_of_scale(from.format, from.dims[1]);
  if (!kernels::is_quantized(to.code)) {
    for (std::int64_t i = 0; i < cols; ++i) {
      const float x = number(from, numbers, col + i) * scales[(col + i) / group];
      std::memcpy(row + static_cast<std::size_t>(i) * sizeof(x), &x, sizeof(x));
    }
    return;
  }
  std::byte* const end = row + kernels::number_bytes(to, cols);
  for (std::int64_t g = 0; g < kernels::scales_of(to, cols); ++g) {
    std::memcpy(end + 4 * g, scales + (col + g * to.group) / group, sizeof(float));
  }
  if (to.code != DType::kI4) {
    std::fill(row + cols, end, std::byte{0});
    if (code == DType::kI4) {
      for (std::int64_t i = 0; i < cols; ++i) row[i] = static_cast<std::byte>(nibble(numbers, col + i) - 8);
    } else {
      std::transform(numbers + col, numbers + col + cols, row, [&](std::byte b) { return b ^ from.flips(); });
    }
    return;
  }
  for (std::int64_t block = 0; block < cols; block += kQuantBlock, row += kQuantBlock / 2) {
    for (std::int64_t word = 0; word < 16; ++word) {
      unsigned bits = 0;
      for (std::int64_t j = 0; j < 4; ++j) {
        const std::int64_t i = block + 16 * j + word;
        bits |= (i < cols ? nibble(numbers, col + i) : 8U) << (4 * j);
      }
      row[2 * word] = static_cast<std::byte>(bits & 255U);
      row[2 * word + 1] = static_cast<std::byte>(bits >> 8U);
    }
  }
}

}  // namespace mmrec::models
