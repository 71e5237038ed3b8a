// JSON from outside.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

namespace mmrec::apps {

/// Deeper values are refused: the library recurses once a level when it prints one.
inline constexpr int kDeepestJson = 64;

/// Refuses what the library would let pass, too: duplicate keys, a byte order mark, depth. Throws std::runtime_error
/// saying what was found where: "the end of the text", "'x' at byte 7", "duplicate key 'id'".
nlohmann::ordered_json parse_json(std::string_view text);

/// The object that the text of a file holds; `name` stands for the file. Throws RejectedFile naming that, found and
/// expected.
nlohmann::ordered_json parse_json_file(std::string_view text, const std::string& name);

/// The object in a file of at most `most` bytes; none where there is no such file. Throws RejectedFile naming file,
/// found and expected.
std::optional<nlohmann::ordered_json> read_json_file(const std::filesystem::path& path, std::uintmax_t most);

/// An object on a line, which `where` stands for. Throws RejectedFile naming that, found and expected.
nlohmann::ordered_json parse_object(std::string_view line, const std::string& where);

/// The text of the value of `key`, one of the keys of the object that parse_object() has made of `line`.
std::string_view member_text(std::string_view line, std::string_view key);

/// `value` as text fit for a message.
std::string brief(const nlohmann::ordered_json& value);

}  // namespace mmrec::apps
