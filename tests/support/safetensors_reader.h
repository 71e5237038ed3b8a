// A small safetensors reader for tests: reference tensors as vectors. It trusts its files (fixtures that the repository
// itself holds) and shares no code with models/checkpoint, so that one cannot hide a mistake of the other.
#pragma once

#include <nlohmann/json.hpp>

#include "kernels/tensor.h"
#include "tests/support/prelude.h"

namespace mmrec::test {

/// The bytes of a file.
inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("cannot read " + path.string());
  std::ostringstream bytes;
  bytes << in.rdbuf();
  return std::move(bytes).str();
}

/// A tensor as it is in a file.
struct RawTensor {
  std::string name;
  std::string dtype = "F32";
  std::vector<std::int64_t> shape;
  std::string bytes;

  template <class T>
  T at(std::size_t i) const {
    T x{};
    std::memcpy(&x, bytes.data() + i * sizeof(T), sizeof(T));
    return x;
  }
};

/// All tensors of one file, in the order of their names. Throws std::runtime_error if the file is missing or odd.
inline std::vector<RawTensor> read_safetensors(const std::filesystem::path& path) {
  const std::string file = read_file(path);
  std::uint64_t header_bytes = 0;
  if (file.size() < 8) throw std::runtime_error(path.string() + ": too short");
  std::memcpy(&header_bytes, file.data(), 8);
  if (header_bytes > file.size() - 8) throw std::runtime_error(path.string() + ": header is too long");
  const std::string data = file.substr(8 + header_bytes);
  const auto header = nlohmann::json::parse(file.substr(8, header_bytes));
  std::vector<RawTensor> tensors;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    const auto begin = entry.at("data_offsets").at(0).get<std::size_t>();
    const auto end = entry.at("data_offsets").at(1).get<std::size_t>();
    if (begin > end || end > data.size()) throw std::runtime_error(path.string() + ": " + name);
    tensors.push_back({name, entry.at("dtype"), entry.at("shape"), data.substr(begin, end - begin)});
  }
  return tensors;
}

/// One tensor, widened to fp32 (F32, F16, BF16) or as integers (I32, I64). The other vector is empty.
struct ReferenceTensor {
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::vector<float> values;
  std::vector<int> integers;

  std::int64_t dim(std::size_t i) const { return shape.at(i); }
};

/// The tensors of one file, by name. Throws as read_safetensors().
class SafetensorsReader {
 public:
  explicit SafetensorsReader(const std::filesystem::path& path) {
    for (const RawTensor& raw : read_safetensors(path)) {
      ReferenceTensor tensor{raw.dtype, raw.shape, {}, {}};
      if (raw.dtype == "F32") {
        convert<float>(raw, tensor.values);
      } else if (raw.dtype == "F16") {
        convert<kernels::Float16>(raw, tensor.values);
      } else if (raw.dtype == "BF16") {
        convert<kernels::BFloat16>(raw, tensor.values);
      } else if (raw.dtype == "I32") {
        convert<std::int32_t>(raw, tensor.integers);
      } else if (raw.dtype == "I64") {
        convert<std::int64_t>(raw, tensor.integers);
      } else {
        throw std::runtime_error(path.string() + ": " + raw.name + " is of type " + raw.dtype);
      }
      tensors_.emplace(raw.name, std::move(tensor));
    }
  }

  bool contains(const std::string& name) const { return tensors_.count(name) != 0; }
  /// Throws std::out_of_range if there is no such tensor.
  const ReferenceTensor& at(const std::string& name) const { return tensors_.at(name); }
  const std::map<std::string, ReferenceTensor>& tensors() const { return tensors_; }

 private:
  template <class T, class To>
  static void convert(const RawTensor& raw, std::vector<To>& to) {
    to.resize(raw.bytes.size() / sizeof(T));
    for (std::size_t i = 0; i < to.size(); ++i) {
      if constexpr (std::is_integral_v<To>) {
        to[i] = static_cast<To>(raw.at<T>(i));
      } else {
        to[i] = kernels::to_float(raw.at<T>(i));
      }
    }
  }

  std::map<std::string, ReferenceTensor> tensors_;
};

}  // namespace mmrec::test
