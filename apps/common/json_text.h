// JSON from outside, by the strict reader of models/files/json.h. All faults are a RejectedFile.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace mmrec::apps {

/// The object in the text of a file, which `name` stands for.
nlohmann::ordered_json parse_json_file(std::string_view text, const std::string& name);

/// The object in a file of at most `most` bytes; none if there is no such file.
std::optional<nlohmann::ordered_json> read_json_file(const std::filesystem::path& path, std::uint64_t most);

/// The object on a line. `where` stands for the line, or is empty.
nlohmann::ordered_json parse_object(std::string_view line, const std::string& where);

/// The text of the value of `key`, one of the keys of the object that parse_object() has made of `line`.
std::string_view member_text(std::string_view line, std::string_view key);

/// A line of token ids: a JSON array of whole numbers in [0, vocab_size); `where` stands for the line.
std::vector<int> parse_ids(std::string_view line, const std::string& where, std::int64_t vocab_size);

/// `value` as text for a message.
std::string brief(const nlohmann::ordered_json& value);

/// JSON on one line. Bytes that are not UTF-8 become U+FFFD.
std::string dump(const nlohmann::ordered_json& json);

}  // namespace mmrec::apps
