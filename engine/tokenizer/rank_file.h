// tokenizer.tiktoken: byte-pair merges as lines of a token's bytes in base64, a space and its rank, which is its id.
// Base64 is read strictly: padded, and nothing in the bits that padding leaves over. A file of its own, because
// scripts/coverage holds readers of files to every line.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/tokenizer/tokenizer_model.h"
#include "models/files/text.h"

namespace mmrec::engine {

inline constexpr std::size_t kMaxBase64 = (kMaxTokenBytes + 2) / 3 * 4;

inline int sextet(char c) {
  if (c >= 'A' && c <= 'Z') return c - 'A';
  if (c >= 'a' && c <= 'z') return c - 'a' + 26;
  if (c >= '0' && c <= '9') return c - '0' + 52;
  return c == '+' ? 62 : c == '/' ? 63 : -1;
}

inline std::optional<std::string> from_base64(std::string_view text) {
  if (text.empty() || text.size() % 4 != 0) return std::nullopt;
  const std::size_t padding = text.ends_with("==") ? 2 : text.ends_with('=') ? 1 : 0;
  std::string bytes;
  bytes.reserve(text.size() / 4 * 3);
  std::uint32_t bits = 0;
  unsigned count = 0;
  for (const char c : text.substr(0, text.size() - padding)) {
    const int value = sextet(c);
    if (value < 0) return std::nullopt;
    bits = (bits << 6) | static_cast<std::uint32_t>(value);
    count += 6;
    if (count >= 8) {
      count -= 8;
      bytes += static_cast<char>((bits >> count) & 0xFFU);
      bits &= (1U << count) - 1;
    }
  }
  if (bits != 0) return std::nullopt;
  return bytes;
}

/// Tokens by rank; empty for ranks that the file leaves out. Every single byte is a token, no two are alike, the last
/// is not empty. Throws std::runtime_error beginning with `name` and naming the line.
class RankReader {
 public:
  explicit RankReader(const std::string& name) : name_(name) {}

  std::vector<std::string> run(std::string_view rest) {
    while (!rest.empty()) {
      ++line_;
      const std::size_t end = std::min(rest.find('\n'), rest.size());
      std::string_view line = rest.substr(0, end);
      rest.remove_prefix(std::min(end + 1, rest.size()));
      if (line.ends_with('\r')) line.remove_suffix(1);
      if (!line.empty()) read(line);
    }
    if (tokens_.empty()) fail("not a rank file: found no tokens");
    check_bytes();
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void fail(const std::string& what) const { throw std::runtime_error(name_ + ": " + what); }
  [[noreturn]] void fail_here(const std::string& what) const { fail(fmt::format("line {}: {}", line_, what)); }

  void read(std::string_view line) {
    const std::size_t space = line.find(' ');
    if (space == std::string_view::npos) {
      fail_here(
          fmt::format("found {}, expected a token in base64, a space and its rank", models::quote(line.substr(0, 64))));
    }
    const std::string_view base64 = line.substr(0, space);
    const std::string_view number = line.substr(space + 1);
    std::size_t rank = 0;
    const auto [end, fault] = std::from_chars(number.data(), number.data() + number.size(), rank);
    if (fault != std::errc() || end != number.data() + number.size() || rank >= kMaxTokens) {
      fail_here(fmt::format("found rank {}, expected 0..{}", models::quote(number.substr(0, 64)), kMaxTokens - 1));
    }
    if (base64.size() > kMaxBase64) {
      fail_here(fmt::format("found {} bytes of base64, expected at most {}", base64.size(), kMaxBase64));
    }
    std::optional<std::string> token = from_base64(base64);
    if (!token) fail_here(fmt::format("found {}, expected base64", models::quote(base64.substr(0, 64))));
    if (token->size() > kMaxTokenBytes) {
      fail_here(fmt::format("found a token of {} bytes, expected at most {}", token->size(), kMaxTokenBytes));
    }
    if (rank >= tokens_.size()) tokens_.resize(rank + 1);
    if (!tokens_[rank].empty()) fail_here(fmt::format("found rank {} again, expected each once", rank));
    const auto [before, is_new] = ranks_.emplace(*token, rank);
    if (!is_new) {
      fail_here(fmt::format("found {} with ranks {} and {}, expected each once", models::quote(*token), before->second,
                            rank));
    }
    tokens_[rank] = std::move(*token);
  }

  void check_bytes() const {
    for (int byte = 0; byte < 256; ++byte) {
      if (!ranks_.contains(std::string(1, static_cast<char>(byte)))) {
        fail(fmt::format("found no token of byte 0x{:02X}, expected all 256 single bytes", byte));
      }
    }
  }

  const std::string& name_;
  std::size_t line_ = 0;
  std::vector<std::string> tokens_;
  std::unordered_map<std::string, std::size_t> ranks_;
};

}  // namespace mmrec::engine
