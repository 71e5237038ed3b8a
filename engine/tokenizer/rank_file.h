// tokenizer.tiktoken: byte-pair merges as lines of a token's bytes in base64, a space and its rank, which is its id.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace mmrec::engine {

/// Tokens by rank; empty for ranks that the file leaves out. Every single byte is a token, no two are alike, the last
/// is not empty. Throws std::runtime_error beginning with `name` and naming the line.
std::vector<std::string> parse_ranks(std::string_view bytes, const std::string& name);

}  // namespace mmrec::engine
