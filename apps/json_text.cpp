#include "apps/json_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "apps/cli.h"

namespace mmrec::apps {
namespace {

using Json = nlohmann::ordered_json;

bool is_too_deep(std::string_view text) {
  int depth = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      if (++depth > kDeepestJson) return true;
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return false;
}

}  // namespace

Json parse_json(std::string_view text) {
  // The library takes it for the end of the text.
  if (const auto nul = text.find('\0'); nul != text.npos) {
    throw std::runtime_error(fmt::format("'\\x00' at byte {}", nul + 1));
  }
  if (is_too_deep(text)) throw std::runtime_error(fmt::format("a value more than {} levels deep", kDeepestJson));
  try {
    return Json::parse(text);
  } catch (const Json::parse_error& error) {
    const std::size_t at = error.byte == 0 ? 0 : error.byte - 1;
    throw std::runtime_error(at >= text.size()
                                 ? std::string("the end of the line")
                                 : fmt::format("'{}' at byte {}", printable(text.substr(at, 20)), error.byte));
  } catch (const Json::out_of_range&) {
    throw std::runtime_error("a number out of range");
  }
}

Json parse_object(std::string_view line, const std::string& where) {
  const auto refuse = [&](const std::string& found) {
    throw RejectedFile(fmt::format("{}{}not a JSON object (found {}, expected an object on a line)", where,
                                   where.empty() ? "" : ": ", found));
  };
  Json object;
  try {
    object = parse_json(line);
  } catch (const std::runtime_error& error) {
    refuse(error.what());
  }
  if (!object.is_object()) refuse(printable(line.substr(0, 40)));
  return object;
}

std::string brief(const Json& value) { return value.dump(-1, ' ', true, Json::error_handler_t::replace).substr(0, 60); }

}  // namespace mmrec::apps
