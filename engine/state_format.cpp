// Layout: header of 88 bytes, payload, checksum of all before it.
//
//   0  char[8]  "mmrecST\n"      16  u64  bytes in all, checksum included
//   8  u32      0x01020304       24  u64  model fingerprint
//  12  u32      version          32  i64  L, B, D, M, C, V, position
//  88  f32 h [L, B, D]; f32 memory [L, B, M, D]; f64 segment_sum [L, B, D]; f32 logits [B, V], absent at position 0
//      u64 CRC-64/XZ
#include "engine/state_format.h"

#include <fmt/format.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string_view>
#include <type_traits>

#include "models/files/checked.h"
#include "models/files/checksum.h"

namespace mmrec::engine {
namespace {

constexpr std::string_view kMagic = "mmrecST\n";
constexpr std::uint32_t kByteOrder = 0x01020304U;
constexpr std::size_t kHeaderBytes = 88;
constexpr std::size_t kChecksumBytes = 8;

struct Counts {
  std::uint64_t h = 0, memory = 0, segment_sum = 0, logits = 0;  // elements
  std::uint64_t total_bytes = 0;                                 // of the whole saved state
};

/// Sizes that `shape` implies. Throws std::runtime_error if they do not fit in memory.
Counts counts_of(const StateShape& shape, bool has_logits) {
  using models::CheckedSize;
  const auto size = [](std::int64_t n) { return CheckedSize(static_cast<std::uint64_t>(n)); };
  const CheckedSize h = size(shape.num_layers) * size(shape.batch) * size(shape.model_dim);
  const CheckedSize memory = h * size(shape.memory_slots);
  const CheckedSize logits = has_logits ? size(shape.batch) * size(shape.vocab_size) : CheckedSize(0);
  const CheckedSize total = CheckedSize(kHeaderBytes + kChecksumBytes) + h * 12 + memory * 4 + logits * 4;
  if (!total.at_most(std::numeric_limits<std::ptrdiff_t>::max())) {
    throw std::runtime_error("saved state: the shapes of this session exceed the address space");
  }
  return {h.value(), memory.value(), h.value(), logits.value(), total.value()};
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

StateShape shape_of(const models::Config& config, int batch, std::uint64_t fingerprint) {
  return {fingerprint,           config.num_layers, batch, config.model_dim, config.memory_slots,
          config.memory_segment, config.vocab_size};
}

std::vector<std::byte> encode_state(const models::HostState& state, const StateShape& shape) {
  const Counts counts = counts_of(shape, state.position > 0);
  if (state.batch != shape.batch || state.h.size() != counts.h || state.memory.size() != counts.memory ||
      state.segment_sum.size() != counts.segment_sum || state.logits.size() != counts.logits) {
    throw std::logic_error("an executor saved a state of other shapes than its configuration's");
  }
  Writer out(counts.total_bytes);
  out.put(kMagic);
  out.put(kByteOrder);
  out.put(kStateVersion);
  out.put(counts.total_bytes);
  out.put(shape.fingerprint);
  for (const std::int64_t n : {shape.num_layers, shape.batch, shape.model_dim, shape.memory_slots, shape.memory_segment,
                               shape.vocab_size, state.position}) {
    out.put(n);
  }
  out.put(state.h);
  out.put(state.memory);
  out.put(state.segment_sum);
  out.put(state.logits);
  return out.finish();
}

models::HostState decode_state(std::span<const std::byte> bytes, const StateShape& shape) {
  // What it is, then whether it is whole, then whether it fits: the message names the first of these that fails.
  if (bytes.size() < kHeaderBytes + kChecksumBytes) {
    throw std::runtime_error(
        fmt::format("saved state: found {} bytes, expected at least {}", bytes.size(), kHeaderBytes + kChecksumBytes));
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
  expect("num_layers", in.get<std::int64_t>(), shape.num_layers);
  expect("batch", in.get<std::int64_t>(), shape.batch);
  expect("model_dim", in.get<std::int64_t>(), shape.model_dim);
  expect("memory_slots", in.get<std::int64_t>(), shape.memory_slots);
  expect("memory_segment", in.get<std::int64_t>(), shape.memory_segment);
  expect("vocab_size", in.get<std::int64_t>(), shape.vocab_size);
  models::HostState state;
  state.batch = shape.batch;
  state.position = in.get<std::int64_t>();
  if (state.position < 0) {
    throw std::runtime_error(fmt::format("saved state: found position {}, expected >= 0", state.position));
  }
  const Counts counts = counts_of(shape, state.position > 0);
  expect("size", static_cast<std::uint64_t>(bytes.size()), counts.total_bytes);
  state.h = in.get<float>(counts.h, "h");
  state.memory = in.get<float>(counts.memory, "memory");
  state.segment_sum = in.get<double>(counts.segment_sum, "segment_sum");
  state.logits = in.get<float>(counts.logits, "logits");
  return state;
}

}  // namespace mmrec::engine
