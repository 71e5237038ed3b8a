// Any header is refused, or describes tensors that cover the data exactly and agree with what nlohmann's JSON reads.
// The first byte chooses how many bytes of data there are.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <string_view>

#include "models/files/checkpoint.h"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

void check(std::string_view json, std::uint64_t data_bytes) {
  std::vector<mmrec::models::TensorInfo> tensors;
  try {
    tensors = mmrec::models::parse_safetensors_header(json, data_bytes, "input");
  } catch (const std::runtime_error&) {
    return;
  }
  const auto tree = nlohmann::json::parse(json);
  require(tensors.size() == tree.size() - tree.count("__metadata__"));
  std::uint64_t end = 0;
  for (const auto& tensor : tensors) {
    require(tensor.begin == end && tensor.end >= tensor.begin);
    end = tensor.end;
    std::uint64_t bytes = 1;
    for (const std::int64_t extent : tensor.shape) {
      require(extent >= 0);
      require(!__builtin_mul_overflow(bytes, static_cast<std::uint64_t>(extent), &bytes));
    }
    require(!__builtin_mul_overflow(bytes, mmrec::kernels::size_of(tensor.dtype), &bytes) && bytes == tensor.bytes());
    require(!tensor.name.empty() && tensor.name.size() <= 512 && tensor.shape.size() <= 8);
    const auto& entry = tree.at(tensor.name);
    require(entry.at("shape") == tensor.shape);
    require(entry.at("data_offsets").at(0) == tensor.begin && entry.at("data_offsets").at(1) == tensor.end);
  }
  require(end == data_bytes);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string_view json(reinterpret_cast<const char*>(data + 1), size - 1);
  check(json, data[0]);
  return 0;
}
