// What tests of model folders share: temporary folders, safetensors files put together by hand, and what an error says.
#pragma once

#include "models/mmrec/config.h"
#include "tests/support/refusal.h"
#include "tests/support/safetensors_reader.h"

namespace mmrec::test {

/// A folder of its own that goes away with it.
class TempFolder {
 public:
  TempFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "mmrec-test-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    path_ = name;
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(std::string_view name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

inline void write_file(const std::filesystem::path& path, std::string_view bytes) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (!out) throw std::runtime_error("cannot write " + path.string());
}

/// A model's folder: "mmrec-12m" is bundled, others are fixtures.
inline std::filesystem::path folder_of(std::string_view name) {
  return std::filesystem::path(name.starts_with("mmrec-") ? MMREC_WEIGHTS : MMREC_FIXTURES) / name;
}

/// The configuration in a model folder.
template <class Config>
Config config_of(const std::filesystem::path& folder, const models::WarningSink& warn = {}) {
  return Config::parse(read_file(folder / "config.json"), (folder / "config.json").string(), warn);
}

/// Length, header and data of a safetensors file, whatever the header says.
inline std::string safetensors_bytes(std::string_view header, std::string_view data = {}) {
  std::string bytes(8, '\0');
  const std::uint64_t length = header.size();
  std::memcpy(bytes.data(), &length, 8);
  return bytes.append(header).append(data);
}

/// The tensors of a checkpoint as a test changes them, in the order they are written.
struct EditableTensor : RawTensor {
  float at(std::size_t i) const { return RawTensor::at<float>(i); }
  void set(std::size_t i, float x) { std::memcpy(bytes.data() + i * sizeof(float), &x, sizeof(float)); }
  /// Rewrites numbers of F32 in 16 bits.
  template <class T>
  void narrow() {
    std::string narrowed;
    for (std::size_t i = 0; i < bytes.size() / sizeof(float); ++i) {
      const T x = kernels::from_float<T>(at(i));
      narrowed.append(reinterpret_cast<const char*>(&x), sizeof(T));
    }
    dtype = std::is_same_v<T, kernels::Float16> ? "F16" : "BF16";
    bytes = narrowed;
  }
};

class EditableCheckpoint {
 public:
  EditableCheckpoint() = default;
  explicit EditableCheckpoint(const std::filesystem::path& file) {
    for (RawTensor& tensor : read_safetensors(file)) tensors.push_back({std::move(tensor)});
  }

  EditableTensor& at(std::string_view name) {
    for (EditableTensor& tensor : tensors) {
      if (tensor.name == name) return tensor;
    }
    throw std::out_of_range(std::string(name));
  }
  void erase(std::string_view name) {
    std::erase_if(tensors, [&](const EditableTensor& tensor) { return tensor.name == name; });
  }
  void add_zeros(std::string name, std::vector<std::int64_t> shape) {
    std::size_t elements = 1;
    for (const std::int64_t extent : shape) elements *= static_cast<std::size_t>(extent);
    tensors.push_back({std::move(name), "F32", std::move(shape), std::string(elements * 4, '\0')});
  }
  std::string bytes() const {
    std::string header = "{";
    std::string data;
    for (const EditableTensor& tensor : tensors) {
      const nlohmann::json entry = {{"dtype", tensor.dtype},
                                    {"shape", tensor.shape},
                                    {"data_offsets", {data.size(), data.size() + tensor.bytes.size()}}};
      header += (header.size() > 1 ? ",\"" : "\"") + tensor.name + "\":" + entry.dump();
      data += tensor.bytes;
    }
    return safetensors_bytes(header + "}", data);
  }
  void write(const std::filesystem::path& file) const { write_file(file, bytes()); }

  std::vector<EditableTensor> tensors;
};

/// The checkpoint of a folder in two shards with an index, a tensor in each in turn.
inline void write_shards(const std::filesystem::path& from, const std::filesystem::path& folder) {
  const std::string names[] = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"};
  const EditableCheckpoint all(from / "model.safetensors");
  EditableCheckpoint shards[2];
  nlohmann::json map;
  for (std::size_t i = 0; i < all.tensors.size(); ++i) {
    shards[i % 2].tensors.push_back(all.tensors[i]);
    map[all.tensors[i].name] = names[i % 2];
  }
  for (std::size_t i = 0; i < 2; ++i) shards[i].write(folder / names[i]);
  write_file(folder / "model.safetensors.index.json", nlohmann::json{{"weight_map", map}}.dump());
}

/// A model's folder to change: its checkpoint in memory, its configuration on the disk.
struct EditedFolder : TempFolder {
  explicit EditedFolder(const std::filesystem::path& of) : checkpoint(of / "model.safetensors") {
    config(read_file(of / "config.json"));
  }
  void config(std::string_view text) const { write_file(*this / "config.json", text); }
  /// Where it lies with all changes.
  const std::filesystem::path& written() const {
    checkpoint.write(*this / "model.safetensors");
    return path();
  }
  EditableCheckpoint checkpoint;
};

}  // namespace mmrec::test
