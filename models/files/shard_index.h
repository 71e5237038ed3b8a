// model.safetensors.index.json: which shard holds which tensor.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace mmrec::models {

/// Shards by name, and for each tensor the number of its shard.
struct ShardIndex {
  std::vector<std::string> shards;
  std::unordered_map<std::string, std::size_t> shard_of;
};

/// Parses the index. Its weight_map may name plain .safetensors files of the same folder only, at most 1,000, and at
/// least one tensor; other keys are ignored. Throws std::runtime_error naming `name`, the tensor, found and expected.
ShardIndex parse_shard_index(std::string_view text, const std::string& name);

}  // namespace mmrec::models
