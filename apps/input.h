// Prompts and documents: files and stdin, as text or as lines of token ids.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace mmrec::apps {

/// Largest file or stream accepted. A text this long is some 500 million tokens.
inline constexpr std::size_t kMaxInputBytes = std::size_t{1} << 31;

/// The whole of `path`, or of stdin for "-". Throws std::runtime_error naming it.
std::string read_input(const std::string& path);

/// "stdin" for "-", the path otherwise.
std::string input_name(const std::string& path);

/// How many maximal runs of bytes in `text` are no UTF-8.
std::int64_t count_invalid_utf8(std::string_view text);

/// A document of token ids and where it came from.
struct IdDocument {
  std::string name;  // FILE:LINE
  std::vector<int> ids;
};

/// One document per line, a JSON array of whole numbers in [0, vocab_size) each; `name` stands for the file. Throws
/// RejectedFile naming file, line and index, found and expected.
std::vector<IdDocument> parse_id_lines(std::string_view text, const std::string& name, std::int64_t vocab_size);

}  // namespace mmrec::apps
