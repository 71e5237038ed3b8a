#include "apps/common/json_text.h"

#include <fmt/format.h>

#include <stdexcept>

#include "apps/common/cli.h"
#include "models/files/file.h"
#include "models/files/json.h"

namespace mmrec::apps {
namespace {

using Json = nlohmann::ordered_json;

template <class Read>
auto rejecting(const Read& read) {
  try {
    return read();
  } catch (const std::runtime_error& error) {
    throw RejectedFile(error.what());
  }
}

}  // namespace

Json parse_json_file(std::string_view text, const std::string& name) {
  return rejecting([&] {
    models::require_json_object(text, name);
    return models::parse_json(text, name);
  });
}

std::optional<Json> read_json_file(const std::filesystem::path& path, std::uint64_t most) {
  std::error_code error;  // opening the file says it
  if (std::filesystem::status(path, error).type() == std::filesystem::file_type::not_found) return std::nullopt;
  return parse_json_file(rejecting([&] { return models::read_text(path, most); }), path.string());
}

Json parse_object(std::string_view line, const std::string& where) {
  Json object = rejecting([&] { return models::parse_json(line, where); });
  if (object.is_object()) return object;
  throw RejectedFile(fmt::format("{}{}found {}, expected a JSON object on a line", where, where.empty() ? "" : ": ",
                                 object.type_name()));
}

std::string_view member_text(std::string_view line, std::string_view key) {
  models::JsonReader reader(line, "");
  reader.begin_object();
  for (std::string at; reader.next_key(at);) {
    const std::string_view value = reader.skip();
    if (at == key) return value;
  }
  return {};
}

std::vector<int> parse_ids(std::string_view line, const std::string& where, std::int64_t vocab_size) {
  return rejecting([&] {
    std::vector<int> ids;
    models::JsonReader reader(line, where);
    reader.begin_array();
    while (reader.next_element()) {
      const std::int64_t id = reader.integer();
      if (id < 0 || id >= vocab_size) {
        reader.fail(fmt::format("index {}: no token id of this model (found {}, expected 0 to {})", ids.size(), id,
                                vocab_size - 1));
      }
      ids.push_back(static_cast<int>(id));
    }
    return ids;
  });
}

std::string brief(const Json& value) { return value.dump(-1, ' ', true, Json::error_handler_t::replace).substr(0, 60); }

std::string dump(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

}  // namespace mmrec::apps
