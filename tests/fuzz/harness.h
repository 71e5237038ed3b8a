// What harnesses share. A promise that does not hold ends the process, which is what a fuzzer and the tests see.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

#include "models/files/checksum.h"

namespace mmrec::fuzz {

inline void require(bool holds) {
  if (!holds) std::abort();
}

inline std::string_view text_of(const std::uint8_t* data, std::size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

/// A message of ours is one line.
inline void require_line(std::string_view message) {
  require(!message.empty() && message.find('\n') == std::string_view::npos);
}

/// The input cut at zero bytes into `count` parts: the last one has the rest, those that are missing are empty.
inline std::vector<std::string_view> parts_of(std::string_view input, std::size_t count) {
  std::vector<std::string_view> parts(count);
  for (std::size_t i = 0; i + 1 < count; ++i) {
    const std::size_t end = input.find('\0');
    parts[i] = input.substr(0, end);
    if (end == std::string_view::npos) return parts;
    input.remove_prefix(end + 1);
  }
  parts.back() = input;
  return parts;
}

/// Sealed bytes (engine/session/sealed_bytes.h) with their size and checksum made good, so that what lies behind is
/// reached.
inline std::vector<std::byte> sealed(std::span<const std::byte> input) {
  constexpr std::size_t kSizeAt = 16, kLeast = 32, kNumber = 8;
  std::vector<std::byte> bytes(input.begin(), input.end());
  if (bytes.size() < kLeast) return bytes;
  const std::uint64_t size = bytes.size();
  std::memcpy(&bytes[kSizeAt], &size, kNumber);
  const std::uint64_t crc = models::crc64(std::span<const std::byte>(bytes).first(bytes.size() - kNumber));
  std::memcpy(&bytes[bytes.size() - kNumber], &crc, kNumber);
  return bytes;
}

}  // namespace mmrec::fuzz
