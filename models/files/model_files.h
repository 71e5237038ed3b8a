// The files of a model folder: their names, and that none of them lies elsewhere.
#pragma once

#include <algorithm>
#include <array>
#include <filesystem>
#include <string_view>

namespace mmrec::models {

inline constexpr char kConfigFile[] = "config.json";
inline constexpr char kGenerationConfigFile[] = "generation_config.json";
inline constexpr char kModelFile[] = "model.safetensors";
inline constexpr char kIndexFile[] = "model.safetensors.index.json";
inline constexpr char kSentencePieceFile[] = "tokenizer.model";
inline constexpr char kTiktokenFile[] = "tokenizer.tiktoken";
inline constexpr char kTokenizerConfigFile[] = "tokenizer_config.json";
inline constexpr std::string_view kShardEnding = ".safetensors";

/// Whether a file of a model folder may be opened: it has one of the names above, or that of a shard.
inline bool is_model_file(std::string_view name) {
  constexpr std::array<std::string_view, 6> kNames = {kConfigFile,        kGenerationConfigFile, kIndexFile,
                                                      kSentencePieceFile, kTiktokenFile,         kTokenizerConfigFile};
  return name.ends_with(kShardEnding) || std::find(kNames.begin(), kNames.end(), name) != kNames.end();
}

/// The file `name` of a model folder with its links resolved. They must stay in the folder, or in the cache that the
/// folder belongs to (REPOSITORY/snapshots/REVISION with links to REPOSITORY/blobs, as Hugging Face's): else a folder
/// from elsewhere could make the engine read any file. Throws std::system_error with errno where there is none, and
/// std::runtime_error for a link to elsewhere.
std::filesystem::path resolve_model_file(const std::filesystem::path& folder, std::string_view name);

}  // namespace mmrec::models
