// Opening a checkpoint: which files belong to it, their headers, and the agreement between the index and the shards.
#include "models/files/checkpoint.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "models/files/checked.h"
#include "models/files/file.h"
#include "models/files/shard_index.h"
#include "models/files/text.h"

namespace mmrec::models {
namespace {

namespace fs = std::filesystem;

constexpr char kModelFile[] = "model.safetensors";
constexpr char kIndexFile[] = "model.safetensors.index.json";
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

/// Opens a shard that an index names. A link must not lead out of the folder: then a checkpoint from elsewhere could
/// make the engine read any file.
File open_shard(const fs::path& folder, const std::string& name, const fs::path& index_path) {
  const fs::path path = folder / name;
  std::error_code error;
  const fs::path target = fs::canonical(path, error);
  if (error == std::errc::no_such_file_or_directory) {
    fail(index_path, fmt::format("names the shard {}, which is missing", quote(name)));
  }
  if (error) throw std::system_error(error, path.string() + ": cannot resolve");
  if (target.parent_path() != fs::canonical(folder)) {
    fail(path, "shard is a link out of the model folder (expected a file in the folder)");
  }
  return File::open(target);
}

/// Why a folder has no checkpoint, with a hint if it seems to hold one in another format.
[[noreturn]] void fail_no_checkpoint(const fs::path& folder) {
  std::string hint;
  std::error_code error;
  std::size_t seen = 0;
  for (fs::directory_iterator it(folder, error), end; !error && it != end && seen < 1000; it.increment(error), ++seen) {
    const fs::path extension = it->path().extension();
    if (extension == ".pt" || extension == ".pth" || extension == ".bin") {
      hint = fmt::format("; convert {} with weights/convert.py", quote(it->path().filename().string()));
    }
  }
  fail(folder, fmt::format("no {} and no {}{}", kModelFile, kIndexFile, hint));
}

}  // namespace

struct Checkpoint::Impl {
  struct Shard {
    File file;
    std::uint64_t data_begin = 0;
  };
  fs::path path;
  std::vector<Shard> shards;
  std::vector<TensorInfo> tensors;
  std::vector<std::size_t> by_name;  // indices into tensors

  void add(File file) {
    std::uint64_t data_begin = 0;
    for (TensorInfo& info : read_header(file, data_begin)) {
      info.file = shards.size();
      tensors.push_back(std::move(info));
    }
    if (tensors.size() > kMaxTensors) fail(file.path(), fmt::format("checkpoint of more than {} tensors", kMaxTensors));
    shards.push_back({std::move(file), data_begin});
  }

  void sort_names() {
    by_name.resize(tensors.size());
    std::iota(by_name.begin(), by_name.end(), std::size_t{0});
    std::sort(by_name.begin(), by_name.end(),
              [&](std::size_t a, std::size_t b) { return tensors[a].name < tensors[b].name; });
    const auto same = std::adjacent_find(by_name.begin(), by_name.end(), [&](std::size_t a, std::size_t b) {
      return tensors[a].name == tensors[b].name;
    });
    if (same == by_name.end()) return;
    const TensorInfo& a = tensors[same[0]];
    const TensorInfo& b = tensors[same[1]];
    fail(shards[b.file].file.path(),
         fmt::format("{}: is also in {}", printable(b.name), quote(shards[a.file].file.path().filename().string())));
  }

  void check_index(const ShardIndex& index, const fs::path& index_path) const {
    for (const TensorInfo& info : tensors) {
      const auto entry = index.shard_of.find(info.name);
      const std::string& shard = index.shards[info.file];
      if (entry == index.shard_of.end()) {
        fail(index_path, fmt::format("weight_map: {} of shard {} is missing", printable(info.name), quote(shard)));
      }
      if (entry->second != info.file) {
        fail(index_path, fmt::format("weight_map: {}: found {}, expected {}, which holds it", printable(info.name),
                                     quote(index.shards[entry->second]), quote(shard)));
      }
    }
    if (index.shard_of.size() == tensors.size()) return;  // all of the map was met above
    for (const auto& [name, shard] : index.shard_of) {
      if (find(name) == nullptr) {
        fail(index_path, fmt::format("weight_map: {} is not in {}", printable(name), quote(index.shards[shard])));
      }
    }
  }

  const TensorInfo* find(std::string_view name) const {
    const auto at = std::lower_bound(by_name.begin(), by_name.end(), name,
                                     [&](std::size_t i, std::string_view n) { return tensors[i].name < n; });
    return at != by_name.end() && tensors[*at].name == name ? &tensors[*at] : nullptr;
  }
};

Checkpoint Checkpoint::open(const fs::path& folder) {
  std::error_code error;
  if (const fs::file_status status = fs::status(folder, error); fs::exists(status) && !fs::is_directory(status)) {
    fail(folder, "found a file, expected a model folder (config.json, model.safetensors, tokenizer.model)");
  }
  auto impl = std::make_unique<Impl>();
  const fs::path index_path = folder / kIndexFile;
  const fs::path model_path = folder / kModelFile;
  if (fs::exists(fs::symlink_status(index_path, error))) {
    impl->path = index_path;
    const ShardIndex index = parse_shard_index(read_text(index_path, kMaxIndexBytes), index_path.string());
    for (const std::string& shard : index.shards) impl->add(open_shard(folder, shard, index_path));
    impl->sort_names();
    impl->check_index(index, index_path);
  } else if (fs::exists(fs::symlink_status(model_path, error))) {
    impl->path = model_path;
    impl->add(File::open(model_path));
    impl->sort_names();
  } else if (error && error != std::errc::no_such_file_or_directory) {
    throw std::system_error(error, folder.string() + ": cannot read the folder");
  } else if (!fs::exists(folder, error)) {
    throw std::system_error(std::make_error_code(std::errc::no_such_file_or_directory), folder.string());
  } else {
    fail_no_checkpoint(folder);
  }
  return Checkpoint(std::move(impl));
}

Checkpoint::Checkpoint(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;
Checkpoint::~Checkpoint() = default;

const fs::path& Checkpoint::path() const { return impl_->path; }

std::span<const TensorInfo> Checkpoint::tensors() const { return impl_->tensors; }

const TensorInfo* Checkpoint::find(std::string_view name) const { return impl_->find(name); }

const fs::path& Checkpoint::path_of(const TensorInfo& tensor) const { return impl_->shards[tensor.file].file.path(); }

void Checkpoint::read(const TensorInfo& tensor, std::uint64_t offset, std::span<std::byte> to) const {
  const CheckedSize end = CheckedSize(offset) + to.size();
  if (!end.at_most(tensor.bytes())) {
    throw std::out_of_range(fmt::format("{}: read of {} bytes at {} in a tensor of {}", printable(tensor.name),
                                        to.size(), offset, tensor.bytes()));
  }
  const Impl::Shard& shard = impl_->shards[tensor.file];
  shard.file.read(shard.data_begin + tensor.begin + offset, to);
}

}  // namespace mmrec::models
