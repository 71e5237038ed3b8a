#include "engine/session/sealed_bytes.h"

#include <utility>

#include "models/files/checksum.h"

namespace mmrec::engine {
namespace {

constexpr std::uint32_t kByteOrder = 0x01020304U;

std::span<const std::byte> as_bytes(std::string_view text) { return std::as_bytes(std::span(text)); }

}  // namespace

SealedWriter::SealedWriter(const SealedFormat& format, std::uint64_t total_bytes) {
  out_.reserve(total_bytes);
  put(as_bytes(format.magic));
  put(kByteOrder);
  put(format.version);
  put(total_bytes);
}

std::vector<std::byte> SealedWriter::finish() {
  put(models::crc64(out_));
  return std::move(out_);
}

SealedReader::SealedReader(std::span<const std::byte> bytes, const SealedFormat& format, std::string name,
                           std::size_t least_bytes)
    : name_(std::move(name)), bytes_(bytes) {
  if (bytes.size() < least_bytes) fail(fmt::format("found {} bytes, expected at least {}", bytes.size(), least_bytes));
  if (std::memcmp(bytes.data(), format.magic.data(), format.magic.size()) != 0) {
    fail(fmt::format("not a {} (its first 8 bytes are not \"{}\\n\")", format.what, format.magic.substr(0, 7)));
  }
  bytes_ = bytes.subspan(format.magic.size());
  if (const auto order = get<std::uint32_t>(); order != kByteOrder) {
    fail(fmt::format("found byte order mark {:#010x}, expected {:#010x}", order, kByteOrder));
  }
  version_ = get<std::uint32_t>();
  if (version_ < format.oldest || version_ > format.version) {
    fail(fmt::format("of {} version of mmrec: found format {}, expected {}. Make it again with this version",
                     version_ < format.oldest ? "an earlier" : "a later", version_, format.version));
  }
  if (const auto total = get<std::uint64_t>(); total != bytes.size()) {
    fail(fmt::format("found {} bytes, expected {} as its header says", bytes.size(), total));
  }
  const std::size_t checked = bytes.size() - kSealEndBytes;
  std::uint64_t stored = 0;
  std::memcpy(&stored, bytes.data() + checked, sizeof stored);
  if (const std::uint64_t computed = models::crc64(bytes.first(checked)); stored != computed) {
    fail(fmt::format("damaged: found checksum {:#018x}, expected {:#018x}", computed, stored));
  }
  bytes_ = bytes_.first(bytes_.size() - kSealEndBytes);
}

}  // namespace mmrec::engine
