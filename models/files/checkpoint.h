// Tensors of a model folder: model.safetensors, or shards listed by model.safetensors.index.json.
//
// The only code that trusts no byte: sizes are checked with overflow-checked arithmetic against the file before
// anything is allocated, and headers are read by bounded reads. Files are read with pread into aligned memory rather
// than mapped: a file that shrinks or a network disk that fails is then an error, not a signal, and pages are resident
// before the first token.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "kernels/tensor.h"
#include "models/files/file.h"

namespace mmrec::models {

/// A checkpoint holds at most this many tensors.
inline constexpr std::size_t kMaxTensors = 100'000;

/// One tensor as its header declares it. `begin` and `end` are byte offsets in the data section of its file.
struct TensorInfo {
  std::string name;
  kernels::DType dtype = kernels::DType::kF32;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::size_t file = 0;  // index into the checkpoint's files

  std::uint64_t bytes() const { return end - begin; }
};

/// Parses one safetensors header (the JSON text alone). Enforces every rule of the format and of docs/file-formats.md:
/// dtype one of kNamesInFile, shape product × size equal to end − begin, offsets sorted, contiguous from 0 and ending
/// at data_bytes, no duplicate names or keys, rank <= 8, names of 1 to 512 bytes of valid UTF-8 without NUL, at most
/// kMaxTensors. The result is sorted by offset. Throws std::runtime_error naming `name`, the tensor, found and
/// expected.
std::vector<TensorInfo> parse_safetensors_header(std::string_view json, std::uint64_t data_bytes,
                                                 const std::string& name);

/// Shards by name, and for each tensor the number of its shard.
struct ShardIndex {
  std::vector<std::string> shards;
  std::unordered_map<std::string, std::size_t> shard_of;
};

/// Parses the index. Its weight_map may name plain .safetensors files of the same folder only, at most 1,000, and at
/// least one tensor; other keys are ignored. Throws std::runtime_error naming `name`, the tensor, found and expected.
ShardIndex parse_shard_index(std::string_view text, const std::string& name);

/// An open checkpoint: the headers are validated, no tensor has been read. Movable.
class Checkpoint {
 public:
  /// Opens the checkpoint of a model folder. Throws std::runtime_error for a malformed file (naming file, field, found
  /// and expected) and std::system_error with errno where a file cannot be opened or read.
  static Checkpoint open(const std::filesystem::path& folder);

  /// The file that names the tensors: model.safetensors or the index.
  const std::filesystem::path& path() const { return path_; }
  /// All tensors, in the order of their files and offsets.
  std::span<const TensorInfo> tensors() const { return tensors_; }
  /// Null if there is no such tensor.
  const TensorInfo* find(std::string_view name) const;
  /// File of a tensor, for messages.
  const std::filesystem::path& path_of(const TensorInfo& tensor) const { return files_[tensor.file].file.path(); }
  /// Reads bytes [offset, offset + to.size()) of the tensor's data. Throws std::system_error or, if the file has become
  /// shorter, std::runtime_error; std::out_of_range beyond the tensor. Thread-safe.
  void read(const TensorInfo& tensor, std::uint64_t offset, std::span<std::byte> to) const;
  /// Of the tensor's data from `offset` on. Throws std::runtime_error naming file, tensor and element for a number that
  /// is not finite.
  void check_finite(const TensorInfo& tensor, std::uint64_t offset, std::span<const std::byte> data) const;

 private:
  struct DataFile {
    File file;
    std::uint64_t data_begin = 0;
  };
  Checkpoint() = default;
  void add(File file);
  void index_names();
  void check_index(const ShardIndex& index) const;

  std::filesystem::path path_;
  std::vector<DataFile> files_;
  std::vector<TensorInfo> tensors_;
  std::unordered_map<std::string_view, const TensorInfo*> by_name_;  // of tensors_
};

}  // namespace mmrec::models
