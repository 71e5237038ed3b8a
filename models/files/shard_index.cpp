// The index of a sharded checkpoint. Its values become paths, so they must be plain names.
#include "models/files/shard_index.h"

#include <fmt/format.h>

#include <stdexcept>

#include "models/files/checkpoint.h"
#include "models/files/file.h"
#include "models/files/json.h"
#include "models/files/model_files.h"
#include "models/files/text.h"

namespace mmrec::models {
namespace {

constexpr std::size_t kMaxShards = 1000;
constexpr std::size_t kMaxShardNameBytes = 255;

/// True for the name of a file in the folder itself.
bool is_shard_name(std::string_view name) {
  return name.size() <= kMaxShardNameBytes && name.ends_with(kShardEnding) &&
         name.find('/') == std::string_view::npos && name.find('\\') == std::string_view::npos &&
         name.find('\0') == std::string_view::npos;
}

}  // namespace

ShardIndex parse_shard_index(std::string_view text, const std::string& name) {
  require_json_object(text, name);
  ShardIndex index;
  std::unordered_map<std::string, std::size_t> numbers;
  JsonReader reader(text, name, kMaxTensors);
  bool has_map = false;
  std::string key;
  std::string tensor;
  reader.begin_object();
  while (reader.next_key(key)) {
    if (key != "weight_map") {
      reader.skip();
      continue;
    }
    has_map = true;
    reader.begin_object();
    while (reader.next_key(tensor)) {
      const std::string shard = reader.string();
      if (!is_shard_name(shard)) {
        reader.fail(
            fmt::format("found {}, expected the plain name of a .safetensors file in the same folder", quote(shard)));
      }
      const auto [entry, is_new] = numbers.try_emplace(shard, index.shards.size());
      if (is_new) index.shards.push_back(shard);
      if (index.shards.size() > kMaxShards) reader.fail(fmt::format("more than {} shards", kMaxShards));
      index.shard_of.emplace(tensor, entry->second);
    }
  }
  if (!has_map) throw std::runtime_error(name + ": weight_map is missing");
  if (index.shards.empty()) throw std::runtime_error(name + ": weight_map: found no tensors");
  return index;
}

}  // namespace mmrec::models
