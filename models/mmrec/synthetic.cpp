// Random model folders, streamed block by block.
#include "models/mmrec/synthetic.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "models/files/checksum.h"
#include "models/files/text.h"
#include "models/mmrec/weight_table.h"

namespace mmrec::models {
namespace {

namespace fs = std::filesystem;
using kernels::DType;

std::string_view name_of(DType dtype) { return dtype == DType::kF32 ? "F32" : dtype == DType::kF16 ? "F16" : "BF16"; }

/// The header's JSON, padded with spaces so that the data begins at a multiple of eight bytes.
std::string header_of(std::span<const TensorDeclaration> tensors) {
  std::string json = "{";
  std::uint64_t begin = 0;
  for (const TensorDeclaration& tensor : tensors) {
    const std::uint64_t end = begin + tensor.bytes();
    json += fmt::format("{}\"{}\":{{\"dtype\":\"{}\",\"shape\":{},\"data_offsets\":[{},{}]}}",
                        json.size() > 1 ? "," : "", tensor.name, name_of(tensor.dtype), list(tensor.shape), begin, end);
    begin = end;
  }
  json += '}';
  json.append((8 - json.size() % 8) % 8, ' ');
  return json;
}

/// Uniform in (low, high), number `i` of the stream `key`: splitmix64, whose every output stands alone.
float uniform(std::uint64_t key, std::uint64_t i, float low, float high) {
  std::uint64_t z = key + (i + 1) * 0x9e3779b97f4a7c15U;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
  z ^= z >> 31;
  const float unit = (static_cast<float>(z >> 41) + 0.5F) * 0x1p-23F;
  return low + (high - low) * unit;
}

/// Bounds of a tensor's values. A bias takes those of its weight, whose name differs in the ending alone.
std::pair<float, float> range_of(const TensorDeclaration& tensor, std::int64_t in) {
  if (tensor.name.find("norm") != std::string::npos) return {0.8F, 1.2F};
  if (tensor.name == "embedding.weight" || tensor.name == "lm_head.weight") return {-0.0625F, 0.0625F};
  const float bound = 1.0F / std::sqrt(static_cast<float>(in));
  return {-bound, bound};
}

template <class T>
void fill(SafetensorsWriter& writer, std::uint64_t elements, std::uint64_t key, std::pair<float, float> range) {
  constexpr std::size_t kBlock = std::size_t{1} << 16;
  std::vector<T> block(std::min<std::uint64_t>(elements, kBlock));
  for (std::uint64_t begin = 0; begin < elements; begin += block.size()) {
    const std::size_t n = std::min<std::uint64_t>(block.size(), elements - begin);
    for (std::size_t i = 0; i < n; ++i) {
      block[i] = kernels::from_float<T>(uniform(key, begin + i, range.first, range.second));
    }
    writer.write(std::as_bytes(std::span(block.data(), n)));
  }
}

void write_text(const fs::path& path, std::string_view text) {
  std::FILE* file = std::fopen(path.c_str(), "wbe");
  bool ok = file != nullptr && std::fwrite(text.data(), 1, text.size(), file) == text.size();
  int error = errno;
  if (file != nullptr && std::fclose(file) != 0 && ok) {
    ok = false;
    error = errno;
  }
  if (!ok) throw std::system_error(error, std::generic_category(), path.string() + ": cannot write");
}

/// Consecutive tensors that share a file.
std::vector<std::vector<TensorDeclaration>> shards_of(std::vector<TensorDeclaration> tensors, std::uint64_t max_bytes) {
  std::vector<std::vector<TensorDeclaration>> shards(1);
  std::uint64_t bytes = 0;
  for (TensorDeclaration& tensor : tensors) {
    if (max_bytes != 0 && !shards.back().empty() && bytes + tensor.bytes() > max_bytes) {
      shards.emplace_back();
      bytes = 0;
    }
    bytes += tensor.bytes();
    shards.back().push_back(std::move(tensor));
  }
  return shards;
}

std::string index_of(const std::vector<std::vector<TensorDeclaration>>& shards, const std::vector<std::string>& names) {
  std::uint64_t bytes = 0;
  std::string map;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    for (const TensorDeclaration& tensor : shards[i]) {
      map += fmt::format("{}\n    \"{}\": \"{}\"", map.empty() ? "" : ",", tensor.name, names[i]);
      bytes += tensor.bytes();
    }
  }
  return fmt::format("{{\n  \"metadata\": {{\"total_size\": {}}},\n  \"weight_map\": {{{}\n  }}\n}}\n", bytes, map);
}

}  // namespace

std::uint64_t TensorDeclaration::elements() const {
  std::uint64_t product = 1;
  for (const std::int64_t extent : shape) product *= static_cast<std::uint64_t>(extent);
  return product;
}

SafetensorsWriter::SafetensorsWriter(const fs::path& path, std::span<const TensorDeclaration> tensors)
    : path_(path), file_(std::fopen(path.c_str(), "wbe")) {
  if (!file_) fail();
  const std::string header = header_of(tensors);
  std::byte length[8];
  for (unsigned i = 0; i < 8; ++i) length[i] = static_cast<std::byte>(header.size() >> (8 * i));
  bytes_left_ = sizeof(length) + header.size();
  for (const TensorDeclaration& tensor : tensors) bytes_left_ += tensor.bytes();
  write(length);
  write(std::as_bytes(std::span(header)));
}

void SafetensorsWriter::write(std::span<const std::byte> bytes) {
  if (bytes.size() > bytes_left_) throw std::logic_error(path_.string() + ": more bytes than were declared");
  if (std::fwrite(bytes.data(), 1, bytes.size(), file_.get()) != bytes.size()) fail();
  bytes_left_ -= bytes.size();
}

void SafetensorsWriter::close() {
  if (bytes_left_ != 0) throw std::logic_error(path_.string() + ": fewer bytes than were declared");
  if (std::fclose(file_.release()) != 0) fail();
}

void SafetensorsWriter::fail() const {
  const int error = errno;
  throw std::system_error(error, std::generic_category(), path_.string() + ": cannot write");
}

void write_synthetic_model(const fs::path& folder, const Config& config, DType dtype, std::uint64_t seed,
                           std::uint64_t max_shard_bytes, bool untied_head) {
  std::vector<TensorDeclaration> tensors;
  for (TensorSpec& spec : tensor_specs(config)) {
    const bool is_extra_head = spec.use == TensorSpec::Use::kOptional && untied_head;
    if (spec.use != TensorSpec::Use::kRequired && !is_extra_head) continue;
    if (spec.may_have_more_rows) spec.shape[0] += 2 * config.model_dim;  // as the public class has them
    tensors.push_back({std::move(spec.name), dtype, std::move(spec.shape)});
  }
  const auto shards = shards_of(std::move(tensors), max_shard_bytes);
  std::vector<std::string> names = {"model.safetensors"};
  if (shards.size() > 1) {
    names.clear();
    for (std::size_t i = 0; i < shards.size(); ++i) {
      names.push_back(fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size()));
    }
  }

  fs::create_directories(folder);
  std::int64_t in = 1;  // of the weight last met: a bias follows its weight
  for (std::size_t i = 0; i < shards.size(); ++i) {
    SafetensorsWriter writer(folder / names[i], shards[i]);
    for (const TensorDeclaration& tensor : shards[i]) {
      if (tensor.shape.size() == 2) in = tensor.shape[1];
      Crc64 key;
      key.update(seed);
      key.update(tensor.name);
      const auto range = range_of(tensor, in);
      const std::uint64_t elements = tensor.elements();
      if (dtype == DType::kF32) {
        fill<float>(writer, elements, key.value(), range);
      } else if (dtype == DType::kF16) {
        fill<kernels::Float16>(writer, elements, key.value(), range);
      } else {
        fill<kernels::BFloat16>(writer, elements, key.value(), range);
      }
    }
    writer.close();
  }
  if (shards.size() > 1) write_text(folder / "model.safetensors.index.json", index_of(shards, names));
  write_text(folder / "config.json", to_json(config));
}

}  // namespace mmrec::models
