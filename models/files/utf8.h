// UTF-8 as it is read here: strict (no overlong forms, no surrogates, nothing above U+10FFFF), and never an error:
// bytes that are no UTF-8 become U+FFFD, one for each maximal ill-formed part, as Unicode recommends and as Python's
// errors="replace" does.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace mmrec::models {

/// U+FFFD, what stands for bytes that are no UTF-8.
inline constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

/// What a text begins with.
struct Utf8Unit {
  char32_t code = 0xFFFD;  // the character, U+FFFD if ill-formed
  std::size_t length = 0;  // bytes of the character or of the ill-formed part; 0 only for an empty text
  bool valid = false;
  bool incomplete = false;  // ill-formed only because the text ends inside a character
};

Utf8Unit first_unit(std::string_view text);

/// Bytes of ASCII that `text` begins with, in steps of 8: a long text is looked through at 8 times the rate.
std::size_t ascii_prefix(std::string_view text);

bool is_valid_utf8(std::string_view text);

/// `text` with every ill-formed part replaced by U+FFFD.
std::string replace_invalid_utf8(std::string_view text);

/// White space as Python's str.isspace() and \s of its re have it.
constexpr bool is_python_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

/// True for the bytes 10xxxxxx, which begin no character.
constexpr bool is_continuation(char c) { return (static_cast<unsigned char>(c) & 0xC0U) == 0x80U; }

}  // namespace mmrec::models
