// Rank files put together by hand, good and bad.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace mmrec::test {

inline std::string base64(std::string_view bytes) {
  const std::string_view digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    std::uint32_t word = 0;
    for (std::size_t j = 0; j < 3; ++j) {
      word = (word << 8) | (i + j < bytes.size() ? static_cast<unsigned char>(bytes[i + j]) : 0U);
    }
    for (unsigned j = 0; j < 4; ++j) out += i + j > bytes.size() ? '=' : digits[(word >> (18 - 6 * j)) & 63U];
  }
  return out;
}

/// All single bytes, from 0 on, and then `more`.
inline std::vector<std::string> bytes_and(const std::vector<std::string>& more) {
  std::vector<std::string> tokens;
  for (int byte = 0; byte < 256; ++byte) tokens.emplace_back(1, static_cast<char>(byte));
  tokens.insert(tokens.end(), more.begin(), more.end());
  return tokens;
}

/// A tokenizer.tiktoken; ranks of empty tokens are left out.
inline std::string rank_file(const std::vector<std::string>& tokens) {
  std::string out;
  for (std::size_t rank = 0; rank < tokens.size(); ++rank) {
    if (!tokens[rank].empty()) out += base64(tokens[rank]) + " " + std::to_string(rank) + "\n";
  }
  return out;
}

}  // namespace mmrec::test
