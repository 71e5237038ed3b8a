// Layout: header, payload, checksum of all before it.
//
//   0  char[8]  "mmrecST\n"      16  u64  bytes in all, checksum included
//   8  u32      0x01020304       24  u64  model fingerprint
//  12  u32      version          32  i64  numbers of the model's, B behind the first of them; position
//      the model's tensors, f32 or f64; u64 CRC-64/XZ
#include "engine/state_format.h"

#include <fmt/format.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string_view>
#include <type_traits>
#include <variant>

#include "models/files/checked.h"
#include "models/files/checksum.h"

namespace mmrec::engine {
namespace {

constexpr std::string_view kMagic = "mmrecST\n";
constexpr std::uint32_t kByteOrder = 0x01020304U;
constexpr std::size_t kFixedBytes = 32;  // before the model's numbers
constexpr std::size_t kChecksumBytes = 8;

std::size_t header_bytes(const models::StateLayout& layout) { return kFixedBytes + 8 * (layout.numbers.size() + 2); }

/// Elements of a tensor and bytes of a whole saved state, as `shape` implies them. Throws std::runtime_error if they do
/// not fit in memory.
struct Counts {
  std::vector<std::uint64_t> elements;  // of each part
  std::uint64_t total_bytes = 0;
};
Counts counts_of(const StateShape& shape, std::int64_t position) {
  using models::CheckedSize;
  const auto size = [](std::int64_t n) { return CheckedSize(static_cast<std::uint64_t>(n)); };
  Counts counts;
  CheckedSize total = header_bytes(shape.layout) + kChecksumBytes;
  for (const models::StatePart& part : shape.layout.parts) {
    const bool is_there = part.at_position_0 || position > 0;
    const CheckedSize elements = is_there ? size(part.rows) * size(shape.batch) * size(part.cols) : CheckedSize(0);
    total += elements * part.element_bytes();
    counts.elements.push_back(elements.overflowed() ? 0 : elements.value());
  }
  if (!total.at_most(std::numeric_limits<std::ptrdiff_t>::max())) {
    throw std::runtime_error("saved state: the shapes of this session exceed the address space");
  }
  counts.total_bytes = total.value();
  return counts;
}

/// visit(name, number) for what a header says between the fingerprint and the position.
template <class Visit>
void for_each_number(const StateShape& shape, const Visit& visit) {
  bool is_first = true;
  for (const models::StateLayout::Number& number : shape.layout.numbers) {
    visit(number.name, number.value);
    if (is_first) visit(std::string_view("batch"), shape.batch);
    is_first = false;
  }
}

/// The bits of an integer or float in the file's byte order (its own inverse).
template <class T>
auto little_endian(T value) {
  using Bits = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;
  auto bits = std::bit_cast<Bits>(value);
  if constexpr (std::endian::native == std::endian::big) {
    Bits swapped = 0;
    for (std::size_t i = 0; i < sizeof(T); ++i) swapped |= ((bits >> (8 * i)) & 0xFFU) << (8 * (sizeof(T) - 1 - i));
    bits = swapped;
  }
  return bits;
}

class Writer {
 public:
  explicit Writer(std::size_t bytes) { out_.reserve(bytes); }
  void put(std::string_view text) { append(text.data(), text.size()); }
  template <class T>
  void put(T value) {
    const auto bits = little_endian(value);
    append(&bits, sizeof bits);
  }
  template <class T>
  void put(const std::vector<T>& values) {
    if constexpr (std::endian::native == std::endian::little) {
      append(values.data(), values.size() * sizeof(T));
    } else {
      for (const T value : values) put(value);
    }
  }
  std::vector<std::byte> finish() {
    put(models::crc64(out_));
    return std::move(out_);
  }

 private:
  void append(const void* data, std::size_t bytes) {
    const auto* p = static_cast<const std::byte*>(data);
    out_.insert(out_.end(), p, p + bytes);
  }
  std::vector<std::byte> out_;
};

/// Requires: as many bytes left as are asked for (the caller has compared the sizes).
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}
  template <class T>
  T get() {
    T value;
    std::memcpy(&value, bytes_.data(), sizeof value);
    bytes_ = bytes_.subspan(sizeof value);
    return std::bit_cast<T>(little_endian(value));
  }
  template <class T>
  std::vector<T> get(std::uint64_t count, std::string_view name) {
    std::vector<T> values(count);
    if (count != 0) std::memcpy(values.data(), bytes_.data(), count * sizeof(T));
    bytes_ = bytes_.subspan(count * sizeof(T));
    for (std::size_t i = 0; i < values.size(); ++i) {
      if constexpr (std::endian::native == std::endian::big) values[i] = std::bit_cast<T>(little_endian(values[i]));
      if (!std::isfinite(values[i])) {
        throw std::runtime_error(
            fmt::format("saved state: {}[{}] is {}, expected a finite number", name, i, values[i]));
      }
    }
    return values;
  }

 private:
  std::span<const std::byte> bytes_;
};

template <class T>
void expect(std::string_view what, T found, T expected) {
  if (found != expected) {
    throw std::runtime_error(fmt::format("saved state: found {} {}, expected {}", what, found, expected));
  }
}

}  // namespace

std::vector<std::byte> encode_state(const models::HostState& state, const StateShape& shape) {
  const Counts counts = counts_of(shape, state.position);
  const auto size_of = [](const models::HostState::Part& part) {
    return std::visit([](const auto& values) { return values.size(); }, part.values);
  };
  bool fits = state.batch == shape.batch && state.parts.size() == counts.elements.size();
  for (std::size_t i = 0; fits && i < state.parts.size(); ++i) {
    const bool is_float = std::holds_alternative<std::vector<float>>(state.parts[i].values);
    fits = size_of(state.parts[i]) == counts.elements[i] &&
           is_float == (shape.layout.parts[i].type == models::StatePart::Type::kF32);
  }
  if (!fits) throw std::logic_error("an executor saved a state of other shapes than its model's");
  Writer out(counts.total_bytes);
  out.put(kMagic);
  out.put(kByteOrder);
  out.put(kStateVersion);
  out.put(counts.total_bytes);
  out.put(shape.fingerprint);
  for_each_number(shape, [&](std::string_view, std::int64_t number) { out.put(number); });
  out.put(state.position);
  for (const models::HostState::Part& part : state.parts) {
    std::visit([&](const auto& values) { out.put(values); }, part.values);
  }
  return out.finish();
}

models::HostState decode_state(std::span<const std::byte> bytes, const StateShape& shape) {
  // What it is, then whether it is whole, then whether it fits: the message names the first of these that fails.
  const std::size_t least = header_bytes(shape.layout) + kChecksumBytes;
  if (bytes.size() < least) {
    throw std::runtime_error(fmt::format("saved state: found {} bytes, expected at least {}", bytes.size(), least));
  }
  if (std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) != 0) {
    throw std::runtime_error("saved state: not a saved state (its first 8 bytes are not \"mmrecST\\n\")");
  }
  Reader in(bytes.subspan(kMagic.size()));
  if (const auto order = in.get<std::uint32_t>(); order != kByteOrder) {
    throw std::runtime_error(
        fmt::format("saved state: found byte order mark {:#010x}, expected {:#010x}", order, kByteOrder));
  }
  expect("version", in.get<std::uint32_t>(), kStateVersion);
  if (const auto total = in.get<std::uint64_t>(); total != bytes.size()) {
    throw std::runtime_error(
        fmt::format("saved state: found {} bytes, expected {} as its header says", bytes.size(), total));
  }
  const std::uint64_t computed = models::crc64(bytes.first(bytes.size() - kChecksumBytes));
  if (const auto stored = Reader(bytes.last(kChecksumBytes)).get<std::uint64_t>(); stored != computed) {
    throw std::runtime_error(
        fmt::format("saved state: damaged: found checksum {:#018x}, expected {:#018x}", computed, stored));
  }
  if (const auto fingerprint = in.get<std::uint64_t>(); fingerprint != shape.fingerprint) {
    throw std::runtime_error(fmt::format("saved state: of another model: found fingerprint {:#018x}, expected {:#018x}",
                                         fingerprint, shape.fingerprint));
  }
  for_each_number(shape,
                  [&](std::string_view name, std::int64_t number) { expect(name, in.get<std::int64_t>(), number); });
  models::HostState state;
  state.batch = shape.batch;
  state.position = in.get<std::int64_t>();
  if (state.position < 0) {
    throw std::runtime_error(fmt::format("saved state: found position {}, expected >= 0", state.position));
  }
  const Counts counts = counts_of(shape, state.position);
  expect("size", static_cast<std::uint64_t>(bytes.size()), counts.total_bytes);
  for (std::size_t i = 0; i < counts.elements.size(); ++i) {
    const models::StatePart& part = shape.layout.parts[i];
    if (part.type == models::StatePart::Type::kF32) {
      state.parts.push_back({part.name, in.get<float>(counts.elements[i], part.name)});
    } else {
      state.parts.push_back({part.name, in.get<double>(counts.elements[i], part.name)});
    }
  }
  return state;
}

}  // namespace mmrec::engine
