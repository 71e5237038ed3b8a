// The safetensors header: JSON of {name: {dtype, shape, data_offsets}}, every rule enforced before a byte of data is
// read.
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "models/files/checked.h"
#include "models/files/checkpoint.h"
#include "models/files/elements.h"
#include "models/files/json.h"
#include "models/files/text.h"

namespace mmrec::models {
namespace {

constexpr std::size_t kMaxNameBytes = 512;
constexpr std::size_t kMaxRank = 8;

class HeaderParser {
 public:
  HeaderParser(std::string_view json, std::uint64_t data_bytes, const std::string& name)
      : data_bytes_(data_bytes), name_(name), reader_(bare(json), name, kMaxTensors + 1) {}

  std::vector<TensorInfo> parse() {
    reader_.begin_object();
    std::string key;
    while (reader_.next_key(key)) {
      if (key == "__metadata__") {
        metadata();
      } else {
        tensor(key);
      }
    }
    check_layout();
    return std::move(tensors_);
  }

 private:
  /// The text, if it is what the format adds to JSON: an object from the first byte on, and then nothing but spaces.
  std::string_view bare(std::string_view json) const {
    if (!json.starts_with('{')) fail("header does not begin with '{'");
    if (json[json.find_last_not_of(' ')] != '}') fail("header is followed by something other than spaces");
    return json;
  }

  void metadata() {
    reader_.begin_object();
    std::string key;
    while (reader_.next_key(key)) {
      if (reader_.peek() != JsonReader::Kind::kString) reader_.fail("expected a string");
      reader_.skip();
    }
  }

  void tensor(std::string_view name) {
    if (tensors_.size() == kMaxTensors) reader_.fail(fmt::format("more than {} tensors", kMaxTensors));
    if (name.empty() || name.size() > kMaxNameBytes) {
      reader_.fail(fmt::format("tensor name of {} bytes (expected 1 to {})", name.size(), kMaxNameBytes));
    }
    if (name.find('\0') != std::string_view::npos) reader_.fail("NUL in a tensor name");
    TensorInfo& info = tensors_.emplace_back();
    info.name = name;
    std::optional<kernels::DType> type;
    bool has_shape = false;
    bool has_offsets = false;
    reader_.begin_object();
    std::string key;
    while (reader_.next_key(key)) {
      if (key == "dtype") {
        type = dtype();
      } else if (key == "shape") {
        shape(info.shape);
        has_shape = true;
      } else if (key == "data_offsets") {
        offsets(info);
        has_offsets = true;
      } else {
        reader_.fail("unknown key (expected dtype, shape and data_offsets)");
      }
    }
    if (!type) fail(info, "dtype is missing");
    if (!has_shape) fail(info, "shape is missing");
    if (!has_offsets) fail(info, "data_offsets is missing");
    info.dtype = *type;
    check_bytes(info);
  }

  kernels::DType dtype() {
    const std::string text = reader_.string(64);
    std::string expected;
    for (const auto& [name, dtype] : kNamesInFile) {
      if (name == text) return dtype;
      expected += expected.empty() ? "" : dtype == kernels::DType::kI64 ? " or " : ", ";
      expected += name;
    }
    reader_.fail(fmt::format("found {}, expected {}", quote(text), expected));
  }

  void shape(std::vector<std::int64_t>& to) {
    reader_.begin_array();
    while (reader_.next_element()) {
      if (to.size() == kMaxRank) reader_.fail(fmt::format("more than {} dimensions", kMaxRank));
      to.push_back(non_negative());
    }
  }

  void offsets(TensorInfo& info) {
    std::uint64_t values[2] = {0, 0};
    std::size_t count = 0;
    reader_.begin_array();
    while (reader_.next_element()) {
      if (count == 2) reader_.fail("found more than 2 offsets, expected 2");
      values[count++] = static_cast<std::uint64_t>(non_negative());
    }
    if (count != 2) reader_.fail(fmt::format("found {} offsets, expected 2", count));
    info.begin = values[0];
    info.end = values[1];
    if (info.begin > info.end) {
      reader_.fail(fmt::format("begins at {}, after its end at {}", info.begin, info.end));
    }
    if (info.end > data_bytes_) {
      reader_.fail(fmt::format("ends at {}, beyond the {} bytes of data", info.end, data_bytes_));
    }
  }

  std::int64_t non_negative() {
    const std::int64_t value = reader_.integer();
    if (value < 0) reader_.fail(fmt::format("found {}, expected 0 or more", value));
    return value;
  }

  void check_bytes(const TensorInfo& info) const {
    const CheckedSize bytes = checked_product(info.shape) * kernels::size_of(info.dtype);
    if (bytes.overflowed()) fail(info, "shape does not fit in 64 bits");
    if (bytes.value() != info.bytes()) {
      fail(info,
           fmt::format("data_offsets: found {} bytes, expected {} by dtype and shape", info.bytes(), bytes.value()));
    }
  }

  /// The data must be covered exactly once: no hole, no overlap, nothing before or after.
  void check_layout() {
    std::stable_sort(tensors_.begin(), tensors_.end(), [](const TensorInfo& a, const TensorInfo& b) {
      return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
    });
    std::uint64_t end = 0;
    for (const TensorInfo& info : tensors_) {
      if (info.begin != end) {
        fail(info, fmt::format("data_offsets: begins at {}, expected {} ({})", info.begin, end,
                               info.begin < end ? "overlaps the tensor before" : "leaves a hole"));
      }
      end = info.end;
    }
    if (end != data_bytes_) {
      fail(fmt::format("data of the tensors ends at byte {}, but the file has {} bytes of data", end, data_bytes_));
    }
  }

  [[noreturn]] void fail(std::string_view message) const {
    throw std::runtime_error(fmt::format("{}: {}", name_, message));
  }
  [[noreturn]] void fail(const TensorInfo& info, std::string_view message) const {
    fail(fmt::format("{}: {}", printable(info.name), message));
  }

  std::uint64_t data_bytes_;
  const std::string& name_;
  JsonReader reader_;
  std::vector<TensorInfo> tensors_;
};

}  // namespace

std::vector<TensorInfo> parse_safetensors_header(std::string_view json, std::uint64_t data_bytes,
                                                 const std::string& name) {
  return HeaderParser(json, data_bytes, name).parse();
}

}  // namespace mmrec::models
