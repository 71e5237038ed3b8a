// Bytes as a writer of other intentions would seal them (engine/session/sealed_bytes.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "models/files/checksum.h"

namespace mmrec::test {

/// With correct size and checksum, so that the reader gets past them.
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

}  // namespace mmrec::test
