// Any index is refused, or names plain files of the folder only, each of them for at least one tensor.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "models/files/shard_index.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  mmrec::models::ShardIndex index;
  try {
    index = mmrec::models::parse_shard_index({reinterpret_cast<const char*>(data), size}, "input");
  } catch (const std::runtime_error&) {
    return 0;
  }
  std::vector<bool> used(index.shards.size());
  for (const auto& [tensor, shard] : index.shard_of) {
    if (shard >= index.shards.size()) std::abort();
    used[shard] = true;
  }
  const std::filesystem::path folder = "/folder";
  for (std::size_t i = 0; i < index.shards.size(); ++i) {
    const auto path = (folder / index.shards[i]).lexically_normal();
    if (!used[i] || path.parent_path() != folder || path.filename() != index.shards[i]) std::abort();
    if (index.shards[i].find('\0') != std::string::npos) std::abort();
  }
  return 0;
}
