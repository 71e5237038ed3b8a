// The folder of a new model: its files appear whole, and together or not at all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string_view>
#include <vector>

#include "models/files/replace_file.h"

namespace mmrec::engine {

/// A file of the folder. Throws WriteError.
class OutputFile {
 public:
  explicit OutputFile(const std::filesystem::path& path);
  /// Thread-safe.
  void write(std::uint64_t offset, std::span<const std::byte> bytes);
  void write(std::uint64_t offset, std::string_view text) { write(offset, std::as_bytes(std::span(text))); }

 private:
  friend class OutputFolder;
  std::filesystem::path path_;
  models::Replacement replacement_;
};

/// Unless kept it goes away with its files; a folder that was there stays, empty.
class OutputFolder {
 public:
  /// Makes the folder if it is not there. Throws std::invalid_argument if it holds something or is no folder, and
  /// WriteError.
  explicit OutputFolder(std::filesystem::path path);
  ~OutputFolder();
  OutputFolder(const OutputFolder&) = delete;
  OutputFolder& operator=(const OutputFolder&) = delete;

  OutputFile open(std::string_view name) const { return OutputFile(path_ / name); }
  /// Puts the file in its place. Throws WriteError.
  void commit(OutputFile& file);
  void keep() { files_.clear(), is_new_ = false; }

 private:
  std::filesystem::path path_;
  bool is_new_ = false;
  std::vector<std::filesystem::path> files_;
};

}  // namespace mmrec::engine
