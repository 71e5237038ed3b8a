// Makes the header of a safetensors file, and the index of a checkpoint in shards.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace mmrec::models {

/// A tensor to be written.
struct NewTensor {
  std::string name;
  std::string_view type;  // its name in the file: "BF16"
  std::vector<std::int64_t> shape;
  std::uint64_t bytes = 0;
};

/// What comes before the tensors' data, which lie one behind the other: the length of a JSON text and that text, padded
/// with spaces so that the data begins at a multiple of eight bytes.
std::string safetensors_header(std::span<const NewTensor> tensors);

/// The text of model.safetensors.index.json for shards of these names with these tensors.
struct NewShard {
  std::string name;
  std::vector<NewTensor> tensors;
};
std::string shard_index(std::span<const NewShard> shards);

}  // namespace mmrec::models
