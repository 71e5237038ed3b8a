// Text inside of HTML and SVG.
#pragma once

#include <string>
#include <string_view>

#include "models/files/utf8.h"

namespace mmrec::apps {

/// `text` with the characters that mean something to a parser written as entities, also for attributes in double
/// quotes. Control characters that XML knows nothing of, and bytes that are no UTF-8, become U+FFFD.
inline std::string html_text(std::string_view text) {
  std::string escaped;
  for (const char c : models::replace_invalid_utf8(text)) {
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '"':
        escaped += "&quot;";
        break;
      case '\'':
        escaped += "&#39;";
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t' && c != '\r') {
          escaped += models::kReplacement;
        } else {
          escaped += c;
        }
    }
  }
  return escaped;
}

}  // namespace mmrec::apps
