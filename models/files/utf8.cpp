// The well-formed sequences of Unicode's table 3-7.
#include "models/files/utf8.h"

#include <cstdint>
#include <cstring>

namespace mmrec::models {

Utf8Unit first_unit(std::string_view text) {
  if (text.empty()) return {};
  const auto lead = static_cast<unsigned char>(text[0]);
  if (lead < 0x80) return {lead, 1, true, false};

  // Bytes that follow, and the range of the first of them: it is what excludes overlong forms and surrogates.
  std::size_t follow = 0;
  unsigned low = 0x80;
  unsigned high = 0xBF;
  char32_t code = 0;
  if (lead >= 0xC2 && lead <= 0xDF) {
    follow = 1;
    code = lead & 0x1FU;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    follow = 2;
    code = lead & 0x0FU;
    if (lead == 0xE0) low = 0xA0;
    if (lead == 0xED) high = 0x9F;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    follow = 3;
    code = lead & 0x07U;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;
  } else {
    return {0xFFFD, 1, false, false};
  }
  for (std::size_t i = 1; i <= follow; ++i) {
    if (i == text.size()) return {0xFFFD, i, false, true};
    const auto byte = static_cast<unsigned char>(text[i]);
    if (byte < low || byte > high) return {0xFFFD, i, false, false};
    code = (code << 6) | (byte & 0x3FU);
    low = 0x80;
    high = 0xBF;
  }
  return {code, follow + 1, true, false};
}

std::size_t ascii_prefix(std::string_view text) {
  std::size_t size = 0;
  for (std::uint64_t eight = 0; size + sizeof(eight) <= text.size(); size += sizeof(eight)) {
    std::memcpy(&eight, text.data() + size, sizeof(eight));
    if ((eight & 0x8080808080808080U) != 0) break;
  }
  return size;
}

bool is_valid_utf8(std::string_view text) {
  while (!text.empty()) {
    const Utf8Unit unit = first_unit(text);
    if (!unit.valid) return false;
    text.remove_prefix(unit.length);
    text.remove_prefix(ascii_prefix(text));
  }
  return true;
}

std::string replace_invalid_utf8(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const Utf8Unit unit = first_unit(text);
    out.append(unit.valid ? text.substr(0, unit.length) : kReplacement);
    text.remove_prefix(unit.length);
  }
  return out;
}

}  // namespace mmrec::models
