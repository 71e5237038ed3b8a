// Text for messages.
#include "models/files/text.h"

#include <fmt/format.h>

#include <algorithm>

namespace mmrec::models {
namespace {

bool is_plain_char(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == '.' || c == '-';
}

}  // namespace

std::size_t utf8_length(std::string_view text) {  // table 3-7 of the Unicode standard
  const auto byte = [&](std::size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U; };
  const auto in = [&](std::size_t i, unsigned low, unsigned high) { return byte(i) >= low && byte(i) <= high; };
  const unsigned first = byte(0);
  if (text.empty()) return 0;
  if (first < 0x80) return 1;
  if (first >= 0xc2 && first <= 0xdf) return in(1, 0x80, 0xbf) ? 2 : 0;
  if (first >= 0xe0 && first <= 0xef) {
    const unsigned low = first == 0xe0 ? 0xa0 : 0x80;
    const unsigned high = first == 0xed ? 0x9f : 0xbf;
    return in(1, low, high) && in(2, 0x80, 0xbf) ? 3 : 0;
  }
  if (first >= 0xf0 && first <= 0xf4) {
    const unsigned low = first == 0xf0 ? 0x90 : 0x80;
    const unsigned high = first == 0xf4 ? 0x8f : 0xbf;
    return in(1, low, high) && in(2, 0x80, 0xbf) && in(3, 0x80, 0xbf) ? 4 : 0;
  }
  return 0;
}

std::string quote(std::string_view text) {
  constexpr std::size_t kLimit = 96;
  std::string out = "\"";
  for (std::size_t i = 0; i < text.size();) {
    if (out.size() > kLimit) {
      out += "...";
      break;
    }
    const std::size_t length = utf8_length(text.substr(i));
    const auto byte = static_cast<unsigned char>(text[i]);
    if (length == 0 || byte < 0x20 || byte == 0x7f) {
      out += fmt::format("\\x{:02x}", byte);
      ++i;
      continue;
    }
    if (byte == '"' || byte == '\\') out += '\\';
    out.append(text.substr(i, length));
    i += length;
  }
  return out + '"';
}

std::string printable(std::string_view name) {
  const bool is_plain = !name.empty() && name.size() <= 128 && std::all_of(name.begin(), name.end(), is_plain_char);
  return is_plain ? std::string(name) : quote(name);
}

std::string list(std::span<const std::int64_t> numbers) {
  std::string out = "[";
  for (const std::int64_t number : numbers) out += (out.size() > 1 ? ", " : "") + std::to_string(number);
  return out + ']';
}

}  // namespace mmrec::models
