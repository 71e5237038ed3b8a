// JSON from outside.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace mmrec::apps {

/// Deeper values are refused: the library recurses once a level when it prints one.
inline constexpr int kDeepestJson = 64;

/// Throws std::runtime_error saying what was found where: "the end of the text", "'x' at byte 7", "a value more than 64
/// levels deep".
nlohmann::ordered_json parse_json(std::string_view text);

/// An object on a line, which `where` stands for. Throws RejectedFile naming that, found and expected.
nlohmann::ordered_json parse_object(std::string_view line, const std::string& where);

/// `value` as text fit for a message.
std::string brief(const nlohmann::ordered_json& value);

}  // namespace mmrec::apps
