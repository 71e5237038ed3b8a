// A reader of quantised matrices for tests, in float64 and by the test's own rules: it shares no code with what writes
// or loads them.
#pragma once

#include <nlohmann/json.hpp>

#include "kernels/tensor.h"
#include "mmrec/quantize.h"
#include "tests/support/model_folder.h"
#include "tests/support/safetensors_reader.h"

namespace mmrec::test {

using Tensors = std::map<std::string, RawTensor>;

/// All tensors of a folder, of one file or of shards.
inline Tensors tensors_of(const std::filesystem::path& folder) {
  Tensors all;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() != ".safetensors") continue;
    for (RawTensor& tensor : read_safetensors(entry.path())) all[tensor.name] = std::move(tensor);
  }
  return all;
}

inline std::size_t elements(const RawTensor& tensor) {
  std::size_t count = 1;
  for (const std::int64_t size : tensor.shape) count *= static_cast<std::size_t>(size);
  return count;
}

/// Number i of a tensor of plain numbers.
inline double plain(const RawTensor& tensor, std::size_t i) {
  if (tensor.dtype == "F32") return static_cast<double>(tensor.at<float>(i));
  const auto bits = tensor.at<std::uint16_t>(i);
  if (tensor.dtype == "F16") return static_cast<double>(kernels::to_float(kernels::Float16{bits}));
  EXPECT_EQ(tensor.dtype, "BF16");
  return static_cast<double>(kernels::to_float(kernels::BFloat16{bits}));
}

/// e4m3 by its definition.
inline double e4m3(unsigned bits) {
  const double sign = (bits & 0x80U) != 0 ? -1.0 : 1.0;
  const int exponent = static_cast<int>((bits >> 3) & 15U);
  const int mantissa = static_cast<int>(bits & 7U);
  EXPECT_NE(bits & 0x7fU, 0x7fU) << "NaN";
  return sign * (exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10));
}

/// A quantised matrix as the file has it.
struct QuantizedReading {
  std::int64_t rows = 0, cols = 0, group = 0;
  double largest = 0.0, smallest = 0.0;  // numbers of the type
  std::vector<double> numbers;           // [rows, cols]
  std::vector<double> scales;            // [rows, cols / group]
  double scale(std::int64_t r, std::int64_t c) const {
    return scales[static_cast<std::size_t>(r * (cols / group) + c / group)];
  }
};

inline QuantizedReading read_quantized(const Tensors& tensors, const std::string& name) {
  QuantizedReading read;
  const auto packed = tensors.find(name + ".weight_packed");
  if (packed != tensors.end()) {
    const RawTensor& shape = tensors.at(name + ".weight_shape");
    EXPECT_EQ(shape.dtype, "I64");
    EXPECT_EQ(packed->second.dtype, "I32");
    read.rows = shape.at<std::int64_t>(0);
    read.cols = shape.at<std::int64_t>(1);
    const std::int64_t words = packed->second.shape.at(1);
    const std::int64_t per_word = words == (read.cols + 3) / 4 ? 4 : 8, bits = 32 / per_word;
    EXPECT_EQ(packed->second.shape, (std::vector{read.rows, (read.cols + per_word - 1) / per_word}));
    read.smallest = per_word == 4 ? -128.0 : -8.0;
    read.largest = -read.smallest - 1.0;
    for (std::int64_t r = 0; r < read.rows; ++r) {
      for (std::int64_t k = 0; k < read.cols; ++k) {
        const auto word = packed->second.at<std::uint32_t>(static_cast<std::size_t>(r * words + k / per_word));
        const std::uint32_t number = (word >> (bits * (k % per_word))) & ((1U << bits) - 1U);
        read.numbers.push_back(static_cast<double>(number) + read.smallest);
      }
    }
  } else {
    const RawTensor& weight = tensors.at(name + ".weight");
    read.rows = weight.shape.at(0);
    read.cols = weight.shape.at(1);
    const bool is_float = weight.dtype == "F8_E4M3";
    EXPECT_TRUE(is_float || weight.dtype == "I8") << weight.dtype;
    for (const char byte : weight.bytes) {
      read.numbers.push_back(is_float ? e4m3(static_cast<unsigned char>(byte)) : static_cast<signed char>(byte));
    }
    read.largest = is_float ? 448.0 : 127.0;
    read.smallest = -read.largest;
  }
  const RawTensor& scales = tensors.at(name + ".weight_scale");
  EXPECT_EQ(scales.dtype, "BF16");
  EXPECT_EQ(scales.shape.at(0), read.rows);
  read.group = read.cols / scales.shape.at(1);
  for (std::size_t i = 0; i < elements(scales); ++i) read.scales.push_back(plain(scales, i));
  EXPECT_EQ(read.numbers.size(), static_cast<std::size_t>(read.rows * read.cols));
  return read;
}

/// Calls visit(name, matrix) with the quantised matrices of a folder.
template <class Visit>
void for_quantized(const Tensors& tensors, const Visit& visit) {
  for (const auto& [name, tensor] : tensors) {
    const std::string ending = ".weight_scale";
    if (!name.ends_with(ending)) continue;
    const std::string module = name.substr(0, name.size() - ending.size());
    visit(module, read_quantized(tensors, module));
  }
}

/// The model with its quantised matrices as F32, their scaled numbers rounded once.
inline void write_dequantized(const std::filesystem::path& from, const std::filesystem::path& to) {
  const Tensors tensors = tensors_of(from);
  EditableCheckpoint plain;
  for (const auto& [name, tensor] : tensors) {
    if (name.find(".weight_") == std::string::npos && !tensors.contains(name + "_scale"))
      plain.tensors.push_back({tensor});
  }
  for_quantized(tensors, [&](const std::string& module, const QuantizedReading& read) {
    plain.add_zeros(module + ".weight", {read.rows, read.cols});
    for (std::int64_t i = 0; i < read.rows * read.cols; ++i) {
      const double x = read.numbers[static_cast<std::size_t>(i)] * read.scale(i / read.cols, i % read.cols);
      plain.tensors.back().set(static_cast<std::size_t>(i), static_cast<float>(x));
    }
  });
  plain.write(to / "model.safetensors");
  auto config = nlohmann::ordered_json::parse(read_file(from / "config.json"));
  config.erase("quantization_config");
  write_file(to / "config.json", config.dump());
}

/// The number of the type nearest to x: all of them are tried.
inline double nearest(double x, QuantizedType type) {
  double best = 0.0;
  const auto try_number = [&](double number) {
    if (std::fabs(x - number) < std::fabs(x - best)) best = number;
  };
  const int first = type == QuantizedType::kInt8 ? -127 : type == QuantizedType::kInt4 ? -8 : 0;
  const int last = type == QuantizedType::kInt8 ? 127 : type == QuantizedType::kInt4 ? 7 : 255;
  for (int i = first; i <= last; ++i) {
    const bool is_nan = type == QuantizedType::kFp8 && (i & 127) == 127;
    if (!is_nan) try_number(type == QuantizedType::kFp8 ? e4m3(static_cast<unsigned>(i)) : i);
  }
  return best;
}

}  // namespace mmrec::test
