#include "apps/common/json_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <stdexcept>
#include <system_error>
#include <utility>
#include <vector>

#include "apps/common/cli.h"
#include "apps/common/input.h"

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
  if (text.starts_with("\xEF\xBB\xBF")) throw std::runtime_error("a byte order mark");
  // The library takes it for the end of the text.
  if (const auto nul = text.find('\0'); nul != std::string_view::npos) {
    throw std::runtime_error(fmt::format("'\\x00' at byte {}", nul + 1));
  }
  if (is_too_deep(text)) throw std::runtime_error(fmt::format("a value more than {} levels deep", kDeepestJson));
  std::vector<std::set<std::string>> keys;  // of the objects around
  const auto check = [&](int, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key && !keys.back().insert(parsed.get<std::string>()).second) {
      throw std::runtime_error(fmt::format("duplicate key '{}'", printable(parsed.get<std::string>().substr(0, 60))));
    }
    return true;
  };
  try {
    return Json::parse(text, check);
  } catch (const Json::parse_error& error) {
    const std::size_t at = error.byte == 0 ? 0 : error.byte - 1;
    throw std::runtime_error(at >= text.size()
                                 ? std::string("the end of the line")
                                 : fmt::format("'{}' at byte {}", printable(text.substr(at, 20)), error.byte));
  } catch (const Json::out_of_range&) {
    throw std::runtime_error("a number out of range");
  }
}

Json parse_json_file(std::string_view text, const std::string& name) {
  const auto refuse = [&](const std::string& what) { throw RejectedFile(fmt::format("{}: {}", name, what)); };
  if (text.empty()) refuse("empty (expected a JSON object)");
  if (text.starts_with("version https://git-lfs")) refuse("looks like a Git LFS pointer (try: git lfs pull)");
  Json json;
  try {
    json = parse_json(text);
  } catch (const std::runtime_error& fault) {
    refuse(fmt::format("not JSON as it should be (found {})", fault.what()));
  }
  if (!json.is_object()) refuse(fmt::format("found {}, expected a JSON object", json.type_name()));
  return json;
}

std::optional<Json> read_json_file(const std::filesystem::path& path, std::uintmax_t most) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (status.type() == std::filesystem::file_type::not_found) return std::nullopt;
  const auto refuse = [&](const std::string& what) { throw RejectedFile(fmt::format("{}: {}", path.string(), what)); };
  if (error) refuse(fmt::format("cannot read ({})", error.message()));
  if (!std::filesystem::is_regular_file(status)) refuse("not a regular file");
  const std::uintmax_t size = std::filesystem::file_size(path, error);
  if (error) refuse(fmt::format("cannot read ({})", error.message()));
  if (size > most) refuse(fmt::format("too large (found {} bytes, expected at most {})", size, most));
  std::string text;
  try {
    text = read_input(path.string());  // no stream: its want of memory would look like a file that cannot be read
  } catch (const std::runtime_error& fault) {
    throw RejectedFile(fault.what());
  }
  return parse_json_file(text, path.string());
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

std::string_view member_text(std::string_view line, std::string_view key) {
  constexpr std::string_view kSpace = " \t\r";
  std::string_view found;
  std::size_t begin = 0;  // of a key, or of a value
  bool is_wanted = false;
  int depth = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < line.size(); ++i) {
    const char c = line[i];
    const std::string_view before = line.substr(begin, i - begin);
    if (c == '"') in_string = !in_string;
    if (in_string) {
      if (c == '\\') ++i;
      continue;
    }
    if (depth == 1 && c == ':') is_wanted = Json::parse(before) == key;
    if (depth == 1 && (c == ',' || c == '}') && std::exchange(is_wanted, false)) found = before;
    if ((depth == 0 && c == '{') || (depth == 1 && (c == ':' || c == ','))) begin = i + 1;
    if (c == '{' || c == '[') ++depth;
    if (c == '}' || c == ']') --depth;
  }
  found.remove_prefix(std::min(found.find_first_not_of(kSpace), found.size()));
  return found.substr(0, found.find_last_not_of(kSpace) + 1);
}

std::string brief(const Json& value) { return value.dump(-1, ' ', true, Json::error_handler_t::replace).substr(0, 60); }

}  // namespace mmrec::apps
