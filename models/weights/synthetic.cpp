// Random model folders, streamed block by block.
#include "models/weights/synthetic.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <fstream>
#include <span>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "models/files/checked.h"
#include "models/files/checksum.h"
#include "models/files/elements.h"
#include "models/files/safetensors_writer.h"

namespace mmrec::models {
namespace {

namespace fs = std::filesystem;
using kernels::DType;

/// A file being written. Throws std::system_error with errno; one that was not closed goes away.
class Output {
 public:
  explicit Output(fs::path path) : path_(std::move(path)), file_(path_, std::ios::binary) { check(); }
  ~Output() {
    std::error_code ignored;
    if (!closed_) fs::remove(path_, ignored);
  }
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;
  void write(std::string_view bytes) {
    file_.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    check();
  }
  void close() {
    file_.close();
    check();
    closed_ = true;
  }

 private:
  void check() const {
    if (!file_) throw std::system_error(errno, std::generic_category(), path_.string() + ": cannot write");
  }

  fs::path path_;
  std::ofstream file_;
  bool closed_ = false;
};

std::uint64_t elements_of(const TensorSpec& tensor) { return checked_product(tensor.shape).value(); }

/// Uniform in (low, high), number `i` of the stream `key`: splitmix64, whose every output stands alone.
float uniform(std::uint64_t key, std::uint64_t i, float low, float high) {
  std::uint64_t z = key + (i + 1) * 0x9e3779b97f4a7c15U;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
  z ^= z >> 31;
  const float unit = (static_cast<float>(z >> 41) + 0.5F) * 0x1p-23F;
  return low + (high - low) * unit;
}

/// Bounds of a tensor's values, `in` being the inputs of the weight that it is or belongs to.
std::pair<float, float> range_of(const TensorSpec& tensor, std::int64_t in) {
  if (tensor.name.find("norm") != std::string::npos) return {0.8F, 1.2F};
  if (tensor.name == "embedding.weight") return {-0.0625F, 0.0625F};
  const float bound = 1.0F / std::sqrt(static_cast<float>(in));
  return {-bound, bound};
}

void check_room(const fs::path& folder, std::span<const TensorSpec> tensors, DType dtype) {
  CheckedSize bytes = 0;
  for (const TensorSpec& tensor : tensors) bytes += checked_product(tensor.shape) * kernels::size_of(dtype);
  std::error_code unknown;
  const fs::space_info space = fs::space(folder, unknown);
  if (unknown || bytes.at_most(space.available)) return;
  throw std::system_error(
      ENOSPC, std::generic_category(),
      fmt::format("{}: the model needs {} bytes, the file system has {}", folder.string(),
                  bytes.overflowed() ? "more than 2^64" : std::to_string(bytes.value()), space.available));
}

void fill(Output& file, std::uint64_t elements, std::uint64_t key, std::pair<float, float> range, DType dtype,
          const std::function<void()>& between_blocks) {
  constexpr std::uint64_t kBlock = std::uint64_t{1} << 16;
  with_element_type(dtype, [&](auto zero) {
    std::vector<decltype(zero)> block;
    for (std::uint64_t begin = 0; begin < elements; begin += block.size()) {
      if (between_blocks) between_blocks();
      block.resize(std::min(elements - begin, kBlock));
      for (std::size_t i = 0; i < block.size(); ++i) {
        block[i] = kernels::from_float<decltype(zero)>(uniform(key, begin + i, range.first, range.second));
      }
      file.write({reinterpret_cast<const char*>(block.data()), block.size() * sizeof(zero)});
    }
  });
}

}  // namespace

void write_synthetic_folder(const fs::path& folder, const SyntheticModel& model, DType dtype, std::uint64_t seed,
                            const std::function<void()>& between_blocks) {
  fs::create_directories(folder);
  check_room(folder, model.tensors, dtype);
  std::vector<NewTensor> stored;
  for (const TensorSpec& tensor : model.tensors) {
    stored.push_back({tensor.name, name_in_file(dtype), tensor.shape, elements_of(tensor) * kernels::size_of(dtype)});
  }
  Output file(folder / "model.safetensors");
  file.write(safetensors_header(stored));
  std::int64_t in = 1;  // of the weight last met: a bias follows its weight
  for (const TensorSpec& tensor : model.tensors) {
    if (tensor.shape.size() == 2) in = tensor.shape[tensor.name.ends_with(kFlaxKernel.suffix) ? 0 : 1];
    Crc64 key;
    key.update(seed);
    key.update(tensor.name);
    fill(file, elements_of(tensor), key.value(), range_of(tensor, in), dtype, between_blocks);
  }
  file.close();
  Output text(folder / "config.json");
  text.write(model.config);
  text.close();
}

}  // namespace mmrec::models
