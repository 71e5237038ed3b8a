// What holds for a tokenizer's file whatever its format.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <string_view>

#include "engine/tokenizer/tokenizer_model.h"
#include "models/files/file.h"

namespace mmrec::engine {

/// parse() of the file's bytes, whose errors say too what such a file looks like. Throws std::runtime_error beginning
/// with `name` for one that is too large.
template <class Parse>
auto parse_tokenizer_bytes(std::string_view bytes, const std::string& name, Parse parse) {
  if (bytes.size() > kMaxTokenizerBytes) {
    throw std::runtime_error(
        fmt::format("{}: found {} bytes, expected at most {}", name, bytes.size(), kMaxTokenizerBytes));
  }
  try {
    return parse();
  } catch (const std::runtime_error& error) {
    const std::string hint = models::content_hint(bytes.substr(0, 1024));
    if (hint.empty()) throw;
    throw std::runtime_error(error.what() + hint);
  }
}

}  // namespace mmrec::engine
