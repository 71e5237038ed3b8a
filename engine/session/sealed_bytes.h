// Bytes that are recognised, whole and undamaged, or refused: how saved states and state files begin and end.
//
//   0  char[8]  what it is        16  u64  bytes in all, checksum included
//   8  u32      0x01020304        24       the format's own
//  12  u32      version                u64 CRC-64/XZ of all before it
//
// Numbers are little-endian.
#pragma once

#include <fmt/format.h>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace mmrec::engine {

/// What bytes of a format begin with, and what messages call them.
struct SealedFormat {
  std::string_view magic;          // 8 bytes
  std::uint32_t version = 0;       // that is written
  std::string_view what;           // "saved state"
  std::uint32_t oldest = version;  // that is read
};
inline constexpr std::size_t kSealBeginBytes = 24;
inline constexpr std::size_t kSealEndBytes = 8;

static_assert(std::endian::native == std::endian::little, "the numbers of files are little-endian");

class SealedWriter {
 public:
  /// `total_bytes`, with both ends, must come true.
  SealedWriter(const SealedFormat& format, std::uint64_t total_bytes);

  void put(std::span<const std::byte> bytes) { out_.insert(out_.end(), bytes.begin(), bytes.end()); }
  template <class T>
  requires std::is_arithmetic_v<T>
  void put(T value) { put(std::as_bytes(std::span(&value, 1))); }
  template <class T>
  requires std::is_arithmetic_v<T>
  void put(const std::vector<T>& values) { put(std::as_bytes(std::span(values))); }
  std::vector<std::byte> finish();

 private:
  std::vector<std::byte> out_;
};

class SealedReader {
 public:
  /// What it is, then whether it is whole: throws std::runtime_error saying what was found and expected of the first of
  /// these that fails. `name` stands for the bytes in messages. `least_bytes` are those with both ends that
  /// the caller will ask for unchecked.
  SealedReader(std::span<const std::byte> bytes, const SealedFormat& format, std::string name,
               std::size_t least_bytes = kSealBeginBytes + kSealEndBytes);

  std::uint32_t version() const { return version_; }
  /// Between both ends, and not yet read. What follows must ask for no more.
  std::size_t left() const { return bytes_.size(); }
  template <class T>
  T get() {
    T value;
    std::memcpy(&value, bytes_.data(), sizeof value);
    bytes_ = bytes_.subspan(sizeof value);
    return value;
  }
  /// Throws std::runtime_error naming `values_name` and index for a value that is not finite.
  template <class T>
  std::vector<T> get(std::uint64_t count, std::string_view values_name) {
    std::vector<T> values(count);
    if (count != 0) std::memcpy(values.data(), bytes_.data(), count * sizeof(T));
    bytes_ = bytes_.subspan(count * sizeof(T));
    for (std::size_t i = 0; i < values.size(); ++i) {
      if constexpr (std::is_floating_point_v<T>) {
        if (!std::isfinite(values[i])) {
          fail(fmt::format("{}[{}] is {}, expected a finite number", values_name, i, values[i]));
        }
      }
    }
    return values;
  }
  std::span<const std::byte> get_bytes(std::size_t count) {
    const auto taken = bytes_.first(count);
    bytes_ = bytes_.subspan(count);
    return taken;
  }
  template <class T>
  void expect(std::string_view what, T found, T expected) const {
    if (found != expected) fail(fmt::format("found {} {}, expected {}", what, found, expected));
  }
  [[noreturn]] void fail(const std::string& message) const { throw std::runtime_error(name_ + ": " + message); }

 private:
  std::string name_;
  std::span<const std::byte> bytes_;
  std::uint32_t version_ = 0;
};

}  // namespace mmrec::engine
