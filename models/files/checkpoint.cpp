// Opening a checkpoint: which files belong to it, their headers, and the agreement between the index and the shards.
#include "models/files/checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "kernels/cpu/bytes.h"
#include "models/files/checked.h"
#include "models/files/elements.h"
#include "models/files/json.h"
#include "models/files/model_files.h"
#include "models/files/text.h"

namespace mmrec::models {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;
constexpr std::uint64_t kMaxIndexBytes = std::uint64_t{64} << 20;

[[noreturn]] void fail(const fs::path& path, std::string_view message) {
  throw std::runtime_error(fmt::format("{}: {}", path.string(), message));
}

/// Reads and parses the header of one file; `data_begin` becomes the offset of its data.
std::vector<TensorInfo> read_header(const File& file, std::uint64_t& data_begin) {
  std::array<char, 64> start{};
  const std::size_t start_bytes = std::min<std::size_t>(start.size(), file.size());
  file.read(0, std::as_writable_bytes(std::span(start).first(start_bytes)));
  const std::string hint = content_hint({start.data(), start_bytes});
  if (file.size() < kLengthBytes) {
    fail(file.path(), fmt::format("found {} bytes, expected a safetensors file (8 or more){}", file.size(), hint));
  }
  std::uint64_t header_bytes = 0;
  for (unsigned i = 0; i < kLengthBytes; ++i) {
    header_bytes |= std::uint64_t{static_cast<unsigned char>(start[i])} << (8 * i);
  }
  if (header_bytes > file.size() - kLengthBytes) {
    fail(file.path(), fmt::format("header: found a length of {} bytes, expected at most the file's {}{}", header_bytes,
                                  file.size() - kLengthBytes, hint));
  }
  if (header_bytes > kMaxHeaderBytes) {
    fail(file.path(),
         fmt::format("header: found a length of {} bytes, expected at most {}", header_bytes, kMaxHeaderBytes));
  }
  const std::unique_ptr<char[]> json(new char[header_bytes]);
  file.read(kLengthBytes, std::as_writable_bytes(std::span(json.get(), header_bytes)));
  data_begin = kLengthBytes + header_bytes;
  return parse_safetensors_header({json.get(), header_bytes}, file.size() - data_begin, file.path().string());
}

/// Opens a shard that an index names.
File open_shard(const fs::path& folder, const std::string& name, const fs::path& index_path) {
  try {
    return File::open(resolve_model_file(folder, name));
  } catch (const std::system_error& error) {
    if (error.code() != std::errc::no_such_file_or_directory) throw;
    fail(index_path, fmt::format("names the shard {}, which is missing", quote(name)));
  }
}

constexpr std::size_t kMaxShards = 1000;
constexpr std::size_t kMaxShardNameBytes = 255;

/// True for the name of a file in the folder itself.
bool is_shard_name(std::string_view name) {
  return name.size() <= kMaxShardNameBytes && name.ends_with(kShardEnding) &&
         name.find('/') == std::string_view::npos && name.find('\\') == std::string_view::npos &&
         name.find('\0') == std::string_view::npos;
}

/// Why a folder has no checkpoint, with a hint if it seems to hold one in another format.
[[noreturn]] void fail_no_checkpoint(const fs::path& folder) {
  constexpr std::size_t kMostNames = 1000;
  std::string hint;
  for (const std::string& name : names_in(folder, kMostNames)) {
    const fs::path extension = fs::path(name).extension();
    if (extension == ".pt" || extension == ".pth" || extension == ".bin") {
      hint = fmt::format("; convert {} with weights/convert.py", quote(name));
    }
  }
  fail(folder, fmt::format("no {} and no {}{}", kModelFile, kIndexFile, hint));
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

void Checkpoint::add(File file) {
  std::uint64_t data_begin = 0;
  for (TensorInfo& info : read_header(file, data_begin)) {
    info.file = files_.size();
    tensors_.push_back(std::move(info));
  }
  if (tensors_.size() > kMaxTensors) fail(file.path(), fmt::format("checkpoint of more than {} tensors", kMaxTensors));
  files_.push_back({std::move(file), data_begin});
}

void Checkpoint::index_names() {
  for (const TensorInfo& info : tensors_) {
    const auto [entry, is_new] = by_name_.try_emplace(info.name, &info);
    if (is_new) continue;
    fail(path_of(info),
         fmt::format("{}: is also in {}", printable(info.name), quote(path_of(*entry->second).filename().string())));
  }
}

void Checkpoint::check_finite(const TensorInfo& tensor, std::uint64_t offset, std::span<const std::byte> data) const {
  const std::size_t size = kernels::size_of(tensor.dtype);
  std::size_t at = 0;
  bool is_infinite = false;
  if (tensor.dtype == kernels::DType::kF8) {  // has a NaN, and no infinity
    const auto is_nan = [](std::byte b) { return (b & std::byte{0x7f}) == std::byte{0x7f}; };
    at = static_cast<std::size_t>(std::find_if(data.begin(), data.end(), is_nan) - data.begin());
    if (at == data.size()) return;
  } else {
    if (kernels::all_finite(data, tensor.dtype)) return;
    while (std::isfinite(element(data.data(), at, tensor.dtype))) ++at;
    is_infinite = !std::isnan(element(data.data(), at, tensor.dtype));
  }
  fail(path_of(tensor), fmt::format("{}: element {} is {} (expected finite weights)", printable(tensor.name),
                                    offset / size + at, is_infinite ? "infinite" : "NaN"));
}

void Checkpoint::check_index(const ShardIndex& index) const {
  for (const TensorInfo& info : tensors_) {
    const auto entry = index.shard_of.find(info.name);
    const std::string& shard = index.shards[info.file];
    if (entry == index.shard_of.end()) {
      fail(path_, fmt::format("weight_map: {} of shard {} is missing", printable(info.name), quote(shard)));
    }
    if (entry->second != info.file) {
      fail(path_, fmt::format("weight_map: {}: found {}, expected {}, which holds it", printable(info.name),
                              quote(index.shards[entry->second]), quote(shard)));
    }
  }
  for (const auto& [name, shard] : index.shard_of) {
    if (find(name) == nullptr) {
      fail(path_, fmt::format("weight_map: {} is not in {}", printable(name), quote(index.shards[shard])));
    }
  }
}

const TensorInfo* Checkpoint::find(std::string_view name) const {
  const auto entry = by_name_.find(name);
  return entry == by_name_.end() ? nullptr : entry->second;
}

Checkpoint Checkpoint::open(const fs::path& folder) {
  std::error_code error;
  if (const fs::file_status status = fs::status(folder, error); fs::exists(status) && !fs::is_directory(status)) {
    fail(folder, "found a file, expected a model folder (config.json, model.safetensors, a tokenizer)");
  }
  Checkpoint checkpoint;
  const fs::path index_path = folder / kIndexFile;
  const fs::path model_path = folder / kModelFile;
  if (fs::exists(fs::symlink_status(index_path, error))) {
    checkpoint.path_ = index_path;
    const ShardIndex index = parse_shard_index(read_text(index_path, kMaxIndexBytes), index_path.string());
    for (const std::string& shard : index.shards) checkpoint.add(open_shard(folder, shard, index_path));
    checkpoint.index_names();
    checkpoint.check_index(index);
  } else if (fs::exists(fs::symlink_status(model_path, error))) {
    checkpoint.path_ = model_path;
    checkpoint.add(File::open(model_path));
    checkpoint.index_names();
  } else if (error && error != std::errc::no_such_file_or_directory) {
    throw std::system_error(error, folder.string() + ": cannot read the folder");
  } else if (!fs::exists(folder, error)) {
    throw std::system_error(std::make_error_code(std::errc::no_such_file_or_directory), folder.string());
  } else {
    fail_no_checkpoint(folder);
  }
  return checkpoint;
}

void Checkpoint::read(const TensorInfo& tensor, std::uint64_t offset, std::span<std::byte> to) const {
  const CheckedSize end = CheckedSize(offset) + to.size();
  if (!end.at_most(tensor.bytes())) {
    throw std::out_of_range(fmt::format("{}: read of {} bytes at {} in a tensor of {}", printable(tensor.name),
                                        to.size(), offset, tensor.bytes()));
  }
  const DataFile& data = files_[tensor.file];
  data.file.read(data.data_begin + tensor.begin + offset, to);
}

}  // namespace mmrec::models
