// CRC-64/XZ: the 64-bit checksum of saved states and of a model's fingerprint.
//
// Every error burst of up to 64 bits, and so every single flipped bit, changes it. It is no protection against intent.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

namespace mmrec::models {

namespace detail {

using Crc64Tables = std::array<std::array<std::uint64_t, 256>, 8>;

// Called while the program is compiled, so that these lines count only where a test calls it too.
constexpr Crc64Tables make_crc64_tables() {
  Crc64Tables tables{};
  for (std::uint64_t byte = 0; byte < 256; ++byte) {
    std::uint64_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1u) != 0 ? 0xc96c5795d7870f42u : 0u);
    tables[0][byte] = crc;
  }
  for (std::size_t t = 1; t < 8; ++t) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      tables[t][byte] = tables[0][tables[t - 1][byte] & 0xffu] ^ (tables[t - 1][byte] >> 8);
    }
  }
  return tables;
}

inline constexpr Crc64Tables kCrc64Tables = make_crc64_tables();

}  // namespace detail

/// CRC-64/XZ of the bytes fed so far (polynomial 0x42f0e1eba9ea3693, reflected; check value of "123456789" is
/// 0x995dc9bbdf1939fa). Feeding in pieces or at once gives the same value.
class Crc64 {
 public:
  void update(std::span<const std::byte> bytes) {
    const std::byte* p = bytes.data();
    std::size_t n = bytes.size();
    std::uint64_t crc = crc_;
    for (; n >= 8;
         n -= 8, p += 8) {  // slicing by eight: eight table look-ups per eight bytes, independent of each other
      std::uint64_t word = 0;
      for (unsigned i = 0; i < 8; ++i) word |= std::uint64_t{std::to_integer<std::uint8_t>(p[i])} << (8 * i);
      crc ^= word;
      std::uint64_t next = 0;
      for (unsigned i = 0; i < 8; ++i) next ^= detail::kCrc64Tables[7 - i][(crc >> (8 * i)) & 0xffu];
      crc = next;
    }
    for (; n != 0; --n, ++p)
      crc = detail::kCrc64Tables[0][(crc ^ std::to_integer<std::uint8_t>(*p)) & 0xffu] ^ (crc >> 8);
    crc_ = crc;
  }
  void update(std::string_view text) { update(std::as_bytes(std::span(text))); }
  /// The eight bytes of `number`, little-endian.
  void update(std::uint64_t number) {
    std::array<std::byte, 8> bytes{};
    for (unsigned i = 0; i < 8; ++i) bytes[i] = static_cast<std::byte>(number >> (8 * i));
    update(std::span<const std::byte>(bytes));
  }
  std::uint64_t value() const { return ~crc_; }

 private:
  std::uint64_t crc_ = ~std::uint64_t{0};
};

/// CRC-64/XZ of one run of bytes.
inline std::uint64_t crc64(std::span<const std::byte> bytes) {
  Crc64 crc;
  crc.update(bytes);
  return crc.value();
}

}  // namespace mmrec::models
