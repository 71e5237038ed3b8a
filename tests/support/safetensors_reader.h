// A small safetensors reader for tests: reference tensors as vectors. It trusts its files (fixtures that the repository
// itself holds) and shares no code with models/checkpoint, so that one cannot hide a mistake of the other.
#pragma once

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/tensor.h"

namespace mmrec::test {

/// One tensor, widened to fp32 (F32, F16, BF16) or as integers (I32, I64). The other vector is empty.
struct ReferenceTensor {
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::vector<float> values;
  std::vector<int> integers;

  std::int64_t dim(std::size_t i) const { return shape.at(i); }
};

/// All the tensors of one file, by name. Throws std::runtime_error if the file is missing or odd.
class SafetensorsReader {
 public:
  explicit SafetensorsReader(const std::filesystem::path& path) {
    std::ifstream in(path, std::ios::binary);
    if (!in) throw std::runtime_error(path.string() + ": cannot open");
    const std::vector<char> file{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
    std::uint64_t header_bytes = 0;
    if (file.size() < 8) throw std::runtime_error(path.string() + ": too short");
    std::memcpy(&header_bytes, file.data(), 8);
    if (header_bytes > file.size() - 8) throw std::runtime_error(path.string() + ": header is too long");
    const char* data = file.data() + 8 + header_bytes;
    const auto header = nlohmann::json::parse(file.data() + 8, data);
    for (const auto& [name, entry] : header.items()) {
      if (name == "__metadata__") continue;
      const auto begin = entry.at("data_offsets").at(0).get<std::size_t>();
      const auto end = entry.at("data_offsets").at(1).get<std::size_t>();
      if (begin > end || end > file.size() - 8 - header_bytes) throw std::runtime_error(path.string() + ": " + name);
      ReferenceTensor tensor;
      tensor.dtype = entry.at("dtype").get<std::string>();
      tensor.shape = entry.at("shape").get<std::vector<std::int64_t>>();
      const char* from = data + begin;
      const std::size_t bytes = end - begin;
      if (tensor.dtype == "F32") {
        tensor.values = widen<float>(from, bytes);
      } else if (tensor.dtype == "F16") {
        tensor.values = widen<kernels::Float16>(from, bytes);
      } else if (tensor.dtype == "BF16") {
        tensor.values = widen<kernels::BFloat16>(from, bytes);
      } else if (tensor.dtype == "I32") {
        tensor.integers = integers<std::int32_t>(from, bytes);
      } else if (tensor.dtype == "I64") {
        tensor.integers = integers<std::int64_t>(from, bytes);
      } else {
        throw std::runtime_error(path.string() + ": " + name + " is of type " + tensor.dtype);
      }
      tensors_.emplace(name, std::move(tensor));
    }
  }

  bool contains(const std::string& name) const { return tensors_.count(name) != 0; }
  /// Throws std::out_of_range if there is no such tensor.
  const ReferenceTensor& at(const std::string& name) const { return tensors_.at(name); }
  const std::map<std::string, ReferenceTensor>& tensors() const { return tensors_; }

 private:
  template <class T>
  static std::vector<float> widen(const char* from, std::size_t bytes) {
    std::vector<float> to(bytes / sizeof(T));
    for (std::size_t i = 0; i < to.size(); ++i) {
      T x{};
      std::memcpy(&x, from + i * sizeof(T), sizeof(T));
      to[i] = kernels::to_float(x);
    }
    return to;
  }
  template <class T>
  static std::vector<int> integers(const char* from, std::size_t bytes) {
    std::vector<int> to(bytes / sizeof(T));
    for (std::size_t i = 0; i < to.size(); ++i) {
      T x{};
      std::memcpy(&x, from + i * sizeof(T), sizeof(T));
      to[i] = static_cast<int>(x);
    }
    return to;
  }

  std::map<std::string, ReferenceTensor> tensors_;
};

}  // namespace mmrec::test
