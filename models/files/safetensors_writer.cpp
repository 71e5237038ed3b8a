#include "models/files/safetensors_writer.h"

#include <fmt/format.h>

#include "models/files/json.h"
#include "models/files/text.h"

namespace mmrec::models {

std::string safetensors_header(std::span<const NewTensor> tensors) {
  std::string json = "{";
  std::uint64_t begin = 0;
  for (const NewTensor& tensor : tensors) {
    const std::uint64_t end = begin + tensor.bytes;
    json += fmt::format("{}{}:{{\"dtype\":\"{}\",\"shape\":{},\"data_offsets\":[{},{}]}}", json.size() > 1 ? "," : "",
                        json_string(tensor.name), tensor.type, list(tensor.shape), begin, end);
    begin = end;
  }
  json += '}';
  json.append((8 - json.size() % 8) % 8, ' ');
  std::string length(8, '\0');
  for (unsigned i = 0; i < 8; ++i) length[i] = static_cast<char>(json.size() >> (8 * i));
  return length + json;
}

std::string shard_index(std::span<const NewShard> shards) {
  std::uint64_t bytes = 0;
  std::string map;
  for (const NewShard& shard : shards) {
    for (const NewTensor& tensor : shard.tensors) {
      bytes += tensor.bytes;
      map += fmt::format("{}\n    {}: {}", map.empty() ? "" : ",", json_string(tensor.name), json_string(shard.name));
    }
  }
  return fmt::format("{{\n  \"metadata\": {{\"total_size\": {}}},\n  \"weight_map\": {{{}\n  }}\n}}\n", bytes, map);
}

}  // namespace mmrec::models
